"""Tensors that autograd gave away, and what may not happen to them meanwhile."""

from __future__ import annotations

import torch


class Watched:
    """Knows whether a tensor was changed in place since it was saved, as autograd would, without its bytes.

    Args:
        probe: shares the count of versions with the tensor, not necessarily its bytes.
    """

    def __init__(self, probe: torch.Tensor) -> None:
        self._probe = probe
        self._version = probe._version

    def check(self) -> None:
        """
        Raises:
            RuntimeError: it was.
        """
        check(self._probe, self._version)


def check(tensor: torch.Tensor, version: int) -> None:
    """
    Raises:
        RuntimeError: a tensor that was saved at that version was changed in place since; in torch's words.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: it "
            f"is at version {tensor._version}; expected version {version} instead"
        )
