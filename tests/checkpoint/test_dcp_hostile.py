"""Directories of torch.distributed.checkpoint that want something else: nothing they say is ever run."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import outcore
from outcore.checkpoint.dcp import data, metadata
from outcore.errors import CheckpointError, OutcoreError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
MARKER = "outcore-was-here"


class Calls:
    """Serialized, it calls a function when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def hostile() -> dict[str, bytes]:
    """Streams that each want to run something, or more than there is."""
    command = f"touch {MARKER}"
    shell = text("posix") + text("system") + b"\x93"
    size = text("torch") + text("Size") + b"\x93"
    opener = [Calls(open, MARKER, "w")]
    return {
        "a shell command": pickle.dumps(Calls(os.system, command)),
        "the same in protocol 0": pickle.dumps(Calls(os.system, command), 0),
        "the same in protocol 2": pickle.dumps(Calls(os.system, command), 2),
        "builtins": pickle.dumps(Calls(eval, f"open({MARKER!r}, 'w')")),
        "a file that is opened": pickle.dumps({"state_dict_metadata": opener}),
        "a call within a key": pickle.dumps({Calls(os.mkdir, MARKER): 1}),
        "an instance by INST": b"(S'" + command.encode() + b"'\niposix\nsystem\n.",
        "an instance by OBJ": b"\x80\x04(" + shell + text(command) + b"o.",
        "a new object with keywords": b"\x80\x04" + shell + text(command) + b"\x85}\x92.",
        "an extension code": b"\x80\x02\x82\x01.",
        "a name within a known module": b"\x80\x04" + text("torch") + text("load") + b"\x93)R.",
        "a dotted name": b"\x80\x04" + text("torch") + text("Size.__init__.__globals__") + b"\x93.",
        "a dotted module": b"\x80\x04" + text("torch.Size") + text("__subclasses__") + b"\x93)R.",
        "torch's own loader of objects": b"\x80\x04"
        + text("torch._utils")
        + text("_rebuild_parameter")
        + b"\x93)R.",
        "a change of a class": b"\x80\x04" + size + b"}" + text("x") + b"K\x01sb.",
        "a change of a constant": b"\x80\x04N}" + text("x") + b"K\x01sb.",
        "a call of what was made": b"\x80\x04" + size + b")R)R.",
        "a call of a list": b"\x80\x04])R.",
        "what was never kept": b"\x80\x04h\x07.",
        "more than the stack has": b"\x80\x04R.",
        "an end without a beginning": b"\x80\x04]K\x01e.",
        "a text of 2^63 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b"x.",
        "a number of 2^31 bytes": b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",
        "bytes of 2^62 bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        "a tower of tuples": b"\x80\x04)" + b"\x85" * 500_000 + b"}" + b"\x86.",
        "a tower of tuples as a key": b"\x80\x04})" + b"\x85" * 500_000 + b"K\x01s.",
        "doubling": b"\x80\x04]"
        + b"".join(b"\x94]h" + bytes([k]) + b"ah" + bytes([k]) + b"a" for k in range(200))
        + b".",
        "no end": b"\x80\x04]",
        "nothing": b"",
        "another format": b"PK\x03\x04",
    }


HOSTILE = hostile()


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / MARKER).exists()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "dcp"
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    dcp.save(
        {"model": model.state_dict(), "optim": {"param_groups": [{"lr": 0.1, "params": ["weight"]}]}},
        checkpoint_id=folder,
    )
    return folder


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "dcp"))


@pytest.fixture(scope="module")
def model() -> Iterator[nn.Module]:
    made = nn.Linear(4, 6)
    outcore.offload(made, budget=outcore.Budget(host="16MiB"), precision=outcore.Precision("fp32"))
    yield made
    outcore.release(made)


def test_the_streams_are_dangerous_indeed(tmp_path: Path) -> None:
    pickle.loads(HOSTILE["a shell command"])
    assert (tmp_path / MARKER).exists()
    (tmp_path / MARKER).unlink()


