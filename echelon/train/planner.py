"""How PyTorch's distributed checkpoints (DCP) are told of boxes: what a rank writes of the whole tensors, and what it
reads of them into which memory. DCP joins all ranks' boxes to the checkpoint's metadata, refuses what does not make up
the whole tensors, and at loading cuts what is stored to what is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from echelon.train.boxes import Box
from echelon.train.state import Chunk, Held


class WriteBoxes(DefaultSavePlanner):
    """Writes this rank's boxes of tensors."""

    def __init__(self, tensors: Mapping[str, Held]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors
        self._memory = {
            MetadataIndex(name, box.offsets): memory for name, held in tensors.items() for box, memory in held.chunks
        }

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(name, held, box) for name, held in self._tensors.items() for box, _ in held.chunks])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._memory[index]


class ReadBoxes(DefaultLoadPlanner):
    """Reads boxes of tensors into memory."""

    def __init__(self, wanted: Mapping[str, list[Chunk]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._wanted = wanted

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, chunks in self._wanted.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [_chunk(box) for box, _ in chunks])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        return self._wanted[index.fqn][index.index][1]


def _item(name: str, held: Held, box: Box) -> WriteItem:
    data = TensorWriteData(_chunk(box), TensorProperties(dtype=held.dtype), torch.Size(held.shape))
    return WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
