"""Ranks that several tests share: starting them takes longer than most of what they do."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import current_process

import pytest

from parallel.together import Team


@pytest.fixture(scope="session", autouse=True)
def nursery(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder of the nursery's socket is one that pytest removes, also if a worker ends abruptly."""
    folder = str(tmp_path_factory.mktemp("nursery"))
    if len(folder) < 80:  # the name of a socket has 108 bytes
        current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]


def _team(ranks: int, factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = Team(ranks, factory.mktemp("team"))
    yield team
    team.end()


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    yield from _team(2, tmp_path_factory)


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    yield from _team(3, tmp_path_factory)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    yield from _team(4, tmp_path_factory)
