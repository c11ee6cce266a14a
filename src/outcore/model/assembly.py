"""Units at run time, from what `outcore.model.units.discover` found: their parameters laid out in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from outcore.chunks.layout import Entry, lay_out
from outcore.chunks.store import PlaneType, build
from outcore.errors import ModelError
from outcore.model.placement import wants_fp32
from outcore.model.sites import Site
from outcore.model.unit import Binding, Unit
from outcore.model.units import UnitPlan
from outcore.optim.optimizer import Optimizer
from outcore.optim.pipeline import master_kind


class Assembly:
    """Lays a model's parameters out.

    Args:
        plans: the units to be.
        optimizer: whose parameters are trained; ``None`` for inference.
        site: where the model computes.
        dtype: what floating parameters are computed in.
        chunk_bytes: the most bytes of a chunk of parameters.
        sums: gradients come summed over slices of a batch, in fp32.

    Raises:
        ModelError: the optimizer holds a parameter that is not in the model, or a complex one.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[UnitPlan],
        optimizer: Optimizer | None,
        site: Site,
        dtype: torch.dtype,
        chunk_bytes: int,
        sums: bool,
    ) -> None:
        self._plans = plans
        self._optimizer = optimizer
        self._rule = None if optimizer is None else optimizer.rule
        self._site = site
        self._dtype = dtype
        self._chunk_bytes = chunk_bytes
        self._sums = sums
        self._keep = wants_fp32(model)
        self._number_of: dict[nn.Parameter, int] = {}
        self._trained = self._numbers()

    def _numbers(self) -> set[nn.Parameter]:
        """Number the optimizer's parameters as it does, and find those that are trained."""
        if self._optimizer is None:
            return set()
        ours = {p for plan in self._plans for _, p in plan.parameters}
        for number, parameter in enumerate(self._optimizer.parameters()):
            if parameter not in ours:
                raise ModelError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not in the model"
                )
            self._number_of[parameter] = number
        return {p for p in self._number_of if p.requires_grad}

    def units(self) -> list[Unit]:
        """One for each plan."""
        return [self._unit(index, plan) for index, plan in enumerate(self._plans)]

    def _unit(self, index: int, plan: UnitPlan) -> Unit:
        entries, found = [], {}
        for name, parameter in plan.parameters:
            number = self._number_of.setdefault(parameter, len(self._number_of))
            if parameter in self._trained and parameter.is_complex():
                raise ModelError(
                    f"{name} is complex ({parameter.dtype}), and complex parameters can't be trained: keep its real "
                    "and imaginary part in one real parameter (torch.view_as_real), or freeze it"
                )
            dtype = self._dtype_of(parameter)
            entries.append(Entry(number, parameter.shape, dtype, parameter in self._trained))
            found[number] = (name, parameter)
        site, stores, bindings = self._site, [], []
        whole = self._rule is not None and self._rule.whole_parameters
        for laid_out in lay_out(entries, self._chunk_bytes // self._dtype.itemsize, whole):
            run = site.share(laid_out)
            planes: tuple[PlaneType, ...] = ()
            if run.trained:
                assert self._rule is not None
                planes = self._rule.planes(run.dtype, master_kind(self._rule, run.dtype))
            store = build(plan.name, run, planes, site.span(run), site.working(), site.plain(), self._sums)
            site.settle(run, store)
            stores.append(store)
            for slot in run.slots:
                name, parameter = found[slot.index]
                bindings.append(Binding(name, parameter, store, slot))
        return Unit(index, plan.name, tuple(stores), tuple(bindings))

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        if not parameter.is_floating_point() or parameter in self._keep:
            return parameter.dtype
        return self._dtype
