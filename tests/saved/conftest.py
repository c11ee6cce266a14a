"""In these tests everything that may move does, however small."""

import pytest

from outcore.model.saved import store


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SMALLEST", 1)