@pytest.mark.parametrize("stream", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_metadata_is_refused(copy: Path, model: nn.Module, stream: bytes) -> None:
    (copy / ".metadata").write_bytes(stream)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        outcore.from_dcp(copy, model)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("stream", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_description_of_a_tensor_is_refused(copy: Path, model: nn.Module, stream: bytes) -> None:
    replaced(copy, stream)
    with pytest.raises(CheckpointError, match=r"distcp"):
        outcore.from_dcp(copy, model)


def replaced(folder: Path, stream: bytes, **more: bytes) -> None:
    """Give the tensor ``model.weight`` another description, in an archive that is whole."""
    change(folder, lambda found: place(found, folder, archive(stream, **more)))


def archive(stream: bytes, **members: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("archive/data.pkl", stream)
        file.writestr("archive/data/0", members.pop("data", bytes(96)))
        for name, content in members.items():
            file.writestr(f"archive/{name}", content)
    return made.getvalue()


def place(found: Metadata, folder: Path, blob: bytes) -> None:
    [index] = [i for i in found.storage_data if i.fqn == "model.weight"]
    info = found.storage_data[index]
    path = folder / info.relative_path
    info.offset, info.length = path.stat().st_size, len(blob)
    path.write_bytes(path.read_bytes() + blob)


def change(folder: Path, how: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    how(found)
    path.write_bytes(pickle.dumps(found))


def weight(found: Metadata) -> Any:
    return found.state_dict_metadata["model.weight"]


def info(found: Metadata) -> Any:
    [index] = [i for i in found.storage_data if i.fqn == "model.weight"]
    return found.storage_data[index]


PATHS = (
    *(
        "../good",
        "/etc/passwd",
        "a/b.distcp",
        "..",
        ".",
        "",
        ".metadata",
        "a\0b",
        "a\nb",
        "~/x",
        "C:\\x",
        "x" * 300,
    ),
    *("-rf", "link.distcp", "folder.distcp", "pipe.distcp", "none.distcp", "é.distcp", "%2e%2e", "$HOME"),
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", PATHS)
def test_a_file_is_one_of_the_directory(copy: Path, model: nn.Module, name: str) -> None:
    (copy / "link.distcp").symlink_to(copy / "__0_0.distcp")
    (copy / "folder.distcp").mkdir()
    os.mkfifo(copy / "pipe.distcp")
    change(copy, lambda found: setattr(info(found), "relative_path", name))
    with pytest.raises((CheckpointError, outcore.errors.DiskReadError)):
        outcore.from_dcp(copy, model)


LIES: dict[str, Callable[[Metadata], object]] = {
    "a place beyond the file": lambda m: setattr(info(m), "offset", 1 << 40),
    "a place before it": lambda m: setattr(info(m), "offset", -8),
    "a length beyond all": lambda m: setattr(info(m), "length", 1 << 70),
    "a length of none": lambda m: setattr(info(m), "length", 0),
    "another archive": lambda m: setattr(info(m), "offset", info(m).offset - 40),
    "compressed": lambda m: setattr(info(m), "transform_descriptors", ["stream.zstd"]),
    "a shape beyond all": lambda m: setattr(weight(m), "size", torch.Size([1 << 40, 1 << 40])),
    "a larger shape": lambda m: setattr(weight(m), "size", torch.Size([60, 4])),
    "another shape": lambda m: setattr(weight(m), "size", torch.Size([4, 6])),
    "a negative shape": lambda m: setattr(weight(m), "size", (-6, -4)),
    "no parts": lambda m: weight(m).chunks.clear(),
    "a part twice": lambda m: weight(m).chunks.extend(weight(m).chunks),
    "a part that is moved": lambda m: setattr(weight(m).chunks[0], "offsets", torch.Size([1, 0])),
    "a part of fewer dimensions": lambda m: setattr(weight(m).chunks[0], "sizes", torch.Size([24])),
    "another dtype": lambda m: setattr(weight(m).properties, "dtype", torch.int64),
    "a dtype that is none": lambda m: setattr(weight(m).properties, "dtype", torch.complex64),
    "no places": lambda m: m.storage_data.clear(),
    "places that are none": lambda m: setattr(m, "storage_data", None),
    "a place that is a number": lambda m: m.storage_data.update(dict.fromkeys(m.storage_data, 7)),
    "a tensor that is a number": lambda m: m.state_dict_metadata.update({"model.weight": 7}),
    "a name that is a number": lambda m: m.state_dict_metadata.update({7: weight(m)}),
    "an index without a name": lambda m: m.storage_data.update({MetadataIndex(None): info(m)}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_lies_of_the_metadata_are_found(
    copy: Path, model: nn.Module, lie: Callable[[Metadata], object]
) -> None:
    before = {name: value.clone() for name, value in outcore.weights(model)}
    change(copy, lie)
    with pytest.raises((CheckpointError, outcore.errors.ModelError)):
        outcore.from_dcp(copy, model)
    assert all(torch.equal(value, before[name]) for name, value in outcore.weights(model))


def described(tensor: torch.Tensor) -> bytes:
    made = io.BytesIO()
    torch.save(tensor, made)
    with zipfile.ZipFile(made) as file:
        return file.read("archive/data.pkl")


@pytest.mark.parametrize("offset", [-1, -(1 << 31), -(1 << 70), 1 << 70])
def test_a_member_that_lies_elsewhere(
    copy: Path, model: nn.Module, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes the difference of two places that a file names, and so may find one before its beginning."""
    infolist = zipfile.ZipFile.infolist

    def moved(self: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
        found = infolist(self)
        for member in found:
            member.header_offset += offset
        return found

    monkeypatch.setattr(zipfile.ZipFile, "infolist", moved)
    with pytest.raises(CheckpointError, match="beyond its ends"):
        outcore.from_dcp(copy, model)


def test_an_honest_description_is_read(copy: Path, model: nn.Module) -> None:
    wanted = torch.arange(24.0).view(6, 4)
    replaced(copy, described(wanted), data=wanted.numpy().tobytes())
    outcore.from_dcp(copy, model)
    assert torch.equal(dict(outcore.weights(model))["weight"], wanted)


@pytest.mark.parametrize(
    ("tensor", "more"),
    [
        (torch.zeros(6, 4, dtype=torch.float64), {}),
        (torch.zeros(4, 6), {}),
        (torch.zeros(4, 6).t(), {}),
        (torch.zeros(7, 4)[1:], {}),
        (torch.zeros(1, 4).expand(6, 4), {}),
        (torch.zeros(6, 4), {"data": bytes(95)}),
        (torch.zeros(6, 4), {"data": bytes(1 << 16)}),
        (torch.zeros(6, 4), {"byteorder": b"big"}),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    copy: Path, model: nn.Module, tensor: torch.Tensor, more: dict[str, bytes]
) -> None:
    replaced(copy, described(tensor), **more)
    with pytest.raises(CheckpointError, match="is not what torch"):
        outcore.from_dcp(copy, model)


def test_a_metadata_that_is_too_long_is_not_read(copy: Path, model: nn.Module) -> None:
    with (copy / ".metadata").open("r+b") as file:
        file.truncate(data.LIMIT + 1)
    with pytest.raises(CheckpointError, match="may have"):
        outcore.from_dcp(copy, model)


def ends_well(read: Callable[[], object]) -> None:
    """In a value, or in the error that says what is wrong; any other error fails the test."""
    said = None
    try:
        read()
    except CheckpointError as error:
        said = str(error)
    assert said is None or said.strip()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_end_in_the_right_error(stream: bytes) -> None:
    ends_well(lambda: data.read(b"\x80\x04" + stream, metadata.NAMES, "it"))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 1 << 20), byte=st.integers(0, 255), cut=st.booleans())
def test_a_metadata_with_a_changed_byte_ends_in_the_right_error(
    good: Path, at: int, byte: int, cut: bool
) -> None:
    raw = bytearray((good / ".metadata").read_bytes())
    at %= len(raw)
    if cut:
        del raw[at:]
    else:
        raw[at] = byte
    ends_well(lambda: metadata.parse(bytes(raw)))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 1 << 20), byte=st.integers(0, 255))
def test_an_archive_with_a_changed_byte_ends_in_the_right_error(
    good: Path, model: nn.Module, tmp_path: Path, at: int, byte: int
) -> None:
    if not (tmp_path / "copy").exists():
        shutil.copytree(good, tmp_path / "copy")
    raw = bytearray((good / "__0_0.distcp").read_bytes())
    raw[at % len(raw)] = byte
    (tmp_path / "copy" / "__0_0.distcp").write_bytes(raw)
    try:
        outcore.from_dcp(tmp_path / "copy", model)
    except OutcoreError:
        return
    torch.manual_seed(0)
    true = dict(
        nn.Linear(4, 6).named_parameters()
    )  # what `good` holds: a byte that goes unnoticed changed no value
    assert all(torch.equal(value, true[name]) for name, value in outcore.weights(model))
