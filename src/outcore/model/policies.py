"""What users may decide about a model: one small object per concern, each with a default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch

from outcore.errors import UsageError

PrecisionName = Literal["bf16", "fp16", "fp32"]
ActivationsName = Literal["keep", "recompute", "offload", "recompute+offload"]

LogitsName = Literal["keep", "recompute"]

WAYS: tuple[ActivationsName, ...] = get_args(ActivationsName)

Units = Mapping[str, ActivationsName] | Callable[[str], ActivationsName | None]
"""Ways for single blocks: by name or shell pattern, or a function from a block's name to a way or ``None``."""

_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


@dataclass(frozen=True)
class Precision:
    """The dtype in which a model computes. Masters are always fp32.

    Attributes:
        compute: ``"bf16"`` (default), ``"fp16"`` with dynamic loss scaling (use `Optimizer.backward`),
            or ``"fp32"``.
    """

    compute: PrecisionName = "bf16"

    def __post_init__(self) -> None:
        if self.compute not in _DTYPES:
            raise UsageError(f"unknown precision {self.compute!r}; choose from {', '.join(_DTYPES)}")

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.compute]


@dataclass(frozen=True)
class Activations:
    """What happens to what a block's forward leaves for its backward.

    Every way gives the same result to the bit.

    Attributes:
        blocks: what every block does. ``"keep"``: it stays where it is. ``"recompute"``: from the block's input
            (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). ``"offload"``: it goes to the next
            tier while forward goes on, and comes back ahead of its use (`docs/activations.md`).
            ``"recompute+offload"``: the inputs of recomputed blocks do.
        units: what single blocks do instead: a mapping from their names, or shell patterns, to a way, of which
            the first that fits counts (``{"h.0": "keep", "h.*": "offload"}``; a name may be the end of the full one);
            or a function from the full name to a way, or to ``None`` for what ``blocks`` says.
        microbatch: rows of a slice: each recomputed block runs the batch in slices along dimension 0, in forward
            and in backward, so that its parameters are fetched once for all of them while the activations of
            one slice exist at a time. Give the batch whole instead of accumulating; gradients are what
            accumulation gives (`docs/slices.md`). ``None`` runs the batch as one.
        loss_slice: positions (rows times tokens) of a slice of the head and the cross-entropy, for causal
            language models of transformers that outcore knows; the logits of a batch then never exist whole.
            By default as many as the tokens of a ``microbatch``, and none if there is none.
        logits: what a loss in slices does with its logits between forward and backward. ``"recompute"``: they are
            multiplied again. ``"keep"``: they stay, in the dtype they are computed in (2 bytes each in 16 bits, where
            a whole cross-entropy holds 10), and backward has three products of the head's size to do for four.

    Raises:
        UsageError: a setting that can't mean anything; a block that would not run in the slices of the others.
    """

    blocks: ActivationsName = "keep"
    microbatch: int | None = None
    loss_slice: int | None = None
    units: Units | tuple[tuple[str, ActivationsName], ...] = ()
    logits: LogitsName = "recompute"

    def __post_init__(self) -> None:
        self._check_way(self.blocks)
        if isinstance(self.units, Mapping):
            object.__setattr__(self, "units", tuple(self.units.items()))  # so that it can be a key
        if isinstance(self.units, tuple):
            for name, way in self.units:
                self._check_way(way, f" for {name!r}")
        elif not callable(self.units):
            raise UsageError(f"units must be a mapping or a function, and is {self.units!r}")
        for way in (self.blocks, *(way for _, way in self.units)) if isinstance(self.units, tuple) else ():
            self._check_slices(way)
        for name in ("microbatch", "loss_slice"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, and is {value!r}")
        if self.logits not in get_args(LogitsName):
            raise UsageError(
                f"unknown way with logits {self.logits!r}; choose from {', '.join(get_args(LogitsName))}"
            )
        if self.logits == "keep" and self.microbatch is None and self.loss_slice is None:
            raise UsageError(
                'logits="keep" is for a loss in slices: give loss_slice=..., or leave it out (a whole loss keeps them)'
            )

    def _check_slices(self, way: ActivationsName) -> None:
        if self.microbatch is not None and not recomputes(way):
            raise UsageError(
                'microbatch works on recomputed blocks: give Activations("recompute", microbatch=...)'
            )

    @staticmethod
    def _check_way(way: object, where: str = "") -> None:
        if way not in WAYS:
            raise UsageError(f"unknown way with activations {way!r}{where}; choose from {', '.join(WAYS)}")

    def way(self, name: str) -> ActivationsName:
        """What the block of this full name does.

        Raises:
            UsageError: the function that was given returns no way.
        """
        if isinstance(self.units, tuple):
            return next((way for pattern, way in self.units if fits(name, pattern)), self.blocks)
        assert callable(self.units)
        way = self.units(name)
        if way is None:
            way = self.blocks
        self._check_way(way, f" for {name!r}")
        self._check_slices(way)
        return way

    def __str__(self) -> str:
        if not isinstance(self.units, tuple):
            return f"{self.blocks}, or as {getattr(self.units, '__name__', 'a function')} says"
        return ",".join([self.blocks, *(f"{name}={way}" for name, way in self.units)])


def fits(name: str, pattern: str) -> bool:
    """Whether a shell pattern means a name, or the end of it after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def recomputes(way: ActivationsName) -> bool:
    return way in ("recompute", "recompute+offload")


def offloads(way: ActivationsName) -> bool:
    return way in ("offload", "recompute+offload")


def read_activations(text: str, slice_rows: int | None = None, logits: str = "recompute") -> Activations:
    """Read what a command line says, as ``str(Activations(...))`` writes it: ``"offload,h.0=keep"``.

    Raises:
        UsageError: it can't be read.
    """
    first, *others = (part.strip() for part in text.split(","))
    units: dict[str, ActivationsName] = {}
    for part in others:
        name, equals, way = part.rpartition("=")
        if not equals or not name or name in units:
            raise UsageError(
                f"can't read the activations {text!r}: write a way, and NAME=WAY for single blocks, such as "
                "'offload,h.0=keep'"
            )
        units[name] = way  # type: ignore[assignment]  # checked by the policy
    return Activations(first, slice_rows, units=units, logits=logits)  # type: ignore[arg-type]
