"""Every error outcore raises on purpose.

::

    OutcoreError
    ├── UsageError (ValueError)      a call or setting that cannot mean anything; says what would
    │   ├── SizeError                a size such as "14GiB" that cannot be read
    │   └── ModelError               a model, weight file or unit that does not fit the request
    ├── BudgetError (MemoryError)    the run needs more bytes on a tier than its budget holds
    ├── TierError (OSError)          a tier could not do what was asked of it
    │   ├── DiskFullError            no space left, on the device or within the disk budget
    │   ├── DiskReadError            a read failed or came back short
    │   ├── DiskWriteError           a write failed or was cut short
    │   ├── CorruptionError          bytes read back are not the bytes that were written
    │   ├── CheckpointError          a checkpoint is incomplete, damaged, or not of this run
    │   └── DeviceError              an accelerator refused an allocation
    ├── PeerError (RuntimeError)     another rank failed or went another way
    ├── StateError (RuntimeError)    calls in an order that has no meaning, e.g. step() inside forward
    └── NonFiniteError (ArithmeticError)   a loss or gradient is inf or NaN where that was forbidden

Each message names what failed, where, how many bytes, and what to do about it.
"""

from __future__ import annotations


class OutcoreError(Exception):
    """Base of all errors that outcore raises on purpose."""


class UsageError(OutcoreError, ValueError):
    """A call or a setting that cannot mean anything."""


class SizeError(UsageError):
    """A size in bytes that cannot be read, such as ``"fourteen"`` or ``"-1GiB"``."""


class ModelError(UsageError):
    """A model, a weight file or a unit that does not fit what was asked."""


class BudgetError(OutcoreError, MemoryError):
    """A tier's budget cannot hold what the run needs.

    Args:
        tier: ``"device"``, ``"host"`` or ``"disk"``.
        needed: bytes the run needs on that tier.
        budget: bytes the budget allows there.
        remedy: the smallest change that would make it fit.
    """

    def __init__(self, tier: str, needed: int, budget: int, remedy: str) -> None:
        self.tier = tier
        self.needed = needed
        self.budget = budget
        self.remedy = remedy
        super().__init__(
            f"the {tier} budget of {budget:,} bytes is too small: {needed:,} bytes are needed there; {remedy}"
        )


class TierError(OutcoreError, OSError):
    """A tier could not do what was asked of it."""


class DiskFullError(TierError):
    """No space left on the device, or within the disk budget."""


class DiskReadError(TierError):
    """A read from the disk tier failed or came back short."""


class DiskWriteError(TierError):
    """A write to the disk tier failed or was cut short."""


class CorruptionError(TierError):
    """Bytes read back are not the bytes that were written."""


class CheckpointError(TierError):
    """A checkpoint is incomplete, damaged, or not of this run."""


class DeviceError(TierError):
    """An accelerator refused an allocation."""


class PeerError(OutcoreError, RuntimeError):
    """Another rank of the run failed, ended, or asked for something else than this one.

    Args:
        rank: which one, as far as it is known; -1 if it is not.
        operation: what was to be done together.
        message: the whole story.
    """

    def __init__(self, rank: int, operation: str, message: str) -> None:
        self.rank = rank
        self.operation = operation
        super().__init__(message)


class StateError(OutcoreError, RuntimeError):
    """Calls in an order that has no meaning."""


class NonFiniteError(OutcoreError, ArithmeticError):
    """A loss or a gradient is inf or NaN where that was forbidden."""
