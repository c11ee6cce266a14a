"""Rules, values and comparisons that the kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from outcore.chunks.layout import ALIGN
from outcore.optim.kernels import (
    AdagradRule,
    AdamRule,
    GradTransform,
    LionRule,
    Master,
    Rule,
    SGDRule,
    Workers,
    choice,
    codec,
)

PLAIN = GradTransform()
CLIPPED = GradTransform(0.5, 0.7, 1.3)

RULES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "adamw": (AdamRule(), {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}),
    "adam": (AdamRule(decoupled=False), {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}),
    "sgd": (SGDRule(momentum=False), {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (SGDRule(momentum=True), {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "nesterov": (SGDRule(momentum=True), {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "lion": (LionRule(), {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "adagrad": (AdagradRule(initial=0.1), {"lr": 0.1, "lr_decay": 0.01, "eps": 1e-10, "weight_decay": 0.1}),
}
"""Every rule with hyperparameters that use all of its terms."""

NARROW: dict[str, tuple[Rule, dict[str, Any]]] = {
    f"{name}-{kept}": (AdamRule(name == "adamw", codec(kept)), RULES[name][1])
    for name in ("adamw", "adam")
    for kept in ("bf16", "8bit")
}
"""Rules whose moments are not kept exactly."""

SPECIAL = torch.tensor(
    [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 3.4e38, -3.4e38, 1.17549435e-38]
)


def combinations() -> list[Any]:
    """Every rule with every dtype, home of the master and dtype of the gradient that it takes."""
    found = []
    for name, (rule, _) in RULES.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for master in Master:
                if (master is Master.NONE) != (dtype is torch.float32):
                    continue
                if master is Master.SPLIT and not (rule.can_split and dtype is torch.bfloat16):
                    continue
                for grad in sorted({dtype, torch.float32}, key=str):
                    short = [str(x).removeprefix("torch.") for x in (dtype, grad)]
                    found.append(
                        pytest.param(name, dtype, grad, master, id="-".join((name, *short, master.value)))
                    )
    return found


@dataclass
class State:
    """A parameter with its planes."""

    param: Tensor
    planes: tuple[Tensor, ...]

    @classmethod
    def new(cls, rule: Rule, values: Tensor, dtype: torch.dtype, master: Master, offset: int = 0) -> State:
        """States for ``values``, each tensor beginning ``offset`` elements into its memory."""
        n = values.numel()

        def empty(dtype: torch.dtype, shared: int = 1) -> Tensor:
            return torch.empty(-(-n // shared) + offset, dtype=dtype)[offset:]

        kinds = rule.planes(dtype, master)
        state = cls(empty(dtype), tuple(empty(plane.dtype, plane.shared) for plane in kinds))
        rule.initialise(state.planes, state.param, values)
        return state

    def part(self, part: slice) -> State:
        """Elements of it; cuts must be those that `outcore.chunks.layout` makes where planes are shared."""

        def cut(plane: Tensor) -> Tensor:
            if plane.numel() == self.param.numel():
                return plane[part]
            return plane[part.start // ALIGN : -(-part.stop // ALIGN)]

        return State(self.param[part], tuple(map(cut, self.planes)))

    def step(
        self,
        name: str,
        grad: Tensor,
        step: int,
        transform: GradTransform = PLAIN,
        workers: Workers | None = None,
    ) -> None:
        rule, hyper = (RULES | NARROW)[name]
        rule.update(self.param, grad, self.planes, hyper, step, transform, workers)

    def read(self, rule: Rule) -> dict[str, Tensor]:
        """The bits of all that can be seen from outside."""
        master = torch.empty(self.param.numel())
        rule.master(self.param, self.planes, master)
        seen = {"param": self.param, "master": master, **rule.moments(self.planes)}
        return {key: bits(value) for key, value in seen.items()}


def values(n: int, seed: int = 0) -> Tensor:
    """Normal numbers with special ones strewn in."""
    numbers = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    places = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: min(n // 4, SPECIAL.numel())]
    numbers[places] = SPECIAL[: places.numel()]
    return numbers


def bits(tensor: Tensor) -> Tensor:
    """A copy as integers, so that NaNs and signs of zero compare."""
    size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().clone().view(size[tensor.element_size()])


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert torch.equal(tensor, right[key]), f"{key} differs: {tensor} and {right[key]}"


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the torch implementation is there."""
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "_compiled", lambda: None)
