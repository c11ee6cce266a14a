"""Each idea off, by putting its predecessor in its place in this process. The library has no switches for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import outcore.engine as engine
from outcore.chunks.chunk import Residence
from outcore.chunks.core import Core
from outcore.chunks.holdings import Holdings
from outcore.chunks.replacers import LRU, Belady
from outcore.chunks.room import Room
from outcore.memory.disk import DiskTier
from outcore.model import sites
from outcore.optim.kernels import AdamRule, Workers, choice


def _update_in_the_step() -> None:
    made: Any = engine.Pipeline

    def pipeline(*given: Any) -> Any:
        return made(*given[:-1], False)

    engine.Pipeline = pipeline  # type: ignore[assignment,misc]


def _no_read_ahead() -> None:
    Core.pump = lambda self: None  # type: ignore[method-assign]


def _no_write_behind() -> None:
    Room.write_behind = lambda self, coming, beyond: None  # type: ignore[method-assign]


def _one_thread() -> None:
    alone = Workers(1)
    engine.workers = lambda: alone  # type: ignore[attr-defined]


def _lru() -> None:
    sites.Belady = lambda schedule: LRU()  # type: ignore[assignment,misc]


def _full_master() -> None:
    AdamRule.can_split = property(lambda self: False)  # type: ignore[method-assign,assignment]


def _pages_given_back() -> None:
    Holdings.empty = lambda self, chunk: self.give_back(chunk, Residence.EMPTY)  # type: ignore[method-assign]


def _torch_kernels() -> None:
    choice._compiled = lambda: None  # type: ignore[assignment]


def _no_checksums() -> None:
    made = DiskTier.__init__

    def init(self: DiskTier, *given: Any, **more: Any) -> None:
        made(self, *given, **{**more, "checksum": False})

    DiskTier.__init__ = init  # type: ignore[method-assign]


def _whole_units() -> None:
    sites.Residents = lambda schedule, room: Belady(schedule)  # type: ignore[assignment,misc]


WITHOUT: dict[str, tuple[str, Callable[[], None]]] = {
    "overlapped update": ("updates are done in step()", _update_in_the_step),
    "read-ahead": ("a chunk is read when it is asked for", _no_read_ahead),
    "write-behind": ("a dirty chunk is written when its room is asked for", _no_write_behind),
    "Belady": ("the least recently used leaves, which also ends read-ahead under pressure", _lru),
    "split master": ("a whole fp32 master, 14 bytes in place of 12", _full_master),
    "warm pages": ("pages of gradients are given back after each update", _pages_given_back),
    "compiled kernels": ("updates by torch's operators, block by block", _torch_kernels),
    "update threads": ("updates and norms on one thread", _one_thread),
    "checksums": ("no digest is taken or compared", _no_checksums),
}
"""What a training run can do without: in words, and how."""

WITHOUT_GENERATING: dict[str, tuple[str, Callable[[], None]]] = {
    "a share of every unit": ("whole units stay, as Belady has it", _whole_units),
    "read-ahead": WITHOUT["read-ahead"],
}


def do_without(name: str) -> None:
    """Turn an idea off in this process, before anything is offloaded."""
    (WITHOUT | WITHOUT_GENERATING)[name][1]()
