"""torch's own writer, fed with rows instead of tensors. Apart, since importing torch's takes a second."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from outcore.checkpoint.dcp import write
from outcore.errors import OutcoreError


def saved(state: dict[str, Any], folder: Path, rows: Mapping[str, Any]) -> None:
    """Save a state whose large tensors are on meta; ``rows`` has the values of these by flattened name.

    Raises:
        CheckpointError, DiskReadError: a value can't be read, or is damaged.
        OSError: the system refused.
    """
    # Without copying ahead torch takes one item at a time, in order, also where there is a CUDA device.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled"
            )  # which is what no_dist asks for
            save(state, storage_writer=writer, planner=_Planner(rows), no_dist=True)
    except CheckpointException as error:
        found = [failure for failure, _ in error.failures.values()]
        raise next((one for one in found if isinstance(one, (OutcoreError, OSError))), found[0]) from error


class _Planner(DefaultSavePlanner):
    """Cuts tensors into parts of whole rows, and reads each when it is written."""

    def __init__(self, rows: Mapping[str, Any]) -> None:
        super().__init__()
        self._rows = rows

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if name in self._rows:
                items += _parts(name, value)
            elif isinstance(value, torch.Tensor):
                items.append(_part(name, value, torch.Size([0] * value.ndim), value.shape))
            else:
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        self.plan = dataclasses.replace(SavePlan(items), planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        rows = self._rows.get(write_item.index.fqn)
        if rows is None or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        return rows.read(chunk.offsets[0] if chunk.offsets else 0, chunk.sizes)


def _parts(name: str, tensor: torch.Tensor) -> list[WriteItem]:
    if not tensor.ndim:
        return [_part(name, tensor, tensor.shape, tensor.shape)]
    rest, count = tensor.shape[1:], tensor.shape[0]
    row = rest.numel() * tensor.dtype.itemsize
    step = max(1, min(count, write.PART // row if row else count))
    return [
        _part(name, tensor, torch.Size([at, *[0] * len(rest)]), torch.Size([min(step, count - at), *rest]))
        for at in range(0, max(count, 1), step)
    ]


def _part(name: str, tensor: torch.Tensor, offsets: torch.Size, sizes: torch.Size) -> WriteItem:
    return WriteItem(
        MetadataIndex(name, offsets),
        WriteItemType.SHARD if sizes != tensor.shape else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=tensor.dtype), tensor.shape
        ),
    )
