"""Ranks that several tests share: starting them takes longer than most of what they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel.together import Team


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
