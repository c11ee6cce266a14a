"""What is found out when a batch is first seen, before anything of its step is computed.

[Note: Prelude]
`outcore.offload` knows no batch, and what a step needs depends on it. So the step is rehearsed when the first batch
arrives (and when a larger one does), on a copy of the model without values (`outcore.planning.blueprint`): a
budget that doesn't hold is refused before step 0, and what activations will take is set aside from the first lap on.
Where nobody said what blocks are to do with their activations, they keep them if that fits and recompute otherwise; the
result is the same to the bit.

The step is only measured as it runs where nothing can be foreseen: in a model that can't be copied or traced, for
inputs that are more than tensors and plain values, under modes and hooks of the user's that a trace would run into. A
loss that the model doesn't compute itself isn't seen; then the trace refuses what can't work without it, and sets
nothing aside.

[Note: Not worth it]
Rehearsing costs a good part of a second. It is left out where room is no question: where each element of the inputs
could pass by each parameter and leave `LAVISH` bytes there, and by each other element and leave as many, and all of
that would still be free.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from outcore.errors import BudgetError
from outcore.model.draws import PythonDraws
from outcore.model.policies import Activations
from outcore.model.trees import tensors_of
from outcore.optim.kernels import Rule
from outcore.optim.optimizer import Optimizer
from outcore.planning.blueprint import Blueprint
from outcore.planning.effective import Effective
from outcore.planning.outcome import Limits
from outcore.planning.rehearsal import Rehearsal, rehearse
from outcore.trace.extents import Extents, count, covers
from outcore.trace.profile import Profile

LAVISH = 16
"""See [Note: Not worth it]."""

log = logging.getLogger("outcore")


class Run(Protocol):
    """The run that is about to take its first step."""

    def expect(self, profile: Profile) -> None:
        """Activations will take so much."""

    def treat(self, activations: Activations) -> None:
        """Blocks are to do this with their activations from now on."""


class Prelude(Protocol):
    """What is done about a batch before its step."""

    def hung(self) -> None:
        """All hooks and replacements are hung in."""

    def known(self) -> None:
        """The first batch is one about which nothing is to be found out."""

    def before(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Extents) -> None:
        """A forward with gradients is about to begin.

        Args:
            inputs: their shapes.

        Raises:
            BudgetError: its step can't fit.
        """


class Nothing:
    """Nothing is done. Implements `Prelude`."""

    def hung(self) -> None:
        """Nothing to do."""

    def known(self) -> None:
        """Nothing to do."""

    def before(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Extents) -> None:
        """Nothing to do."""


def prelude(
    model: nn.Module,
    optimizer: Optimizer | None,
    ranks: int,
    settings: Effective,
    limits: Limits,
    states: int,
) -> Prelude:
    """The prelude of a run. What one of several ranks keeps of a step isn't traced yet.

    Args:
        model: with nothing hung in yet.
        settings: of the run.
        limits: the budgets.
        states: bytes of all parameters, states and gradients.
    """
    if optimizer is None or ranks > 1:
        return Nothing()
    return Rehearsing(model, optimizer.rule, optimizer.parameters(), settings, limits, states)


@dataclass(frozen=True)
class _Copied:
    """An optimizer's rule, and the parameters of a copy in its order. Implements `outcore.planning.subject.Trains`."""

    rule: Rule
    order: tuple[nn.Parameter, ...]

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.order


class Rehearsing:
    """Rehearses the step of each batch that those before don't cover. Implements `Prelude`.

    Args:
        order: the parameters in the optimizer's order.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        order: Iterable[nn.Parameter],
        settings: Effective,
        limits: Limits,
        states: int,
    ) -> None:
        self._blueprint = Blueprint(model)
        self._model = model
        self._rule = rule
        self._order = tuple(order)
        self._settings = settings
        self._ways = [settings.activations]
        if settings.free:
            self._ways.append(Activations("recompute"))
        self._limits = limits
        self._room = (limits.host if limits.device is None else min(limits.device, limits.host)) - states
        self._count = sum(p.numel() for p in model.parameters())
        self._seen: list[Extents] = []
        self._known = self._told = False

    def hung(self) -> None:
        self._blueprint.hung()

    def known(self) -> None:
        self._known = True

    def before(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Extents) -> None:
        if not any(covers(seen, inputs) for seen in self._seen):
            self._seen = [*(seen for seen in self._seen if not covers(inputs, seen)), inputs]
            size = count(inputs)
            if not self._known and LAVISH * size * (self._count + size) > self._room:
                self._rehearse(run, args, kwargs, inputs)
            self._known = False

    def _rehearse(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Extents) -> None:
        for way in self._ways:
            try:
                with self._blueprint.apart(), _undisturbed():
                    found, whole = self._found(way, args, kwargs)
                    if way == self._ways[-1]:
                        found.check(self._limits)
                    elif not found.fits(self._limits):
                        continue
            except BudgetError:
                self._seen.remove(
                    inputs
                )  # the next batch may be smaller, and must be told the same if it isn't
                raise
            except Exception as error:  # whatever a model may raise that isn't made for this
                self._say(error)
                return
            if way != self._ways[0]:
                log.info("blocks recompute their activations: kept, they would not fit beside the states")
                run.treat(way)
                self._blueprint.hung(("forward",))
            self._ways = [way]
            if whole:
                run.expect(found.activations)
            return

    def _found(
        self, way: Activations, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Rehearsal, bool]:
        """A rehearsal, and whether the model computed its loss itself."""
        batch = _named(self._model, args, kwargs)
        copied, of = self._blueprint.copied()
        settings, whole = self._settings, True

        def loss(output: Any) -> torch.Tensor:
            nonlocal whole
            own, whole = _own_loss(output)
            return own

        found = rehearse(
            copied,
            _Copied(self._rule, tuple(of[p] for p in self._order)),
            batch,
            on_host=self._limits.device is None,
            precision=settings.precision,
            activations=way,
            chunk_size=settings.chunk_bytes,
            units=settings.units,
            loss=loss,
        )
        return found, whole

    def _say(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            text = str(error).strip().splitlines()
            log.info(
                "what a step needs is measured in the first one, not foreseen: %s",
                text[0] if text else type(error).__name__,
            )


def _own_loss(output: Any) -> tuple[torch.Tensor, bool]:
    """The ``loss`` of an output; or the least that any loss does with its first tensor, and that this is not all."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found.mean(), True
    return next(t for t in tensors_of(output) if t.requires_grad).sum(), False


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names.

    Raises:
        ValueError: they can't all be named, or are more than tensors and plain values.
        TypeError: they are not what the model takes.
    """
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY) and name in named:
            raise ValueError("inputs without names")
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    plain = (torch.Tensor, str, bytes, int, float, complex, type(None))
    if not all(isinstance(leaf, plain) for leaf in tree_leaves(named)):
        raise ValueError("inputs that are more than tensors and plain values")
    return named


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, nothing reaches the user's modes and hooks, and no random number is drawn.

    Raises:
        ValueError: there are modes or hooks that would see what runs here.
    """
    if (
        _get_current_dispatch_mode_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    ):
        raise ValueError("modes or hooks for saved tensors are at work")
    drawn = PythonDraws.now()
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            drawn.restore()
