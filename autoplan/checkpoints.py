"""Checkpoints in the format of `torch.distributed.checkpoint`, under the user's own names.

    model.<name>                       parameters and persistent buffers, each shared one once
    optimizer.state.<name>.<key>       states of the optimizer
    optimizer.groups                   hyper-parameters of its groups
    random.<...>                       see `autoplan.random_state`
    extra                              what the caller adds: step, position in the data, ...

Every rank writes the chunks that it holds, so a checkpoint of one plan loads under any other. It is
written beside its place and moved there when it is whole: an interrupted save leaves the last one.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from autoplan.chunks import Chunked, chunked
from autoplan.errors import EmitError

__all__ = ["State", "export_safetensors", "is_saved", "load", "newest", "read_model", "save"]

# By key: what this rank holds of tensors, or any other value that pickles.
State = dict[str, Any]


def save(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a checkpoint to the folder `path`; all ranks call it, on a file system they share.

    Args:
        state: by key, tensors (DTensors are written in chunks) or values that pickle.
        path: the folder; an earlier checkpoint there is replaced once the new one is whole.

    Raises:
        EmitError: a rank could not write; on every rank.
    """
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial")
    if _is_first():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    own = {k: chunked(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    try:
        with _quiet():
            save_state_dict(
                own,
                storage_writer=FileSystemWriter(partial, overwrite=True),
                planner=_SavePlanner(),
                no_dist=not dist.is_initialized(),
            )
    except (CheckpointException, OSError) as error:
        raise EmitError(
            f"the checkpoint was not written to {target}: {error}; what was there is still there"
        ) from None
    if _is_first():
        _move(partial, target)
    _barrier()


def load(make_state: Callable[[Mapping[str, Any]], State], path: str | Path) -> State:
    """Read a checkpoint into tensors of this rank; all ranks call it.

    Args:
        make_state: takes per key the `TensorStorageMetadata` (shape, dtype) of a tensor or None for
            another value, and returns what to read: tensors are filled in place, other values are
            replaced in what is returned.
        path: the folder.

    Raises:
        EmitError: there is no checkpoint, or it lacks a key or has it in another shape.
    """
    folder = newest(path)
    reader = FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    known = {k: m if isinstance(m, TensorStorageMetadata) else None for k, m in saved.items()}
    state = make_state(known)
    own = {k: chunked(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    for key, value in own.items():
        _check(key, value, known, folder)
    load_state_dict(
        own, storage_reader=reader, planner=_LoadPlanner(), no_dist=not dist.is_initialized()
    )
    return {k: state[k] if isinstance(v, Chunked) else v for k, v in own.items()}


def is_saved(path: str | Path) -> bool:
    """Return whether a whole checkpoint was saved to `path`."""
    return any((folder / ".metadata").is_file() for folder in _places(Path(path)))


def _places(target: Path) -> tuple[Path, Path]:
    return target, target.with_name(f"{target.name}.last")


def newest(path: str | Path) -> Path:
    """Return the folder that holds the last whole checkpoint saved to `path`.

    Raises:
        EmitError: there is none.
    """
    target = Path(path)
    for folder in _places(target):
        if (folder / ".metadata").is_file():
            return folder
    raise EmitError(f"{target} holds no checkpoint: save one with save_checkpoint(path)")


def read_model(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the whole model of a checkpoint by the user's names, without a process group.

    Of a shared weight only the first name is there: `load_state_dict(..., strict=False)`.
    """
    folder = newest(path)
    reader = FileSystemReader(folder)
    tensors = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in reader.read_metadata().state_dict_metadata.items()
        if key.startswith("model.") and isinstance(meta, TensorStorageMetadata)
    }
    own = {key: chunked(value) for key, value in tensors.items()}
    _read(own, reader, is_alone=True)
    return {key.removeprefix("model."): tensor for key, tensor in tensors.items()}


def _read(own: State, reader: FileSystemReader, *, is_alone: bool) -> None:
    try:
        with _quiet():
            load_state_dict(own, storage_reader=reader, planner=_LoadPlanner(), no_dist=is_alone)
    except (CheckpointException, OSError) as error:
        raise EmitError(f"the checkpoint in {reader.path} cannot be read: {error}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Do not warn that there is one process: `no_dist` says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def export_safetensors(path: str | Path, out: str | Path) -> None:
    """Write the model of a checkpoint to one safetensors file, which `transformers` loads.

    Raises:
        EmitError: safetensors is not installed, or there is no checkpoint.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise EmitError("safetensors is not installed: pip install safetensors") from None
    tensors = {name: tensor.contiguous() for name, tensor in read_model(path).items()}
    partial = Path(f"{out}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(out)


def _check(key: str, value: Any, known: Mapping[str, Any], folder: Path) -> None:
    if key not in known:
        raise EmitError(
            f"{folder} has no {key}: it is a checkpoint of another model, or of another optimizer"
        )
    meta = known[key]
    if isinstance(value, Chunked) and (meta is None or meta.size != value.shape):
        got = "no tensor" if meta is None else f"shape {tuple(meta.size)}"
        raise EmitError(
            f"{folder} has {key} with {got}, this model has shape {tuple(value.shape)}: "
            "load a checkpoint of this model"
        )


def _move(partial: Path, target: Path) -> None:
    """Put a whole checkpoint in its place; at every instant one whole checkpoint is found."""
    _, last = _places(target)
    if target.exists():
        shutil.rmtree(last, ignore_errors=True)
        target.rename(last)
    partial.rename(target)
    shutil.rmtree(last, ignore_errors=True)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


class _SavePlanner(DefaultSavePlanner):
    """Writes every chunk of this rank; equal chunks of several ranks are written once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """Return one item per chunk, and one per other value."""
        items = []
        for key, value in self.state_dict.items():
            if not isinstance(value, Chunked):
                items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
                continue
            for chunk in value.chunks:
                offsets, sizes = torch.Size(chunk.offsets), chunk.local.shape
                tensor_data = TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                    properties=TensorProperties.create_from_tensor(chunk.local),
                    size=value.shape,
                )
                index = MetadataIndex(key, offsets)
                items.append(
                    WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=tensor_data)
                )
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return a chunk, or the bytes of another value."""
        value = self.state_dict[write_item.index.fqn]
        if isinstance(value, Chunked):
            return _find(value, write_item.index).contiguous()
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer


class _LoadPlanner(DefaultLoadPlanner):
    """Reads into the chunks of this rank."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Note what is loaded; the default would copy values that are no tensors."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return what to read for every chunk, and for every other value."""
        assert self.metadata is not None, "a plan before the metadata"
        items: list[ReadItem] = []
        for key, value in self.state_dict.items():
            if isinstance(value, Chunked):
                saved = self.metadata.state_dict_metadata[key]
                assert isinstance(saved, TensorStorageMetadata), key
                wanted = [
                    ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=c.local.shape)
                    for c in value.chunks
                ]
                items += create_read_items_for_chunk_list(key, saved, wanted)
                continue
            none = torch.Size((0,))
            items.append(
                ReadItem(
                    type=LoadItemType.BYTE_IO,
                    dest_index=MetadataIndex(key),
                    dest_offsets=none,
                    storage_index=MetadataIndex(key),
                    storage_offsets=none,
                    lengths=none,
                )
            )
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the memory that an item is read into."""
        view = _find(self.state_dict[read_item.dest_index.fqn], read_item.dest_index)
        for dim, (at, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, at, length)
        return view


def _find(value: Chunked, index: MetadataIndex) -> torch.Tensor:
    offsets = tuple(index.offset or ())
    return next(c.local for c in value.chunks if c.offsets == offsets)
