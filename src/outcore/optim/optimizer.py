"""The optimizers users hold: real `torch.optim.Optimizer` objects whose work is done chunk by chunk.

Until `outcore.offload` binds it, an optimizer works wholly in memory on its parameters' ``.grad``, with the
same kernels: that is the reference every placement is compared with.
"""

from __future__ import annotations

import copy
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, overload

import torch

from outcore.errors import NonFiniteError, StateError, UsageError
from outcore.optim import clipping
from outcore.optim.due import Due
from outcore.optim.kernels import GradTransform, Rule
from outcore.optim.local import LocalBackend
from outcore.optim.scaling import LossScale


class Backend(Protocol):
    """Where an optimizer's gradients and states are. Parameters are numbered in the order of the groups."""

    def sum_of_squares(self, transform: GradTransform) -> float:
        """The exact sum of squares of all gradients, inf or NaN if one of them is."""

    def first_nonfinite(self) -> str | None:
        """Where backward came first upon a gradient that is inf or NaN."""

    def present(self) -> set[int]:
        """The parameters that have a gradient."""

    def apply(self, due: Due) -> None:
        """Update all parameters that have a gradient, and forget the gradients."""

    def clear(self) -> None:
        """Forget the gradients."""

    def state(self, index: int) -> Mapping[str, torch.Tensor]:
        """The moments of one parameter, by torch's names, in its shape."""


