"""The whole page: what a run came to, in words, tables and pictures."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from outcore.report.folder import Folder
from outcore.report.page import sections, summary
from outcore.report.page.markup import Markup, tag


def page(folder: Folder) -> str:
    """The report on a log directory, as one HTML document that needs nothing else."""
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    title = f"{folder.name}: an outcore run"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", style),
    )
    body = tag("body", _hatches(), tag("main", *_sections(folder)), tag("script", script))
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def _asset(name: str) -> Markup:
    return Markup(files("outcore.report.page").joinpath(name).read_text(encoding="utf-8"))


def _hatches() -> Markup:
    """Stripes for waits, so that they don't rest on colour alone."""
    patterns = [
        tag(
            "pattern", tag("rect", width=7, height=7), tag("path", d="M0 0V7"),
            id=f"hatch-{name}", class_="hatch", width=7, height=7, patternUnits="userSpaceOnUse",
            patternTransform=f"rotate({angle})",
        )
        for name, angle in (("read", 45), ("write", -45), ("in", 0), ("out", 90))
    ]  # fmt: skip
    return tag("svg", tag("defs", patterns), width=0, height=0, style="position:absolute", aria_hidden="true")


def _sections(folder: Folder) -> list[Markup | None]:
    rows = folder.rows
    return [
        summary.header(folder),
        summary.remarks(folder),
        sections.course(rows) if rows else None,
        sections.split(rows) if rows else None,
        sections.links(rows, folder.records) if rows else None,
        sections.recorded_steps(folder.records) if folder.records else None,
        sections.plan(folder.plan, rows) if folder.plan else None,
        sections.settings(folder.settings) if folder.settings else None,
        sections.steps(rows) if rows else None,
        tag("footer", f"Made by outcore report from {folder.path}. Sizes in powers of 1024, rates in powers of 1000."),
    ]  # fmt: skip
