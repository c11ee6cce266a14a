"""The page as text: one well-formed document, everything escaped, nothing from outside, every part optional."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded import MIB, log, record, row

from outcore.report.folder import read
from outcore.report.page.gantt import gantt
from outcore.report.page.markup import Markup, tag
from outcore.report.page.page import page
from outcore.report.page.scale import rate
from outcore.report.timeline import Level

VOID = {"meta", "br", "input"}


class Reader(HTMLParser):
    """Elements in order, and the text outside of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data + "\n"


def made(folder: Path) -> Reader:
    return Reader(page(read(folder)))


def test_everything_that_was_asked_is_on_it(tmp_path: Path) -> None:
    found = made(log(tmp_path / "run", steps=12))
    headings = ("The run", "Where a step's time goes", "Bytes per link", "A step, recorded", "Settings")
    for heading in (*headings, "Plan against measured"):
        assert heading in found.text
    for row_ in ("compute", "update", "waiting", "disk read", "disk write", "device in", "device", "host"):
        assert f"\n{row_}\n" in found.text
    assert "A step takes 1.00 s (mean of steps 2 to 12): 65.0 % compute, 20.0 % update" in found.text
    assert "+9.1 %" in found.text  # 120 MiB where 110 were planned
    assert "128.0 MiB budget" in found.text


def test_it_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    text = page(read(log(tmp_path)))
    found = Reader(text)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form", "a"} & set(found.tags)
    assert not {"src", "href", "xlink:href", "srcset"} & {name for name, _ in found.attributes}
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert (
        re.findall(r"https?://[^\"'\s)]+", text) == ["http://www.w3.org/2000/svg"] * 2
    )  # a name, in the script
    assert "@import" not in text


@pytest.mark.parametrize(
    "name",
    ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</script>", "</style>", "<!--", "]]>", "&lt;",
     "a'b\"c", "\u202eevil", "\x00", "\ud800"],
)  # fmt: skip
def test_names_can_not_become_markup(name: str, tmp_path: Path) -> None:
    folder = log(tmp_path / "run", name=name)
    lines = [json.dumps(row(k, waited={name: 0.2}, moved={name: 7}, held={name: 1}, peak={name: 1}, budget={name: 2}))
             for k in (1, 2, 3)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "plan.json").write_text(json.dumps({"step": {"bottleneck": name}, "peak_bytes": {name: 1}}))
    plain = made(log(tmp_path / "plain"))
    text = page(read(folder)).encode("utf-8", "replace").decode()
    found = Reader(text)
    assert found.tags.count("script") == plain.tags.count("script") == 1
    assert found.tags.count("style") == 1
    assert "img" not in found.tags
    assert not [attribute for attribute, _ in found.attributes if attribute.startswith("on")]


def test_a_directory_may_have_a_hostile_name_too(tmp_path: Path) -> None:
    found = made(log(tmp_path / "<b>run<script>"))
    assert "b" not in found.tags[: found.tags.index("h1")]
    assert "<b>run<script>" in found.text


def test_parts_that_are_not_there_are_said_or_left_out(tmp_path: Path) -> None:
    folder = log(tmp_path)
    (folder / "plan.json").unlink()
    (folder / "trace.json").unlink()
    found = made(folder)
    assert "There is no trace.json" in found.text
    assert "Plan against measured" not in found.text
    log(tmp_path)
    (folder / "metrics.jsonl").unlink()
    found = made(folder)
    assert "There is no metrics.jsonl" in found.text
    assert "A step, recorded" in found.text


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_are_shown(steps: int, tmp_path: Path) -> None:
    assert "Throughput" in made(log(tmp_path, steps=steps)).text


def test_losses_that_are_not_finite_leave_holes(tmp_path: Path) -> None:
    folder = log(tmp_path)
    lines = [json.dumps(row(k, loss=None if k in (3, 4) else 1.0)) for k in range(1, 9)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    text = page(read(folder))
    assert text.count('class="curve"') == 3  # the loss before and after the hole, and the throughput
    (folder / "metrics.jsonl").write_text(json.dumps(row(1, loss=None)))
    assert "No finite number." in page(read(folder))


def test_metrics_with_nothing_but_the_least_are_shown(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0, "tokens": 0, "seconds": 1e-9}))
    assert made(tmp_path).tags


def test_a_long_run_makes_no_long_page(tmp_path: Path) -> None:
    folder = log(tmp_path)
    lines = [json.dumps(row(k)) for k in range(1, 20_001)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    text = page(read(folder))
    assert len(text) < 400_000
    assert "steps 2 to 20000" in text


def test_a_crowded_step_makes_no_long_page(tmp_path: Path) -> None:
    from outcore.report.chrome import to_trace
    from outcore.report.timeline import Level, Record, Span

    spans = tuple(
        Span("disk read", f"unit {k}", k * 1e-5 + 0.6e-5 * lane, (k + 0.9) * 1e-5, 4096)
        for k in range(50_000)
        for lane in (0, 1)
    )
    levels = tuple(
        Level(k * 1e-5, "host", "parameters", k % 997 + (k == 33_333) * 5000) for k in range(50_000)
    )
    folder = log(tmp_path)
    record = Record(2, 0.0, 0.5, spans, levels, {"host": 6000})
    (folder / "trace.json").write_text(json.dumps(to_trace([record])))
    text = page(read(folder))
    assert len(text) < 2_000_000
    assert "5.3 KiB" in text  # the peak is not lost: 33,333 % 997 + 5,000 bytes


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to check the script with")
def test_the_script_is_valid() -> None:
    from importlib.resources import files

    path = files("outcore.report.page").joinpath("page.js")
    subprocess.run(["node", "--check", str(path)], check=True)


def test_tag_escapes_all_but_markup() -> None:
    assert (
        tag("p", "<b>", Markup("<i></i>"), None, 3, 0.5, title='"<&')
        == '<p title="&quot;&lt;&amp;">&lt;b&gt;<i></i>30.5</p>'
    )
    assert tag("rect", x=1.0, class_="a", hidden=True, data_tip=None) == '<rect x="1" class="a" hidden/>'


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(2.1e9, "2.10 GB/s"), (520e6, "0.52 GB/s"), (20e6, "20.0 MB/s"), (0.3e6, "0.30 MB/s"), (5e4, "50.0 kB/s"),
     (0, "0 GB/s")],
)  # fmt: skip
def test_rates_have_a_unit_in_which_they_can_be_read(nbytes: float, said: str) -> None:
    assert rate(nbytes, 1.0) == said
    assert rate(nbytes, 0.0) == "-"


@pytest.mark.parametrize("nbytes", [296, MIB])
def test_a_legend_names_no_crumbs(nbytes: int) -> None:
    made = record()
    levels = (Level(made.start, "host", "other", nbytes), *made.levels)
    assert ("other" in Reader(str(gantt(replace(made, levels=levels)))).text) is (nbytes == MIB)
