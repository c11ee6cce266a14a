"""A script that ends while its last updates are under way ends well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, sys, threading, time

started = threading.Event()

def look():  # the first to be registered is the last to be called
    print("at the end:", sorted(t.name for t in threading.enumerate() if t.name.startswith("outcore")))

atexit.register(look)
import torch
import outcore
from outcore.optim.pipeline import Pipeline

def slow(pipeline, update, apply=Pipeline.apply):
    started.set()
    time.sleep(0.05)
    apply(pipeline, update)

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
optimizer = outcore.AdamW(model.parameters())
outcore.offload(model, optimizer, budget=outcore.Budget(host="1MiB", disk=sys.argv[1]), chunk_size="4KiB")
model(torch.ones(4, 64)).float().square().mean().backward()
Pipeline.apply = slow
optimizer.step()
started.wait(20)
print("before:", any(t.name == "outcore-update" for t in threading.enumerate()))
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_no_thread_is_left_to_the_end_of_the_interpreter(end: str, code: int, tmp_path: Path) -> None:
    """One that were in compiled code then would abort the process."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == code, ran.stderr
    assert "before: True" in ran.stdout
    assert "at the end: []" in ran.stdout


def test_a_forked_child_leaves_its_parents_threads_alone(tmp_path: Path) -> None:
    end = (
        "import os\nif (child := os.fork()) == 0:\n    sys.exit(0)\nprint('child:', os.waitpid(child, 0)[1])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr
    assert "child: 0" in ran.stdout


def test_what_comes_first_at_the_end_may_fail(tmp_path: Path) -> None:
    """Threads are ended all the same."""
    end = "from outcore.memory import ending\nending.before(lambda: 1 / 0)"
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "ZeroDivisionError" in ran.stderr
    assert "at the end: []" in ran.stdout
