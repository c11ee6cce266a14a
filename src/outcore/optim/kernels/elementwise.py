"""What the rules have in common: planes, masters and moments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from outcore.chunks.layout import Slot
from outcore.errors import UsageError
from outcore.optim.kernels.codecs import FP32, Codec
from outcore.optim.kernels.launch import check
from outcore.optim.kernels.master import Master, join_master, quiet, split_master, with_carry
from outcore.optim.kernels.rule import Plane, Planes
from outcore.optim.kernels.transform import GradTransform
from outcore.optim.kernels.workers import Workers

STEP = 1 << 16
"""Elements handled at a time: temporaries, which no budget counts, stay at two MiB, and in the cache."""


class Elementwise(ABC):
    """A rule whose planes are a master, if any, and then moments.

    Where the split master is allowed, the last moment is never negative and lends it the sign bit.
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The moments' names."""

    @property
    @abstractmethod
    def can_split(self) -> bool:
        """Whether the last moment is never negative."""

    @property
    def codec(self) -> Codec:
        """How the moments are kept."""
        return FP32

    @abstractmethod
    def update(
        self,
        param: Tensor,
        grad: Tensor,
        planes: Planes,
        hyper: Mapping[str, object],
        step: int,
        transform: GradTransform,
        workers: Workers | None = None,
        slot: Slot | None = None,
    ) -> None: ...

    @property
    def whole_parameters(self) -> bool:
        return False

    def start(self, name: str) -> float:
        """What a moment is before the first step."""
        del name
        return 0.0

    def planes(self, param_dtype: torch.dtype, master: Master) -> tuple[Plane, ...]:
        fits = {
            Master.NONE: param_dtype is torch.float32,
            Master.FULL: param_dtype in (torch.bfloat16, torch.float16),
            Master.SPLIT: param_dtype is torch.bfloat16 and self.can_split,
        }
        if not fits[master]:
            raise UsageError(f"{type(self).__name__} can't keep the master of {param_dtype} as {master}")
        self.codec.check(param_dtype)
        moments = self.codec.planes(self.names)
        if master is Master.FULL:
            return (Plane("master", torch.float32), *moments)
        if master is Master.SPLIT:
            return (Plane("low", torch.int16), *moments)
        return moments

    def initialise(self, planes: Planes, param: Tensor, master_values: Tensor) -> None:
        moments = self.parts(planes)[1]
        for part in _pieces(param):
            for k, name in enumerate(self.names):
                start = torch.full_like(param[part], self.start(name), dtype=torch.float32)
                self.codec.write(moments, k, part, start)
        self.set_master(param, planes, master_values)

    def master(self, param: Tensor, planes: Planes, out: Tensor) -> None:
        check(param, out, *self._unshared(planes))
        stored, moments = self.parts(planes)
        for part in _pieces(param):
            if stored is None:
                out[part] = param[part]
            elif stored.dtype is torch.float32:
                out[part] = stored[part]
            else:
                out[part] = join_master(param[part], stored[part], self._last(moments, part))

    def set_master(self, param: Tensor, planes: Planes, values: Tensor) -> None:
        check(param, values, *self._unshared(planes))
        param = param.detach()
        stored, moments = self.parts(planes)
        for part in _pieces(param):
            exact = quiet(values.detach()[part])
            if param.dtype is torch.bfloat16:
                param[part], low, carry = split_master(exact)
                if stored is not None and stored.dtype is torch.int16:
                    stored[part] = low
                    marked = with_carry(self._last(moments, part), carry)
                    self.codec.write(moments, len(self.names) - 1, part, marked)
            else:
                param[part] = exact
            if stored is not None and stored.dtype is torch.float32:
                stored[part] = exact

    def moments(self, planes: Planes) -> dict[str, Tensor]:
        stored, moments = self.parts(planes)
        copies = {}
        for k, name in enumerate(self.names):
            copies[name] = torch.empty(moments[k].numel(), dtype=torch.float32)
            for part in _pieces(moments[k]):
                copies[name][part] = self.codec.read(moments, k, part)
        if stored is not None and stored.dtype is torch.int16:
            copies[self.names[-1]].abs_()
        return copies

    def set_moments(self, planes: Planes, values: Mapping[str, Tensor]) -> None:
        unknown = set(values) - set(self.names)
        if unknown:
            raise UsageError(f"{type(self).__name__} has moments {self.names}, not {sorted(unknown)}")
        stored, moments = self.parts(planes)
        for k, name in enumerate(self.names):
            if name not in values:
                continue
            check(moments[k], values[name])
            lends = name == self.names[-1] and stored is not None and stored.dtype is torch.int16
            for part in _pieces(moments[k]):
                new = quiet(values[name].detach()[part])
                if lends:
                    new = with_carry(new, self._last(moments, part).signbit())
                self.codec.write(moments, k, part, new)

    def parts(self, planes: Planes) -> tuple[Tensor | None, Planes]:
        """The plane of the master, if there is one, and the planes of the moments."""
        extra = len(planes) - len(self.codec.planes(self.names))
        if extra not in (0, 1):
            raise UsageError(
                f"{type(self).__name__} has the moments {self.names} and perhaps a master, "
                f"not {len(planes)} planes"
            )
        return (planes[0] if extra else None), planes[extra:]

    def _unshared(self, planes: Planes) -> Planes:
        """Those with an entry for each element."""
        stored, moments = self.parts(planes)
        own = moments[: len(self.names)]
        return own if stored is None else (stored, *own)

    def _last(self, moments: Planes, part: slice) -> Tensor:
        return self.codec.read(moments, len(self.names) - 1, part)


def number(hyper: Mapping[str, object], name: str, default: float | None = None) -> float:
    """A hyperparameter as a float; torch allows one-element tensors.

    Raises:
        UsageError: it is missing or is no number.
    """
    value = hyper.get(name, default)
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    raise UsageError(f"the hyperparameter {name!r} must be a number, not {value!r}")


def pair(hyper: Mapping[str, object], name: str) -> tuple[float, float]:
    """A hyperparameter made of two numbers, such as ``betas``.

    Raises:
        UsageError: it is missing or is something else.
    """
    value = hyper.get(name)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return float(value[0]), float(value[1])
    raise UsageError(f"the hyperparameter {name!r} must be two numbers, not {value!r}")


def _pieces(tensor: Tensor) -> Iterator[slice]:
    count = tensor.numel()
    return (slice(start, min(start + STEP, count)) for start in range(0, count, STEP))
