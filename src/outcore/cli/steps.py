"""The steps of ``outcore train``: measured, shown, saved, and stopped when that is asked for.

[Note: What may fail]
What is written about a run is worth less than the run. A console that is gone is passed over (`report.unfailing`). A
log that can't be written, to a full disk perhaps, stops a run that keeps checkpoints as a signal does: once its step is
saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

import outcore
from outcore.cli import loop
from outcore.cli.batches import Batches
from outcore.cli.keeping import Keeping, Previous
from outcore.cli.ranks import Launch
from outcore.cli.settings import Settings
from outcore.cli.tokens import Given, Trained
from outcore.errors import OutcoreError
from outcore.report.console import Progressed, show_end, show_plan
from outcore.report.metrics import Metrics
from outcore.report.placement import SETTLED, placement
from outcore.report.run import write_run
from outcore.report.step import Step
from outcore.report.totals import Totals
from outcore.report.tracer import Tracer

if TYPE_CHECKING:
    from rich.console import Console

    from outcore.integrations.transformers import Built


class Steps:
    """The steps of one run, from the first or from where a checkpoint was, to the last or to a signal.

    Args:
        traced: the steps that are recorded.
        launch: this rank; all stop when one is asked to.
        keeping: the run's checkpoints; without them a signal stops it between two passes, and nothing is kept.
    """

    def __init__(
        self,
        settings: Settings,
        built: Built,
        optimizer: outcore.Optimizer,
        batches: Batches,
        keeping: Keeping | None,
        interrupts: outcore.Interrupts,
        console: Console,
        traced: frozenset[int],
        launch: Launch,
    ) -> None:
        self._settings = settings
        self._built = built
        self._optimizer = optimizer
        self._batches = batches
        self._keeping = keeping
        self._interrupts = interrupts
        self._console = console
        self._from: Previous | None = None
        self._plan: dict[str, str] = {}
        self._traced = traced
        self._launch = launch
        self._stopping = False
        self._failure: OutcoreError | OSError | None = None

    def begin(self, previous: Previous | None) -> None:
        """Load the checkpoint to go on from, if there is one."""
        if self._keeping is None:
            self._interrupts.check()
        elif previous is not None:
            self._from = self._keeping.restore(self._built.model, self._optimizer, self._batches)

    def plan(self, plan: Mapping[str, str]) -> None:
        """Say what will be done."""
        kept: dict[str, str] = {}
        if self._keeping is not None:
            every, keep = self._keeping.every, self._keeping.keep
            where = f"{self._keeping.directory}: every {every} steps, the newest {keep} stay"
            if self._from is not None:
                where += f"; going on from {self._from.path.name}"
            elif self._settings.resume:
                where += "; there is none yet: starting from the beginning"
            kept["checkpoint"] = where
        self._plan = {**plan, **kept}
        show_plan(self._console, self._plan)

    def run(self, device: torch.device, tokenizer: Given | Trained) -> None:
        """Take the steps.

        Raises:
            KeyboardInterrupt: a signal came, and the run keeps no checkpoints.
            TierError: the log can't be written.
        """
        settings, keeping, before = self._settings, self._keeping, self._from
        numbers = range(1 if before is None else before.step + 1, settings.steps + 1)
        after = None if before is None else (before.step, before.extra.get("loss", 0.0))
        totals: Totals | None = None
        tracer = Tracer(self._built.model, settings.log_dir, self._traced)
        metrics = Metrics(settings.log_dir, after)
        with metrics, tracer, Progressed(self._console, numbers) as progress:
            if not self._agree(0.0)[1]:
                for step in loop.train(
                    self._built.model,
                    self._optimizer,
                    self._batches,
                    device=device,
                    steps=numbers,
                    accumulate=settings.accumulate,
                    clip=settings.clip,
                    between=self._interrupts.check if keeping is None else lambda: None,
                    watch=tracer.step,
                    shares=outcore.shares(self._built.model, settings.split),  # type: ignore[arg-type]
                    agree=lambda loss: self._agree(loss)[0],
                ):
                    self._log(step, metrics, tracer, tokenizer if step.number == numbers.start else None)
                    progress.show(step)
                    if totals is None:
                        totals = Totals(step)
                    else:
                        totals.add(step)
                    if totals.count == SETTLED:
                        self._console.print(placement(step.after, step.moved, "step"))
                    stopped = self._is_stopped()  # asked once: a signal after this is for the next step
                    if keeping is not None and (stopped or keeping.due(step.number, settings.steps)):
                        keeping.save(step, self._built.model, self._optimizer, self._batches)
                    if stopped:
                        break
                if keeping is not None:
                    keeping.finish()
        if totals is not None:
            show_end(self._console, totals)
            self._console.print(
                f"metrics in {settings.log_dir}; outcore report {settings.log_dir} draws them"
            )
        self._say_kept(numbers.start - 1 if totals is None else totals.last.number)
        if self._failure is not None:
            raise self._failure

    def _log(self, step: Step, metrics: Metrics, tracer: Tracer, tokenizer: Given | Trained | None) -> None:
        """Write a step down; see [Note: What may fail].

        Args:
            tokenizer: of the first step: what the run is, too.
        """
        if self._failure is not None:
            return
        try:
            metrics.write(step)
            if tokenizer is not None:
                write_run(self._settings.log_dir, self._plan)
            tracer.write(more=True)
            if isinstance(tokenizer, Trained):
                tokenizer.save(self._settings.log_dir / "tokenizer.json")
        except (OutcoreError, OSError) as error:
            if self._keeping is None:
                raise
            self._failure = error

    def _agree(self, loss: float) -> tuple[float, bool]:
        """The loss over all ranks, and whether any was asked to stop and keep what it has."""
        loss, self._stopping = self._launch.agreed(self._built.model, loss, self._wants_to_stop())
        return loss, self._stopping

    def _wants_to_stop(self) -> bool:
        return self._keeping is not None and (self._interrupts.asked or self._failure is not None)

    def _is_stopped(self) -> bool:
        """Whether all ranks stop: one alone needs no agreement, and hears of a signal until the last moment."""
        return self._stopping or (self._launch.size == 1 and self._wants_to_stop())

    def _say_kept(self, step: int) -> None:
        if self._keeping is None:
            return
        saved = self._keeping.saved
        if step < self._settings.steps:
            kept = (
                "nothing to save yet" if saved is None else f"saved in {self._keeping.directory}/step-{saved}"
            )
            self._console.print(f"stopped after step {step} of {self._settings.steps}, {kept}")
            self._console.print(self._interrupts.hint)
        elif saved is not None:
            self._console.print(f"checkpoint in {self._keeping.directory}/step-{saved}")
