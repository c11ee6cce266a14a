"""What is said when the host can't hold what is in use."""

from __future__ import annotations

from outcore.errors import BudgetError


def too_small(needed: int, budget: int, held: int, reserved: int, has_disk: bool) -> BudgetError:
    """The error for a host budget that does not hold ``needed`` bytes.

    Args:
        held: bytes of chunks that are in use.
        reserved: bytes that are set aside for activations.
    """
    remedy = (
        f"{held:,} bytes of chunks are in use and {reserved:,} are set aside for activations: "
        "give the host more, use a smaller batch or recomputation"
    )
    return BudgetError("host", needed, budget, remedy + ("" if has_disk else ", or add a disk"))
