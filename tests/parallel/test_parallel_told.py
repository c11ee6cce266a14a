"""What fails on one rank in a save or a load is the same error on all, and they go on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import outcore
from outcore import errors
from outcore.checkpoint.files import writing
from outcore.errors import BudgetError, DeviceError, DiskFullError, OutcoreError, PeerError, TierError
from outcore.parallel import told
from parallel.loops import stack
from parallel.together import Place, Team, values

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OutcoreError) and kind not in (OutcoreError, PeerError)
]


def example(kind: type[OutcoreError]) -> OutcoreError:
    return (
        BudgetError("host", 2**40, 7, "give more")
        if kind is BudgetError
        else kind("it's § \udcff full: of it")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_is_raised_as_what_it_is(kind: type[OutcoreError]) -> None:
    error = example(kind)
    found = told.raised(3, "the save", told.pack(error))
    assert type(found) is kind
    assert str(found) == f"rank 3: {error}"
    assert {**vars(found)} == {**vars(error)}


def test_what_the_system_said_is_told_too() -> None:
    with pytest.raises(DiskFullError) as full, writing(Path("place")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    found = told.raised(1, "the save", told.pack(full.value))
    assert type(found) is DiskFullError
    assert found.errno == errno.ENOSPC
    assert str(found) == f"rank 1: {full.value}"

    class OwnError(DeviceError):
        pass

    assert type(told.raised(1, "the save", told.pack(OwnError("mine")))) is DeviceError
    other = told.raised(1, "the save", told.pack(ZeroDivisionError("a/b")))
    assert type(other) is PeerError
    assert str(other) == "rank 1 failed in the save: ZeroDivisionError: a/b"


def failing(place: Place) -> list[tuple[str, str, Any]]:
    """A save fails on one rank; all go on, and save."""
    from outcore.checkpoint import save

    model = stack()
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(model, optimizer, device="cpu", budget=outcore.Budget(host="64MiB"))
    found = []
    for kind in (BudgetError, TierError, DeviceError):

        def refuse(*arguments: Any, kind: Any = kind) -> Any:
            raise example(kind)

        with pytest.MonkeyPatch.context() as patch:
            if place.rank == 1:
                patch.setattr(save, "write_own", refuse)
            with pytest.raises(kind) as raised:
                outcore.save(place.path / "saved", model, optimizer)
        found.append((type(raised.value).__name__, str(raised.value), vars(raised.value)))
    outcore.save(place.path / "saved", model, optimizer)
    outcore.release(model)
    return found


def test_a_save_fails_on_all_ranks_with_the_same_error(two: Team, tmp_path: Path) -> None:
    first, second = values(two.run(failing, tmp_path))
    for (kind, text, fields), (other, cause, own) in zip(first, second, strict=True):
        assert kind == other
        assert text == f"rank 1: {cause}"
        assert fields == own
    outcore.verify(tmp_path / "saved")
