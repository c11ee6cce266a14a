"""The manifest: what a checkpoint holds, where, and with which checksums.

It is JSON: ``{"format": "outcore checkpoint", "version": 1, "digest": ..., "body": {...}}``, the digest being
that of the body in its canonical form (keys sorted, no spaces, ASCII). The version is 2 where ranks wrote tensors
together: such a tensor has a list of stretches, each with a digest, in place of its own. Nothing in it is believed
before `parse` has checked it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outcore.checkpoint.pieces import DTYPES, HEADER_LIMIT, Piece, Stretch, digest, dtype_name
from outcore.checkpoint.schema import Fields
from outcore.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "outcore checkpoint"
WHOLE, TOGETHER = VERSIONS = 1, 2
LIMIT = 256 * 1024 * 1024
"""No manifest is longer than this, in bytes."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,180}\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_DIMENSIONS = 64


@dataclass(frozen=True)
class StoredFile:
    """A file: its length in bytes, and its header's length (the 8 bytes before it included) and digest."""

    nbytes: int
    header: int
    digest: str


@dataclass(frozen=True)
class StoredParameter:
    """A parameter: its value in full precision, and its moments by torch's names if it was trained."""

    value: Piece
    trained: bool
    moments: Mapping[str, Piece]


@dataclass(frozen=True)
class StoredGroup:
    """A parameter group: the parameters' names, and its hyperparameters as `values.encode` made them."""

    parameters: tuple[str, ...]
    hyper: Any


@dataclass(frozen=True)
class StoredScale:
    """A dynamic loss scale, as `outcore.optim.scaling.LossScale`."""

    value: float
    growth: float
    backoff: float
    interval: int
    good_steps: int


@dataclass(frozen=True)
class StoredOptimizer:
    """An optimizer without its moments.

    Attributes:
        kind: the class, by name.
        steps: parameter name to the number of its steps.
        unstreamed: parameter name to what a foreign optimizer keeps beside its moments, encoded.
    """

    kind: str
    groups: tuple[StoredGroup, ...]
    steps: Mapping[str, int]
    skipped_steps: int
    scale: StoredScale | None
    unstreamed: Any


@dataclass(frozen=True)
class Manifest:
    """All of it. ``rng`` and ``extra`` are encoded values whose tensors are in ``state``."""

    files: Mapping[str, StoredFile]
    parameters: Mapping[str, StoredParameter]
    buffers: Mapping[str, Piece]
    state: Mapping[str, Piece]
    optimizer: StoredOptimizer | None
    rng: Any
    extra: Any

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def pieces(self) -> list[Piece]:
        """All tensors."""
        return [piece for _, piece in self.named_pieces()]

    def own_pieces(self) -> list[Piece]:
        """Parameters and their moments: what ranks keep."""
        return [
            piece for stored in self.parameters.values() for piece in (stored.value, *stored.moments.values())
        ]

    def named_pieces(self) -> list[tuple[str, Piece]]:
        """All tensors with their names: parameters, their moments as ``exp_avg:name``, buffers, states."""
        found = []
        for name, parameter in self.parameters.items():
            found.append((name, parameter.value))
            found += [(f"{moment}:{name}", piece) for moment, piece in parameter.moments.items()]
        return [*found, *self.buffers.items(), *self.state.items()]


# -- writing ------------------------------------------------------------------------------------------


def write(manifest: Manifest) -> bytes:
    """The bytes of the manifest's file."""
    optimizer = manifest.optimizer
    together = any(len(piece.stretches) > 1 for piece in manifest.pieces())
    return seal(
        {
            "files": {
                name: {"bytes": file.nbytes, "header": file.header, "digest": file.digest}
                for name, file in manifest.files.items()
            },
            "parameters": {
                name: _piece(stored.value)
                | {
                    "trained": stored.trained,
                    "moments": {moment: _piece(piece) for moment, piece in stored.moments.items()},
                }
                for name, stored in manifest.parameters.items()
            },
            "buffers": {name: _piece(piece) for name, piece in manifest.buffers.items()},
            "state": {key: _piece(piece) for key, piece in manifest.state.items()},
            "optimizer": None if optimizer is None else _optimizer(optimizer),
            "rng": manifest.rng,
            "extra": manifest.extra,
        },
        TOGETHER if together else WHOLE,
    )


def seal(body: Mapping[str, Any], version: int = WHOLE) -> bytes:
    """The bytes of a manifest with this body, whatever it says."""
    whole = {"format": FORMAT, "version": version, "digest": digest(_canonical(body)), "body": body}
    return json.dumps(whole, indent=1, allow_nan=False).encode()


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _piece(piece: Piece) -> dict[str, Any]:
    return {
        "file": piece.file,
        "start": piece.start,
        "dtype": dtype_name(piece.dtype),
        "shape": list(piece.shape),
        "digest": _digests(piece.stretches),
    }


def _digests(stretches: tuple[Stretch, ...]) -> str | list[list[int | str]]:
    if len(stretches) == 1:
        return stretches[0].digest
    return [[stretch.stop, stretch.digest] for stretch in stretches]


def _optimizer(optimizer: StoredOptimizer) -> dict[str, Any]:
    return {
        "class": optimizer.kind,
        "groups": [{"parameters": list(g.parameters), "hyper": g.hyper} for g in optimizer.groups],
        "steps": dict(optimizer.steps),
        "skipped_steps": optimizer.skipped_steps,
        "loss_scale": None if optimizer.scale is None else vars(optimizer.scale),
        "unstreamed": optimizer.unstreamed,
    }


# -- reading ------------------------------------------------------------------------------------------


