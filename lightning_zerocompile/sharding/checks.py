"""Errors for what this strategy does not support, raised before anything starts; and explanations of torch's errors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined, unused-ignore]
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_zerocompile.config import Config
from lightning_zerocompile.ranks.consistency import differences_between, first_difference
from lightning_zerocompile.ranks.messages import Messages
from lightning_zerocompile.sharding.layout import stride_of
from lightning_zerocompile.sharding.parameter import FUNCTORCH
from lightning_zerocompile.sharding.pretrained import SOURCES, source_of
from lightning_zerocompile.sharding.sharded import refuse_left
from lightning_zerocompile.sharding.unsharded import master_of

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the repr of a user's pass or function; differs between processes


def settings_of(config: Config) -> dict[str, str]:
    """The options and versions that must be equal on all ranks, as the model must be: texts, by name.

    Bytes of ``keep_gathered`` are not among them: devices may differ, and the ranks agree on the smallest.
    """
    chosen = {field.name: getattr(config, field.name) for field in fields(config)}
    chosen["keep_gathered"] = config.kept_names
    options = {f"option `{name}`": _ADDRESS.sub("", repr(value)) for name, value in chosen.items()}
    if isinstance(config.device_mesh, DeviceMesh):
        options["the ranks of `device_mesh`"] = str(config.device_mesh.mesh.tolist())
    package = __name__.partition(".")[0]
    try:
        own = version(package.replace("_", "-"))
    except PackageNotFoundError:  # run from its sources
        own = "not installed"
    found = {"torch": torch.__version__, "lightning": lightning.__version__, package: own}
    return options | {f"version of `{name}`": str(number) for name, number in found.items()}


def trainer_settings(trainer: pl.Trainer) -> dict[str, str]:
    """The Trainer's arguments that decide what a step computes: texts, by name."""
    names = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "precision")
    return {f"`Trainer({name}=)`": repr(getattr(trainer, name, None)) for name in names}


def _kind(parameter: Tensor) -> str:
    stride = stride_of(parameter)
    return f"{parameter.dtype}" if stride is None else f"{parameter.dtype} with strides {stride}"


def check_equal_on_all_ranks(model: nn.Module, settings: Mapping[str, str]) -> None:
    """Raises on every rank if the ranks hold different models, or were set up differently. All ranks must call.

    Args:
        model: not sharded yet.
        settings: the chosen settings as texts, by name.

    Raises:
        RuntimeError: the ranks differ, and the message names the setting, or the first parameter or buffer, and the
            rank; or a tensor is on a device that is not supported, or is not initialized.
        TypeError: TorchScript has parameters of the model.
    """
    check_initialized(model)
    loaded = {  # rank 0 sends values or not, depending on where they come from
        f"{path}.{name}" if path else name: source.name
        for path, inner in model.named_modules()
        for name, source in inner.__dict__.get(SOURCES, {}).items()
        if source_of(inner, name) is not None
    }
    mine = [(n, tuple(p.shape), _kind(p), p.requires_grad, loaded.get(n)) for n, p in model.named_parameters()]
    buffers = [(n, tuple(b.shape), str(b.dtype), False, None) for n, b in model.named_buffers()]
    said = (dict(settings), mine + buffers)
    digest = hashlib.sha256(repr(said).encode()).hexdigest()
    digests = _gathered(digest)  # what each rank tells must not grow with the model: there may be a thousand of them
    alike = digests.count(digest) == len(digests)
    heard = [said] * len(digests) if alike else _gathered(said)
    differences = differences_between([theirs for theirs, _ in heard]) if not alike else None
    if differences is not None:
        raise RuntimeError(
            f"The ranks are set up differently: {differences}. Give every rank the same options and installation."
        )
    everyone = [theirs for _, theirs in heard]
    for rank, theirs in enumerate(everyone):
        if alike or theirs == everyone[0]:
            continue
        first, other = next(
            pair for pair in zip_longest(everyone[0], theirs, fillvalue="no more") if pair[0] != pair[1]
        )
        raise RuntimeError(
            f"The ranks hold different models: rank 0 has {first}, rank {rank} has {other}. Build the same "
            "model on every rank (same code path, same configuration; do not depend on the rank)."
        )
    check_devices(model)
    check_not_scripted(model)
    check_kinds_of_parameters(model)


