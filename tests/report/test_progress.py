"""What is said while a run goes on: on the terminal, and to TensorBoard."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from outcore.memory.ledger import Snapshot
from outcore.report.console import Progressed, said, waits
from outcore.report.metrics import scalars
from outcore.report.step import Step

GIB = 1 << 30


def snapshot(waited: dict[str, float], update: float, read: int) -> Snapshot:
    links = ("disk read", "disk write", "device in", "device out")
    return Snapshot(
        held={"device": GIB, "host": 3 * GIB, "disk": 0},
        peak={"device": 2 * GIB, "host": 4 * GIB, "disk": 0},
        budget={"device": 8 * GIB, "host": 16 * GIB},
        moved=dict.fromkeys(links, 0) | {"disk read": read},
        waited=dict.fromkeys(links, 0.0) | waited,
        spent={"update": update},
    )


def step(**waited: float) -> Step:
    """Ten seconds."""
    after = {name.replace("_", " "): seconds for name, seconds in waited.items()}
    return Step(7, 2.5, 1e-4, 1.25, 4096, 10.0, snapshot({}, 0, 0), snapshot(after, 2.0, GIB), 0)


def test_a_line_has_all_that_is_asked_while_a_run_goes_on() -> None:
    line = said(step(disk_read=1.8, disk_write=0.7))
    for part in ("loss 2.5000", "410 tokens/s", "waits 25% (disk read 18%, disk write 7%)",
                 "device 1.0 GiB of 8.0 GiB", "host 3.0 GiB of 16.0 GiB"):  # fmt: skip
        assert part in line


def test_waits_name_what_matters_longest_first() -> None:
    assert waits(step()) == "waits 0%"
    assert waits(step(disk_read=0.01)) == "waits 0%"
    assert waits(step(disk_read=0.01, device_in=3.0)) == "waits 30% (device in 30%)"
    assert waits(step(disk_read=1.0, device_out=2.0)) == "waits 30% (device out 20%, disk read 10%)"


def test_a_narrow_terminal_still_shows_loss_speed_and_waits() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Progressed(screen, range(1, 10)) as progress:
        progress.show(step(disk_read=1.8))
    shown = " ".join(Text.from_ansi(screen.file.getvalue()).plain.split())  # type: ignore[attr-defined]
    for part in ("7/9", "loss 2.5000", "410 tokens/s", "waits 18%", "host 3.0 GiB of 16.0 GiB"):
        assert part in shown


def test_tensorboard_gets_every_number() -> None:
    found = scalars(step(disk_read=1.8, disk_write=0.7))
    assert found["loss"] == 2.5
    assert found["lr"] == 1e-4
    assert found["grad_norm"] == 1.25
    assert found["tokens_per_second"] == 409.6
    assert found["held/host"] == 3 * GIB
    assert found["peak/device"] == 2 * GIB
    assert found["budget/device"] == 8 * GIB
    assert found["moved/disk_read"] == GIB
    assert found["update"] == 2.0
    assert found["wait_share/total"] == 0.25
    assert found["wait_share/disk_read"] == 0.18
    assert not any(" " in name for name in found)
