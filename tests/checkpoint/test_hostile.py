"""Files that lie: damage is found, and whatever a file says, only outcore's errors come out and nothing is touched."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import outcore
from checkpoint.runs import STACK, offloaded, train, weights
from exact.shapes import SHAPES
from outcore.checkpoint import manifest
from outcore.checkpoint.pieces import digest
from outcore.errors import CheckpointError, DiskReadError, ModelError, OutcoreError

Saved = tuple[Path, nn.Module, outcore.Optimizer]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    path = tmp_path_factory.mktemp("hostile") / "saved"
    with offloaded(STACK) as (model, optimizer):
        train(model, optimizer, STACK, range(1))
        outcore.save(path, model, optimizer, extra={"a": (1, float("inf")), 5: torch.ones(3)})
        yield path, model, optimizer


@pytest.fixture
def copied(saved: Saved, tmp_path: Path) -> Saved:
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy", saved[1], saved[2]


def body(path: Path) -> Any:
    return json.loads((path / manifest.NAME).read_text())["body"]


def put_body(path: Path, value: Any) -> None:
    """A manifest that says so, with a digest that fits."""
    (path / manifest.NAME).write_bytes(manifest.seal(value))


# -- damage -------------------------------------------------------------------------------------------

FILES = [
    "parameters-00001.safetensors",
    "moments-00001.safetensors",
    "state-00001.safetensors",
    manifest.NAME,
]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit(name: str, copied: Saved) -> None:
    path, model, optimizer = copied
    size = (path / name).stat().st_size
    good = (path / name).read_bytes()
    for offset in (0, 9, size // 3, size // 2, size - 2, *range(100, size, max(1, size // 20))):
        data = bytearray(good)
        data[offset] ^= 0x10
        (path / name).write_bytes(data)
        if name == manifest.NAME and _means_the_same(good, bytes(data)):
            continue
        with pytest.raises(CheckpointError):
            outcore.verify(path)
        with pytest.raises(CheckpointError):
            outcore.load(path, model, optimizer)
    (path / name).write_bytes(good)
    outcore.load(path, model, optimizer)


def _means_the_same(one: bytes, other: bytes) -> bool:
    """White space between JSON's tokens may change."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["shorter", "longer", "empty", "gone", "directory", "link", "pipe"])
def test_a_file_that_is_not_as_it_was(how: str, name: str, copied: Saved) -> None:
    path, model, optimizer = copied
    before = weights(model)
    file = path / name
    data = file.read_bytes()
    file.unlink()
    match how:
        case "shorter":
            file.write_bytes(data[:-1])
        case "longer":
            file.write_bytes(data + b"x")
        case "empty":
            file.touch()
        case "directory":
            file.mkdir()
        case "link":
            (path.parent / "elsewhere").write_bytes(data)
            file.symlink_to(path.parent / "elsewhere")
        case "pipe":
            os.mkfifo(file)
    with pytest.raises((CheckpointError, DiskReadError)) as error:
        outcore.load(path, model, optimizer)
    assert "undefined" not in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())


