"""``outcore train``: a causal language model on text files."""

from __future__ import annotations

import inspect
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outcore.cli import options
from outcore.cli import train_options as own
from outcore.cli.failures import reported
from outcore.cli.settings import Settings, resume_command
from outcore.errors import UsageError
from outcore.report.traced import TRACED, parse_steps

if TYPE_CHECKING:
    from outcore.checkpoint.interrupts import Interrupts
    from outcore.cli.keeping import Previous
    from outcore.cli.ranks import Launch
    from outcore.cli.tokens import Given, Trained
    from outcore.integrations.transformers import Built


def train(
    model: own.Model = "gpt2",
    data: own.Data = None,
    device: options.Device = None,
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    disk: options.Disk = None,
    seq_len: options.SeqLen = 256,
    batch_size: options.BatchSize = 4,
    accumulate: options.Accumulate = 1,
    steps: own.Steps = 40,
    optimizer: options.Optimizer = "adamw",
    lr: own.Lr = None,
    clip: own.Clip = 1.0,
    precision: options.Precision = "bf16",
    activations: own.Activations = None,
    plan: own.Plan = "none",
    microbatch: own.SliceRows = None,
    logits: own.Logits = "recompute",
    seed: options.Seed = 0,
    log_dir: own.LogDir = None,
    trace_steps: own.TraceSteps = TRACED,
    checkpoint: own.Checkpoint = None,
    every: own.Every = None,
    keep: own.Keep = None,
    resume: own.Resume = False,
    grace: own.Grace = None,
    sharding: own.Sharding = "parameters",
    split: own.Split = "even",
    sums: own.Sums = "backward",
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
            microbatch=microbatch,
            logits=logits,
            plan=plan,
            seed=seed,
            log_dir=log_dir or checkpoint or _named(model),
            trace_steps=trace_steps,
            checkpoint=checkpoint,
            every=every,
            keep=keep,
            resume=resume,
            grace=grace,
            sharding=sharding,
            split=split,
            sums=sums,
        )
        run(settings)


def run(settings: Settings) -> None:
    """Train as the settings say, alone or as one of the ranks that ``torchrun`` started."""
    from outcore.cli.ranks import launched
    from outcore.memory.device import find

    with launched(find(settings.device)) as launch:
        run_rank(launch.settings(settings), launch)


def run_rank(settings: Settings, launch: Launch) -> None:
    """Train on this rank. What can be refused is refused before the model gets any memory."""
    import torch

    import outcore
    from outcore.cli.batches import Batches
    from outcore.cli.files import Texts
    from outcore.cli.identity import facts, facts_of_data
    from outcore.cli.keeping import Keeping
    from outcore.cli.plan import describe
    from outcore.cli.recipes import learning_rate, make, recipe
    from outcore.cli.rehearsing import rehearsed
    from outcore.cli.searching import searched
    from outcore.cli.steps import Steps
    from outcore.memory.device import find
    from outcore.model.policies import read_activations
    from outcore.offloaded import engine_of
    from outcore.report.console import make_console
    from outcore.report.metrics import check_writable

    console = make_console()
    console.quiet = launch.rank > 0
    outcore.widen_matmuls()
    sharding = outcore.Sharding(settings.sharding, sums=settings.sums)  # type: ignore[arg-type]
    device = find(settings.device)
    budget = outcore.Budget(
        device=settings.device_memory, host=settings.host_memory, disk=settings.disk or None
    )
    precision = outcore.Precision(settings.precision)  # type: ignore[arg-type]
    activations = read_activations(settings.activations or "recompute", settings.microbatch, settings.logits)
    found = recipe(settings.optimizer)
    check_writable(settings.log_dir, "log")
    traced = parse_steps(settings.trace_steps, settings.steps)
    keeping = Keeping.of(settings)
    texts = Texts.find(settings.data)
    built = _built(settings)
    lr = settings.lr or learning_rate(found, built.name, built.weights is not None)
    previous = None if keeping is None else keeping.previous(settings.resume, facts(settings, built, lr))
    if previous is not None and previous.step >= settings.steps:
        console.print(
            f"nothing to do: {previous.path} is at step {previous.step} of {settings.steps}; give a larger --steps "
            "to go on"
        )
        return
    tokenizer = _tokenizer(built, texts, previous)
    tokens, said = _tokens(built, texts, tokenizer, console)
    batches = Batches(tokens, settings.seq_len, settings.batch_size, settings.seed)
    if keeping is not None:
        keeping.feed(facts_of_data(tokens), tokenizer.files(), previous)
    torch.manual_seed(settings.seed)
    optimizer = make(found, built.model.parameters(), lr)
    plan = searched(settings, built, optimizer, budget, device)
    expected = None
    if launch.size == 1:  # what a rank keeps of a step is not traced yet
        expected = rehearsed(settings, built, optimizer, budget, activations, device, plan)
    with _interrupts(settings, keeping is not None) as interrupts:
        outcore.offload(
            built.model,
            optimizer,
            budget=budget,
            precision=precision,
            activations=activations if plan is None else None,
            device=device,
            weights=built.weights,
            plan=plan,
            sharding=sharding,
        )
        if expected is not None:
            engine_of(built.model).foreseen(expected)
        if launch.rank > 0:  # the first weights are the same on all ranks, what is drawn afterwards is not
            torch.manual_seed(settings.seed + launch.rank)
        try:
            steps = Steps(settings, built, optimizer, batches, keeping, interrupts, console, traced, launch)
            steps.begin(previous)
            steps.plan(describe(settings, built, said, lr, device, plan))
            steps.run(device, tokenizer)
        finally:
            outcore.release(built.model)


