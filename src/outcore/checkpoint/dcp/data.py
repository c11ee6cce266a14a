"""Reads the data in Python's serialized objects, and nothing else.

[Note: Data, not a program]
The metadata of torch.distributed.checkpoint, and the description of each tensor in it, is a stream of opcodes
that Python would run: it may import any module and call anything in it. Here the standard library's `pickletools`
only takes the stream apart, and the few opcodes that build plain data are interpreted below. A name becomes a
`Name` if it is in the caller's list and is refused otherwise; a call becomes a `Made` that notes what was to be
called with what. Nothing is imported, looked up, constructed or called, whatever the file says. Dictionaries become
lists of pairs, so that no key is ever hashed, and nothing is copied or walked, so that deep or shared structure
costs no more than its own bytes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from outcore.errors import CheckpointError

LIMIT = 1 << 28
"""No stream is longer than this, in bytes."""

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
)
_PUTS = frozenset({"BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"BINGET", "LONG_BINGET"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset({"PROTO", "FRAME"})
_MARK = object()


@dataclass(frozen=True)
class Name:
    """A class or function that the stream names, as ``module.name``."""

    text: str


@dataclass(eq=False)
class Made:
    """What the stream wants made: of which class or by which function, from what, and with which state."""

    of: str
    arguments: Any
    state: Any = None


@dataclass(eq=False)
class Table:
    """A dictionary, in order, keys as they come."""

    pairs: list[tuple[Any, Any]]

    def get(self, key: str) -> Any:
        """The last value under a string, or ``None``."""
        return next(
            (value for found, value in reversed(self.pairs) if type(found) is str and found == key), None
        )


def read(data: bytes, names: Set[str], what: str) -> Any:
    """What a stream holds: numbers, strings, lists, tuples, and `Name`, `Made` and `Table`.

    Args:
        names: that may occur, as ``module.name``.
        what: it is, for messages.

    Raises:
        CheckpointError: it holds anything else, or is cut or malformed.
    """
    if len(data) > LIMIT:
        raise CheckpointError(f"{what} has {len(data):,} bytes, and may have {LIMIT:,}")
    machine = _Machine(names)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode.name, argument)
    except _RefusedError as refusal:
        raise CheckpointError(f"{what} holds {refusal}, which is not data and is not run") from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{what} is damaged: {error}") from None
    return machine.result


class _RefusedError(Exception):
    """An opcode or a name that is no data."""


class _Machine:
    def __init__(self, names: Set[str]) -> None:
        self.result: Any = None
        self._names = names
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._does: dict[str, Callable[[], None]] = {
            "MARK": lambda: self._stack.append(_MARK),
            "EMPTY_LIST": lambda: self._stack.append([]),
            "EMPTY_DICT": lambda: self._stack.append(Table([])),
            "TUPLE": lambda: self._stack.append(tuple(self._marked())),
            "APPEND": lambda: self._list([self._pop()]),
            "APPENDS": lambda: self._list(self._marked()),
            "SETITEM": lambda: self._pairs([self._pop(), self._pop()][::-1]),
            "SETITEMS": lambda: self._pairs(self._marked()),
            "STACK_GLOBAL": self._stack_global,
            "REDUCE": self._make,
            "NEWOBJ": self._make,
            "BUILD": self._build,
            "BINPERSID": lambda: self._stack.append(Made("persistent", self._pop())),
            "STOP": self._stop,
        }

    def step(self, name: str, argument: Any) -> None:
        if name in _IGNORED:
            return
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self._tuple(_TUPLES[name])
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in _PUTS:
            self._memo[argument] = self._top()
        elif name in _GETS:
            self._stack.append(self._memo[argument])
        elif name == "GLOBAL":
            self._name(argument.replace(" ", "."))
        elif name in self._does:
            self._does[name]()
        else:
            raise _RefusedError(f"the instruction {name}")

    def _top(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("it takes more than it has")
        return self._stack[-1]

    def _pop(self) -> Any:
        self._top()
        return self._stack.pop()

    def _marked(self) -> list[Any]:
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                found = self._stack[at + 1 :]
                del self._stack[at:]
                return found
        raise ValueError("it ends a list that it never began")

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _list(self, items: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise _RefusedError("an extension of something else than a list")
        target.extend(items)

    def _pairs(self, items: list[Any]) -> None:
        target = self._top()
        if type(target) is Made and target.of == "collections.OrderedDict":
            target.state = target.state or Table([])
            target = target.state
        if type(target) is not Table or len(items) % 2:
            raise _RefusedError("an extension of something else than a dictionary")
        target.pairs.extend(zip(items[::2], items[1::2], strict=True))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise _RefusedError("a name that is no text")
        self._name(f"{module}.{name}")

    def _name(self, text: str) -> None:
        if text not in self._names:
            raise _RefusedError(f"the name {text[:100]!r}")
        self._stack.append(Name(text))

    def _make(self) -> None:
        arguments, of = self._pop(), self._pop()
        if type(of) is not Name or type(arguments) is not tuple:
            raise _RefusedError("a call of something else than a known class")
        self._stack.append(Made(of.text, arguments))

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if type(target) is not Made or target.state is not None:
            raise _RefusedError("a change of something that it has not just made")
        target.state = state

    def _stop(self) -> None:
        self.result = self._pop()
