"""The head and the cross-entropy of a language model in slices: its logits never exist whole.

[Note: Two ways to cut logits]
Forward goes through the positions in slices: of each it makes the logits, takes what the loss needs of them (the
logarithm of the sum of their exponentials, which is kept, and the logit of the label), and drops them. Backward goes
through the vocabulary in slices of the same number of logits, for all positions at once: with the kept logarithms, the
softmax of any part of the vocabulary can be had by itself. So the gradient of the head's weight comes out of one
product per part, rounded once, where a sum over slices of positions would need an fp32 copy of the whole weight beside
it. The hidden states' gradient is summed over the parts in fp32 and rounded at the end.

Where logits are kept, they come out of one product in forward, and only what is made of them in fp32 is in slices.

Logits come out of the product in the dtype of the weight and are widened to fp32, as in transformers. The losses of the
positions are summed by one reduction, so the slices don't show in the loss but for what the product itself does with
other shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def summed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int,
    positions: int,
    keeps: bool = False,
) -> torch.Tensor:
    """The sum over positions of the cross-entropy of ``hidden @ weight.T + bias``.

    Args:
        hidden: shape [n, width].
        weight: shape [vocabulary, width], of the same dtype.
        bias: shape [vocabulary], or ``None``.
        labels: integers, shape [n].
        ignore_index: a label that doesn't count.
        positions: never more logits exist in fp32 than those of so many positions.
        keeps: whether all of them exist in the dtype of the weight, from forward to backward.

    Returns:
        An fp32 scalar.
    """
    found: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, ignore_index, positions, keeps
    )
    return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        ignore_index: int,
        positions: int,
        keeps: bool,
    ) -> torch.Tensor:
        count = hidden.shape[0]
        counts = labels != ignore_index
        labels = torch.where(counts, labels, 0)
        logsumexp = torch.empty(count, dtype=torch.float32, device=hidden.device)
        losses = torch.empty(count, dtype=torch.float32, device=hidden.device)
        kept = F.linear(hidden, weight, bias) if keeps else None
        for start, stop in _parts(count, positions):
            logits = (
                F.linear(hidden[start:stop], weight, bias) if kept is None else kept[start:stop]
            ).float()
            logsumexp[start:stop] = logits.logsumexp(1)
            own = logits.gather(1, labels[start:stop, None])[:, 0]
            losses[start:stop] = (logsumexp[start:stop] - own) * counts[start:stop]
            del logits, own
        ctx.save_for_backward(hidden, labels, counts, logsumexp, kept)
        ctx.weight, ctx.bias, ctx.positions = (
            weight,
            bias,
            positions,
        )  # parameters have their values when it matters
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, labels, counts, logsumexp, kept = ctx.saved_tensors
        weight, bias = ctx.weight.detach(), None if ctx.bias is None else ctx.bias.detach()
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        vocabulary, count = weight.shape[0], hidden.shape[0]
        scale = (gradient.float() * counts)[:, None]
        own = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if for_hidden else None
        of_weight = torch.empty_like(weight) if for_weight else None
        of_bias = torch.empty_like(bias) if for_bias and bias is not None else None
        for start, stop in _parts(vocabulary, max(1, ctx.positions * vocabulary // max(1, count))):
            if kept is None:
                part = None if bias is None else bias[start:stop]
                errors = F.linear(hidden, weight[start:stop], part).float()
            else:
                errors = kept[:, start:stop].to(torch.float32, copy=True)  # backward may come again
            errors.sub_(logsumexp[:, None]).exp_()
            here = (labels >= start) & (labels < stop)
            place = torch.where(here, labels - start, 0)[:, None]
            errors.scatter_add_(1, place, here[:, None].float().neg_())
            errors.mul_(scale)
            if of_bias is not None:
                of_bias[start:stop] = errors.sum(0)
            rounded = errors.to(hidden.dtype)
            del errors
            if of_weight is not None:
                torch.mm(rounded.T, hidden, out=of_weight[start:stop])
            if own is not None:
                own.add_(rounded @ weight[start:stop])
            del rounded
        of_hidden = None if own is None else own.to(hidden.dtype)
        return of_hidden, of_weight, of_bias, None, None, None, None


def _parts(count: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, size):
        yield start, min(start + size, count)
