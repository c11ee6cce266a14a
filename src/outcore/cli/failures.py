"""Errors become one line on stderr and an exit code.

====  ==============================================================================================
code  meaning
====  ==============================================================================================
0     done
1     it failed while it ran: a tier, the machine, or the program itself
2     it could not begin: a setting, a path, a model or a budget that doesn't do
3     outcore plan: it does not fit
130   interrupted (SIGINT), with nothing saved
143   the same by SIGTERM
====  ==============================================================================================

With ``OUTCORE_DEBUG=1`` in the environment the traceback comes before the line.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

from outcore.errors import BudgetError, OutcoreError, UsageError

FAILED = 1
USAGE = 2
UNFIT = 3
INTERRUPTED = 128 + signal.SIGINT


def say(text: str) -> None:
    """One line on stderr."""
    print(f"outcore: {' '.join(text.split())}", file=sys.stderr)


@contextmanager
def reported() -> Iterator[None]:
    """Turn what the block raises into a line and an exit code, and warnings into lines.

    Raises:
        typer.Exit: with the code.
    """
    show = warnings.showwarning
    warnings.showwarning = _warned
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as interrupt:
        say("interrupted")
        [number] = interrupt.args or (signal.SIGINT,)
        raise typer.Exit(128 + number) from None
    except Exception as error:
        if os.environ.get("OUTCORE_DEBUG", "") not in ("", "0"):
            traceback.print_exc()
        say(message(error))
        raise typer.Exit(code_of(error)) from None
    finally:
        warnings.showwarning = show


def code_of(error: Exception) -> int:
    """The exit code for an error; the argument parser's errors bring their own."""
    if hasattr(error, "format_message"):
        return int(getattr(error, "exit_code", USAGE))
    return USAGE if isinstance(error, (UsageError, BudgetError)) or _is_long(error) else FAILED


def _is_long(error: Exception) -> bool:
    """Whether a path is longer than the file system takes: it can only be one that was given."""
    return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG


def message(error: Exception) -> str:
    """What the user is told."""
    if hasattr(error, "format_message"):
        return f"error: {error.format_message()}"
    if isinstance(error, OutcoreError):
        return f"error: {error}"
    if isinstance(error, OSError) and _is_long(error):
        return f"error: a path is too long: {str(error.filename)[:60]}..."
    if isinstance(error, MemoryError):
        return "error: the machine has no more memory: give a smaller --host-memory and a --disk"
    text = str(error).strip()
    first = f": {text.splitlines()[0]}" if text else ""
    return f"error: unexpected {type(error).__name__}{first} (OUTCORE_DEBUG=1 shows where)"


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    say(f"warning: {message}")
