"""A model's units and chunks without bytes: the layout that `outcore.offload` would make, to be counted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from outcore.chunks.layout import Entry, lay_out
from outcore.chunks.store import PlaneType, build
from outcore.model.unit import Binding, Unit
from outcore.model.units import UnitPlan
from outcore.optim.kernels import Rule
from outcore.optim.pipeline import master_kind
from outcore.planning.flow import Nowhere


def lay(
    plans: Sequence[UnitPlan],
    keep: set[nn.Parameter],
    dtype: torch.dtype,
    rule: Rule | None,
    numbers: Mapping[nn.Parameter, int],
    trained: Collection[nn.Parameter],
    chunk_bytes: int,
) -> list[Unit]:
    """The units of a model with their chunks.

    Args:
        plans: what `outcore.model.units.discover` found.
        keep: parameters that keep their dtype (`outcore.model.placement.wants_fp32`).
        dtype: what floating parameters are computed in.
        rule: the optimizer's, or ``None`` for inference.
        numbers: the optimizer's parameters with their numbers.
        trained: those of them that are not frozen.
        chunk_bytes: as `outcore.offload` takes it.
    """
    number_of = dict(numbers)
    units = []
    for index, plan in enumerate(plans):
        entries, found = [], {}
        for name, parameter in plan.parameters:
            number = number_of.setdefault(parameter, len(number_of))
            kept = not parameter.is_floating_point() or parameter in keep
            learns = rule is not None and parameter in trained
            entries.append(Entry(number, parameter.shape, parameter.dtype if kept else dtype, learns))
            found[number] = (name, parameter)
        stores, bindings = [], []
        whole = rule is not None and rule.whole_parameters
        for run in lay_out(entries, chunk_bytes // dtype.itemsize, whole):
            planes: tuple[PlaneType, ...] = ()
            if run.trained:
                assert rule is not None
                planes = rule.planes(run.dtype, master_kind(rule, run.dtype))
            store = build(plan.name, run, planes, _span, Nowhere, Nowhere)
            stores.append(store)
            for slot in run.slots:
                name, parameter = found[slot.index]
                bindings.append(Binding(name, parameter, store, slot))
        units.append(Unit(index, plan.name, tuple(stores), tuple(bindings)))
    return units


def _span(offset: int, nbytes: int) -> Nowhere:
    return Nowhere(nbytes)