def _built(settings: Settings) -> Built:
    """The model, without memory.

    Raises:
        UsageError: a sequence has more positions than it.
    """
    from outcore.integrations.transformers import build

    built = build(settings.model, training=True)
    if built.positions is not None and settings.seq_len > built.positions:
        raise UsageError(
            f"--seq-len is {settings.seq_len}, but {settings.model} has {built.positions} positions"
        )
    return built


def _interrupts(settings: Settings, patient: bool) -> Interrupts:
    """What a signal does: the step is finished and saved first, if there is where to."""
    import outcore
    from outcore.checkpoint.interrupts import GRACE

    if not patient:
        return outcore.Interrupts(None, "this pass")
    interrupts = outcore.Interrupts(GRACE if settings.grace is None else settings.grace, _ending())
    interrupts.hint = f"resume with: {command(settings)}"
    return interrupts


def _ending() -> str:
    """What is waited for after a signal, and who doesn't wait as long."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    return "this step (torchrun waits for it 30 s, or its --shutdown-timeout)" if launched else "this step"


def command(settings: Settings) -> str:
    """The command that goes on with a run."""
    defaults = {name: found.default for name, found in inspect.signature(train).parameters.items()}
    return resume_command(settings, {**defaults, "data": ["stdlib"], "log_dir": settings.checkpoint})


def _named(model: str) -> Path:
    return Path("runs", f"{Path(model).name or 'model'}-{time.strftime('%Y%m%d-%H%M%S')}")


def _tokenizer(built: Built, texts: Any, previous: Previous | None) -> Given | Trained:
    """The model's own, the one that the checkpoint has, or a new one."""
    from outcore.cli.tokens import Given, Trained

    if built.tokenizer is not None:
        return Given(built.tokenizer)
    kept = {} if previous is None else previous.tokenizer
    return (
        Trained.kept(kept["tokenizer.json"]) if "tokenizer.json" in kept else Trained(texts, built.vocabulary)
    )


def _tokens(built: Built, texts: Any, tokenizer: Given | Trained, console: Any) -> tuple[Any, str]:
    """All tokens, shape (n,), and what there is to say about them."""
    from outcore.cli.tokens import Trained, token_file
    from outcore.memory.heap import give_back

    with console.status("reading the data") as status:
        tokens = token_file(
            texts,
            tokenizer,
            built.vocabulary,
            lambda done: status.update(f"reading the data: {done:,} characters"),
        )
    give_back()
    whose = "the model's tokenizer"
    if isinstance(tokenizer, Trained):
        whose = f"a tokenizer of {tokenizer.size:,} trained on it"
    skipped = f", {texts.skipped} files skipped that are not text" if texts.skipped else ""
    files = "1 file" if len(texts.paths) == 1 else f"{len(texts.paths):,} files"
    return tokens, f"{files}, {len(tokens):,} tokens by {whose}{skipped}"
