"""A parameter that somebody puts in place of another one while the model is trained.

[Note: replaced parameters] In torch ``module.weight = nn.Parameter(new)`` means two things. The module computes with
the new parameter from now on. An optimizer goes on with the old one, which gets no gradient any more, until it is given
the new one. The same happens here, from the next step on. The record of the parameter stays, with its unit, its number
and its master, and the master takes the new values (rank 0's, as at set-up). Where optimizers still hold the old
parameter they get a :class:`Former`, with its values, its gradient and its state. Where an optimizer was given the new
parameter, it gets the master. Until the next step the new parameter is a plain tensor. Modules, compiled or not,
compute with it, and its gradient would be that of one rank, so a backward before that step raises.

All ranks must have replaced the same parameters. In a step in which no rank has replaced any, nothing is communicated.
A rank that has replaced one asks the others. A rank that has not does not answer, so the two are found as any other
knot, see [Note: ranks that wait for each other].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from lightning_zerocompile.ranks.consistency import first_difference
from lightning_zerocompile.ranks.messages import CommunicationError, Messages
from lightning_zerocompile.sharding.layout import over_local, shard_like
from lightning_zerocompile.sharding.master import as_plain_tensors, gradient_of, refuse_hooks
from lightning_zerocompile.sharding.parameter import ShardedParameter

_REMEDY = "Change the module in `configure_model` or `setup`, or copy new values into it with `load_state_dict`."
_SERIES = "replaced parameters"
_NAME = "_zerocompile_former"


class Former(DTensor):
    """What an optimizer holds in place of a parameter that the model has no longer, see [Note: replaced parameters]."""


def check_alike(replaced: Mapping[ShardedParameter, nn.Parameter], messages: Messages) -> None:
    """Raises unless every rank has put parameters of the right kind in place of the same ones.

    Collective if all ranks have replaced parameters.

    Raises:
        RuntimeError: names the first parameter, and what is wrong with the new one, or the rank that has another.
    """
    first = next(iter(replaced)).name
    mine = f"Parameter `{first}` was replaced after the model was sharded on rank {dist.get_rank()}"
    lines = {sharded.name: _described(sharded, parameter) for sharded, parameter in replaced.items()}
    late = partial(messages.silent, doing="has come there")
    try:
        found = first_difference(messages, _SERIES, lines, f"the replacement of parameter `{first}`", late)
    except CommunicationError as error:
        raise RuntimeError(f"{mine}, and another rank has not come there: {error} {_REMEDY}") from error
    if found is not None:
        one, two = (str(values.get(found.names[0], "nothing")) for values in found.values)
        raise RuntimeError(
            f"{mine}, and rank {found.first} has replaced `{found.names[0]}` by {one}, rank {found.other} by {two}. "
            f"All ranks must do the same. {_REMEDY}"
        )


def _described(sharded: ShardedParameter, parameter: nn.Parameter) -> str:
    name, dtype = f"Parameter `{sharded.name}` was replaced after the model was sharded", parameter.dtype
    if isinstance(parameter, DTensor) or tuple(parameter.shape) != sharded.size or dtype != sharded.dtype:
        kind = "a DTensor" if isinstance(parameter, DTensor) else "one"
        raise RuntimeError(
            f"{name}, by {kind} of shape {tuple(parameter.shape)} in {dtype}; it has shape {sharded.size} in "
            f"{sharded.dtype}, and rows and gathers are laid out for these. {_REMEDY}"
        )
    if parameter.grad is not None:
        raise RuntimeError(
            f"{name}, and had a backward before the next step began, so its gradient is of one rank only. Replace it "
            "in a hook between steps, such as `on_train_batch_start` or `on_train_epoch_end`."
        )
    if getattr(parameter, "grad_dtype", dtype) != sharded.grad_dtype:
        raise RuntimeError(f"{name}, by one with another `grad_dtype` than {sharded.grad_dtype}. {_REMEDY}")
    refuse_hooks(sharded.name, parameter)
    return f"`{sharded.name}` ({'trained' if parameter.requires_grad else 'frozen'})"


def former_of(sharded: ShardedParameter) -> Tensor:
    """A copy of the parameter as it is now, without a record: this rank's rows, and the gradient, which it takes away
    from the master."""
    master = sharded.master
    with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
        grad = gradient_of(master)
        rows = over_local(sharded.local.detach().to(sharded.source.device, copy=True), master)
        former: Tensor = nn.Parameter(rows, requires_grad=master.requires_grad)
        former.__class__ = Former  # type: ignore[assignment, unused-ignore]
        former.__dict__[_NAME] = sharded.name
        if isinstance(grad, DTensor):
            former.grad_dtype = grad.dtype
            former.grad = over_local(grad._local_tensor.detach().clone(), master)
    master.grad = None
    return former


def former_name(value: Tensor) -> str | None:
    """The name of the parameter that a :class:`Former` was; None: ``value`` is no :class:`Former`."""
    return value.__dict__[_NAME] if isinstance(value, Former) else None


def take_values(sharded: ShardedParameter, parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Gives the master rank 0's values of ``parameter``, and the attributes that a user has set on it; collective.

    Args:
        parameter: of the size and dtype of ``sharded``, on any device.
        group: of all ranks.
    """
    master = sharded.master
    with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
        full = parameter.detach().to(sharded.source.device, copy=True).contiguous()
        if dist.get_world_size(group) > 1:
            dist.broadcast(full, group=group, group_src=0)
        master.requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            sharded.widen()
        master.copy_(shard_like(full, master))
    ours = [name for name in vars(master) if name == "_is_param" or name.startswith("_zerocompile")]
    own = {name: vars(master)[name] for name in ours}
    master.__dict__.clear()
    master.__dict__.update(vars(parameter) | own)
    master._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    sharded.original = TensorWeakRef(parameter)
