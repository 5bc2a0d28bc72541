"""A checkpoint as a directory to which every rank writes its shards (``torch.distributed.checkpoint``).

The layout is that of Lightning's FSDP strategy, so that Lightning's consolidation commands work: the shards under the
keys ``model`` and ``optimizer_0``, …, and the rest of Lightning's dictionary in ``meta.pt``. One more file has a
checksum of every other file, so that damage is found before anything is loaded.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor

from lightning_zerocompile.checkpoint import files
from lightning_zerocompile.sharding.full_values import ON_HOST
from lightning_zerocompile.sharding.layout import as_dtensor, over_local
from lightning_zerocompile.sharding.sharded import STATES_ON_HOST, mark_on_host, sharded_as

CHECKSUMS, INDEX = "checksums.json", ".metadata"
MODEL, OPTIMIZER = "model", "optimizer_"
AVERAGED = "current_model_state"  # the model's own state, where WeightAveraging has put the average in its place
_MODEL_KEYS = (MODEL, "state_dict", AVERAGED)  # the second is the name in Lightning's ModelParallelStrategy

Result = TypeVar("Result")


def on_all_ranks(what: str, action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> list[Result]:
    """Every rank's result of ``action``; collective.

    Args:
        what: what the ranks do, for the error.
        action: may raise on some ranks.
        group: a process group of all ranks; ``None``: the default one, which only the main thread may use.

    Raises:
        RuntimeError: on all ranks alike, if some rank's ``action`` raised.
    """
    if not dist.is_initialized():  # one process by itself, such as the consolidation command
        return [action()]
    result, failure, text = None, None, None
    try:
        result = action()
    except Exception as error:
        failure, text = error, f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (result, text), group)
    texts = {rank: text for rank, (_, text) in enumerate(everyone) if text is not None}
    if not texts:
        return [result for result, _ in everyone]
    if failure is not None and len(set(texts.values())) == 1:
        raise failure
    where = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    raise RuntimeError(f"{what} failed. {where}") from failure


# ---- saving ----


def saving(path: Path) -> str:
    """How errors say what the ranks do."""
    return f"Saving the checkpoint `{path}`"


def save(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Writes Lightning's dictionary, in which model and optimizer states are DTensors, to a directory; collective.

    Args:
        checkpoint: this rank's; everything that is not sharded is taken from rank 0.
        path: where it goes; a checkpoint that is there already is replaced when the new one is complete.

    Raises:
        IsADirectoryError: ``path`` is a directory that is no checkpoint.
        RuntimeError: a rank could not write; the former checkpoint is untouched.
    """
    state, rest = parts(checkpoint)
    on_all_ranks(saving(path), lambda: refuse_dtensors(rest))
    write(state, lambda file: torch.save(rest, file), path)


