"""A parameter that somebody puts in place of another one while the model is trained.

[Note: replaced parameters] In torch ``module.weight = nn.Parameter(new)`` means two things. The module computes with
the new parameter from now on. An optimizer goes on with the old one, which gets no gradient any more, until it is given
the new one. The same happens here, from the next step on. The record of the parameter stays, with its unit, its number
and its master, and the master takes the new values (rank 0's, as at set-up). Where optimizers still hold the old
parameter they get a :class:`Former`, with its values, its gradient and its state. Where an optimizer was given the new
parameter, it gets the master. Until the next step the new parameter is a plain tensor. Modules, compiled or not,
compute with it. Its gradient would be that of one rank, so if a backward gives it one, the next step raises.

[Note: other layouts] A new parameter of another shape or dtype, or one of a layer that was put in the place of another
layer, does not fit into the record, the unit and the graphs of the old one. Then the whole model is laid out anew
before the step: it is made whole and sharded again, as between two fits. What was there stays: the rows of masters
(since whole values in half precision would have fewer bits), gradients, the states of optimizers. ``p.data = value`` of
another shape is such a replacement, too, but of the same object, so optimizers go on with the new parameter. Their old
state for it does not fit, and is dropped with a warning.

All ranks must have replaced the same parameters. In a step in which no rank has replaced any, nothing is communicated.
A rank that has replaced one asks the others. A rank that has not does not answer, so the two are found as a knot, see
[Note: ranks that wait for each other].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from lightning_zerocompile.ranks.consistency import first_difference
from lightning_zerocompile.ranks.messages import CommunicationError, Messages
from lightning_zerocompile.sharding.held import part
from lightning_zerocompile.sharding.layout import in_mesh, on_the_wire, over_local, shard_like
from lightning_zerocompile.sharding.master import as_plain_tensors, gradient_of, refuse_hooks
from lightning_zerocompile.sharding.parameter import ShardedParameter

_REMEDY = "Change the module in `configure_model` or `setup`, or copy new values into it with `load_state_dict`."
_SERIES = "replaced parameters"
_NAME = "_zerocompile_former"


class Former(DTensor):
    """What an optimizer holds in place of a parameter that the model has no longer, see [Note: replaced parameters]."""


@dataclass(frozen=True)
class Changes:
    """What users have put into the model since the last step.

    Attributes:
        replaced: the new parameters, by the records of the parameters in whose place they are.
        layers: the parameters of layers that were put in the place of others, by their fully qualified names.
    """

    replaced: dict[ShardedParameter, nn.Parameter]
    layers: dict[str, nn.Parameter]

    def __bool__(self) -> bool:
        return bool(self.replaced or self.layers)

    @property
    def fits(self) -> bool:
        """Whether records and units can stay as they are, see [Note: other layouts]."""
        return not self.layers and all(_same_layout(sharded, new) for sharded, new in self.replaced.items())

    @property
    def names(self) -> list[str]:
        """The fully qualified names of all parameters that are new."""
        return [*(sharded.name for sharded in self.replaced), *self.layers]

    def parameters(self) -> list[nn.Parameter]:
        """All parameters that are new, each once."""
        return list(dict.fromkeys([*self.replaced.values(), *self.layers.values()]))


def check_alike(changes: Changes, messages: Messages) -> None:
    """Raises unless every rank has put the same parameters in the place of the same ones.

    It waits for all ranks. A rank calls it only if it has replaced parameters.

    Raises:
        RuntimeError: a new parameter cannot be used, the ranks have replaced different ones, or another rank does not
            come here. The message names a parameter, and what is wrong with the new one or which ranks differ.
    """
    first = changes.names[0]
    mine = f"Parameter `{first}` was replaced after the model was sharded on rank {dist.get_rank()}"
    lines = {sharded.name: _described(sharded.name, sharded, new) for sharded, new in changes.replaced.items()}
    lines |= {name: _described(name, None, new) for name, new in changes.layers.items()}
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


def _same_layout(sharded: ShardedParameter, parameter: nn.Parameter) -> bool:
    return tuple(parameter.shape) == sharded.size and parameter.dtype == sharded.dtype


def _described(name: str, sharded: ShardedParameter | None, parameter: nn.Parameter) -> str:
    what, dtype = f"Parameter `{name}` was replaced after the model was sharded", parameter.dtype
    if isinstance(parameter, DTensor):
        raise RuntimeError(
            f"{what}, by a DTensor of shape {tuple(parameter.shape)} in {dtype}. Put a parameter with full values "
            "there: `with strategy.full_parameters(module) as values:` gives them."
        )
    if parameter.grad is not None:
        raise RuntimeError(
            f"{what}, and had a backward before the next step began, so its gradient is of one rank only. Replace it "
            "in a hook between steps, such as `on_train_batch_start` or `on_train_epoch_end`."
        )
    fits = sharded is not None and _same_layout(sharded, parameter)
    if fits and sharded is not None and getattr(parameter, "grad_dtype", dtype) != sharded.grad_dtype:
        raise RuntimeError(f"{what}, by one with another `grad_dtype` than {sharded.grad_dtype}. {_REMEDY}")
    refuse_hooks(name, parameter)
    layout = "" if fits else f", of shape {tuple(parameter.shape)} in {dtype}"
    return f"one that is {'trained' if parameter.requires_grad else 'frozen'}{layout}"


def former_of(sharded: ShardedParameter) -> Tensor:
    """A :class:`Former` that copies this rank's rows of the parameter as they are now, and its gradient.

    The master has no gradient after this.
    """
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


def former_in(mesh: DeviceMesh, name: str, rows: DTensor, requires_grad: bool, grad: Tensor | None) -> Tensor:
    """A :class:`Former` for the parameter ``name`` of a model that was laid out anew; see :func:`former_of`.

    Args:
        mesh: the mesh of the new layout, in which each rank has the same rows.
        name: the parameter's fully qualified name.
        rows: the rows of the former master, in the former mesh; their memory is used, not copied.
        requires_grad: whether the parameter was trained.
        grad: this rank's rows of its gradient, [<=rows, ...]; None: it has none.
    """
    with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
        former: Tensor = nn.Parameter(in_mesh(rows, mesh), requires_grad=requires_grad)
        former.__class__ = Former  # type: ignore[assignment, unused-ignore]
        former.__dict__[_NAME] = name
        if grad is not None:
            former.grad_dtype = grad.dtype
            former.grad = over_local(grad, former)
    return former


def as_rows(sharded: ShardedParameter) -> DTensor:
    """This rank's rows of the parameter, as a DTensor over the master's memory that belongs to no parameter."""
    return over_local(sharded.local.detach(), sharded.master)


def former_again(former: Former, mesh: DeviceMesh) -> Tensor:
    """``former`` in the mesh of a model that was laid out anew."""
    with torch.no_grad(), as_plain_tensors():
        grad = former.grad._local_tensor if isinstance(former.grad, DTensor) else None
        rows: DTensor = in_mesh(former, mesh)
        return former_in(mesh, former.__dict__[_NAME], rows, former.requires_grad, grad)


def former_name(value: Tensor) -> str | None:
    """The name of the parameter that a :class:`Former` was; None: ``value`` is no :class:`Former`."""
    return value.__dict__[_NAME] if isinstance(value, Former) else None


def take_values(sharded: ShardedParameter, parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Gives the master rank 0's values of ``parameter``, and the attributes that a user has set on it; collective.

    Hooks and ``requires_grad`` of ``parameter`` go to the master, too.

    Args:
        sharded: the parameter's record.
        parameter: the new parameter, of the size and dtype of ``sharded``, on any device.
        group: a group of all ranks.
    """
    master = sharded.master
    part(sharded)
    with torch.inference_mode(False), torch.no_grad(), as_plain_tensors():
        full = parameter.detach().to(sharded.source.device, copy=True).contiguous()
        if dist.get_world_size(group) > 1:
            dist.broadcast(on_the_wire(full), group=group, group_src=0)
        master.requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            sharded.widen()
        master.copy_(shard_like(full, master))
    ours = [name for name in vars(master) if name == "_is_param" or name.startswith("_zerocompile")]
    own = {name: vars(master)[name] for name in ours}
    master.__dict__.clear()
    master.__dict__.update(vars(parameter) | own)
    master._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    sharded.original, sharded.awaited = TensorWeakRef(parameter), None
