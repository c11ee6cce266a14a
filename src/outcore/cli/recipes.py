"""Optimizers by name, with learning rates that suit them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import outcore
from outcore.errors import UsageError
from outcore.integrations.presets import PRESETS


@dataclass(frozen=True)
class Recipe:
    """An optimizer and where its learning rate begins.

    Attributes:
        make: from parameters and ``lr``.
        fresh: learning rate for a new model of the smallest size.
        tuned: learning rate for a model that has its weights.
    """

    make: Callable[..., outcore.Optimizer]
    fresh: float
    tuned: float


RECIPES = {
    "adamw": Recipe(outcore.AdamW, 6e-4, 5e-5),
    "adamw-bf16": Recipe(partial(outcore.AdamW, moments="bf16"), 6e-4, 5e-5),
    "adamw-8bit": Recipe(partial(outcore.AdamW, moments="8bit"), 6e-4, 5e-5),
    "adam": Recipe(outcore.Adam, 6e-4, 5e-5),
    "sgd": Recipe(partial(outcore.SGD, momentum=0.9), 1e-1, 1e-2),
    "lion": Recipe(outcore.Lion, 1e-4, 1e-5),
    "adagrad": Recipe(outcore.Adagrad, 1e-2, 1e-3),
}


def recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        UsageError: there is none.
    """
    try:
        return RECIPES[name.lower()]
    except KeyError:
        raise UsageError(f"unknown optimizer {name!r}; choose from {', '.join(RECIPES)}") from None


def learning_rate(found: Recipe, model: str, has_weights: bool) -> float:
    """Where the learning rate begins if the user doesn't say: smaller for large models, and for trained ones."""
    if has_weights or model not in PRESETS:
        return found.tuned
    return found.fresh * PRESETS[model].lr_scale


def make(found: Recipe, parameters: Iterable[Any], lr: float) -> outcore.Optimizer:
    """The optimizer of a recipe."""
    return found.make(parameters, lr=lr)
