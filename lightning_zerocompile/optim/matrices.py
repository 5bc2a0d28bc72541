"""torch.optim.Muon on shards: each matrix is orthogonalised by one rank, and its rows travel there and back.

[Note: Muon] Muon orthogonalises the whole matrix of a parameter's update (Newton-Schulz). All else that it does is
elementwise: the momentum, Nesterov's step, weight decay, the write to the parameter. So each rank does all else on its
own rows. One rank owns a matrix in this step. The rows of the update travel to that rank, and the rows of the result
travel back. Both travel in bfloat16: Newton-Schulz casts its input to bfloat16 first, and its result has this dtype. So
each element costs 2 bytes there and 2 bytes back. Every operation is torch's own on the same numbers, so the result is
Muon's on whole matrices, to the bit where the matrix products are deterministic. The momentum stays sharded as its
parameter is.

Units are updated in rounds of as many as there are ranks, so that each rank has about one unit's matrices whole at a
time. The owners of a round follow from the matrices' shapes, alike on all ranks: the most costly matrix goes to the
rank with the least work so far. The cost of m x n is m n min(m, n).

This module calls two private functions of torch, which another version may change. So an optimizer is updated in this
way only if, on two small matrices, it gives what Muon itself gives (:func:`can_share_matrices`). Else the optimizer
sees whole values on every rank, see [Note: whole values].
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Muon, Optimizer
from torch.optim import _muon as torch_muon

from lightning_zerocompile.optim.supported import plain_step
from lightning_zerocompile.sharding.layout import rows_of

_MOMENTUM = "momentum_buffer"  # Muon's only state


@dataclass
class _Matrix:
    """One parameter in a round.

    Attributes:
        rows: this rank's part of the parameter, [<=rows, n].
        size: of the whole matrix, (m, n).
        update: this rank's rows of the matrix that is orthogonalised, [<=rows, n] in bfloat16; afterwards its rows of
            the result.
        group: the optimizer's group of the parameter, with its options.
    """

    rows: Tensor
    size: tuple[int, int]
    update: Tensor
    group: Mapping[str, Any]

    @property
    def cost(self) -> int:
        m, n = self.size
        return m * n * min(m, n)


def owners(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank that does each piece of work: the largest is given first, each to the rank that has the least so far.

    Args:
        costs: of each piece, in any unit.
        ranks: how many there are.
    """
    loads, chosen = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        chosen[number], loads[rank] = rank, loads[rank] + costs[number]
    return chosen


def shares_matrices(optimizer: Optimizer) -> bool:
    """Whether the optimizer is updated in this way, see [Note: Muon].

    Without Nesterov's step torch's Muon orthogonalises the momentum itself. If that is in bfloat16, Newton-Schulz
    writes to it, which :func:`step` does not do where it is sharded. An optimizer with such a parameter is updated in
    torch's own way.
    """
    if type(optimizer) is not Muon or not inspect.isfunction(Muon.step):
        return False
    plain = [group["params"] for group in optimizer.param_groups if not group["nesterov"]]
    return not any(p.dtype is torch.bfloat16 for parameters in plain for p in parameters) and can_share_matrices()


