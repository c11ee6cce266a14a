"""Ranks that several tests share: starting them takes longer than most of what they do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from multiprocessing import current_process, forkserver

import pytest

from parallel.together import Team


@pytest.fixture(scope="session", autouse=True)
def no_folder_stays() -> Iterator[None]:
    """The socket of the nursery lies in a folder that nobody removes where a worker of pytest ends abruptly."""
    yield
    if folder := current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)


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
