"""A block in slices beside the same block run row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outcore.model.slices.block import recompute_in_slices

WIDTH = 16


def rows(count: int = 5, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, *(shape or (3, WIDTH)), generator=torch.Generator().manual_seed(seed))


def sliced(module: nn.Module, size: int = 2) -> dict[nn.Parameter, torch.Tensor]:
    """Let a module run in slices; gradients of its parameters come into the dict."""
    sums: dict[nn.Parameter, torch.Tensor] = {}
    recompute_in_slices(module, "the.block", size, sums.__setitem__)
    return sums


def compare(
    module: nn.Module,
    args: tuple[Any, ...],
    size: int = 2,
    own: Callable[[int, int], tuple[Any, ...]] | None = None,
    take: Callable[[Any], torch.Tensor] = lambda output: output,
    **kwargs: Any,
) -> None:
    """Against a loop over slices with a graph each, by bits: outputs, gradients of inputs and of parameters.

    Args:
        own: the arguments of the rows from start to stop; by default the first is cut and the others pass whole.
    """
    own = own or (lambda start, stop: (args[0][start:stop], *args[1:]))
    count = args[0].shape[0]
    parts = [(start, min(start + size, count)) for start in range(0, count, size)]
    leaf = args[0].detach().requires_grad_()
    weights = rows(count, *take(module(*args, **kwargs)).shape[1:], seed=9)
    parameters = list(module.parameters())
    expected, of_rows = [], []
    sums = [torch.zeros(p.shape) for p in parameters]
    torch.manual_seed(5)
    outputs = [take(module(*own(*part), **kwargs)) for part in parts]  # draws what the slices draw
    torch.manual_seed(5)
    for (start, stop), output in zip(parts, outputs, strict=True):
        piece = leaf[start:stop].detach().requires_grad_()
        again = take(module(piece, *own(start, stop)[1:], **kwargs))
        assert torch.equal(again, output)
        found = torch.autograd.grad(again, [piece, *parameters], weights[start:stop], allow_unused=True)
        expected.append(output.detach())
        of_rows.append(found[0])
        for total, gradient in zip(sums, found[1:], strict=True):
            if gradient is not None:
                total += gradient
    collected = sliced(module, size)
    torch.manual_seed(5)
    output = take(module(leaf, *args[1:], **kwargs))
    assert torch.equal(output, torch.cat(expected))
    output.backward(weights)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.cat([g for g in of_rows if g is not None]))
    for parameter, total in zip(parameters, sums, strict=True):
        if parameter in collected:
            assert torch.equal(collected[parameter], total)
        else:
            assert not total.any()


class Around(nn.Module):
    """A block whose arguments come in many forms."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear(x), *args, **kwargs)


# -- arguments -----------------------------------------------------------------------------------------