def warn_of_shared_memory(model: nn.Module, device: torch.device) -> None:
    """Warns where two parameters, or a parameter and a buffer, share memory and are not one object.

    DDP trains one memory then, if the model is on ``device`` already; to move it there gives each memory of its own. A
    shard has memory of its own in any case.
    """
    there = [
        (name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if type(tensor) in (nn.Parameter, torch.Tensor) and tensor.device == device and tensor.numel()
    ]
    pairs, last, end = [], ("", False), 0  # `last`: what reaches furthest so far, and whether it is a parameter
    for name, tensor in sorted(there, key=lambda one: one[1].data_ptr()):
        begin, trained = tensor.data_ptr(), isinstance(tensor, nn.Parameter)
        if begin < end and (trained or last[1]):
            pairs.append((last[0], name))
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if (until := begin + (reach + 1) * tensor.element_size()) > end:
            last, end = (name, trained), until
    if pairs:
        others = f", and {len(pairs) - 1} more pairs," if len(pairs) > 1 else ""
        rank_zero_warn(
            f"`{pairs[0][0]}` and `{pairs[0][1]}`{others} share memory without being one object. With DDP on this "
            "device a change of one is a change of the other; here each has memory of its own from now on. Make them "
            "one parameter (`b.weight = a.weight`), or `clone()` one of them."
        )


def check_has_parameters(model: nn.Module) -> None:
    """Called before training; a model without parameters can still be evaluated.

    Raises:
        RuntimeError: the model has none.
    """
    if next(model.parameters(), None) is None:
        raise RuntimeError(
            f"{type(model).__name__} has no parameters, so there is nothing to shard or to train. Create its layers "
            "in `__init__` or `configure_model`."
        )


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def check_equal_replicas(rows: Mapping[str, torch.Tensor], part: int, messages: Messages) -> None:
    """Raises on every rank if two ranks that should hold the same rows hold different values.

    See [Note: replicas] in csrc/registry.h.

    Args:
        rows: this rank's rows by the parameters' names, each ``[<=ceil(d0 / W), ...]``.
        part: which rows these are: this rank's place in its shard group.
        messages: the conversation of all ranks.

    Raises:
        RuntimeError: names the first parameter and the two ranks.
    """
    mine = {name: _sum_of_bits(value) for name, value in rows.items()}
    late = partial(messages.silent, doing="has sharded its replica of the model")
    found = first_difference(messages, "replicas", mine, "the comparison of replicas", late, part)
    if found is not None:
        raise RuntimeError(
            f"The replicas differ: ranks {found.first} and {found.other} hold the same rows of parameter "
            f"{_first_of(found.names)}, with other values. Values that no rank has sent to the others come from "
            "files: let all hosts see the same folder in `load_pretrained`."
        )


def _first_of(names: Sequence[str]) -> str:
    """The first name, quoted, and how many more there are; for messages."""
    return f"`{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _sum_of_bits(value: torch.Tensor) -> int:
    """The sum of a tensor's bits, read as integers: exact, whatever the order of the sum."""
    bits = value.detach().contiguous().reshape(-1).view(torch.uint8)
    width = {1: torch.uint8, 2: torch.int16}.get(value.element_size(), torch.int32)
    return int(bits.view(width).sum(dtype=torch.int64))


def check_equal_optimizers(
    optimizers: Sequence[Optimizer],
    names: Mapping[torch.Tensor, str],
    messages: Messages,
) -> None:
    """Raises on every rank if the ranks' optimizers differ: each would update its rows by a rule of its own.

    Args:
        optimizers: over the sharded model's parameters.
        names: the parameters' names, by master.
        messages: the conversation of all ranks.

    Raises:
        RuntimeError: the optimizers differ; the message names the optimizer, what differs, and two ranks.
    """
    mine = _described(optimizers, names)
    late = partial(messages.silent, doing="has set its optimizers up")
    differences = first_difference(messages, "optimizers", mine, "the comparison of optimizers", late)
    if differences is not None:
        raise RuntimeError(
            f"The ranks have different optimizers: {differences}. Let `configure_optimizers` return the same on every "
            "rank (same code path, same configuration; do not depend on the rank)."
        )


def _described(optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str]) -> dict[str, str]:
    found = {"the number of optimizers": str(len(optimizers))}
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer)
        found[f"the class of optimizer {number}"] = f"{kind.__module__}.{kind.__qualname__}"
        for place, group in enumerate(optimizer.param_groups):
            where = f"of group {place} of optimizer {number}"
            for key, value in group.items():
                if key != "params":
                    found[f"`{key}` {where}"] = _plain(value)
            held = [names.get(master_of(parameter), "?") for parameter in group["params"]]
            digest = hashlib.sha256("\n".join(held).encode()).hexdigest()[:12]
            found[f"the parameters {where}"] = f"{len(held)} from `{(held or ['none'])[0]}` on (digest {digest})"
    return found


def _plain(value: object) -> str:
    """A value as text, which is equal in two processes if the value is."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_plain(item) for item in value)}]"
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return repr(value.detach().item())
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return repr(value)
    return f"of type {type(value).__qualname__}"


def check_initialized(model: nn.Module) -> None:
    """Raises RuntimeError, which names it, if a parameter or buffer of a lazy layer has no shape yet."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise RuntimeError(
                f"`{name}` has no shape yet, since its lazy layer has run no forward. Run one with a batch before the "
                "model is sharded, on all ranks: at the end of `configure_model`, or before `fit` or `fabric.setup`."
            )


