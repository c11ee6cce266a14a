"""Any other torch optimizer class, run parameter by parameter on streamed states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outcore.chunks.layout import Slot
from outcore.errors import UsageError
from outcore.optim.kernels import GradTransform, Master, Plane, Planes, Workers
from outcore.optim.optimizer import Optimizer
from outcore.optim.optimizers import Params


class Foreign(Optimizer):
    """Runs a `torch.optim` class (or one like it) on fp32 masters, one parameter at a time.

    State tensors of a parameter's shape are streamed as chunks; anything else it keeps (step counters,
    factored moments) stays in memory. ::

        optimizer = outcore.Foreign(torch.optim.NAdam, model.parameters(), lr=2e-4)

    Args:
        kind: the optimizer class. It must update each parameter from that parameter's own gradient and state.
        params: parameters or parameter groups.
        settings: the arguments of ``kind``.

    Raises:
        UsageError: the class can't work on one dense parameter at a time (L-BFGS, sparse optimizers).
    """

    def __init__(self, kind: type[torch.optim.Optimizer], params: Params, **settings: Any) -> None:
        self._foreign = ForeignRule(kind, settings)
        super().__init__(params, self._foreign.defaults, self._foreign)

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """The class that is run."""
        return self._foreign.kind

    def unstreamed(self) -> Mapping[int, Mapping[str, Any]]:
        return self._foreign.rest

    def resume(
        self, steps: Mapping[int, int], unstreamed: Mapping[int, Mapping[str, Any]], skipped_steps: int
    ) -> None:
        super().resume(steps, unstreamed, skipped_steps)
        self._foreign.rest = {index: dict(rest) for index, rest in unstreamed.items()}


class ForeignRule:
    """An `outcore.optim.kernels.Rule` around an optimizer class.

    Attributes:
        rest: parameter number to what the class keeps of it that is not streamed.
    """

    @property
    def can_split(self) -> bool:
        return False

    @property
    def whole_parameters(self) -> bool:
        return True

    def __init__(self, kind: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> None:
        self.kind = kind
        self._settings = dict(settings)
        self.rest: dict[int, dict[str, Any]] = {}
        self._streamed: tuple[str, ...] = ()
        self.defaults: dict[str, Any] = {}
        self._probe()

    def _probe(self) -> None:
        """Find out by a step on small parameters which state tensors have the parameter's shape."""
        names: dict[str, None] = {}
        failure: Exception | None = None
        for shape in ((3, 5), (7,)):
            parameter = torch.nn.Parameter(torch.ones(shape))
            try:
                optimizer = self.kind([parameter], **self._settings)
                parameter.grad = torch.ones(shape)
                optimizer.step()
            except Exception as error:
                failure = error
                continue
            self.defaults = dict(optimizer.defaults)
            for name, value in optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    names[name] = None
        if not self.defaults:
            raise UsageError(
                f"{self.kind.__name__} can't be run on one parameter at a time: {failure}"
            ) from failure
        self._streamed = tuple(names)

    def planes(self, param_dtype: torch.dtype, master: Master) -> tuple[Plane, ...]:
        own = () if master is Master.NONE else (Plane("master", torch.float32),)
        return own + tuple(Plane(name, torch.float32) for name in self._streamed)

    def initialise(self, planes: Planes, param: torch.Tensor, master_values: torch.Tensor) -> None:
        for plane in self._moments(planes).values():
            plane.zero_()
        self.set_master(param, planes, master_values)

    def _master(self, param: torch.Tensor, planes: Planes) -> torch.Tensor:
        return planes[0] if len(planes) > len(self._streamed) else param

    def _moments(self, planes: Planes) -> dict[str, torch.Tensor]:
        return dict(zip(self._streamed, planes[len(planes) - len(self._streamed) :], strict=True))

    def master(self, param: torch.Tensor, planes: Planes, out: torch.Tensor) -> None:
        out.copy_(self._master(param, planes))

    def set_master(self, param: torch.Tensor, planes: Planes, values: torch.Tensor) -> None:
        param.copy_(values)
        self._master(param, planes).copy_(values)

    def moments(self, planes: Planes) -> dict[str, torch.Tensor]:
        return {name: plane.clone() for name, plane in self._moments(planes).items()}

    def set_moments(self, planes: Planes, values: Mapping[str, torch.Tensor]) -> None:
        own = self._moments(planes)
        for name, value in values.items():
            own[name].copy_(value)

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        planes: Planes,
        hyper: Mapping[str, object],
        step: int,
        transform: GradTransform,
        workers: Workers | None = None,
        slot: Slot | None = None,
    ) -> None:
        assert slot is not None, "a foreign rule works on whole parameters"
        master, streamed, shape = self._master(param, planes), self._moments(planes), slot.shape
        whole = torch.nn.Parameter(master.view(shape))
        whole.grad = transform.apply(grad).view(shape)
        optimizer = self.kind([whole], **self._settings)
        optimizer.param_groups[0].update(hyper)
        if slot.index in self.rest:
            state = optimizer.state[whole]
            state.update(self.rest[slot.index])
            state.update({name: plane.view(shape) for name, plane in streamed.items() if name not in state})
        optimizer.step()
        rest = {}
        for name, value in optimizer.state[whole].items():
            if name in streamed and isinstance(value, torch.Tensor) and value.shape == shape:
                if value.data_ptr() != streamed[name].data_ptr():
                    streamed[name].copy_(value.reshape(-1))
            else:
                rest[name] = value
        self.rest[slot.index] = rest
        if master is not param:
            param.copy_(master)
