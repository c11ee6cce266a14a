"""Deep models traced by few of their blocks.

[Note: Depth]
Ninety-six blocks that are alike take ninety-six times as long to trace as one, and say nothing new. So a long sequence
of them is cut to its first three and last two blocks; what the third adds to the second, each further one adds to the
one before it: operators, activations that stay, temporaries beside them. That this is so isn't assumed but seen: the
spans of the second, third and fourth block must grow evenly, forward and backward, or the model is traced whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from outcore.model.units import discover
from outcore.planning.fake_step import Trace
from outcore.planning.recorder import Event, Span

FEWEST = 8
"""Blocks from which on it is worth it."""

FIRST, KEPT = 3, 5
"""Blocks that are kept: the first ones, and all."""

NUMBERS = ("layer_idx", "layer_id")
"""Attributes that hold the number of a block, by which alone it differs from others."""


@dataclass(frozen=True)
class Depth:
    """A sequence of blocks, of which those between the first and the last are alike."""

    model: nn.Module
    blocks: nn.ModuleList
    path: str

    @classmethod
    def of(cls, model: nn.Module, trained: frozenset[str]) -> Depth | None:
        """The longest such sequence of a model, if there is one.

        Args:
            trained: names of the parameters that are.
        """
        found = [
            cls(model, module, name)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) >= FEWEST
        ]
        found = [depth for depth in found if depth._is_even(trained)]
        return max(found, key=lambda depth: len(depth.blocks), default=None)

    def _is_even(self, trained: frozenset[str]) -> bool:
        kinds = {
            _kind(block, f"{self.path}.{number}.", trained)
            for number, block in enumerate(self.blocks)
            if 0 < number < len(self.blocks) - 1
        }
        return len(kinds) == 1

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside, the model has the blocks alone that are kept."""
        every = self.blocks._modules
        chosen = list(every.values())
        chosen = chosen[:FIRST] + chosen[FIRST - KEPT :]
        self.blocks._modules = {str(number): block for number, block in enumerate(chosen)}
        try:
            yield
        finally:
            self.blocks._modules = every

    def units(self) -> list[str]:
        """Names of the units as they are now."""
        return [plan.name for plan in discover(self.model)[0]]

    def lengthened(self, short: Trace, names: Sequence[str]) -> Trace | None:
        """The trace of the whole model, or ``None`` if blocks don't grow evenly.

        Args:
            short: of the shortened model.
            names: of its units.
        """
        try:
            return _Lengthening(short, names, self.units(), self.path, len(self.blocks)).trace()
        except (_UnevenError, ValueError, IndexError):
            return None


class _UnevenError(Exception):
    """What one block adds, the next one doesn't."""


