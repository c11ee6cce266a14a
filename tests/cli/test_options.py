"""What the help of an option says, and what it takes."""

from __future__ import annotations

import re
from typing import get_args

from outcore.cli import options
from outcore.cli.recipes import RECIPES


def test_every_optimizer_is_named_in_the_help() -> None:
    _, option = get_args(options.Optimizer)
    assert set(RECIPES) <= set(re.findall(r"[\w-]+", option.help))