def check_devices(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            raise RuntimeError(f"`{name}` is on {tensor.device}; only cpu, cuda and meta tensors can be sharded.")


def check_not_scripted(model: nn.Module) -> None:
    """Called before a model is sharded.

    Raises:
        TypeError: a module that TorchScript has compiled has parameters; the message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise TypeError(
                f"`{name or type(model).__name__}` was compiled by `torch.jit`. TorchScript reads its parameters where "
                "they were, so they cannot be sharded. Use the module itself, which torch.compile compiles. If it is "
                "not trained it can stay out of the model: keep it in a list, `self.teacher = [scripted]`."
            )


def check_kinds_of_parameters(model: nn.Module) -> None:
    """Called before a model is sharded.

    Raises:
        TypeError: a parameter is of a class of its own, derived from ``nn.Parameter``; the message names both.
    """
    for name, parameter in model.named_parameters():
        kind = type(parameter)
        if issubclass(kind, nn.Parameter) and kind.__module__.partition(".")[0] != "torch":
            raise TypeError(
                f"Parameter `{name}` is a {kind.__module__}.{kind.__qualname__}, which is derived from nn.Parameter. A "
                "module reads the gathered value of a parameter, which is a tensor without what such a class defines. "
                "Make it a plain nn.Parameter: attributes of a parameter are kept, and methods belong into the module. "
                "If it is not trained it can stay out of the model, in a list. Or train with strategy='ddp'."
            )


SHARD = (
    "This rank holds a shard of each parameter, a DTensor, and `grad` is a DTensor, too. `with "
    "strategy.full_parameters(module) as values:` gives full values by name. In an optimizer's step a tensor that is "
    "added to a gradient, or that it is multiplied by (noise, a mask of rows), must have the gradient's layout: "
    "`torch.randn_like(p.grad)` has it, and `torch.distributed.tensor.distribute_tensor(value, p.device_mesh, "
    "p.placements)` gives it."
)


def explain(message: str, param_dtype: torch.dtype | None = None) -> str | None:
    """What an error of torch's means for a sharded module.

    Args:
        message: the error's message.
        param_dtype: the dtype that parameters are read in, if the option ``param_dtype`` asks for one.

    Returns:
        The text of the error to raise in its place, which begins with the message or replaces it; None: there is
        nothing to add to the message.
    """
    if param_dtype is not None and "same dtype" in message:
        return (
            f"{message} (Parameters are read as {param_dtype}, since `param_dtype` asks for it. Inputs of modules are "
            "cast where the LightningModule, a child of it or a repeated block is called, and not further inside. "
            "Cast what this operation takes, or use the Trainer's precision='bf16-mixed', which casts in each one.)"
        )
    if "does not currently support double backward" in message and "compile=False" not in message:
        return (
            f"{message} (Compiled code has no backward of its backward, which create_graph=True asks for: use "
            "compile=False, or keep the module that does so out of compiled code by `@torch.compiler.disable` on its "
            "forward.)"
        )
    if "don't yet support saved tensor hooks" in message or "storage of TensorWrapper" in message:
        return FUNCTORCH.format("parameters")
    texts = ("got mixed torch.Tensor and DTensor", "require placement changes", "not have a sharding strategy")
    mixed = any(text in message for text in texts)
    if mixed and SHARD not in message:
        return f"{message} {SHARD}"
    if "appears to not have been used in the graph" in message and "sharded module" not in message:
        return (
            f"{message} (A parameter that was read again from a sharded module is a new value each time: differentiate "
            "with respect to the value that you used, or call `backward` and read `grad`.)"
        )
    return None


def check_whole(model: nn.Module) -> None:
    """Raises if a parameter is a shard that no strategy manages, or holds more than the numbers of a plain tensor.

    Raises:
        RuntimeError: names the parameter and the remedy.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            refuse_left(name)
        if is_lazy(parameter):
            continue
        kind = type(parameter)
        plain_functions = (nn.Parameter.__torch_function__, torch.Tensor.__torch_function__)
        own_functions = kind.__torch_function__ not in plain_functions
        own_dispatch = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if own_functions or own_dispatch or kind.__module__.partition(".")[0] == "bitsandbytes":
            raise RuntimeError(
                f"Parameter `{name}` is a {kind.__module__}.{kind.__qualname__}: what it means (scales, packed "
                "numbers) is not in its rows, so it cannot be sharded by rows and gathered. Load it unquantised: a "
                "frozen parameter costs its own bytes (bfloat16: two), divided by the number of ranks. Or use "
                "strategy='ddp'."
            )