@cache
def can_share_matrices() -> bool:
    """Whether the Muon of this torch computes what :func:`step` does; tried on the CPU, with and without Nesterov."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    for size, nesterov in (((4, 3), True), ((2, 5), False)):
        ours = torch.nn.Parameter(draw(size))
        theirs = torch.nn.Parameter(ours.detach().clone())
        one, other = (Muon([p], lr=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw") for p in (ours, theirs))
        for _ in range(2):
            ours.grad = draw(size)
            theirs.grad = ours.grad.clone()
            plain_step(other)()
            try:
                step(one, {ours: ours})
            except Exception:  # whatever has changed in torch
                return False
        if not torch.equal(ours, theirs) or set(one.state[ours]) != set(other.state[theirs]):
            return False
        if not torch.equal(one.state[ours][_MOMENTUM], other.state[theirs][_MOMENTUM]):
            return False
    return True


@torch.no_grad()
def step(optimizer: Optimizer, masters: Mapping[Tensor, Tensor]) -> None:
    """A step of Muon on this rank's rows; collective over the shard group if a parameter is sharded.

    Args:
        optimizer: a Muon. Its groups hold this rank's rows of each parameter, [<=rows, n], with their gradients and
            states. The same parameters have a gradient on all ranks.
        masters: by these rows; a DTensor is sharded, any other tensor is whole.

    Raises:
        RuntimeError: a parameter is complex.
    """
    matrices = [
        _prepared(optimizer, rows, masters[rows], group)
        for group in optimizer.param_groups
        for rows in group["params"]
        if rows.grad is not None
    ]
    sharded = [m for m in matrices if isinstance(masters[m.rows], DTensor)]
    for matrix in matrices:
        if not isinstance(masters[matrix.rows], DTensor):
            matrix.update = _orthogonal(matrix.update, matrix.group)
    if sharded:
        master = masters[sharded[0].rows]
        assert isinstance(master, DTensor)
        _share(sharded, master.device_mesh.get_group())
    for matrix in matrices:
        group = matrix.group
        lr = group["lr"].item() if isinstance(group["lr"], Tensor) else group["lr"]
        matrix.rows.mul_(1 - lr * group["weight_decay"])
        rate = torch_muon._adjust_lr(lr, group["adjust_lr_fn"], torch.Size(matrix.size))
        matrix.rows.add_(matrix.update, alpha=-rate)


def _prepared(optimizer: Optimizer, rows: Tensor, master: Tensor, group: Mapping[str, Any]) -> _Matrix:
    if torch.is_complex(rows):
        raise RuntimeError("Muon does not support complex parameters")
    grad, state = rows.grad, optimizer.state[rows]
    assert grad is not None
    if _MOMENTUM not in state:
        state[_MOMENTUM] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    momentum = state[_MOMENTUM]
    momentum.lerp_(grad, 1 - group["momentum"])
    update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    m, n = master.shape
    return _Matrix(rows, (m, n), update.to(torch.bfloat16), group)


def _orthogonal(whole: Tensor, group: Mapping[str, Any]) -> Tensor:  # [m, n] -> [m, n], bfloat16; it writes to `whole`
    return torch_muon._zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _share(matrices: Sequence[_Matrix], group: dist.ProcessGroup) -> None:
    """Orthogonalises matrices, each on one rank, of which each rank of ``group`` has its rows; collective.

    The results take the place of the matrices' ``update``.
    """
    world, here = dist.get_world_size(group), dist.get_rank(group)
    chosen = owners([matrix.cost for matrix in matrices], world)
    of_rank = [[m for m, owner in zip(matrices, chosen, strict=True) if owner == rank] for rank in range(world)]
    mine, like = of_rank[here], matrices[0].update.new_empty(0)
    came = _exchange(
        [[matrix.update for matrix in theirs] for theirs in of_rank],
        [
            [(Shard.local_shard_size_and_offset(matrix.size[0], world, rank)[0], matrix.size[1]) for matrix in mine]
            for rank in range(world)
        ],
        group,
        like,
    )
    results = []
    for number, matrix in enumerate(mine):
        whole = torch.cat([parts[number] for parts in came])
        results.append(_orthogonal(whole, matrix.group))
    del came
    back = _exchange(
        [[rows_of(whole, world, rank) for whole in results] for rank in range(world)],
        [[tuple(matrix.rows.shape) for matrix in theirs] for theirs in of_rank],
        group,
        like,
    )
    for theirs, parts in zip(of_rank, back, strict=True):
        for matrix, part in zip(theirs, parts, strict=True):
            matrix.update = part


def _exchange(
    sent: Sequence[Sequence[Tensor]],
    sizes: Sequence[Sequence[tuple[int, ...]]],
    group: dist.ProcessGroup,
    like: Tensor,
) -> list[list[Tensor]]:
    """Sends each rank its tensors, and receives this rank's; one collective.

    Args:
        sent: by rank, the tensors that go there, in bfloat16.
        sizes: by rank, those of the tensors that come from there.
        group: of these ranks; one rank alone communicates nothing.
        like: a tensor without elements, of the same dtype and device.

    Returns:
        By rank, the tensors that have come from there: views of one piece of memory.
    """
    if len(sent) == 1:
        return [list(sent[0])]
    numels = [[torch.Size(size).numel() for size in one] for one in sizes]
    outgoing = torch.cat([like, *(tensor.reshape(-1) for one in sent for tensor in one)])
    incoming = like.new_empty(sum(map(sum, numels)))
    dist.all_to_all_single(
        incoming.view(torch.uint8),  # gloo knows no bfloat16 here
        outgoing.view(torch.uint8),
        [2 * sum(one) for one in numels],
        [2 * sum(tensor.numel() for tensor in one) for one in sent],
        group=group,
    )
    parts = iter(torch.split(incoming, [n for one in numels for n in one]))
    return [[next(parts).view(size) for size in one] for one in sizes]
