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
rank with the least work so far.

A round has turns. In each turn a rank orthogonalises one matrix. The rows of all turns are sent at once, and those of a
result as soon as it is there. So while a device orthogonalises, the rows of later turns arrive and those of earlier
results leave. The cheapest matrices have the first turn and the last one, whose rows nothing else hides.

This module calls two private functions of torch, which another version may change. So an optimizer is updated in this
way only if, on two small matrices, it gives what Muon itself gives (:func:`can_share_matrices`). Else the optimizer
sees whole values on every rank, see [Note: whole values].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Muon, Optimizer
from torch.optim import _muon as torch_muon

from lightning_zerocompile.optim.supported import plain_step
from lightning_zerocompile.sharding.master import as_plain_tensors, gradient_of

_MOMENTUM = "momentum_buffer"  # Muon's only state


@dataclass(frozen=True, eq=False)
class _Matrix:
    """One parameter in a round.

    Attributes:
        rows: this rank's part of the parameter, [<=rows, n].
        size: of the whole matrix, (m, n).
        group: the optimizer's group of the parameter, with its options.
    """

    rows: Tensor
    size: tuple[int, int]
    group: Mapping[str, Any]

    @property
    def flops(self) -> int:
        return flops(self.size, self.group["ns_steps"])


def flops(size: Sequence[int], steps: int) -> int:
    """FLOPs that orthogonalise a matrix, in matrix products, a multiplication and an addition each counted.

    Args:
        size: of the matrix, (m, n).
        steps: of Newton-Schulz. Each multiplies the matrix, with its shorter side first, by its transpose, the square
            result by itself, and that by the matrix.
    """
    short, long = sorted(size)
    return steps * (4 * short**2 * long + 2 * short**3)


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


def flops_of_a_step(units: Sequence[Sequence[int]], ranks: int) -> int:
    """FLOPs of the rank that has the most in each round, over all rounds: the ranks meet in each of them.

    Args:
        units: the FLOPs of the matrices of each unit.
        ranks: how many share them.
    """
    total = 0
    for first in range(0, len(units), ranks):
        costs = [cost for unit in units[first : first + ranks] for cost in unit]
        loads = [0] * ranks
        for cost, rank in zip(costs, owners(costs, ranks), strict=True):
            loads[rank] += cost
        total += max(loads)
    return total


def shares_matrices(optimizer: Optimizer) -> bool:
    """Whether the optimizer is updated in this way, see [Note: Muon].

    Without Nesterov's step torch's Muon orthogonalises the momentum itself. If that is in bfloat16, as its gradient is,
    Newton-Schulz writes to it, which :func:`step` does not do where it is sharded. An optimizer with such a parameter
    is updated in torch's own way.
    """
    if type(optimizer) is not Muon or not inspect.isfunction(Muon.step):
        return False
    plain = [group["params"] for group in optimizer.param_groups if not group["nesterov"]]
    return not any(_is_half(optimizer, p) for parameters in plain for p in parameters) and can_share_matrices()