class _Lengthening:
    """Puts blocks in."""

    def __init__(
        self, short: Trace, names: Sequence[str], every: Sequence[str], path: str, count: int
    ) -> None:
        self._short = short
        self._spans = short.spans
        self._count = count
        self._extra = count - KEPT
        self._blocks = [every.index(f"{path}.{k}") for k in range(count)]
        self._number = {names.index(f"{path}.{k}"): k for k in range(KEPT)}
        self._others = {u: every.index(name) for u, name in enumerate(names) if u not in self._number}

    def trace(self) -> Trace:
        unit = {number: index for index, number in self._number.items()}
        forward = [self._first("forward", unit[k]) for k in range(KEPT)]
        backward = [self._first("backward", unit[k]) for k in range(KEPT)]
        if forward != sorted(forward) or backward != sorted(backward, reverse=True):
            raise _UnevenError
        spans = self._spans
        up = [spans[forward[k] : forward[k + 1]] for k in (1, 2, 3)]
        down = [spans[backward[k] : backward[k - 1]] for k in (1, 2, 3)]
        for segments in (up, down):
            self._check(segments)
        made = [self._put(span, 0) for span in spans[: forward[FIRST]]]
        middle = range(FIRST, self._count - (KEPT - FIRST))
        for k in middle:
            made += [self._further(a, b, k - 2) for a, b in zip(up[0], up[1], strict=True)]
        a, b = up[0][-1], up[1][-1]
        live = (b.live - a.live) * self._extra
        parts = [(y - x) * self._extra for x, y in zip(up[0][0].parts, up[1][0].parts, strict=True)]
        for span in spans[forward[FIRST] : backward[FIRST - 1]]:
            risen = replace(
                self._put(span, self._extra),
                peak=span.peak + live,
                live=span.live + live,
                parts=tuple(x + y for x, y in zip(span.parts, parts, strict=True)),
            )
            made.append(risen)
        for k in reversed(middle):
            made += [self._further(a, b, k - 2) for a, b in zip(down[0], down[1], strict=True)]
        made += [self._put(span, 0) for span in spans[backward[FIRST - 1] :]]
        short = self._short
        peak = max(span.peak for span in made)
        return Trace(made, short.growth + peak - short.peak, short.tokens, self._wide())

    def _first(self, phase: str, unit: int) -> int:
        return next(k for k, span in enumerate(self._spans) if span.event == (phase, unit))

    def _check(self, segments: Sequence[Sequence[Span]]) -> None:
        """Each of three segments must have what the one before it has, and as much more."""
        for a, b, c in zip(*segments, strict=True):
            for k, (first, second) in enumerate(((a, b), (b, c))):
                if self._relative(first.event, 1 + k) != self._relative(second.event, 2 + k):
                    raise _UnevenError
            if b.work != a.work or c.work != a.work:
                raise _UnevenError
            rises = [
                [second.peak - first.peak, second.live - first.live]
                + [y - x for x, y in zip(first.parts, second.parts, strict=True)]
                for first, second in ((a, b), (b, c))
            ]
            if rises[0] != rises[1]:
                raise _UnevenError

    def _relative(self, event: Event, block: int) -> tuple[str, Any]:
        phase, unit = event
        number = self._number.get(unit)
        return (phase, ("other", unit)) if number is None else (phase, number - block)

    def _event(self, event: Event, by: int) -> Event:
        phase, unit = event
        if unit < 0:
            return event
        number = self._number.get(unit)
        return phase, self._others[unit] if number is None else self._blocks[number + by]

    def _put(self, span: Span, by: int) -> Span:
        """The span, of a block so many further on."""
        return replace(span, event=self._event(span.event, by))

    def _further(self, a: Span, b: Span, times: int) -> Span:
        """What comes so many blocks after ``b``, as ``b`` does after ``a``."""
        return replace(
            self._put(b, times),
            peak=b.peak + (b.peak - a.peak) * times,
            live=b.live + (b.live - a.live) * times,
            parts=tuple(y + (y - x) * times for x, y in zip(a.parts, b.parts, strict=True)),
        )

    def _wide(self) -> frozenset[int]:
        found = {self._event(("", unit), 0)[1] for unit in self._short.wide if unit in self._others}
        numbers = {self._number[unit] for unit in self._short.wide if unit in self._number}
        found |= {self._blocks[k] for k in numbers if k < FIRST}
        found |= {self._blocks[k + self._extra] for k in numbers if k >= FIRST}
        if FIRST - 1 in numbers:
            found |= set(self._blocks[FIRST : self._count - (KEPT - FIRST)])
        return frozenset(found)


def _kind(block: nn.Module, path: str, trained: frozenset[str]) -> tuple[Any, ...]:
    """Equal for blocks that compute the same, as far as their parts, shapes and plain attributes tell.

    Args:
        path: what names of its parameters begin with.
        trained: names of the parameters that are.
    """
    parts: list[Any] = [tuple(name for name, _ in block.named_parameters() if path + name in trained)]
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str, type(None))) and key not in NUMBERS
        }
        shapes = [
            (key, tuple(t.shape), t.dtype, t.requires_grad)
            for own in (module._parameters, module._buffers)
            for key, t in own.items()
            if t is not None
        ]
        parts.append((name, type(module), tuple(sorted(plain.items())), tuple(shapes)))
    return tuple(parts)
