"""`outcore.Interrupts` in a loop of one's own, with data loader workers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import outcore

LOOP = """
import os, sys, time
import torch
import outcore

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.tensor([float(index)])

loader = torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2)
with outcore.Interrupts(grace=30) as interrupts:
    data = iter(loader)
    for step in range(1000):
        batch = next(data)
        print("step", step, flush=True)
        if interrupts.asked:
            for _ in range(10):  # the workers still deliver while the run finishes
                batch = next(data)
            print("saved", step, flush=True)
            break
del data
print("done", flush=True)
"""

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture
def interrupts() -> Iterator[outcore.Interrupts]:
    made = outcore.Interrupts()
    yield made
    made.close()


def test_a_process_with_many_open_files(
    interrupts: outcore.Interrupts, capfd: pytest.CaptureFixture[str]
) -> None:
    """The thread that watches gets a descriptor above what select() knows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("a process may not open so many files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1100:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        with interrupts:
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts._said.wait(20)
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
    finally:
        interrupts.close()
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@BOTH
def test_the_first_signal_is_noted_and_raised_at_the_check(
    interrupts: outcore.Interrupts, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with interrupts:
        interrupts.check()
        assert not interrupts.asked
        assert interrupts.code == 0
        os.kill(os.getpid(), number)
        assert interrupts.asked
        assert interrupts.code == 128 + number
        with pytest.raises(KeyboardInterrupt) as caught:
            interrupts.check()
    assert caught.value.args == (number,)
    assert "once more to stop at once" in capfd.readouterr().err


def ended() -> None:
    """Wait for the threads that read signals."""
    for thread in threading.enumerate():
        if thread.name == "outcore-interrupts":
            thread.join(10)


def test_without_any_all_is_put_back(interrupts: outcore.Interrupts) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    ended()  # those of earlier tests
    descriptors = len(os.listdir("/proc/self/fd"))
    with interrupts:
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    ended()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_outside_the_main_thread_it_does_nothing() -> None:
    found = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with outcore.Interrupts() as interrupts:
            found.append(signal.getsignal(signal.SIGINT) is before and not interrupts.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize("grace", [0, -1, float("inf"), float("nan")])
def test_a_grace_that_is_none_is_refused(grace: float) -> None:
    with pytest.raises(outcore.errors.UsageError, match="grace must be above 0"):
        outcore.Interrupts(grace=grace)


def worker(ready: str) -> str:
    """A parent in the block and a child that it forked; the child writes ``ready`` and sleeps."""
    return f"""
import os, sys, time
import outcore
with outcore.Interrupts(grace=30) as interrupts:
    child = os.fork()
    if child == 0:
        try:
            os.write(1, b"{ready}\\n")
            time.sleep(60)
        except KeyboardInterrupt:
            os._exit(1)
        os._exit(0)
    os.write(1, b"%d\\n" % child)
    status = None
    until = time.monotonic() + 4
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    print("child", os.waitstatus_to_exitcode(status) if done else "lives", "asked", interrupts.asked, flush=True)
    if not done:
        os.kill(child, 9)
"""


@pytest.mark.parametrize(
    ("number", "group", "expected"),
    [
        (signal.SIGINT, True, "child lives asked True"),
        (signal.SIGTERM, True, "child lives asked True"),
        (signal.SIGINT, False, "child 1 asked False"),
        (signal.SIGTERM, False, "child -15 asked False"),
    ],
)
def test_a_signal_to_the_group_is_the_parents_alone(
    number: signal.Signals, group: bool, expected: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", worker("ready")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline().strip() for _ in range(2)}
        [child] = lines - {"ready"}
        if group:
            os.killpg(process.pid, number)
        else:
            os.kill(int(child), number)
        said, errors = process.communicate(timeout=60)
    assert expected in said, errors
    assert process.returncode == 0, errors


@BOTH
def test_workers_of_a_data_loader_go_on_until_the_run_has_stopped(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOOP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline().startswith("step")
        os.killpg(process.pid, number)
        start = time.monotonic()
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "saved" in said
    assert said.endswith("done\n")
    assert "Traceback" not in errors
    assert time.monotonic() - start < 20
