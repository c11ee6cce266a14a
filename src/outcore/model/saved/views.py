"""Saved tensors as views of stored bytes.

Autograd saves views: three of one projection, a transposed one, a slice. What is stored is the storage below them,
once, or the part of it that a view spans where that is less than half. A view is then restored with the dtype,
shape, strides and place that it had.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of a storage."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def holds(self, other: Span) -> bool:
        return self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in bytes that are stored.

    Attributes:
        offset: of its first element from the first byte that is stored, in elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage, first: int, device: torch.device) -> torch.Tensor:
        """The tensor in a storage on a device, of which ``first`` is the first byte that is stored."""
        empty = torch.empty(0, dtype=self.dtype, device=device)
        offset = self.offset + first // self.dtype.itemsize
        return empty.set_(storage, offset, self.shape, self.strides)


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary one, whose bytes say all there is to say."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def spanned(tensor: torch.Tensor) -> Span:
    """The bytes of the storage from the first to the last element of a tensor that has some."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return Span(start, start + (reach + 1) * tensor.element_size())


def to_store(tensor: torch.Tensor) -> Span:
    """The bytes that are stored for a tensor: all of its storage, unless it spans less than half of that."""
    own, whole = spanned(tensor), tensor.untyped_storage().nbytes()
    if 2 * own.nbytes >= whole:
        return Span(0, whole)
    return Span(own.start - own.start % ALIGNMENT, own.stop)


ALIGNMENT = 64
"""Bytes: parts of storages begin at multiples of it, so that elements of any dtype stay aligned."""


def layout_in(tensor: torch.Tensor, stored: Span) -> Layout:
    """How the tensor lies in bytes that hold it."""
    offset = int(tensor.storage_offset()) - stored.start // tensor.element_size()
    return Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)


def bytes_of(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """Those bytes of a tensor's storage, shape [nbytes], uint8, without a copy."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), span.start, (span.nbytes,), (1,))
