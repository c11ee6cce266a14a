"""``outcore train``: a causal language model on text files."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outcore.cli import options
from outcore.cli.failures import reported
from outcore.errors import UsageError

if TYPE_CHECKING:
    from outcore.cli.batches import Batches
    from outcore.cli.tokens import Trained
    from outcore.integrations.transformers import Built


@dataclass(frozen=True)
class Settings:
    """The flags of ``outcore train``, checked as far as they can be by themselves."""

    model: str
    data: list[str]
    device: str | None
    device_memory: str | None
    host_memory: str | None
    disk: list[str]
    seq_len: int
    batch_size: int
    accumulate: int
    steps: int
    optimizer: str
    lr: float | None
    clip: float
    precision: str
    activations: str
    seed: int
    log_dir: Path
    trace_steps: str

    def __post_init__(self) -> None:
        options.at_least(2, seq_len=self.seq_len)
        options.at_least(1, batch_size=self.batch_size, accumulate=self.accumulate, steps=self.steps)
        options.check_seed(self.seed)
        if self.lr is not None and not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"--lr must be above 0, and is {self.lr}")
        if not (self.clip >= 0 and math.isfinite(self.clip)):
            raise UsageError(f"--clip must be 0 (off) or more, and is {self.clip}")


def train(
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face directory (config.json and safetensors), or a preset to train anew: gpt2, "
            "gpt2-medium, gpt2-large, gpt2-xl, gpt2-1.3b (24 layers, 2048 wide, 16 heads) or gpt2-tiny. "
            "Presets have dropout 0.0."
        ),
    ] = "gpt2",
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="A text file or a folder of them; may be repeated. The word stdlib, the default, means the "
            "source files of Python's standard library.",
        ),
    ] = None,
    device: options.Device = None,
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    disk: options.Disk = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Sequences of a batch.")] = 4,
    accumulate: Annotated[int, typer.Option(help="Batches of an optimizer step.")] = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    optimizer: Annotated[
        str, typer.Option(help="adamw, adam, sgd (momentum 0.9), lion or adagrad.")
    ] = "adamw",
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate, constant. By default one that suits the optimizer: for adamw 6e-4 on "
            "gpt2, down to 2e-4 on gpt2-1.3b, and 5e-5 on a directory's weights."
        ),
    ] = None,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient; 0 for no clipping.")] = 1.0,
    precision: options.Precision = "bf16",
    activations: Annotated[
        str, typer.Option(help="recompute each block's activations in the backward pass, or keep them.")
    ] = "recompute",
    seed: options.Seed = 0,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For metrics.jsonl, TensorBoard, trace.json and the tokenizer. By default runs/MODEL-DATE-TIME.",
        ),
    ] = None,
    trace_steps: Annotated[
        str,
        typer.Option(
            metavar="STEPS",
            help="Steps to record in trace.json, for outcore report and Perfetto: numbers, ranges and the word "
            "last; or none.",
        ),
    ] = "2-3,last",
) -> None:
    """Train a language model with its states spread over accelerator, DRAM and disk."""
    with reported():
        settings = Settings(
            model=model,
            data=data or ["stdlib"],
            device=device,
            device_memory=device_memory,
            host_memory=host_memory,
            disk=disk or [],
            seq_len=seq_len,
            batch_size=batch_size,
            accumulate=accumulate,
            steps=steps,
            optimizer=optimizer,
            lr=lr,
            clip=clip,
            precision=precision,
            activations=activations,
            seed=seed,
            log_dir=log_dir or _named(model),
            trace_steps=trace_steps,
        )
        run(settings)


def run(settings: Settings) -> None:
    """Train as the settings say. What can be refused is refused before the model gets any memory."""
    import torch

    import outcore
    from outcore.cli import loop
    from outcore.cli.interrupts import Interrupts
    from outcore.cli.plan import describe
    from outcore.cli.recipes import learning_rate, make, recipe
    from outcore.integrations.transformers import build
    from outcore.memory.device import find
    from outcore.report.console import Progressed, make_console, show_end, show_plan
    from outcore.report.metrics import Metrics
    from outcore.report.run import write_run
    from outcore.report.tracer import Tracer, parse_steps

    console = make_console()
    device = find(settings.device)
    budget = outcore.Budget(
        device=settings.device_memory, host=settings.host_memory, disk=settings.disk or None
    )
    precision = outcore.Precision(settings.precision)  # type: ignore[arg-type]
    activations = outcore.Activations(settings.activations)  # type: ignore[arg-type]
    found = recipe(settings.optimizer)
    metrics = Metrics(settings.log_dir)
    traced = parse_steps(settings.trace_steps, settings.steps)
    texts = _texts(settings)
    built = build(settings.model, training=True)
    if built.positions is not None and settings.seq_len > built.positions:
        raise UsageError(
            f"--seq-len is {settings.seq_len}, but {settings.model} has {built.positions} positions"
        )
    batches, trained, said = _batches(settings, built, texts, console)
    lr = settings.lr or learning_rate(found, built.name, built.weights is not None)
    torch.manual_seed(settings.seed)
    optimizer = make(found, built.model.parameters(), lr)
    with Interrupts() as interrupts:
        outcore.offload(
            built.model,
            optimizer,
            budget=budget,
            precision=precision,
            activations=activations,
            device=device,
            weights=built.weights,
        )
        try:
            interrupts.check()
            plan = describe(settings, built, said, lr, device)
            show_plan(console, plan)
            steps = []
            tracer = Tracer(built.model, settings.log_dir, traced)
            with metrics, tracer, Progressed(console, settings.steps) as progress:
                for step in loop.train(
                    built.model,
                    optimizer,
                    batches,
                    device=device,
                    steps=settings.steps,
                    accumulate=settings.accumulate,
                    clip=settings.clip,
                    interrupts=interrupts,
                    watch=tracer.step,
                ):
                    metrics.write(step)
                    if step.number == 1:
                        write_run(settings.log_dir, plan)
                    tracer.write(more=True)
                    if trained is not None and step.number == 1:
                        trained.save(settings.log_dir / "tokenizer.json")
                    progress.show(step)
                    steps.append(step)
            show_end(console, steps)
            console.print(f"metrics in {settings.log_dir}; outcore report {settings.log_dir} draws them")
        finally:
            outcore.release(built.model)


def _named(model: str) -> Path:
    return Path("runs", f"{Path(model).name or 'model'}-{time.strftime('%Y%m%d-%H%M%S')}")


def _texts(settings: Settings) -> Any:
    from outcore.cli.files import Texts

    return Texts.find(settings.data)


def _batches(
    settings: Settings, built: Built, texts: Any, console: Any
) -> tuple[Batches, Trained | None, str]:
    """The data, the tokenizer if one had to be trained, and what there is to say about them."""
    from outcore.cli.batches import Batches
    from outcore.cli.tokens import Given, Trained, token_file
    from outcore.memory.heap import give_back

    trained = None if built.tokenizer is not None else Trained(texts, built.vocabulary)
    with console.status("reading the data") as status:
        tokens = token_file(
            texts,
            trained or Given(built.tokenizer),
            built.vocabulary,
            lambda done: status.update(f"reading the data: {done:,} characters"),
        )
    give_back()
    batches = Batches(tokens, settings.seq_len, settings.batch_size, settings.seed)
    whose = "the model's tokenizer" if trained is None else f"a tokenizer of {trained.size:,} trained on it"
    skipped = f", {texts.skipped} files skipped that are not text" if texts.skipped else ""
    said = f"{len(texts.paths):,} files, {len(tokens):,} tokens by {whose}{skipped}"
    return batches, trained, said
