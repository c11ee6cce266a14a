"""Draw docs/images/demo.svg: what `make demo` prints, from a run of it.

    python docs/images/make_demo_image.py --model gpt2 --data stdlib --host-memory 1GiB --disk build/demo ...

The arguments are those of ``outcore train``; ``make picture`` gives the demo's.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI

from outcore.cli.main import app
from outcore.report import console

SECONDS_PER_LINE = 25.0
"""So that a run of some minutes leaves a handful of lines."""


def main(arguments: list[str]) -> None:
    record = Console(record=True, width=112, file=io.StringIO(), highlight=False)

    def recorded(**_: Any) -> Console:
        return record

    console.make_console = recorded
    console._QUIET = SECONDS_PER_LINE
    record.print(f"[bold]$ outcore train {' '.join(arguments)}[/]\n")
    app(["train", *arguments], standalone_mode=False)
    target = Path(__file__).with_name("demo.svg")
    record.save_svg(str(target), title="make demo", theme=MONOKAI)
    print(f"wrote {target}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
