"""A parameter that somebody puts in place of another one while the model is trained.

[Note: replaced parameters] ``module.weight = nn.Parameter(new)`` means in torch: the module computes with the new
parameter from now on; an optimizer goes on with the old one, which gets no gradient any more, until it is given the
new one. That is what happens here, from the next step on. The record of the parameter stays, with its unit, its number
and its master, and the master takes the new values (rank 0's, as at set-up). What optimizers still hold of the old
parameter becomes a :class:`Former`, with its values, its gradient and its state; where an optimizer was given the new
parameter, the master takes its place. Until then the new one is a plain tensor: modules, compiled or not, compute with
it, and its gradient would be of one rank; so a backward before that step raises.

All ranks must have replaced the same. Nothing is communicated in a step in which none has: a rank that has asks the
others, and one that has not meets it in no message, so that it is found as any other knot, see [Note: ranks that wait
for each other].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from lightning_zerocompile.ranks.messages import CommunicationError, Messages
from lightning_zerocompile.sharding.layout import over_local, shard_like
from lightning_zerocompile.sharding.master import as_plain_tensors, gradient_of, refuse_hooks
from lightning_zerocompile.sharding.parameter import ShardedParameter

_REMEDY = "Change the module in `configure_model` or `setup`, or copy new values into it with `load_state_dict`."
_SERIES = "replaced parameters"
_NAME = "_zerocompile_former"


class Former(DTensor):
    """What an optimizer holds of a parameter that the model has no more, see [Note: replaced parameters]."""


def check_alike(replaced: Mapping[ShardedParameter, nn.Parameter], messages: Messages) -> None:
    """Raises unless every rank has put such parameters in place of the same ones; collective where all have.

    Raises:
        RuntimeError: names the first parameter, and what is wrong with the new one, or the rank that has another.
    """
    lines = [_described(sharded, parameter) for sharded, parameter in replaced.items()]
    first = next(iter(replaced)).name
    mine = f"Parameter `{first}` was replaced after the model was sharded on rank {dist.get_rank()}"
    try:
        what = f"the replacement of parameter `{first}`"
        heard = messages.exchange_numbered(_SERIES, messages.next_number(_SERIES), "\n".join(lines), what)
    except CommunicationError as error:
        raise RuntimeError(f"{mine}, and another rank has not come there: {error} {_REMEDY}") from error
    for rank, theirs in heard.items():
        if theirs is None or theirs.split("\n") != lines:
            other = None if theirs is None else next((t for t in theirs.split("\n") if t not in lines), "fewer")
            what = "nothing" if theirs is None else f"{other}, and here {lines[0]}"
            raise RuntimeError(f"{mine}, and rank {rank} has replaced {what}. All ranks must do the same. {_REMEDY}")


def _described(sharded: ShardedParameter, parameter: nn.Parameter) -> str:
    name, dtype = f"Parameter `{sharded.name}` was replaced after the model was sharded", parameter.dtype
    if isinstance(parameter, DTensor) or tuple(parameter.shape) != sharded.size or dtype != sharded.dtype:
        kind = "DTensor" if isinstance(parameter, DTensor) else "one"
        raise RuntimeError(
            f"{name}, by a {kind} of shape {tuple(parameter.shape)} in {dtype}; it has shape {sharded.size} in "
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
    """The parameter as it is now, apart from its record: a copy of this rank's rows, with the gradient, which the
    master then has no more."""
    master = sharded.master
    with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
        grad = gradient_of(master)
        rows = over_local(sharded.local.detach().clone(), master)
        former: Tensor = nn.Parameter(rows, requires_grad=master.requires_grad)
        former.__class__ = Former  # type: ignore[assignment, unused-ignore]
        former.__dict__[_NAME] = sharded.name
        if isinstance(grad, DTensor):
            former.grad_dtype = grad.dtype
            former.grad = over_local(grad._local_tensor.detach().clone(), master)
    master.grad = None
    return former


def former_name(value: Tensor) -> str | None:
    """Of which parameter it is the former one; None: it is none."""
    return value.__dict__[_NAME] if isinstance(value, Former) else None


def take_values(sharded: ShardedParameter, parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Gives the master the values of ``parameter``, rank 0's, and what a user has put on it; collective over ``group``.

    Args:
        parameter: of the size and dtype of ``sharded``, on any device.
        group: of the ranks of the mesh, in its order.
    """
    master = sharded.master
    with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
        full = parameter.detach().to(sharded.local.device, copy=True).contiguous()
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
