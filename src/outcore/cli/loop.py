"""The training loop: the one of any PyTorch program, with a clock."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

import outcore
from outcore.cli.batches import Batches
from outcore.report.step import Step


def train(
    model: Any,
    optimizer: outcore.Optimizer,
    batches: Batches,
    *,
    device: torch.device,
    steps: range,
    accumulate: int,
    clip: float,
    between: Callable[[], None],
    watch: Callable[[int], AbstractContextManager[None]],
    shares: outcore.Shares,
    agree: Callable[[float], float],
) -> Iterator[Step]:
    """Take optimizer steps, and yield each one's measurements as it ends.

    Args:
        model: offloaded; called with ``input_ids`` and ``labels``, gives a ``loss``.
        steps: their numbers.
        accumulate: micro-batches of a step; each counts alike.
        clip: largest norm of the gradient, 0 for no clipping.
        between: called between passes, where everything is at rest.
        watch: gives, for the number of a step, what to run it in.
        shares: gives this rank its part of each batch.
        agree: gives the mean loss of all ranks for this one's.
    """
    healthy = True
    for number in steps:
        with watch(number):
            before = outcore.snapshot(model)
            start = time.perf_counter()
            losses, batch, tokens = [], [], 0
            for _ in range(accumulate):
                whole = torch.from_numpy(batches.next())
                with shares.part(whole) as part:
                    ids = part.batch.to(device)
                    between()
                    loss = part.weigh(model(input_ids=ids, labels=ids).loss)
                    between()
                    optimizer.backward(loss / accumulate if accumulate > 1 else loss)
                    between()
                losses.append(loss.detach())
                batch.append(ids)
                tokens += whole.numel()
            norm = float(optimizer.clip_grad_norm_(clip)) if clip > 0 else None
            lr = float(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            mean = agree(sum(float(loss) for loss in losses) / accumulate)
            seconds = time.perf_counter() - start
            after = outcore.snapshot(model)
        where = optimizer.nonfinite
        if not math.isfinite(mean) and healthy:  # the step was skipped: the weights are what they were
            pairs = zip(batch, losses, strict=True)
            bad = next((ids for ids, loss in pairs if not math.isfinite(float(loss))), batch[-1])
            where = outcore.first_nonfinite(model, input_ids=bad, labels=bad) or where
            found = "in the output of no unit" if where is None else f"first in {where}"
            warnings.warn(f"the loss of step {number} is not finite, {found}", RuntimeWarning, stacklevel=2)
        healthy = math.isfinite(mean)
        yield Step(number, mean, lr, norm, tokens, seconds, before, after, optimizer.skipped_steps, where)