class Optimizer(torch.optim.Optimizer):
    """Base of outcore's optimizers.

    Args:
        params: parameters or parameter groups.
        defaults: hyperparameters of groups that do not state their own.
        rule: the update rule.

    Attributes:
        skipped_steps: steps left out because a gradient was not finite.
        nonfinite: the unit in which backward came first upon such a gradient, if the last step was left out.
        scaling: whether a backward of a scaled loss runs.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        rule: Rule,
    ) -> None:
        self.rule = rule
        self.skipped_steps = 0
        self.nonfinite: str | None = None
        self.loss_scale: LossScale | None = None
        self.scaling = False
        self._local: Backend | None = None
        self._engine: Callable[[], Backend | None] | None = None  # the model owns it: one may drop the model
        self._order: list[torch.nn.Parameter] = []
        self._steps: dict[int, int] = {}
        self._transform = GradTransform()
        super().__init__(params, defaults)

    # -- binding ----------------------------------------------------------------------------------

    def check_free(self) -> None:
        """Raises StateError: an engine does its work already, or it has stepped."""
        if self._engine is not None:
            raise StateError("this optimizer already belongs to an offloaded model")
        if self._steps:
            raise StateError("offload the model before the optimizer's first step")

    def bind(self, backend: Backend, loss_scale: LossScale | None) -> None:
        """Hand the work over to an engine. Called by `outcore.offload`.

        Raises:
            StateError: it is bound already, or has stepped.
        """
        self.check_free()
        self._engine, self.loss_scale = weakref.ref(backend), loss_scale
        self._order = self.parameters()

    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters, in the order in which they are numbered."""
        return [p for group in self.param_groups for p in group["params"]]

    def group_of(self) -> dict[int, int]:
        """Parameter number to group number."""
        numbers = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        return dict(enumerate(numbers))

    @property
    def clipped(self) -> bool:
        """Whether the gradients that are there are to be clipped in the step."""
        return self._transform != GradTransform()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._engine is not None:
            raise StateError("parameter groups can't be added after offload(): add them before it")
        super().add_param_group(param_group)

    def unbind(self) -> None:
        """The engine is shut, and took gradients and states with it: nothing can be done any more."""
        self._engine = _nobody

    def _work(self) -> Backend:
        if self._engine is None:
            if self._local is None:
                self._local = LocalBackend(self.rule, self.parameters())
            return self._local
        engine = self._engine()
        if engine is None:
            raise StateError(
                "the model of this optimizer was released or is gone, and the optimizer's states with it: make a new "
                "optimizer for the new model"
            )
        return engine

    # -- a step -----------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """``loss.backward()``, with the loss scaled where fp16 asks for it."""
        scale = self.loss_scale
        self.scaling = scale is not None
        try:
            (loss if scale is None else loss * scale.value).backward()
        finally:
            self.scaling = False

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients down so that their joint norm is at most ``max_norm``.

        Works like `torch.nn.utils.clip_grad_norm_`; the factor is applied in fp32 within the update.

        Args:
            max_norm: the largest norm, positive.
            norm_type: only the Euclidean norm, 2, is known.
            error_if_nonfinite: raise if the norm is not finite. Otherwise `step` will skip.

        Returns:
            The norm before clipping, an fp32 scalar on the CPU.
        """
        if norm_type != 2.0:
            raise UsageError(f"only the 2-norm can be clipped, not norm_type={norm_type}")
        if not max_norm > 0:
            raise UsageError(f"a norm can only be clipped to a positive value, not to {max_norm}")
        transform = self._unscaled()
        squares = self._work().sum_of_squares(replace(transform, post_scale=1.0))
        total = clipping.norm(squares, transform)
        if not math.isfinite(total):
            if error_if_nonfinite:
                raise NonFiniteError(
                    f"the gradient norm is {total}{_first_in(self._work().first_nonfinite())}"
                )
            return torch.tensor(total)
        self._transform = clipping.scaled(self._transform, clipping.clip_factor(total, max_norm))
        return torch.tensor(total)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value], as `torch.nn.utils.clip_grad_value_`."""
        transform = self._unscaled()
        if self.loss_scale is not None:
            # the clamp comes after unscaling, so the unscaling must be part of what is noted
            self._transform = transform
        self._transform = clipping.clamped(self._transform, clip_value)

    def _unscaled(self) -> GradTransform:
        """What is noted so far, with the loss scale taken out of the gradients first."""
        if self.loss_scale is None or not math.isinf(self._transform.clamp):
            return self._transform
        return clipping.scaled(self._transform, 1.0 / self.loss_scale.value)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters from the gradients of all backward passes since the last step.

        A gradient that is inf or NaN skips the whole step, with a warning, and counts in `skipped_steps`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_moved()
        work = self._work()
        overflow = not math.isfinite(work.sum_of_squares(GradTransform()))
        self.nonfinite = work.first_nonfinite() if overflow else None
        if not overflow:  # what is refused here changes nothing
            steps = self._steps | {index: self._steps.get(index, 0) + 1 for index in work.present()}
            hyper = [{k: _kept(v) for k, v in group.items() if k != "params"} for group in self.param_groups]
            work.apply(Due(hyper, self.group_of(), dict(steps), self._unscaled()))
            self._steps = steps
        self._transform = GradTransform()
        if self.loss_scale is not None:
            self.loss_scale.update(overflow)
        if overflow:
            self.skipped_steps += 1
            self._say_skipped()
            work.clear()
        return loss

    def _refuse_moved(self) -> None:
        """States are found by a parameter's number, so it must stay the same."""
        ours = self.parameters()
        if self._engine is not None and (
            len(ours) != len(self._order) or any(map(operator.is_not, ours, self._order))
        ):
            raise StateError(
                "the parameter groups hold other parameters than when the model was offloaded, or in another order: "
                "change their learning rates and the like, and freeze with requires_grad"
            )

    def _say_skipped(self) -> None:
        scale = "" if self.loss_scale is None else f"; the loss scale is now {self.loss_scale.value:g}"
        warnings.warn(
            f"step skipped: a gradient is not finite{_first_in(self.nonfinite)} "
            f"({self.skipped_steps} skipped so far){scale}",
            RuntimeWarning,
            stacklevel=3,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not stepped with. After a step there is nothing left to do."""
        super().zero_grad(set_to_none=True)
        self._transform = GradTransform()
        self._work().clear()

    # -- what a checkpoint keeps beside moments and hyperparameters ---------------------------------

    @property
    def steps(self) -> dict[int, int]:
        """Parameter number to the number of steps it took; those that took one."""
        return dict(self._steps)

    def unstreamed(self) -> Mapping[int, Mapping[str, Any]]:
        """Parameter number to what is kept of it beside its moments. Nothing, but for foreign optimizers."""
        return {}

    def resume(
        self, steps: Mapping[int, int], unstreamed: Mapping[int, Mapping[str, Any]], skipped_steps: int
    ) -> None:
        """Go on from where another run was: the counterpart of `steps` and `unstreamed`."""
        self._steps = dict(steps)
        self.skipped_steps = skipped_steps
        self._transform = GradTransform()

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, in torch's form, on the CPU. Needs host memory for all moments at once."""
        work = self._work()
        groups, first = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            groups.append(
                {k: v for k, v in group.items() if k != "params"}
                | {"params": list(range(first, first + count))}
            )
            first += count
        state = {
            index: {"step": torch.tensor(float(step)), **work.state(index)}
            for index, step in sorted(self._steps.items())
        }
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not possible: moments and step counts lie in chunks, not in ``state``.

        Raises:
            StateError: always.
        """
        raise StateError(
            "an optimizer's state can't be loaded by load_state_dict(): use outcore.save and outcore.load"
        )


def _nobody() -> None:
    """Whom an optimizer works for after its engine was shut."""


def _kept(value: Any) -> Any:
    """A hyperparameter as it is now: torch's schedulers change a tensor in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _first_in(where: str | None) -> str:
    return "" if where is None else f", first in {where}"
