"""Checkpoints of several ranks: the files are those of one process, so any number of ranks loads them.

[Note: Who writes]
The first rank makes the folder and the files, and writes all that is small. Then each rank writes what it keeps to
its place in these files, all at the same time, takes a digest of each stretch that it wrote in one go, and makes its
bytes durable (the first one all files, since it began each). What several ranks keep alike, they share out chunk by
chunk. Once all have said that they are done the first rank writes the manifest, with everyone's digests, and commits.
What fails on one rank is heard of by all before that: nothing is committed, and training can go on.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash

from outcore.checkpoint import files as seam
from outcore.checkpoint import rng, states
from outcore.checkpoint.descriptors import Writable
from outcore.checkpoint.files import Files
from outcore.checkpoint.manifest import StoredParameter
from outcore.checkpoint.pieces import Piece, Stretch, raw
from outcore.checkpoint.states import PART
from outcore.checkpoint.values import decode, encode
from outcore.chunks.pool import Access
from outcore.chunks.store import RunStore
from outcore.engine import Engine
from outcore.errors import CheckpointError, DiskWriteError
from outcore.parallel.ranks import Ranks, World

Found = dict[str, list[list[Any]]]
"""By `_place`, what one rank wrote of a tensor: first byte, one past the last, digest."""


class SharedFiles:
    """Files of a checkpoint that the first rank made.

    Args:
        made: those that this one made; they are made durable whether it writes to them or not.
    """

    def __init__(self, files: Files, folder: Path, made: Iterable[str]) -> None:
        self._files = Writable(files)
        self._folder = folder
        self._names = dict.fromkeys(made)

    def write(self, name: str, view: memoryview, offset: int) -> None:
        """Write all of ``view`` at an offset of a file.

        Raises:
            CheckpointError: this rank does not see the file.
            DiskFullError, DiskWriteError: the system refused.
        """
        self._names[name] = None
        path = self._folder / name
        try:
            self._files.write(path, view, offset)
        except DiskWriteError as error:
            if error.errno != errno.ENOENT:
                raise
            raise CheckpointError(
                f"{path} is not there: all ranks must see the directory that the first one saves to"
            ) from error

    def finish(self) -> None:
        """Make what was written durable.

        Raises:
            DiskFullError, DiskWriteError: the system refused.
        """
        for name in self._names:
            self._files.finish(self._folder / name)

    def close(self) -> None:
        self._files.close()


class Stretches:
    """Writes parts of one tensor, wherever in it they are. Is a `Sink`."""

    def __init__(self, piece: Piece, files: SharedFiles) -> None:
        self.piece = piece
        self._files = files
        self._first = self._done = 0
        self._hash = xxhash.xxh3_128()
        self._found: list[list[Any]] = []

    def seek(self, element: int) -> None:
        """Go on with this element."""
        byte = element * self.piece.dtype.itemsize
        if byte != self._done:
            self._end()
            self._first = self._done = byte

    def write(self, values: torch.Tensor) -> None:
        view = raw(values)
        self._hash.update(view)
        self._files.write(self.piece.file, view, self.piece.start + self._done)
        self._done += len(view)

    def found(self) -> list[list[Any]]:
        """All that was written."""
        self._end()
        return self._found

    def _end(self) -> None:
        if self._done > self._first:
            self._found.append([self._first, self._done, self._hash.hexdigest()])
        self._first, self._hash = self._done, xxhash.xxh3_128()


@torch.no_grad()
def write_own(
    engine: Engine, folder: Path, parameters: Mapping[str, StoredParameter], made: Iterable[str]
) -> Found:
    """Write what this rank keeps, and of what others keep too its part; all of it is durable then.

    Args:
        folder: where the first rank made the files.
        parameters: where everything goes, by name.
        made: the files that this rank made.

    Raises:
        CheckpointError, DiskFullError, DiskWriteError: as `SharedFiles.write`.
    """
    assert isinstance(engine.ranks, World)
    shared = SharedFiles(seam.SYSTEM, folder, made)
    values = {name: Stretches(stored.value, shared) for name, stored in parameters.items()}
    moments = {
        name: {moment: Stretches(piece, shared) for moment, piece in stored.moments.items()}
        for name, stored in parameters.items()
    }
    staging = torch.empty(PART)
    try:
        for unit in engine.units:
            of = {binding.slot.index: binding for binding in unit.bindings}
            for store in unit.stores:
                for k in _shared_out(store, engine.ranks):
                    with engine.pool.guard(states.chunks_of(store, k), Access.READ):
                        for part in states.parts_of(store, k, of):
                            name = part.binding.name
                            for sink in (values[name], *moments[name].values()):
                                sink.seek(part.first)
                            states.read_part(part, engine.rule, values, moments, staging)
        shared.finish()
    finally:
        shared.close()
    sinks = [*values.values(), *(sink for of_one in moments.values() for sink in of_one.values())]
    return {_place(sink.piece): found for sink in sinks if (found := sink.found())}


def _shared_out(store: RunStore, world: World) -> range:
    """The chunks that this rank writes of those that it keeps."""
    if store.run.whole is None:
        return range(world.number, store.run.chunks, world.size)
    return range(world.replicas.number, store.run.chunks, world.replicas.size)


def _place(piece: Piece) -> str:
    return f"{piece.file} {piece.start}"


def merged(piece: Piece, everyones: Iterable[Found]) -> tuple[Stretch, ...]:
    """What all ranks wrote of a tensor, which is all of it."""
    found = sorted(stretch for one in everyones for stretch in one.get(_place(piece), ()))
    edges = [(0, 0), *((start, stop) for start, stop, _ in found), (piece.nbytes, piece.nbytes)]
    assert all(one[1] == other[0] for one, other in pairwise(edges)), f"{piece.key} is not written whole"
    return tuple(Stretch(stop, digest) for _, stop, digest in found)


# -- random numbers -----------------------------------------------------------------------------------


def everyones_randoms(ranks: Ranks, what: str) -> dict[str, Any]:
    """The first rank's random number states, with those of the others under ``ranks``."""
    said = json.dumps(encode(rng.capture(), lambda tensor: json.dumps(tensor.tolist()), "random numbers"))
    first, *others = (_heard(words) for words in ranks.words(said.encode(), what))
    return {**first, "ranks": others}


def _heard(words: bytes) -> dict[str, Any]:
    found = decode(json.loads(words), lambda text: torch.tensor(json.loads(text), dtype=torch.uint8))
    assert isinstance(found, dict)
    return found


def own_randoms(states_of: Any, ranks: Ranks) -> Any:
    """Which of a checkpoint's states are this rank's: those of its number, or what it has now if there are none."""
    others = states_of.get("ranks", [])
    if ranks.number == 0:
        return states_of
    if (
        isinstance(others, list)
        and ranks.number <= len(others)
        and isinstance(others[ranks.number - 1], dict)
    ):
        return dict(others[ranks.number - 1])
    return rng.capture()
