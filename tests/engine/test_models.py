"""Models that do what models do: odd parameters, views, in-place work, adapters, hooks, other orders."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from engine.twin import WIDTH, Run, adamw, same
from exact.shapes import Block, Stack

pytestmark = pytest.mark.rehearsed


class Whole(Stack):
    """Parameters of integers and truth values, buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__(3)
        self.blocks[1].order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)
        self.register_buffer("scale", torch.full((WIDTH,), 1.5, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("gone", None)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().hidden(x) * self.mask * self.scale.to(x.dtype)


class Whole2(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[..., self.order])


class Empty(Stack):
    """Parameters of no elements and of no dimensions."""

    def __init__(self) -> None:
        super().__init__(3)
        self.blocks[0].nothing = nn.Parameter(torch.zeros(0, 7))
        self.gain = nn.Parameter(torch.tensor(1.25))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return super().hidden(x) * self.gain


class Order(Stack):
    """Blocks in an order that depends on the input."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        turn = int(x[0, 0, 0] * 100) % len(self.blocks)
        x = self.embed(x)
        for k in range(len(self.blocks)):
            x = self.blocks[(k * 2 + turn) % len(self.blocks)](x)
        return x


class Inside(Stack):
    """A block under no_grad within a forward that is trained, as for a target."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        with torch.no_grad():
            target = self.blocks[1](x)
        x = self.blocks[0](x) - target
        return self.blocks[2](self.blocks[1](x))


class Passing(Stack):
    """Modules that give back what they were given, beside one that computes."""

    class Gate(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return x, super().forward(x) * 0.5, x

    def __init__(self) -> None:
        super().__init__(3)
        self.blocks = nn.ModuleList([Passing.Gate(), nn.Identity(), Passing.Gate()])

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        a, b, c = self.blocks[0](x)
        x = self.blocks[1](a + b * c)
        return sum(self.blocks[2](x))  # type: ignore[return-value]


class Inplace(Stack):
    """Work in place on a unit's input and on its output."""

    class Adds(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x.clone())
            x.mul_(0.5).add_(y)
            return x

    def __init__(self) -> None:
        super().__init__(3)
        self.blocks = nn.ModuleList(Inplace.Adds() for _ in range(3))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * 1.0
        for block in self.blocks:
            x = block(x.clone()) * 1.0
            x *= 0.5
            x[:, 0] += 1
        return x


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank path."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class Adapters(Stack):
    """The base is frozen, adapters sit in the last two blocks alone: the first get no gradient."""

    def __init__(self) -> None:
        super().__init__(4)
        self.requires_grad_(False)
        for block in self.blocks[2:]:
            block.up = Adapted(block.up)  # type: ignore[assignment]


class HeadOnly(Stack):
    def __init__(self) -> None:
        super().__init__(3)
        self.requires_grad_(False)
        self.head.requires_grad_(True)


class BiasOnly(Stack):
    def __init__(self) -> None:
        super().__init__(3)
        for name, p in self.named_parameters():
            p.requires_grad_(name.endswith("bias"))


class Positions(nn.Module):
    """Gives back a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, length: int) -> torch.Tensor:
        return self.weight[:length]


class Views(Stack):
    def __init__(self) -> None:
        super().__init__(3)
        self.positions = Positions()

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.positions(x.shape[1])
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x + positions


class Query(nn.Module):
    """Gives back its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> torch.Tensor:
        return self.query


class Itself(Stack):
    def __init__(self) -> None:
        super().__init__(3)
        self.query = Query()

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return super().hidden(x) * self.query()


class Normed(Stack):
    """Old and new forms of weights that are computed."""

    def __init__(self) -> None:
        super().__init__(3)
        torch.nn.utils.parametrizations.weight_norm(self.head)
        torch.nn.utils.parametrizations.weight_norm(self.blocks[1].up)


class OldNorm(Stack):
    def __init__(self) -> None:
        super().__init__(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.nn.utils.weight_norm(self.blocks[1].up)
            torch.nn.utils.weight_norm(self.embed)


def _whole() -> nn.Module:
    model = Whole()
    model.blocks[1].__class__ = Whole2
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (Empty, Passing, Inplace, Adapters, HeadOnly, BiasOnly, Views, Itself, Normed, OldNorm)
} | {"Whole": _whole, "Order": lambda: Order(5), "Inside": lambda: Inside(3)}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, recompute: bool, tmp_path: Path) -> None:
    import outcore

    def script(run: Run) -> None:
        run.train(0, 1)
        with torch.no_grad():
            run.loss(2)
        run.train(3)

    activations = outcore.Activations("recompute" if recompute else "keep")
    if recompute and name == "Inplace":
        pytest.skip("a block that changes its own input can't be computed twice")
    same(script, tmp_path, MODELS[name], activations=activations, tight="4MiB")


def test_hooks_of_the_users(tmp_path: Path) -> None:
    """They see each call once, and may change what goes in and out, in both directions."""

    def script(run: Run) -> None:
        block, seen = run.model.blocks[1], []
        block.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        block.register_forward_hook(lambda m, args, out: out * 1.5)
        block.register_full_backward_hook(lambda m, gin, gout: (gin[0] * 0.5,))
        block.up.register_full_backward_pre_hook(lambda m, gout: seen.append(1) or (gout[0] * 2,))
        run.train(0, 1, 2)
        run.log.append(len(seen))

    def build() -> nn.Module:
        return Stack(3)

    same(script, tmp_path, build)


def test_hooks_from_before(tmp_path: Path) -> None:
    """Hooks that were there first read open parameters too."""

    def build() -> nn.Module:
        model = Stack(3)
        block: Any = model.blocks[1]
        block.register_forward_pre_hook(lambda m, args: (args[0] + m.up.bias[:WIDTH],))
        block.register_forward_hook(lambda m, args, out: F.linear(out, m.down.weight[:, :WIDTH]))
        return model

    same(lambda run: run.train(0, 1, 2), tmp_path, build)


@pytest.mark.filterwarnings("ignore:.*has a gradient that nobody takes:RuntimeWarning")
def test_an_optimizer_of_some_parameters(tmp_path: Path) -> None:
    """The others have gradients that nobody uses."""
    same(
        lambda run: run.train(0, 1, 2),
        tmp_path,
        make=lambda model: adamw([p for n, p in model.named_parameters() if "down" in n]),
    )
