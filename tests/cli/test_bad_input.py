"""Bad input: one clear line, the right exit code, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from calling import TINY, outcore, text

from outcore.cli.failures import code_of, message
from outcore.cli.main import run
from outcore.errors import BudgetError, DiskFullError, UsageError
from outcore.memory.extents import Space

BAD = {
    "missing path": (("--data", "{tmp}/none.txt"), "no such file or folder"),
    "a path that is too long": (("--data", "n" * 300), "a path is too long: nnn"),
    "a folder without text": (("--data", "{tmp}/empty"), "no text files"),
    "not text": (("--data", "{tmp}/binary.txt"), "not UTF-8"),
    "text shorter than a sequence": (("--data", "{tmp}/short.txt"), "less than one sequence of 32"),
    "unknown model": (("--model", "gpt5"), "unknown model 'gpt5'"),
    "a folder that is no model": (("--model", "{tmp}/empty"), "no config.json"),
    "a config that is no config": (("--model", "{tmp}/broken"), "config.json can't be used"),
    "unknown device": (("--device", "abacus"), "unknown device 'abacus'"),
    "a device that is not here": (("--device", "cuda:63"), "cuda"),
    "a device budget on the CPU": (("--device", "cpu", "--device-memory", "1GiB"), "device budget"),
    "a size of zero": (("--host-memory", "0"), "at least one byte"),
    "a malformed size": (("--host-memory", "fourteen"), "'fourteen' is not a size"),
    "a negative size": (("--host-memory", "-1GiB"), "'-1GiB' is not a size"),
    "a disk of size zero": (("--disk", "{tmp}:0GiB"), "at least one byte"),
    "a disk that is not there": (("--disk", "{tmp}/none"), "can't be used"),
    "a disk that is a file": (("--disk", "{tmp}/short.txt"), "not a directory"),
    "a disk that is a link": (("--disk", "{tmp}/link"), "is a symbolic link: name"),
    "a host budget too small": (("--host-memory", "64KiB"), "too small"),
    "no room for activations": (("--host-memory", "1200KiB"), "too small"),
    "a host budget too large": (("--host-memory", "4096TiB"), "ask for no more"),
    "no steps": (("--steps", "0"), "--steps must be at least 1"),
    "no batch": (("--batch-size", "0"), "--batch-size must be at least 1"),
    "a sequence without a next token": (("--seq-len", "1"), "--seq-len must be at least 2"),
    "a sequence too long": (("--seq-len", "129"), "128 positions"),
    "no micro-batch": (("--microbatch", "0"), "--microbatch must be at least 1"),
    "logits without slices": (("--logits", "keep"), "--logits keep is for a loss in slices"),
    "logits in an odd way": (("--logits", "offload"), "--logits is keep or recompute"),
    "slices of what is kept": (
        ("--microbatch", "1", "--activations", "keep"),
        "give --activations recompute",
    ),
    "no accumulation": (("--accumulate", "-2"), "--accumulate must be at least 1"),
    "unknown optimizer": (("--optimizer", "magic"), "unknown optimizer 'magic'"),
    "a learning rate of zero": (("--lr", "0"), "--lr must be above 0"),
    "a learning rate that is no number": (("--lr", "nan"), "--lr must be above 0"),
    "a negative norm": (("--clip", "-1"), "--clip must be 0 (off) or more"),
    "unknown precision": (("--precision", "int3"), "unknown precision 'int3'"),
    "unknown activations": (("--activations", "forget"), "unknown way with activations 'forget'"),
    "a negative seed": (("--seed", "-1"), "--seed must be at least 0"),
    "a log that is a file": (("--log-dir", "{tmp}/short.txt"), "is not a directory"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Good and bad files."""
    text(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short.txt").write_text("too short")
    return tmp_path


def tree(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize(("arguments", "expected"), BAD.values(), ids=BAD)
def test_bad_input_to_train(folder: Path, arguments: tuple[str, ...], expected: str) -> None:
    before = tree(folder)
    good = {"--data": folder / "words.txt", "--disk": folder, "--log-dir": folder / "log"}
    bad = [argument.format(tmp=folder) for argument in arguments]
    rest = [part for name, value in good.items() if name not in bad for part in (name, value)]
    result = outcore("train", *TINY, *rest, *bad)
    assert result.exit_code == 2, result.output
    assert one_line(result.stderr)
    assert expected in result.stderr
    assert tree(folder) == before


def test_an_unreadable_file_is_named(folder: Path) -> None:
    path = folder / "words.txt"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("the superuser reads every file")
    result = outcore("train", *TINY, "--data", path, "--log-dir", folder / "log")
    assert result.exit_code == 2
    assert one_line(result.stderr)
    assert "Permission denied" in result.stderr


def test_a_disk_that_fills_up_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Space, nbytes: int) -> None:
        return None

    monkeypatch.setattr(Space, "take", full)
    before = tree(folder)
    arguments = ("--data", folder / "words.txt", "--disk", folder, "--log-dir", folder / "log")
    result = outcore("train", *TINY, *arguments, "--host-memory", "5MiB")
    assert result.exit_code == 1, result.output
    assert one_line(result.stderr)
    assert "the disk" in result.stderr
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--model", "nothing", "--prompt", "a"), "unknown model"),
        (("--model", "gpt2-tiny", "--prompt", "a"), "has no weights"),
        (("--model", "gpt2-tiny", "--prompt", "a", "--max-new-tokens", "0"), "--max-new-tokens must be"),
        (("--model", "gpt2-tiny", "--prompt", "a", "--temperature", "-1"), "--temperature must be"),
        (("--model", "gpt2-tiny", "--prompt", "a", "--host-memory", "much"), "'much' is not a size"),
        (("--model", "gpt2-tiny", "--prompt", "a", "--device", "abacus"), "unknown device"),
    ],
)
def test_bad_input_to_generate(arguments: tuple[str, ...], expected: str) -> None:
    result = outcore("generate", *arguments)
    assert result.exit_code == 2
    assert one_line(result.stderr)
    assert expected in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["train", "--bogus"], ["train", "--steps", "many"], ["generate"], ["fly"]]
)
def test_what_the_parser_refuses_is_one_line_too(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        run(arguments)
    assert done.value.code == 2
    assert one_line(capsys.readouterr().err)


def test_a_traceback_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTCORE_DEBUG", "1")
    result = outcore("train", "--steps", "0")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_exit_codes() -> None:
    assert code_of(UsageError("no")) == 2
    assert code_of(BudgetError("host", 2, 1, "more")) == 2
    assert code_of(DiskFullError("full")) == 1
    assert code_of(RuntimeError("fault")) == 1
    assert message(RuntimeError("fault\nand more")).startswith("error: unexpected RuntimeError: fault (")
    assert "no more memory" in message(MemoryError())


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outcore.cli.train.run", interrupt)
    result = outcore("train")
    assert result.exit_code == 130
    assert result.stderr == "outcore: interrupted\n"


def test_the_installed_command(folder: Path) -> None:
    command = [sys.executable, "-c", "from outcore.cli.main import run; run()", "train", "--model", "gpt5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 2
    assert one_line(done.stderr)
    assert "unknown model" in done.stderr
    assert not (folder / "runs").exists()


def one_line(said: str) -> bool:
    """Whether it is one line of the program's own."""
    return said.count("\n") == 1 and said.startswith("outcore: error: ")
