"""The page as a person meets it: in a real browser, with a mouse, a keyboard, at night, on paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from browser import Page
from recorded import log

from outcore.report.folder import read
from outcore.report.page.page import page

CHROMIUM = browser.find()

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason=f"no browser here: none of {', '.join(browser.NAMES)} is installed"
    ),
]

NAME = "<img src=x onerror=alert(1)> & </script><script>alert(2)</script>"
FAINT = """(() => {
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const texts = "h1, h2, p, td, th, .side span, .tile b, .tile span, small, button, summary, .legend span, .name";
  const bad = [];
  for (const e of document.querySelectorAll(texts)) {
    if (!e.textContent.trim() || !e.getClientRects().length) continue;
    const inside = e.classList.contains("name");
    const a = light(inside ? getComputedStyle(e).fill : getComputedStyle(e).color);
    const b = light(inside ? getComputedStyle(e.parentElement.querySelector("rect")).fill : behind(e));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) bad.push([e.tagName, e.className.baseVal ?? e.className, contrast.toFixed(2)]);
  }
  return bad;
})()"""
"""Finds text whose contrast with what is behind it is below 4.5 to 1, as WCAG counts it."""

LAST = ".recorded:not([hidden])"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = log(tmp_path_factory.mktemp("run"), steps=40, name=NAME)
    path = folder / "report.html"
    path.write_text(page(read(folder)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shared() -> Iterator[Page]:
    assert CHROMIUM is not None
    with browser.opened(CHROMIUM) as opened:
        yield opened


@pytest.fixture
def shown(shared: Page, written: Path) -> Iterator[Page]:
    """The page, fresh; afterwards it must have had no problem and have asked for nothing but itself."""
    shared.problems.clear()
    shared.asked.clear()
    shared.open(written)
    assert shared.run("document.documentElement.dataset.ready") == "yes"
    yield shared
    assert shared.problems == []
    assert {address for address in shared.asked if not address.startswith("about:")} == {written.as_uri()}


def test_names_stay_text(shown: Page) -> None:
    assert shown.run("document.querySelectorAll('img').length") == 0
    assert shown.run("document.scripts.length") == 1
    assert NAME in shown.run("document.body.innerText")


def test_pointing_at_a_span_names_it(shown: Page) -> None:
    shown.point(*shown.centre(f"{LAST} .span.c-forward"))
    tip = shown.tip()
    assert tip is not None
    assert tip.splitlines() == [f"forward {NAME}", "200 ms, from 100 ms"]
    shown.point(1, 1)
    assert shown.tip() is None


def test_pointing_at_a_transfer_tells_its_bytes(shown: Page) -> None:
    shown.point(*shown.centre(f"{LAST} .c-disk-read"))
    assert (shown.tip() or "").splitlines()[-1] == "50.0 MiB, 0.52 GB/s"


def test_pointing_at_a_tier_tells_what_it_holds_then(shown: Page) -> None:
    x, y = shown.centre(f"{LAST} .labels > div:last-child")
    left, width = shown.run(
        f"(() => {{ const b = document.querySelector('{LAST} .inner').getBoundingClientRect();"
        "return [b.left, b.width]; })()"
    )
    shown.point(left + 0.6 * width, y)
    assert (shown.tip() or "").splitlines() == [
        "host 110.0 MiB at 600.0 ms",
        "optimizer states 20.0 MiB",
        "gradients 30.0 MiB",
        "parameters 60.0 MiB",
    ]
    assert x < left


def test_a_curve_is_read_with_mouse_and_keys(shown: Page) -> None:
    shown.point(*shown.centre(".plot[data-points]"))
    assert re.fullmatch(r"step 2[01]: [56]\.\d{4}", shown.tip() or "")
    shown.run("document.querySelector('.plot[data-points]').focus()")
    shown.press("End")
    assert shown.tip() == "step 40: 4.0000"
    shown.press("ArrowLeft")
    assert shown.tip() == "step 39: 4.1000"


def test_columns_tell_their_parts(shown: Page) -> None:
    shown.point(*shown.centre(".plot:not([data-points]) g:nth-of-type(5) .c-compute"))
    tip = shown.tip() or ""
    assert tip.startswith("step 5: 1.00 s")
    assert "waiting for disk read 100 ms (10.0 %)" in tip


def test_the_picture_zooms_and_names_what_has_room(shown: Page) -> None:
    def wide() -> float:
        found = shown.run(f"document.querySelector('{LAST} .inner').getBoundingClientRect().width")
        assert isinstance(found, int | float)
        return found

    whole = wide()
    shown.click(f"{LAST} [data-zoom='2']")
    assert wide() == pytest.approx(2 * whole, rel=0.01)
    shown.run(f"document.querySelector('{LAST} .scroll').focus()")
    shown.press("+")
    assert wide() == pytest.approx(4 * whole, rel=0.01)
    ticks = shown.run(f"[...document.querySelectorAll('{LAST} .tick')].map(e => e.textContent)")
    assert len(ticks) >= 20
    assert len(set(ticks)) == len(ticks)
    shown.press("0")
    assert wide() == pytest.approx(whole)


def test_one_recorded_step_is_shown_at_a_time(shown: Page) -> None:
    def visible() -> list[str]:
        found = shown.run(
            "[...document.querySelectorAll('.recorded')].filter(e => e.offsetHeight).map(e => e.dataset.title)"
        )
        assert isinstance(found, list)
        return found

    assert visible() == ["step 40"]
    shown.click(".tabs button:first-child")
    assert visible() == ["step 2"]


def test_nothing_sticks_out(shared: Page, written: Path) -> None:
    for width in (360, 800, 1600):
        shared.open(written, width=width)
        assert shared.run("document.documentElement.scrollWidth <= innerWidth"), width


def test_text_is_readable_by_day_and_by_night(shared: Page, written: Path) -> None:
    for dark in (False, True):
        shared.open(written, dark=dark)
        assert shared.run(FAINT) == [], "dark" if dark else "bright"
        page = shared.run("getComputedStyle(document.body).backgroundColor")
        assert (page == "rgb(255, 255, 255)") is not dark


def test_without_script_all_is_there(shared: Page, written: Path) -> None:
    shared.open(written, script=False)
    assert shared.run("[...document.querySelectorAll('.recorded')].every(e => e.offsetHeight > 200)")
    assert shared.run("document.querySelectorAll('.tools:not([hidden])').length") == 0
    shared.open(written)


def test_it_prints(shared: Page, written: Path) -> None:
    shared.open(written, dark=True)
    assert shared.printed().startswith(b"%PDF")
    shared.media("print", dark=True)
    assert shared.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert shared.run("getComputedStyle(document.querySelector('.tabs')).display") == "none"


def test_a_script_that_got_in_would_not_run(shared: Page, written: Path, tmp_path: Path) -> None:
    text = written.read_text(encoding="utf-8").replace(
        "<main>", "<script>document.title = 'taken'</script><main>", 1
    )
    path = tmp_path / "bad.html"
    path.write_text(text, encoding="utf-8")
    shared.problems.clear()
    shared.open(path)
    assert shared.run("document.title") != "taken"
    assert any("Content Security Policy" in problem for problem in shared.problems)
    assert shared.run("document.documentElement.dataset.ready") == "yes"