def parse(data: bytes) -> Manifest:
    """Read a manifest's bytes.

    Raises:
        CheckpointError: they are not a manifest of this version, are damaged, or say something impossible.
    """
    try:
        whole = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
        top = Fields(whole, "the manifest")
        if top.value.get("format") != FORMAT:
            raise CheckpointError("the manifest is not that of a checkpoint of outcore")
        if top.count("version") not in VERSIONS:
            raise CheckpointError(
                f"the checkpoint has format version {top.count('version')}, this outcore reads {WHOLE} and {TOGETHER}"
            )
        body = top.fields("body")
        if digest(_canonical(body.value)) != top.text("digest"):
            raise CheckpointError("the manifest is damaged: its digest is another")
        return _body(body)
    except (ValueError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"the manifest can't be read: {error}") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _body(body: Fields) -> Manifest:
    files = {name: _stored_file(name, f) for name, f in body.fields("files").each().items()}
    parameters = {}
    for name, fields in body.fields("parameters").each().items():
        moments = {m: _stored_piece(m, f, files) for m, f in fields.fields("moments").each().items()}
        value = _stored_piece(name, fields, files)
        if any(moment.shape != value.shape for moment in moments.values()):
            raise CheckpointError(f"the manifest: a moment of {name} has another shape than it")
        parameters[name] = StoredParameter(value, fields.flag("trained"), moments)
    buffers = {name: _stored_piece(name, f, files) for name, f in body.fields("buffers").each().items()}
    state = {key: _stored_piece(key, f, files) for key, f in body.fields("state").each().items()}
    stored = body.value.get("optimizer")
    optimizer = None if stored is None else _stored_optimizer(body.fields("optimizer"), parameters)
    return Manifest(
        files, parameters, buffers, state, optimizer, body.value.get("rng"), body.value.get("extra")
    )


def _stored_file(name: str, fields: Fields) -> StoredFile:
    if not _FILE.fullmatch(name):
        raise CheckpointError(f"the manifest names {name!r}, which is not a file of its own directory")
    file = StoredFile(fields.count("bytes"), fields.count("header"), _stored_digest(fields))
    if not 8 <= file.header <= min(file.nbytes, HEADER_LIMIT):
        raise CheckpointError(f"the manifest: the header of {name} can't have {file.header:,} bytes")
    return file


def _stored_digest(fields: Fields) -> str:
    return _checked(fields.text("digest"))


def _checked(found: Any) -> str:
    if type(found) is not str or not _DIGEST.fullmatch(found):
        raise CheckpointError(f"the manifest: {str(found)[:80]!r} is not a digest")
    return found


def _stored_stretches(key: str, fields: Fields, nbytes: int, width: int) -> tuple[Stretch, ...]:
    found = fields.value.get("digest")
    if type(found) is not list:
        return (Stretch(nbytes, _stored_digest(fields)),)
    stretches, start = [], 0
    for entry in found:
        if type(entry) is not list or len(entry) != 2 or type(entry[0]) is not int or entry[0] <= start:
            raise CheckpointError(f"the manifest: {key[:80]!r} has stretches that can't be")
        start = entry[0]
        if start % width:
            raise CheckpointError(f"the manifest: a stretch of {key[:80]!r} ends within an element")
        stretches.append(Stretch(start, _checked(entry[1])))
    if start != nbytes or not stretches:
        raise CheckpointError(f"the manifest: the stretches of {key[:80]!r} are not all of it")
    return tuple(stretches)


def _stored_piece(key: str, fields: Fields, files: Mapping[str, StoredFile]) -> Piece:
    dtype = DTYPES.get(fields.text("dtype"))
    shape = fields.counts("shape")
    if dtype is None or len(shape) > _DIMENSIONS:
        raise CheckpointError(f"the manifest: {key[:80]!r} has an unknown dtype or too many dimensions")
    piece = Piece(key, dtype, tuple(shape), fields.text("file"), fields.count("start"))
    file = files.get(piece.file)
    if file is None or not file.header <= piece.start <= piece.stop <= file.nbytes:
        raise CheckpointError(f"the manifest: {key[:80]!r} does not lie within a file of the checkpoint")
    piece.stretches = _stored_stretches(key, fields, piece.nbytes, dtype.itemsize)
    return piece


def _stored_optimizer(fields: Fields, parameters: Mapping[str, StoredParameter]) -> StoredOptimizer:
    groups = []
    for entry in fields.items("groups"):
        group = Fields(entry, "the manifest: a parameter group")
        hyper = group.fields("hyper").value
        if "params" in hyper:
            raise CheckpointError("the manifest: a parameter group's hyperparameters name parameters")
        groups.append(StoredGroup(tuple(group.texts("parameters")), hyper))
    counted = fields.fields("steps")
    steps = {name: counted.count(name) for name in counted.value}
    for name in [*steps, *(name for group in groups for name in group.parameters)]:
        if name not in parameters:
            raise CheckpointError(f"the manifest: the optimizer knows {name[:80]!r}, the model does not")
    scale = None if fields.value.get("loss_scale") is None else _stored_scale(fields.fields("loss_scale"))
    unstreamed = fields.fields("unstreamed").value
    return StoredOptimizer(
        fields.text("class"), tuple(groups), steps, fields.count("skipped_steps"), scale, unstreamed
    )


def _stored_scale(fields: Fields) -> StoredScale:
    value, growth, backoff = fields.number("value"), fields.number("growth"), fields.number("backoff")
    if not (math.isfinite(value * growth) and 0 < backoff <= 1 <= growth):
        raise CheckpointError("the manifest: a loss scale that can't be")
    return StoredScale(value, growth, backoff, fields.count("interval"), fields.count("good_steps"))