def parts(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The part that all ranks write, under the directory's keys, and the rest, which rank 0 writes."""
    rest = dict(checkpoint)
    state = {MODEL: rest.pop("state_dict")}
    if AVERAGED in rest:
        state[AVERAGED] = rest.pop(AVERAGED)
    state |= {f"{OPTIMIZER}{number}": part for number, part in enumerate(rest.pop("optimizer_states", []))}
    return state, rest


def write(
    state: dict[str, Any], rest: Callable[[IO[bytes]], Any], path: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Writes the parts of a dictionary to a directory; collective.

    Args:
        state: this rank's part of what all ranks write; on the CPU if a group is given.
        rest: writes rank 0's rest to a file.
        path: as for :func:`save`.
        group: a process group of all ranks that no other thread uses; ``None``: the default one, from the main thread.

    Raises:
        IsADirectoryError, RuntimeError: as :func:`save`.
    """
    first, what = dist.get_rank() == 0, saving(path)
    draft: files.Draft | None = None
    # the current device belongs to a thread: in this thread the default loader would initialise the first device
    options: dict[str, Any] = {} if group is None else {"per_thread_copy_ahead": 0}

    def prepare() -> str:
        nonlocal draft
        if not first:
            return ""
        draft = files.Draft(path, directory=True)
        return draft.path.name

    def save_state() -> None:
        # of what all ranks have (buffers, steps, groups) rank 0's is written: buffers may differ between ranks
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        save_shards(state, storage_writer=FileSystemWriter(temporary, **options), planner=planner, process_group=group)

    def finish(checksums: Mapping[str, str]) -> None:
        if draft is not None:
            files.write(temporary / files.META, rest)
            rank_zero = {name: files.checksum(temporary / name) for name in (INDEX, files.META)}
            content = _sealed({**checksums, **rank_zero})
            files.write(temporary / CHECKSUMS, lambda file: file.write(content))
            files.sync_directory(temporary)
            draft.commit()

    try:
        # each rank uses its own path of the folder, and the name that rank 0 has chosen
        temporary = path.with_name(on_all_ranks(what, prepare, group)[0])
        _collective(what, save_state)
        checksums = on_all_ranks(what, lambda: _own_checksums(temporary), group)
        on_all_ranks(what, lambda: finish({name: value for part in checksums for name, value in part.items()}), group)
    finally:
        if draft is not None:
            draft.discard()


def _sealed(checksums: Mapping[str, str]) -> bytes:
    """The list of checksums, with a checksum of the list itself."""
    own = hashlib.sha256(json.dumps(checksums).encode()).hexdigest()
    return json.dumps({"sha256": own, "files": checksums}, indent=1).encode()


def _unsealed(content: bytes) -> dict[str, str] | None:
    """The list of checksums, or None if the list is damaged."""
    try:
        checksums: dict[str, str] = json.loads(content)["files"]
    except (ValueError, KeyError, TypeError):
        return None
    return checksums if _sealed(checksums) == content else None


def _own_checksums(folder: Path) -> dict[str, str]:
    return {file.name: files.checksum(file) for file in sorted(folder.glob(f"__{dist.get_rank()}_*.distcp"))}


def _collective(what: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except CheckpointException as error:  # it derives from BaseException, so users' `except Exception` would miss it
        causes = {rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()}
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        own = error.failures.get(rank)
        if own is not None and len(causes) == world and len(set(causes.values())) == 1:
            raise own[0] from error
        text = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
        raise RuntimeError(f"{what} failed. {text}") from error


def refuse_dtensors(value: Any, where: str = "checkpoint") -> None:
    """Raises if the rest of the dictionary, of which only rank 0's is saved, holds shards.

    Raises:
        TypeError: names the entry.
    """
    if isinstance(value, DTensor):
        raise TypeError(
            f"`{where}` is a sharded tensor, of which only rank 0's part would be saved. Put `value.full_tensor()` "
            "into the checkpoint, on every rank, or read the values in `strategy.full_parameters(writeback=False)`."
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        refuse_dtensors(item, f"{where}[{key!r}]")


# ---- loading ----


def load(path: Path, masters: Mapping[str, Tensor], weights_only: bool | None, with_optimizers: bool) -> dict[str, Any]:
    """Lightning's dictionary from a directory; collective.

    A state that has its master's shape becomes a DTensor laid out as the master, whatever world size it was saved with,
    and each rank reads its own rows. Tensors of other shapes are read whole, so that torch's own messages report them.

    Args:
        path: written by :func:`save`, or by Lightning's FSDP or model-parallel strategy.
        masters: the model's sharded parameters by all their names.
        weights_only: unless False, nothing but tensors and plain containers is unpickled.
        with_optimizers: whether the optimizers' states are read.

    Raises:
        RuntimeError: a file is missing or damaged; the message names it.
        UnpicklingError: a file holds an object that may not be unpickled; the message names both.
    """
    what = f"Loading the checkpoint `{path}`"
    check(path)
    reader = _Reader(path, weights_only)
    metadata = reader.read_metadata()
    paths: dict[str, Any] = metadata.planner_data
    wanted = {
        key: _target(item, paths[key], masters)
        for key, item in metadata.state_dict_metadata.items()
        if paths[key][0] in _MODEL_KEYS or (with_optimizers and paths[key][0].startswith(OPTIMIZER))
    }
    planner, alone = _Planner(weights_only), not dist.is_initialized()
    _collective(what, lambda: load_shards(wanted, storage_reader=reader, planner=planner, no_dist=alone))
    state = unflatten_state_dict(wanted, paths)
    with refusals(str(path / files.META)), files.unreadable(path / files.META):
        rest = torch.load(path / files.META, map_location="cpu", weights_only=weights_only)
    checkpoint = as_lightning({**rest, **state})
    if with_optimizers and "lr_schedulers" in checkpoint:  # else only the weights were saved
        checkpoint.setdefault("optimizer_states", [])
    return checkpoint


def as_lightning(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The dictionary with the keys of Lightning's single file. A directory has other keys.

    A file from ``lightning.fabric.utilities.consolidate_checkpoint`` has the keys of a directory.
    """
    if "state_dict" in checkpoint and f"{OPTIMIZER}0" not in checkpoint:
        return checkpoint
    states: dict[str, Any] = {}
    while (key := f"{OPTIMIZER}{len(states)}") in checkpoint:
        states[key] = checkpoint.pop(key)
    if states:
        checkpoint["optimizer_states"] = list(states.values())
    if MODEL in checkpoint and "state_dict" not in checkpoint:
        checkpoint["state_dict"] = checkpoint.pop(MODEL)
    return checkpoint


def check(path: Path) -> None:
    """Raises if a file of the directory is missing or damaged; each rank reads a part of the files. Collective.

    Raises:
        RuntimeError: names the files.
    """

    def look() -> list[str]:
        if not (path / CHECKSUMS).is_file():  # a strategy of Lightning's has written the directory
            missing = [name for name in (INDEX, files.META) if not (path / name).is_file()]
            if len(missing) == 2:
                raise RuntimeError(f"The directory `{path}` is no checkpoint: it has neither {INDEX} nor {files.META}.")
            return [f"`{name}` is missing" for name in missing]
        checksums = _unsealed((path / CHECKSUMS).read_bytes())
        if checksums is None:
            return [f"`{CHECKSUMS}` does not match its checksum"]
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = sorted(checksums.items())[rank::world]
        faults = {name: _fault(path / name, value) for name, value in mine}
        return [f"`{name}` {fault}" for name, fault in faults.items() if fault]

    faults = sorted({fault for part in on_all_ranks(f"Reading the checkpoint `{path}`", look) for fault in part})
    if faults:
        raise RuntimeError(f"The checkpoint `{path}` is damaged: {', '.join(faults)}. Load another one.")


def _fault(file: Path, value: str) -> str:
    if not file.is_file():
        return "is missing"
    return "" if files.checksum(file) == value else "does not match its checksum"


def _target(item: Any, path: tuple[Any, ...], masters: Mapping[str, Tensor]) -> Any:
    """The tensor into which an entry is read, and which hooks get; None: the entry is no tensor."""
    if not isinstance(item, TensorStorageMetadata):
        return None
    name = path[1] if path[0] in _MODEL_KEYS else path[2] if path[1:2] == ("state",) else None
    master = masters.get(name) if isinstance(name, str) else None
    if isinstance(master, DTensor) and item.size == master.shape and master.dim() > 0:
        rows = master.to_local()
        on_host = ON_HOST if path[0] in _MODEL_KEYS else STATES_ON_HOST
        if master.__dict__.get(on_host):  # a device may have no room for all of it
            away = over_local(torch.empty(rows.shape, dtype=item.properties.dtype), master)
            return mark_on_host(sharded_as(away, master))
        local = torch.empty_like(rows, dtype=item.properties.dtype, requires_grad=False)
        return sharded_as(as_dtensor(local, item.size, master.device_mesh), master)
    return torch.empty(item.size, dtype=item.properties.dtype)


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """Turns the refusal of ``torch.load`` to unpickle an object into an error that names the file and the remedy.

    Raises:
        UnpicklingError: the file holds something else than tensors and plain containers.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error))
        raise pickle.UnpicklingError(
            f"`{name}` holds more than tensors and plain containers, and loading it can run any code. If you trust "
            "the file, pass `weights_only=False` to `Trainer.fit` (or `validate`, ...; `--trust` to the command "
            f"`consolidate`), or allow its classes by `torch.serialization.add_safe_globals([...])`. {reason.strip()}"
        ) from error


class _Planner(DefaultLoadPlanner):
    """Reads into a flat dictionary. It unpickles objects as ``weights_only`` says; torch's planner always does."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        with refusals(key):
            self.state_dict[key] = torch.load(value, map_location="cpu", weights_only=self._weights_only)


class _Reader(FileSystemReader):
    """Reads the index of a checkpoint without running what may have been put into it."""

    def __init__(self, path: str | os.PathLike[str], weights_only: bool | None) -> None:
        super().__init__(path)
        self._trusted = weights_only is False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(os.path.join(self.path, INDEX), "rb") as file, refusals(file.name), files.unreadable(file.name):
            metadata: Metadata = (pickle.Unpickler if self._trusted else _IndexUnpickler)(file).load()
        return metadata


# exact names only: a dotted name could reach what a module imports
_INDEX_CLASSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torch.distributed.checkpoint.metadata": (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "torch": ("Size",),
        "collections": ("OrderedDict",),
        "pathlib": ("Path", "PosixPath", "WindowsPath"),
        "pathlib._local": ("Path", "PosixPath", "WindowsPath"),
    }
)  # fmt: skip


def _member(enum: object, name: object) -> object:
    """A member of the only enum that is in an index; no other attribute of anything."""
    for member in _MEM_FORMAT_ENCODING if enum is _MEM_FORMAT_ENCODING else ():
        if member.name == name:
            return member
    raise pickle.UnpicklingError(f"It asks for attribute {name!r} of {enum!r}.")


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles only the classes of an index: those of torch's checkpoint metadata, dtypes and paths."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python before 3.11.4 pickles a member of an enum
            return _member
        raise pickle.UnpicklingError(f"It asks for GLOBAL {module}.{name}.")
