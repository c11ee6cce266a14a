"""The model shapes that must all work: each makes a small model and a batch from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model, its batches, and how a loss comes out."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any], torch.Tensor]


WIDTH = 160


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """A plain stack of blocks with an embedding of floats and a head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 8)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.hidden(x))


class Unused(Stack):
    """A block that forward never calls, and a parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.blocks.append(Block())

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return x


class Frozen(Stack):
    """The embedding and half of each block are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        for block in self.blocks:
            block.up.requires_grad_(False)


class Tied(nn.Module):
    """Token embedding and head share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(500, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 500, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(Stack):
    """Every block is called twice in one forward."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(block(x))
        return x


class Dicts(Stack):
    """Blocks that take and give dicts; the model gives a dataclass-like dict."""

    class DictBlock(Block):
        def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
            y = super().forward(state["x"])
            return {"x": y, "seen": [*state["seen"], y.mean()]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dicts.DictBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        state: dict[str, Any] = {"x": self.embed(x), "seen": []}
        for block in self.blocks:
            state = block(state)
        return {"logits": self.head(state["x"]), "extra": state["seen"]}


class Owner(Stack):
    """The model itself owns parameters, one of them in a list, beside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(4)])

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale
        for block, shift in zip(self.blocks, self.shifts, strict=True):
            x = block(x + shift)
        return x * self.scale


class Attention(nn.Module):
    """torch's own encoder layers: multi-head attention reads its projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embed(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x)


class Experts(nn.Module):
    """Blocks of two experts of which a batch may hit one only."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 2)
            self.experts = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            choice = int(self.gate(x).detach().float().mean((0, 1)).argmax())
            return self.experts[choice](x) * self.gate(x).softmax(-1)[..., choice : choice + 1]

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, WIDTH)
        self.blocks = nn.ModuleList(Experts.Mixture() for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Dropout(Stack):
    """Random numbers in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        for block in self.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.1))  # type: ignore[assignment]


class Convolutions(nn.Module):
    """A stem, two stages of convolutions with batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.stages = nn.Sequential(*(self._stage() for _ in range(3)))
        self.head = nn.Linear(64, 8)

    @staticmethod
    def _stage() -> nn.Module:
        return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def _floats(seed: int) -> Batch:
    return {"x": torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(seed))}


def _tokens(seed: int) -> Batch:
    return {"ids": torch.randint(0, 500, (3, 12), generator=torch.Generator().manual_seed(seed))}


def _images(seed: int) -> Batch:
    return {"x": torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(seed))}


def _square(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["logits"].float().square().mean() + 0.01 * torch.stack(output["extra"]).float().sum()
    return output.float().square().mean()


SHAPES = [
    Shape("stack", Stack, _floats, _square),
    Shape("unused", Unused, _floats, _square),
    Shape("frozen", Frozen, _floats, _square),
    Shape("tied", Tied, _tokens, _square),
    Shape("twice", Twice, _floats, _square),
    Shape("dicts", Dicts, _floats, _square),
    Shape("owner", Owner, _floats, _square),
    Shape("attention", Attention, _floats, _square),
    Shape("experts", Experts, _floats, _square),
    Shape("dropout", Dropout, _floats, _square),
    Shape("convolutions", Convolutions, _images, _square),
]


def built(shape: Shape, seed: int = 7) -> nn.Module:
    """The shape's model with weights from a seed."""
    torch.manual_seed(seed)
    return shape.build()
