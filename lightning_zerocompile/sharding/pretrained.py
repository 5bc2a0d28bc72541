"""Pretrained weights in a folder of safetensors files, of which each rank reads its own rows.

[Note: pretrained weights] :func:`load_pretrained` compares the folder with the module by the files' headers. For a
parameter on the meta device it reads no value: it stores in the module where the value lies. Each rank reads its own
rows of the value when the parameter's unit is sharded, and no rank sends them to another. A deep copy of the module has
the stored place, too. It is used only if the parameter is still on the meta device when the model is sharded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

SOURCES = "_zerocompile_pretrained"  # attribute of a module: the :class:`Source` of parameters, by their local names
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # Hugging Face's names
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
_SHOWN = 8  # names that a message lists at most


def _open(file: str) -> Any:
    """The open file, a context manager; it gives tensors on the CPU.

    Raises:
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(f"`{file}` is a safetensors file: `pip install safetensors` to read it") from error
    return safe_open(file, framework="pt", device="cpu")


@dataclass(frozen=True)
class Source:
    """A tensor in a file: the file's path, and the tensor's name there, shape and dtype (``None``: unknown here)."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def rows(self, rank: int, world: int) -> Tensor:
        """The rows of one rank, on the CPU: ``[<=ceil(d0 / world), ...]`` in the file's dtype; all of a 0-dim tensor.

        Raises:
            RuntimeError: the file cannot be read any more, or has another tensor there now.
        """
        try:
            with _open(self.file) as file:
                there = file.get_slice(self.name)
                if tuple(there.get_shape()) != self.shape:
                    raise ValueError(f"its shape is {there.get_shape()} now")
                if not self.shape:
                    return file.get_tensor(self.name)  # type: ignore[no-any-return]
                count, first = Shard.local_shard_size_and_offset(self.shape[0], world, rank)
                if count == 0 or 0 in self.shape:
                    return torch.empty(count, *self.shape[1:], dtype=self.dtype)
                rows: Tensor = there[first : first + count]
                return rows
        except Exception as error:  # safetensors raises a class of its own, which derives from `Exception` alone
            raise RuntimeError(
                f"Tensor `{self.name}` of {self.file} could not be read: {error}. The folder must stay as it was at "
                "`load_pretrained` until the model is sharded."
            ) from error


def load_pretrained(module: nn.Module, folder: str | os.PathLike[str], cast: bool = False) -> None:
    """Gives ``module`` the values in ``folder``.

    The folder has safetensors files with Hugging Face's names, and their index file if there are several.

    Call it on every rank, in ``configure_model`` or before. The value of a parameter on the meta device is not read
    before the strategy shards it. Then each rank reads its own rows, one unit after the other. So no rank ever holds
    the whole model, or more than one parameter's rows beside its shard. Parameters on other devices, and persistent
    buffers, get their values at once. A tied parameter needs one of its names in the folder. See
    [Note: pretrained weights].

    Args:
        module: an ordinary module, best built under ``torch.device("meta")``; its ``state_dict`` names are the files'.
        folder: a local folder, which every rank sees.
        cast: whether floating-point tensors may have another dtype than the module's: they are cast to it.

    Raises:
        FileNotFoundError: the folder, or a file that its index names, is not there.
        ValueError: tensors are missing, the module has no such tensors, or shapes or dtypes differ. The message names
            every problem, and nothing is loaded.
        RuntimeError: a file cannot be read, or the module is sharded.
        ImportError: safetensors is not installed.
    """
    sharded = next((entry.name for entry in saved_tensors(module) if isinstance(entry.tensor, DTensor)), None)
    if sharded is not None:
        raise RuntimeError(
            f"`load_pretrained`: `{sharded}` is sharded already. Call it in `configure_model` or before, or write "
            "whole values with `load_state_dict`, on all ranks."
        )
    sources = _sources(Path(folder))
    own: dict[Tensor, list[SavedTensor]] = {}
    for entry in saved_tensors(module):
        own.setdefault(entry.tensor, []).append(entry)
    _check(type(module).__name__, folder, {t: [entry.name for entry in held] for t, held in own.items()}, sources, cast)
    for tensor, entries in own.items():
        source = next((sources[entry.name] for entry in entries if entry.name in sources), None)
        if source is None:
            continue
        for _, holder, local_name, _ in entries:
            if local_name in holder._parameters and tensor.is_meta:
                holder.__dict__.setdefault(SOURCES, {})[local_name] = source
            elif tensor.is_meta:
                holder._buffers[local_name] = source.rows(0, 1).to(tensor.dtype)
            else:
                with torch.no_grad():
                    tensor.copy_(source.rows(0, 1))


def source_of(module: nn.Module, name: str) -> Source | None:
    """Where the value of a parameter on the meta device lies; None: nothing was loaded for it."""
    parameter = module._parameters[name]
    source: Source | None = module.__dict__.get(SOURCES, {}).get(name)
    return source if parameter is not None and parameter.is_meta and source is not None else None


def forget_sources(module: nn.Module) -> None:
    """Removes what :func:`load_pretrained` has stored in the module; called after the module was sharded."""
    for inner in module.modules():
        inner.__dict__.pop(SOURCES, None)


def _sources(folder: Path) -> dict[str, Source]:
    """Every tensor of the folder by its name, from the headers of the files."""
    index = folder / INDEX
    if (folder / SINGLE).is_file():  # `from_pretrained` prefers this file, too
        files = [folder / SINGLE]
    elif index.is_file():
        files = [folder / name for name in dict.fromkeys(json.loads(index.read_text())["weight_map"].values())]
    else:
        raise FileNotFoundError(f"There is neither {SINGLE} nor {INDEX} in `{folder}`.")
    sources: dict[str, Source] = {}
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"`{path}`, which {INDEX} names, is not there.")
        try:
            with _open(str(path)) as file:
                for name in file.keys():  # noqa: SIM118  (it is no dictionary)
                    there = file.get_slice(name)
                    shape, dtype = tuple(there.get_shape()), _DTYPES.get(there.get_dtype())
                    sources[name] = Source(str(path), name, shape, dtype)
        except ImportError:
            raise
        except Exception as error:
            raise RuntimeError(f"`{path}` is no safetensors file that can be read: {error}") from error
    return sources


class SavedTensor(NamedTuple):
    """A parameter or a persistent buffer: its name in the ``state_dict``, the module that holds it, its name there."""

    name: str
    holder: nn.Module
    local_name: str
    tensor: Tensor


def saved_tensors(module: nn.Module) -> Iterator[SavedTensor]:
    """The tensors that ``state_dict`` saves. A tied tensor comes once for each of its names."""
    for path, holder in module.named_modules(remove_duplicate=False):
        buffers = {n: b for n, b in holder._buffers.items() if n not in holder._non_persistent_buffers_set}
        for name, tensor in {**holder._parameters, **buffers}.items():
            if tensor is not None:
                yield SavedTensor(f"{path}.{name}" if path else name, holder, name, tensor)


def _check(
    kind: str,
    folder: str | os.PathLike[str],
    own: Mapping[Tensor, list[str]],
    sources: Mapping[str, Source],
    cast: bool,
) -> None:
    known = {name for names in own.values() for name in names}
    missing = [names[0] for names in own.values() if not any(name in sources for name in names)]
    foreign = [name for name in sources if name not in known]
    shapes, dtypes = [], []
    for tensor, names in own.items():
        for source in (sources[name] for name in names if name in sources):
            if source.shape != tuple(tensor.shape):
                shapes.append(f"{source.name} is {list(source.shape)} there, {list(tensor.shape)} here")
            castable = cast and source.dtype is not None and source.dtype.is_floating_point
            if source.dtype != tensor.dtype and not (castable and tensor.is_floating_point()):
                dtypes.append(f"{source.name} is {source.dtype or 'unknown to torch'} there, {tensor.dtype} here")
    remedies = {
        "missing": "Load it into the module that was saved (without a wrapper's prefix, before adapters are added).",
        "of no parameter or buffer here": "Load it into the module that was saved, without a wrapper's prefix.",
        "of another shape": "Build the module with the folder's configuration.",
        "of another dtype": "Build the module in the folder's dtype, or pass `cast=True`.",
    }
    found = dict(zip(remedies, (missing, foreign, shapes, dtypes), strict=True))
    if any(found.values()):
        problems = " ".join(f"{what.capitalize()}: {_listed(names)}." for what, names in found.items() if names)
        advice = " ".join(dict.fromkeys(remedies[what] for what, names in found.items() if names))
        raise ValueError(f"`{folder}` does not hold the values of a {kind}; nothing was loaded. {problems} {advice}")


def _listed(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - _SHOWN
    return ", ".join(all_names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
