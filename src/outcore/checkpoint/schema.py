"""Reading untrusted JSON: each accessor checks what it takes, and fails with one sentence."""

from __future__ import annotations

from typing import Any

from outcore.errors import CheckpointError

MOST = 1 << 62
"""No size or count is larger than this."""


class Fields:
    """A JSON object with checked access.

    Args:
        value: what should be an object.
        where: its name, for messages.

    Raises:
        CheckpointError: it is something else; so do all accessors.
    """

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise CheckpointError(f"{where} must be an object")
        self.value: dict[str, Any] = value
        self._where = where

    def _get(self, key: str, kind: type, what: str) -> Any:
        found = self.value.get(key)
        if type(found) is not kind:
            raise CheckpointError(f"{self._where}: {key!r} must be {what}")
        return found

    def text(self, key: str) -> str:
        found: str = self._get(key, str, "a string")
        return found

    def flag(self, key: str) -> bool:
        found: bool = self._get(key, bool, "true or false")
        return found

    def count(self, key: str) -> int:
        """A whole number, 0 or more."""
        found: int = self._get(key, int, "a whole number")
        if not 0 <= found <= MOST:
            raise CheckpointError(f"{self._where}: {key!r} is out of range")
        return found

    def number(self, key: str) -> float:
        """A number above 0 that is no larger than `MOST`."""
        found = self.value.get(key)
        if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 < found <= MOST:
            return float(found)
        raise CheckpointError(f"{self._where}: {key!r} must be a number above 0")

    def items(self, key: str) -> list[Any]:
        found: list[Any] = self._get(key, list, "a list")
        return found

    def fields(self, key: str) -> Fields:
        return Fields(self.value.get(key), f"{self._where}: {key!r}")

    def each(self) -> dict[str, Fields]:
        """All values, each of which must be an object."""
        return {key: Fields(value, f"{self._where}: {key!r}") for key, value in self.value.items()}

    def texts(self, key: str) -> list[str]:
        found = self.items(key)
        if not all(type(item) is str for item in found):
            raise CheckpointError(f"{self._where}: {key!r} must hold strings")
        return found

    def counts(self, key: str) -> list[int]:
        found = self.items(key)
        if not all(type(item) is int and 0 <= item <= MOST for item in found):
            raise CheckpointError(f"{self._where}: {key!r} must hold whole numbers")
        return found
