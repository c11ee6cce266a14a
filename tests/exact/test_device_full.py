"""An accelerator that is full: what outcore itself asks for fails with an error of its own, and the run goes on."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import outcore
from exact.shapes import Stack
from exact.test_matrix import adamw
from outcore.errors import DeviceError
from outcore.memory.device import Offers
from outcore.memory.ledger import Ledger
from outcore.memory.refusal import allocating_on_device
from outcore.model import fresh_stage, sites
from outcore.offloaded import engine_of

pytestmark = pytest.mark.emulated

OURS = str(Path(outcore.__file__).parent)


def lifted(disk: Path, blocks: int, memory: str, activations: Any) -> tuple[Any, outcore.AdamW]:
    """A model that is lifted block by block, though it is never changed."""
    torch.manual_seed(0)
    model = Stack(blocks)
    optimizer = adamw(model.parameters())
    outcore.offload(
        model,
        optimizer,
        device="emu",
        budget=outcore.Budget(device=memory, host="4MiB", disk=disk),
        chunk_size="128KiB",
        activations=activations,
    )
    return model, optimizer


def passed(model: Any, optimizer: outcore.AdamW, rows: int, passes: int = 1) -> tuple[float, float]:
    """Forward and backward: the loss and the norm of its gradients, which are dropped."""
    try:
        for _ in range(passes):
            loss = model(torch.ones(rows, 32)).float().square().mean()
            optimizer.backward(loss)
        return loss.item(), optimizer.clip_grad_norm_(1.0).item()
    finally:
        optimizer.zero_grad()


def asked(error: BaseException) -> str:
    """The line that asked for the memory."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


@pytest.mark.parametrize(
    ("blocks", "memory", "rows", "way", "resizing", "kinds"),
    [
        (
            2,
            "600KiB",
            8,
            "keep",
            True,
            ("the model's inputs", "the parameters of blocks", "the gradients of blocks"),
        ),
        (4, "1500KiB", 128, "offload", True, ("activations",)),
        (2, "600KiB", 8, "keep", False, ("the parameter blocks", "the gradients of blocks")),
    ],
    ids=["keep", "offload", "no resizing"],
)
def test_each_allocation_of_a_pass_fails_in_turn(
    blocks: int,
    memory: str,
    rows: int,
    way: str,
    resizing: bool,
    kinds: tuple[str, ...],
    emu: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the operators of the model ask for stays torch's error; later passes give the same bits."""
    if not resizing:
        for module in (sites, fresh_stage):
            monkeypatch.setattr(module, "offers", lambda device: Offers(False, False, storages=True))
    model, optimizer = lifted(tmp_path, blocks, memory, way)
    expected = passed(model, optimizer, rows)
    passed(model, optimizer, rows)
    emu.configure()
    assert passed(model, optimizer, rows) == expected
    told, theirs = [], []
    for at in range(emu.allocations_made()):
        emu.configure(fail_allocation=at)
        try:
            passed(model, optimizer, rows)
        except DeviceError as error:
            told.append(str(error))
        except torch.OutOfMemoryError as error:
            theirs.append(asked(error))
        if at % 5 == 0:
            emu.configure()
            assert passed(model, optimizer, rows) == expected, at
    outcore.release(model)
    assert theirs
    assert not [place for place in theirs if place.startswith(OURS)]
    assert all("bytes" in text and "a smaller device budget" in text for text in told)
    for kind in kinds:
        assert any(kind in text for text in told), (kind, set(told))


def test_each_allocation_of_an_offload_fails_in_turn(emu: ModuleType, tmp_path: Path) -> None:
    model, _ = lifted(tmp_path, 1, "1MiB", "keep")
    count = emu.allocations_made()
    outcore.release(model)
    assert count > len(list(model.parameters()))
    for at in range(count):
        emu.configure(fail_allocation=at)
        with pytest.raises(DeviceError, match="smaller device budget"):
            lifted(tmp_path, 1, "1MiB", "keep")


def test_what_else_goes_wrong_keeps_its_name() -> None:
    """XLA has no class of its own for a full device; other errors pass."""
    with pytest.raises(DeviceError, match="9 bytes"), allocating_on_device("a tensor", 9):
        raise RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Error allocating device buffer")
    with pytest.raises(RuntimeError, match="launch failure"), allocating_on_device("a tensor", 9):
        raise RuntimeError("launch failure")


@pytest.mark.parametrize(("link", "passes"), [("device in", 1), ("device out", 1), ("device out", 2)])
def test_a_copy_that_fails_leaves_its_chunks_free(
    link: str, passes: int, emu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was pinned or borrowed for it goes back. The second pass adds beside what is there."""
    model, optimizer = lifted(tmp_path, 2, "600KiB", "keep")
    pool = engine_of(model).pool
    expected = passed(model, optimizer, 8, passes)
    resting = pool.pinned
    crossing, left = Ledger.crossing, 0

    def failing(ledger: Ledger, what: str, *given: Any) -> Any:
        nonlocal left
        left -= what == link
        if left == 0 and what == link:
            raise RuntimeError("planned")
        return crossing(ledger, what, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "crossing", failing)
    failed = 0
    for at in range(1, 40):
        left = at
        try:
            assert passed(model, optimizer, 8, passes) == expected
        except RuntimeError:
            failed += 1
        left = 0
        assert passed(model, optimizer, 8, passes) == expected, at
        assert pool.pinned == resting, at
    assert failed > 3
    outcore.release(model)