def _is_half(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the momentum is in bfloat16, or will be. It is made with the dtype of the first gradient."""
    kept = optimizer.state.get(parameter, {}).get(_MOMENTUM)
    if kept is None:
        with as_plain_tensors():
            kept = gradient_of(parameter)
    return (parameter if kept is None else kept).dtype is torch.bfloat16


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
def step(optimizer: Optimizer, masters: Mapping[Tensor, Tensor], begins: Callable[[], object] = lambda: None) -> None:
    """A step of Muon on this rank's rows; collective over the shard group if a parameter is sharded.

    Args:
        optimizer: a Muon. Its groups hold this rank's rows of each parameter, [<=rows, n], with their gradients and
            states. The same parameters have a gradient on all ranks.
        masters: by these rows; a DTensor is sharded, any other tensor is whole.
        begins: called before rows travel. If an exception leaves this function after that, ranks may have exchanged
            different rows, so they must not exchange others.

    Raises:
        RuntimeError: a parameter is complex.
        ValueError: torch's own, of options of a group that Newton-Schulz does not take; on every rank.
    """
    matrices = [
        _Matrix(rows, (masters[rows].shape[0], masters[rows].shape[1]), group)
        for group in optimizer.param_groups
        for rows in group["params"]
        if rows.grad is not None
    ]
    if any(torch.is_complex(matrix.rows) for matrix in matrices):
        raise RuntimeError("Muon does not support complex parameters")
    for group in optimizer.param_groups:
        _check_options(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
    by_ranks = _by_ranks(matrices, masters)
    if any(ranks is not None for ranks in by_ranks):
        begins()
    for ranks, theirs in by_ranks.items():
        for matrix, result in _share(optimizer, theirs, ranks) if ranks is not None else _alone(optimizer, theirs):
            _write(matrix, result)


@cache
def _check_options(coefficients: Any, steps: int, eps: float) -> None:
    """Raises what torch would raise, on the owners of matrices alone."""
    torch_muon._zeropower_via_newtonschulz(
        torch.zeros(1, 1, dtype=torch.bfloat16, device="cpu"), coefficients, steps, eps
    )


def _by_ranks(
    matrices: Sequence[_Matrix], masters: Mapping[Tensor, Tensor]
) -> dict[dist.ProcessGroup | None, list[_Matrix]]:
    """The matrices by the group that shares them; ``None``: this rank has all of their rows."""
    found: dict[dist.ProcessGroup | None, list[_Matrix]] = {}
    for matrix in matrices:
        master = masters[matrix.rows]
        mesh = master.device_mesh if isinstance(master, DTensor) else None
        found.setdefault(mesh.get_group() if mesh is not None and mesh.size() > 1 else None, []).append(matrix)
    return found


def _update(optimizer: Optimizer, matrix: _Matrix) -> Tensor:
    """Updates the momentum. Returns this rank's rows of what is orthogonalised, [<=rows, n] in the gradient's dtype."""
    grad, state, group = matrix.rows.grad, optimizer.state[matrix.rows], matrix.group
    assert grad is not None
    if _MOMENTUM not in state:
        state[_MOMENTUM] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    momentum: Tensor = state[_MOMENTUM]
    momentum.lerp_(grad, 1 - group["momentum"])
    return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _write(matrix: _Matrix, result: Tensor) -> None:
    """Writes this rank's rows.

    Args:
        result: these rows of the orthogonalised matrix, [<=rows, n] in bfloat16.
    """
    group = matrix.group
    lr = group["lr"].item() if isinstance(group["lr"], Tensor) else group["lr"]
    matrix.rows.mul_(1 - lr * group["weight_decay"])
    rate = torch_muon._adjust_lr(lr, group["adjust_lr_fn"], torch.Size(matrix.size))
    matrix.rows.add_(result, alpha=-rate)


def _orthogonal(whole: Tensor, group: Mapping[str, Any]) -> Tensor:  # [m, n] -> [m, n], bfloat16; it writes to `whole`
    return torch_muon._zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _alone(optimizer: Optimizer, matrices: Sequence[_Matrix]) -> Iterator[tuple[_Matrix, Tensor]]:
    """Yields each matrix, of which this rank has all rows, and the result."""
    for matrix in matrices:
        yield matrix, _orthogonal(_update(optimizer, matrix).to(torch.bfloat16), matrix.group)


def _share(
    optimizer: Optimizer, matrices: Sequence[_Matrix], group: dist.ProcessGroup
) -> Iterator[tuple[_Matrix, Tensor]]:
    """Orthogonalises matrices, each on one rank, of which each rank of ``group`` has its rows; collective.

    Yields:
        Each matrix and this rank's rows of the result, a turn after the turn in which it was orthogonalised.
    """
    world, here = dist.get_world_size(group), dist.get_rank(group)
    chosen = owners([matrix.flops for matrix in matrices], world)
    turns = [
        _Turn(optimizer, of_rank, here, group)
        for of_rank in _in_turns(
            [[m for m, owner in zip(matrices, chosen, strict=True) if owner == rank] for rank in range(world)]
        )
    ]
    for turn, former in zip(turns, [None, *turns[:-1]], strict=True):
        turn.orthogonalise()
        if former is not None:
            yield from former.results()
    yield from turns[-1].results()


def _in_turns(of_rank: Sequence[Sequence[_Matrix]]) -> list[list[_Matrix | None]]:
    """By turn and rank, the matrix of that rank, if it still has one.

    Args:
        of_rank: by rank, all of its matrices.
    """
    cheapest_first = [sorted(mine, key=attrgetter("flops")) for mine in of_rank]
    return list(map(list, zip_longest(*(mine[1:] + mine[:1] for mine in cheapest_first))))


class _Turn:
    """Each rank orthogonalises one matrix, or none. The rows are on their way when this is made.

    Args:
        optimizer: whose momenta and gradients count.
        of_rank: by rank, the matrix that it orthogonalises.
        here: this rank.
        group: of these ranks.
    """

    def __init__(
        self, optimizer: Optimizer, of_rank: Sequence[_Matrix | None], here: int, group: dist.ProcessGroup
    ) -> None:
        self._matrices = [matrix for matrix in of_rank if matrix is not None]
        self._mine, self._group = of_rank[here], group
        self._theirs = [0 if matrix is None else matrix.rows.numel() for matrix in of_rank]
        self._own = [0] * len(of_rank)
        if self._mine is not None:
            m, n = self._mine.size
            self._own = [
                Shard.local_shard_size_and_offset(m, len(of_rank), rank)[0] * n for rank in range(len(of_rank))
            ]
        outgoing = torch.empty(sum(self._theirs), dtype=torch.bfloat16, device=self._matrices[0].rows.device)
        for matrix, part in zip(self._matrices, self._parts(outgoing), strict=True):
            part.copy_(_update(optimizer, matrix))
        self._exchange = _Exchange(outgoing, self._theirs, self._own, group)

    def orthogonalise(self) -> None:
        """Orthogonalises this rank's matrix, and sends each rank its rows of the result."""
        whole = self._exchange.wait()  # the rows of one rank after those of another
        if self._mine is not None:
            whole = _orthogonal(whole.view(self._mine.size), self._mine.group)
        self._exchange = _Exchange(whole.reshape(-1), self._own, self._theirs, self._group)

    def results(self) -> Iterator[tuple[_Matrix, Tensor]]:
        """Yields each matrix and this rank's rows of the result, [<=rows, n] in bfloat16; the turn is over then."""
        came = self._exchange.wait()
        del self._exchange
        yield from zip(self._matrices, self._parts(came), strict=True)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Views of what has an element for each of this rank's rows of the matrices."""
        parts = torch.split(flat, [matrix.rows.numel() for matrix in self._matrices])
        return [part.view(matrix.rows.shape) for matrix, part in zip(self._matrices, parts, strict=True)]


class _Exchange:
    """Sends each rank its part of a tensor, and receives this rank's; one collective, which runs until :meth:`wait`.

    Args:
        outgoing: [sum of ``sent``] in bfloat16; nobody may write to it before :meth:`wait` returns.
        sent: elements that go to each rank.
        received: elements that come from each rank.
        group: of these ranks.
    """

    def __init__(
        self, outgoing: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._incoming, self._outgoing = outgoing.new_empty(sum(received)), outgoing
        self._work = dist.all_to_all_single(
            self._incoming.view(torch.uint8),  # gloo knows no bfloat16 here
            outgoing.view(torch.uint8),
            [2 * numel for numel in received],
            [2 * numel for numel in sent],
            group=group,
            async_op=True,
        )

    def wait(self) -> Tensor:
        """What has come, [sum of ``received``] in bfloat16. On a device the current stream waits, not the host."""
        self._work.wait()
        del self._outgoing
        return self._incoming
