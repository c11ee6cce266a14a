"""Rules of the house: what is public is documented, what is documented runs, and modules stay small."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore import errors

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "outcore").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]

FORBIDDEN = re.compile(r"\bpickle\b|torch\.load\(|(?<![.\w])(?:eval|exec)\(|trust_remote_code=True")
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)|(?:src|href)=\"([^\"#]+)\"")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.S | re.M)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -- sources ------------------------------------------------------------------------------------------


def sources_where(broken: Callable[[str], object]) -> list[str]:
    return [name_of(path) for path in SOURCES if broken(path.read_text("utf-8"))]


def notes(text: str) -> set[str]:
    """The titles of the notes that a source has."""
    return set(re.findall(r"^\[Note: (.+?)\]$", text, re.M))


def test_modules_stay_small() -> None:
    assert not sources_where(lambda text: len(text.splitlines()) >= 500)


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert not sources_where(FORBIDDEN.search)


def test_serialized_objects_are_taken_apart_in_one_place() -> None:
    """There they are read as data: see [Note: Data, not a program]."""
    assert sources_where(re.compile(r"\bpickletools\b|\bmarshal\b|\bshelve\b|Unpickler").search) == [
        "src/outcore/checkpoint/dcp/data.py"
    ]


def test_modules_say_what_they_are_for() -> None:
    assert not sources_where(lambda text: text.strip() and not text.startswith('"""'))


def test_notes_that_are_cited_exist() -> None:
    assert not sources_where(lambda text: set(re.findall(r"\[Note: (.+?)\]", text)) - notes(text))


def test_notes_that_pages_cite_exist() -> None:
    defined: set[str] = set()
    for path in SOURCES:
        defined |= notes(path.read_text("utf-8"))
    for page in PAGES:
        cited = re.findall(r"\[Note:\s+([^.\]]+)\]", page.read_text("utf-8"))
        assert {" ".join(note.split()) for note in cited} <= defined


# -- public names -------------------------------------------------------------------------------------


def test_public_names_are_sorted_and_exist() -> None:
    assert len(set(outcore.__all__)) == len(outcore.__all__)
    assert all(hasattr(outcore, name) for name in outcore.__all__)


@pytest.mark.parametrize("name", outcore.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    thing = getattr(outcore, name)
    assert inspect.getdoc(thing)
    assert "__doc__" in vars(thing) if inspect.isclass(thing) else thing.__doc__
    assert any(re.search(rf"`(?:outcore\.)?{name}\b", page.read_text("utf-8")) for page in PAGES)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_is_documented(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.OutcoreError)
    assert f"**`{kind.__name__}`**" in (ROOT / "docs" / "errors.md").read_text("utf-8")
    assert kind.__name__ in str(errors.__doc__) or kind is errors.OutcoreError


# -- the command line ---------------------------------------------------------------------------------


def options() -> list[str]:
    """``command --option`` for everything the command line takes."""
    app = importlib.import_module("outcore.cli.main").app
    command = importlib.import_module("typer").main.get_command(app)
    found = []
    for name, sub in sorted(getattr(command, "commands", {}).items()):
        found.append(name)
        for parameter in sub.params:
            found += [f"{name} {flag}" for flag in parameter.opts if flag.startswith("--")]
    return found


def test_options_are_documented() -> None:
    pytest.importorskip("outcore.cli.main")
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    sections = {part.split("`", 1)[0]: part for part in page.split("\n## `outcore ")[1:]}
    missing = []
    for option in options():
        name, _, flag = option.partition(" ")
        if name not in sections or (flag and f"`{flag}" not in sections[name]):
            missing.append(option)
    assert not missing


# -- pages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(page.read_text("utf-8")):
        target = match[1] or match[2]
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "tutorial"}
    found = blocks(page, "python")
    assert found
    for block in found:
        exec(compile(block, name_of(page), "exec"), names)


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=32, vocab_size=128)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "swap").mkdir()
    [example] = blocks(ROOT / "README.md", "python")
    assert "/nvme:400GiB" in example
    ids = torch.randint(0, 128, (2, 32))
    names: dict[str, Any] = {"path": tmp_path / "model", "loader": [{"input_ids": ids, "labels": ids}] * 4}
    exec(compile(example.replace("/nvme:400GiB", f"{tmp_path / 'swap'}:1GiB"), "README.md", "exec"), names)
    moved = outcore.snapshot(names["model"])
    assert moved.peak["host"] <= moved.budget["host"]
    outcore.release(names["model"])
