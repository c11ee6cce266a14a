from __future__ import annotations

import pytest

from outcore.memory.host import PAGE
from outcore.memory.pinned import PinnedMemory


def _refused(self: PinnedMemory, nbytes: int) -> None:
    raise MemoryError("planned")


def test_what_was_refused_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle memory stays as long as there is room for both."""
    memory = PinnedMemory(3 * PAGE, locks=False)
    idle = memory.take(PAGE)
    memory.put(idle)
    with monkeypatch.context() as patch:
        patch.setattr(PinnedMemory, "_allocate", _refused)
        for _ in range(3):
            with pytest.raises(MemoryError, match="planned"):
                memory.take(2 * PAGE)
    other = memory.take(2 * PAGE)
    assert other.numel() == 2 * PAGE
    assert memory.take(PAGE) is idle