def _in_two(path: Path) -> tuple[Any, dict[str, Any], list[list[Any]]]:
    """A manifest's body, a tensor of it, and that tensor's digests as if two ranks had written it."""
    found = body(path)
    piece = next(iter(found["parameters"].values()))
    nbytes = 4 * math.prod(piece["shape"])
    with (path / piece["file"]).open("rb") as file:
        file.seek(piece["start"])
        halves = file.read(nbytes // 8 * 4), file.read(nbytes - nbytes // 8 * 4)
    ends = [[len(halves[0]), digest(halves[0])], [nbytes, digest(halves[1])]]
    return found, piece, ends


def test_stretches_of_a_tensor(copied: Saved) -> None:
    path, model, optimizer = copied
    found, piece, ends = _in_two(path)
    before = weights(model)
    piece["digest"] = ends
    (path / manifest.NAME).write_bytes(manifest.seal(found, manifest.TOGETHER))
    outcore.verify(path)
    outcore.load(path, model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())
    for half in (0, 1):
        good, ends[half][1] = ends[half][1], ends[1 - half][1]
        (path / manifest.NAME).write_bytes(manifest.seal(found, manifest.TOGETHER))
        with pytest.raises(CheckpointError, match="damaged"):
            outcore.load(path, model, optimizer)
        ends[half][1] = good


def test_stretches_that_can_not_be(copied: Saved) -> None:
    path, model, optimizer = copied
    found, piece, ends = _in_two(path)
    (one, first), (two, second) = ends
    for wrong in (
        [],
        [[one, first]],
        [[two, second], [one, first]],
        [[one, first], [one, first], [two, second]],
        [[one + 1, first], [two, second]],
        [[one, first], [two + 4, second]],
        [[0, first], [two, second]],
        [[-4, first], [two, second]],
        [[float(one), first], [two, second]],
        [[True, first], [two, second]],
        [[one, None], [two, second]],
        [[one], [two, second]],
        [first, second],
        {"stop": one},
        None,
    ):
        piece["digest"] = wrong
        (path / manifest.NAME).write_bytes(manifest.seal(found, manifest.TOGETHER))
        with pytest.raises(CheckpointError, match="manifest"):
            outcore.load(path, model, optimizer)


def test_swapped_pieces(copied: Saved) -> None:
    path, model, optimizer = copied
    one, other = path / FILES[0], path / FILES[1]
    one.rename(path / "x")
    other.rename(one)
    (path / "x").rename(other)
    with pytest.raises(CheckpointError):
        outcore.load(path, model, optimizer)


def test_a_piece_of_another_checkpoint(copied: Saved) -> None:
    """A file of the same shape from another step is found by its digests, and another load heals."""
    path, model, optimizer = copied
    outcore.load(path, model, optimizer)
    expected = weights(model)
    train(model, optimizer, STACK, range(1))
    outcore.save(path.parent / "later", model, optimizer)
    good = (path / FILES[0]).read_bytes()
    shutil.copy(path.parent / "later" / FILES[0], path / FILES[0])
    with pytest.raises(CheckpointError, match="undefined until another load succeeds"):
        outcore.load(path, model, optimizer)
    (path / FILES[0]).write_bytes(good)
    outcore.load(path, model, optimizer)
    assert all(torch.equal(value, expected[key]) for key, value in weights(model).items())


def test_never_committed(copied: Saved) -> None:
    path, model, optimizer = copied
    path.rename(path.parent / ".tmp-copy-1-00")
    with pytest.raises(CheckpointError, match="never committed"):
        outcore.load(path.parent / ".tmp-copy-1-00", model, optimizer)
    with pytest.raises(CheckpointError, match="missing"):
        outcore.load(path, model, optimizer)


# -- another model or optimizer ------------------------------------------------------------------------


@pytest.mark.parametrize("other", [1, 2, 3, 6, 10], ids=lambda i: SHAPES[i].name)
def test_another_model(other: int, saved: Saved) -> None:
    with offloaded(SHAPES[other]) as (model, optimizer):
        before = weights(model)
        with pytest.raises((ModelError, CheckpointError)):
            outcore.load(saved[0], model, optimizer)
        assert all(torch.equal(value, before[key]) for key, value in weights(model).items())


def test_another_optimizer(saved: Saved, tmp_path: Path) -> None:
    makers: list[Any] = [
        outcore.Adam,
        outcore.SGD,
        lambda params: outcore.Foreign(torch.optim.NAdam, params),
        lambda params: outcore.AdamW([{"params": params[:2]}, {"params": params[2:]}]),
    ]
    for make in makers:
        with offloaded(STACK, make) as (model, optimizer):
            with pytest.raises(CheckpointError):
                outcore.load(saved[0], model, optimizer)
            outcore.load(saved[0], model)
    outcore.save(tmp_path / "weights", saved[1])
    with pytest.raises(CheckpointError, match="without an optimizer"):
        outcore.load(tmp_path / "weights", saved[1], saved[2])


# -- malice -------------------------------------------------------------------------------------------

NAMES = [
    "", ".", "..", "/etc/passwd", "../secret.safetensors", "a/b.safetensors", "./x.safetensors", "x",
    "..\\secret.safetensors", "a\\b.safetensors", "C:\\x.safetensors", "~/x.safetensors", "x.safetensors/",
    "x.safetensors\x00", "\x00.safetensors", "x.safetensors\n", ".hidden.safetensors", "-rf.safetensors",
    "//host/x.safetensors", "/dev/zero", "/proc/self/mem", "x.pkl", "manifest.json", "é.safetensors",
    "x" * 300 + ".safetensors", "%2e%2e%2fx.safetensors", "file:///x.safetensors", "${HOME}.safetensors",
    "x\u202e.safetensors", "\ud800.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_hostile_names(name: str, copied: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, optimizer = copied
    (path.parent / "secret.safetensors").write_bytes((path / FILES[0]).read_bytes())
    hostile = body(path)
    hostile["files"][name] = hostile["files"].pop(FILES[0])
    for piece in hostile["parameters"].values():
        piece["file"] = name
    put_body(path, hostile)
    touched: list[Path] = []
    original = outcore.checkpoint.files.Files.open

    def watched(self: Any, place: Path) -> int:
        touched.append(place)
        return original(self, place)

    monkeypatch.setattr(outcore.checkpoint.files.Files, "open", watched)
    with pytest.raises(CheckpointError, match="not a file of its own directory"):
        outcore.load(path, model, optimizer)
    assert touched == [path / manifest.NAME]


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def test_planted_pickles(copied: Saved) -> None:
    """Pickles beside the files are never opened; pickles in their place are refused."""
    path, model, optimizer = copied
    mark = path.parent / "mark"
    bomb = pickle.dumps(Bomb(mark))
    names = ["pytorch_model.bin", "optimizer.pt", "rng_state.pth", "data.pkl", ".metadata", "scheduler.pt"]
    for name in names:
        (path / name).write_bytes(bomb)
    torch.save(Bomb(mark), path / "training_args.bin")
    outcore.load(path, model, optimizer)
    outcore.verify(path)
    for name in FILES:
        good = (path / name).read_bytes()
        (path / name).write_bytes(bomb + bytes(max(0, len(good) - len(bomb))))
        with pytest.raises(CheckpointError):
            outcore.load(path, model, optimizer)
        (path / name).write_bytes(good)
    assert not mark.exists()


def test_sizes_are_bounded_before_memory_is_taken(copied: Saved) -> None:
    path, model, optimizer = copied
    for change in (
        lambda b: b["files"][FILES[0]].update(bytes=1 << 61, header=1 << 60),
        lambda b: b["files"][FILES[0]].update(header=1 << 40),
        lambda b: b["state"]["state.0"].update(shape=[1 << 50]),
        lambda b: b["state"]["state.0"].update(shape=[1 << 40] * 64),
        lambda b: b["state"]["state.0"].update(start=-8),
        lambda b: b["state"]["state.0"].update(shape=[-1]),
    ):
        hostile = body(copied[0])
        change(hostile)
        put_body(path, hostile)
        with pytest.raises(CheckpointError):
            outcore.load(path, model, optimizer)
        put_body(path, _unchanged(copied))
    with open(path / manifest.NAME, "r+b") as file:
        file.truncate(manifest.LIMIT + 1)
    with pytest.raises(CheckpointError, match="no manifest has more"):
        outcore.load(path, model, optimizer)


_bodies: dict[int, Any] = {}


@pytest.fixture(autouse=True)
def _remember(saved: Saved) -> None:
    _bodies.setdefault(0, body(saved[0]))


def _unchanged(copied: Saved) -> Any:
    return copy.deepcopy(_bodies[0])


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(
        ["F32", "$tensor", "state.0", "../x.safetensors", "0" * 32, [], {}, [[]], {"$float": "nan"}]
    ),
    st.sampled_from(
        [{"$tuple": 3}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$counter": [["a", "b"]]}, {"$x": 1}]
    ),
)


_truth: dict[str, dict[str, torch.Tensor]] = {}
"""The weights of each checkpoint, as its first true load found them."""


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_field_may_lie(data: st.DataObject, saved: Saved) -> None:
    """One field of a manifest is another, with a digest that fits: a result, or outcore's errors; nothing else."""
    path, model, optimizer = saved
    good = (path / manifest.NAME).read_bytes()
    hostile = copy.deepcopy(_bodies[0])
    node: Any = hostile
    for _ in range(data.draw(st.integers(0, 6))):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        inner = [key for key in keys if isinstance(node[key], (dict, list)) and node[key]]
        if not inner:
            break
        node = node[data.draw(st.sampled_from(inner))]
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = data.draw(st.sampled_from(keys))
    if data.draw(st.booleans()) and isinstance(node, dict):
        del node[key]
    else:
        node[key] = data.draw(LEAVES)
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        put_body(path, hostile)
        outcore.load(path, model, optimizer)
    except OutcoreError:
        pass
    finally:
        (path / manifest.NAME).write_bytes(good)
        for group, old in zip(optimizer.param_groups, groups, strict=True):
            group.update(old)
    outcore.load(path, model, optimizer)  # whatever the lie left half done, the truth mends
    found = {name: value.clone() for name, value in outcore.weights(model)}
    assert _truth.setdefault(str(path), found).keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in _truth[str(path)].items())


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.one_of(st.binary(max_size=300), st.text(alphabet='{}[]",:0e-1nul$', max_size=200).map(str.encode))
)
def test_any_bytes_as_a_manifest(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        manifest.parse(data)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 50_000, "9" * 10_000, "NaN", '{"format": 1e999}', "\ud800"]
)
def test_manifests_that_hurt_parsers(text: str) -> None:
    with pytest.raises(CheckpointError):
        manifest.parse(text.encode("utf-8", "surrogatepass"))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_header(data: st.DataObject, saved: Saved) -> None:
    """A header other than the one that was saved is refused, whatever it says."""
    path, model, optimizer = saved
    file = path / FILES[0]
    good = file.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    if bytes(changed) == good:
        return
    try:
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match="header"):
            outcore.load(path, model, optimizer)
    finally:
        file.write_bytes(good)
