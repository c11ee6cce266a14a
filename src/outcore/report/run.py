"""``run.json``: what a run was asked to do, kept beside its metrics.

An object with ``outcore`` (the version that ran), ``started`` (UTC, ISO 8601) and ``plan``: setting to words, as the
run printed them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import outcore
from outcore.errors import TierError
from outcore.report.chrome import NAME as TRACE
from outcore.report.metrics import set_aside

NAME = "run.json"


def write_run(directory: Path, plan: Mapping[str, str]) -> None:
    """Write ``run.json``; it and the trace of an earlier run are kept under another name, as its metrics are.

    Raises:
        TierError: it can't be written.
    """
    run = {
        "outcore": outcore.__version__,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": dict(plan),
    }
    try:
        set_aside(directory / NAME)
        set_aside(directory / TRACE)
        (directory / NAME).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise TierError(f"{NAME} can't be written to {directory}: {error.strerror or error}") from None
