"""A sharded model as a folder of safetensors files that Hugging Face's ``from_pretrained`` reads.

Every file belongs to one rank, in turn. The ranks gather one tensor after the other. Only the rank that owns the file
keeps the tensor, until the file is full and a thread writes it. So a rank holds its shard, one whole tensor and its
files in memory, but never the whole model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile.checkpoint.directory import on_all_ranks
from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.layout import on_the_wire
from lightning_zerocompile.sharding.module_swap import PARAMETERS
from lightning_zerocompile.sharding.pretrained import INDEX, SINGLE, saved_tensors

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_UNFINISHED = ".unfinished"


def export(module: nn.Module, folder: Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
    """Writes the values of ``module``, sharded or not, and its ``config`` if it has one of Hugging Face's; collective.

    Args:
        module: its ``state_dict`` names are the tensors' names; a tied tensor has the first of its names.
        folder: one that all ranks see; its model files are replaced when the new ones are complete.
        dtype: of floating-point tensors in the files; ``None``: the dtype that each had before it was sharded.
        max_file_bytes: a larger tensor has a file to itself.

    Raises:
        RuntimeError: a rank could not write; the former files are untouched.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("`save_pretrained` writes safetensors files: `pip install safetensors`") from error
    what, rank = f"Writing `{folder}`", dist.get_rank()
    tensors = _tensors(module, dtype)
    files = _files(tensors, max_file_bytes)
    on_all_ranks(what, lambda: folder.mkdir(parents=True, exist_ok=True))
    written: list[Future[None]] = []
    with ThreadPoolExecutor(1) as thread:  # ranks write at the same time, and gather meanwhile
        for number, (name, keys) in enumerate(files.items()):
            mine, held = number % dist.get_world_size() == rank, {}
            for key in keys:
                value = _value(*tensors[key], keep=mine)
                if value is not None:
                    held[key] = value
            if mine:
                if written:
                    written[-1].exception()  # waits: a rank is to hold two files at most
                written.append(thread.submit(save_file, held, folder / f"{name}{_UNFINISHED}", {"format": "pt"}))
            del held
    try:
        on_all_ranks(what, lambda: [future.result() for future in written])
        on_all_ranks(what, lambda: _complete(module, folder, files, tensors) if rank == 0 else None)
    finally:
        if rank == 0:  # after a failure they are still there
            for name in files:
                (folder / f"{name}{_UNFINISHED}").unlink(missing_ok=True)


def _tensors(module: nn.Module, dtype: torch.dtype | None) -> dict[str, tuple[Tensor, torch.dtype]]:
    """The tensors to write, with their dtypes in the files: parameters and persistent buffers, each once."""
    found: dict[str, tuple[Tensor, torch.dtype]] = {}
    seen: set[Tensor] = set()
    for name, holder, local_name, tensor in saved_tensors(module):
        if tensor not in seen:
            seen.add(tensor)
            own = holder.__dict__.get(PARAMETERS, {}).get(local_name, tensor).dtype
            found[name] = tensor, dtype if dtype is not None and own.is_floating_point else own
    return found


def _files(tensors: Mapping[str, tuple[Tensor, torch.dtype]], limit: int) -> dict[str, list[str]]:
    """The names of the files, each with the names of its tensors, in order."""
    groups: list[list[str]] = []
    size = limit
    for name, (tensor, dtype) in tensors.items():
        bytes_ = prod(tensor.shape) * dtype.itemsize
        if not groups or size + bytes_ > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += bytes_
    if len(groups) <= 1:
        return {SINGLE: [name for group in groups for name in group]}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, 1)}


def _value(tensor: Tensor, dtype: torch.dtype, keep: bool) -> Tensor | None:
    """The whole value on the CPU where ``keep``, of what is not sharded rank 0's; collective."""
    value = tensor.detach()
    if isinstance(value, DTensor):
        value = full_value(value, dtype=dtype if dtype.itemsize < value.dtype.itemsize else None)  # less to move
    elif value.numel() and dist.get_world_size() > 1:
        value = value.contiguous().clone()
        kinds = [device.type for device in dist.distributed_c10d._get_default_group()._device_types]
        value = value if value.device.type in kinds else value.to(kinds[0])  # after a fit the module may be on the CPU
        dist.broadcast(on_the_wire(value), src=0)
    # a copy: the next step may write to the module's own memory while a thread still reads it
    return value.to(device="cpu", dtype=dtype, copy=True).contiguous() if keep else None


def _complete(
    module: nn.Module,
    folder: Path,
    files: Mapping[str, list[str]],
    tensors: Mapping[str, tuple[Tensor, torch.dtype]],
) -> None:
    """Puts the new files in the place of the old ones, the index last, and the configuration beside them."""
    for name in files:
        os.replace(folder / f"{name}{_UNFINISHED}", folder / name)
    if len(files) > 1:
        size = sum(prod(tensor.shape) * dtype.itemsize for tensor, dtype in tensors.values())
        weight_map = {key: name for name, keys in files.items() for key in keys}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / f"{INDEX}{_UNFINISHED}").write_text(json.dumps(index, indent=2) + "\n")
        os.replace(folder / f"{INDEX}{_UNFINISHED}", folder / INDEX)
    for old in folder.iterdir():  # `from_pretrained` would prefer an old single file to a new index
        if _OURS.fullmatch(old.name) and old.name not in (*files, INDEX if len(files) > 1 else SINGLE):
            old.unlink()
    for name in ("config", "generation_config"):
        config: Any = getattr(module, name, None)
        if callable(getattr(config, "save_pretrained", None)):
            config.save_pretrained(folder)
