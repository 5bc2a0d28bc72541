"""How long a step takes, from rates: compute, communication, the host, and the optimizer's update.

[Note: predicted seconds] Communication runs beside the compute of the same phase, so a phase takes the longer of the
two. Nothing hides the first gather, and the reduction of the unit that the forward uses first, which is reduced last.
What the strategy's own kernels read and write is a part of the compute, since they need the multiprocessors: they place
the rows that a gather reads, and sum gradients.
Forward and backward together take at least the time in which the host issues them, where that was measured. The
optimizer's update comes after them. It is as fast as the device's memory, the host or (with ``offload``) the link to
host memory allows, and values that live for a step are gathered beside it. Matrix products of an update (Muon's) take
as long as those of the model. With ``optimizer_in_backward`` the update, and what it copies over the link, run beside
the backward.

A gather or a reduction over n ranks on N hosts moves (n - 1)/n of its bytes into and out of each rank. It goes round a
ring of n - 1 steps, N - 1 of them from host to host, and each step costs the latency of its link. With hundreds of
ranks these steps cost more than the bytes. Each rank of a host sends a part of what leaves the host through its own
network card, so the bytes take as long as the slower of the links inside a host, and all its cards together. The rows
that a reduction leaves are then reduced over R replicas (see [Note: replicas] in csrc/registry.h): that moves 2 (R -
1)/R of their bytes, and takes 2 log2(R) steps, in a tree. NCCL chooses its algorithms by this model (its
src/graph/tuning.cc). Where each replica is inside a host, replicas use another link than the ranks of one, so the two
run beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.memory import Memory, Traffic, UnitBytes
from lightning_zerocompile.plan.timing import STRATEGY
from lightning_zerocompile.plan.trace import Trace


@dataclass(frozen=True)
class Ranks:
    """Who communicates.

    Attributes:
        shards: ranks of one replica.
        replicas: their number.
        inner: ranks that gather in the backward among themselves, inside a host; ``None``: a whole replica does.
    """

    shards: int
    replicas: int = 1
    inner: int | None = None


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        total: of all.
        exposed: in which only communication runs.
    """

    total: float
    exposed: float


@dataclass(frozen=True)
class _Group:
    """Ranks that communicate, one or more on each of ``hosts``.

    ``bandwidth``: bytes a second of each rank between hosts, ``node_bandwidth`` inside one; ``inside``, ``across``:
    seconds of a step inside a host and between two.
    """

    ranks: int
    hosts: int
    bandwidth: float
    node_bandwidth: float
    inside: float
    across: float

    @property
    def _on_a_host(self) -> int:
        return max(1, self.ranks // self.hosts)

    @property
    def _rate(self) -> float:
        if self.hosts == 1:
            return self.node_bandwidth
        return min(self._on_a_host * self.bandwidth, self.node_bandwidth) if self._on_a_host > 1 else self.bandwidth

    def ring(self, size: int, count: int) -> float:
        """Seconds of ``count`` gathers, or reductions, of ``size`` bytes in all."""
        steps = (self.ranks - self.hosts) * self.inside + (self.hosts - 1) * self.across
        return size * (self.ranks - 1) / self.ranks / self._rate + count * steps

    def tree(self, size: int, count: int) -> float:
        """Seconds of ``count`` sums of ``size`` bytes in all, which every rank gets."""
        steps = 2 * math.ceil(math.log2(self.ranks)) * (self.across if self.hosts > 1 else self.inside)
        return 2 * size * (self.ranks - 1) / self.ranks / self._rate + count * steps


def _groups(machine: Machine, ranks: Ranks) -> tuple[_Group, _Group, _Group]:
    """The ranks of a replica, those of it that gather in the backward, and the replicas' holders of the same rows."""
    bandwidth = machine.bandwidth or math.inf  # a single rank sends nothing
    node_bandwidth = machine.node_bandwidth or bandwidth
    across = machine.latency or 0.0
    inside = machine.node_latency if machine.node_latency is not None else across

    per_node = machine.ranks_per_node
    in_host = bandwidth if per_node is None else node_bandwidth  # of ranks of which no host is known

    def group(size: int, hosts: int) -> _Group:
        return _Group(size, hosts, bandwidth, in_host, inside, across)

    hosts = 1 if per_node is None else math.ceil(ranks.shards / per_node)
    replica = group(ranks.shards, hosts)
    inner = replica if ranks.inner is None else _Group(ranks.inner, 1, bandwidth, node_bandwidth, inside, across)
    all_hosts = 1 if per_node is None else math.ceil(ranks.shards * ranks.replicas / per_node)
    return replica, inner, group(ranks.replicas, min(ranks.replicas, all_hosts))


def step_time(
    stage: int,
    trace: Trace | None,
    traffic: Traffic,
    memory: Memory,
    units: Sequence[UnitBytes],
    ranks: Ranks,
    *,
    accumulate: int,
    defers: bool,
    machine: Machine,
    in_backward: bool,
    update_flops: int,
) -> StepTime | None:
    """See [Note: predicted seconds]; ``None``: the batch or a rate is not known.

    Args:
        stage: of ZeRO.
        trace: of one forward and backward.
        traffic, memory: of a rank in one step, all backwards together.
        units: in order.
        ranks: who communicates.
        accumulate: backwards of the step.
        defers: whether gradients are reduced in the last of them only.
        machine: what each rank has.
        in_backward: whether units are updated beside the backward.
        update_flops: of the matrix products of the optimizers, of one rank.
    """
    alone = ranks.shards * ranks.replicas == 1
    if trace is None or machine.flops is None or (machine.bandwidth is None and not alone):
        return None
    computed = accumulate * trace.forward_flops / machine.flops, accumulate * trace.backward_flops / machine.flops
    sent = _Sent(0.0, 0.0, 0.0)
    if not alone:
        reductions = 1 if defers else accumulate
        sent = _communication(traffic, units, ranks, machine, reductions)
        kernels = _own_kernels(traffic, memory, units, ranks, machine, reductions)
        computed = computed[0] + kernels[0], computed[1] + kernels[1]
    # one direction at a time, so about half of what the link moves both ways
    moved = 2 * accumulate * trace.offloaded / machine.link if machine.link is not None else 0.0
    forward, back = max(computed[0], sent.forward, moved), max(computed[1], sent.backward, moved)
    exposed = forward - computed[0] + back - computed[1] + sent.ends
    issued = stepped = 0.0
    if machine.host is not None and machine.call is not None:  # see [Note: host of the strategy]
        calls, parameters = STRATEGY[stage], sum(len(unit.trainable) for unit in units)
        own = (calls.unit * len(units) + calls.parameter * parameters) * machine.call
        issued = accumulate * (machine.host + own)
        stepped = (calls.step + calls.stepped * parameters) * machine.call
    update, followed = update_flops / machine.flops, 0.0
    if machine.memory_bandwidth is not None:
        # it reads masters, states and gradients, and writes the first two; gathers read masters and write their rows
        owned = 2 * (memory.masters + memory.states) + memory.copied + sum(unit.reduced for unit in units)
        update += owned / machine.memory_bandwidth
        if memory.resident:
            followed = (memory.masters + memory.resident // ranks.shards) / machine.memory_bandwidth
    copied = memory.copied / machine.link if machine.link is not None else 0.0
    if in_backward:
        return StepTime(max(forward + max(back, update, copied) + sent.ends, issued + stepped) + followed, exposed)
    return StepTime(
        max(forward + back + sent.ends, issued) + max(update + followed, stepped, copied),
        exposed,
    )


def _own_kernels(
    traffic: Traffic,
    memory: Memory,
    units: Sequence[UnitBytes],
    ranks: Ranks,
    machine: Machine,
    reductions: int,
) -> tuple[float, float]:
    """Seconds of the strategy's own kernels in the forward and in the backward; what is gathered after the optimizer's
    update is not in them."""
    if machine.gloo or machine.memory_bandwidth is None:
        return 0.0, 0.0
    forward = 2 * (traffic.forward - memory.resident) // ranks.shards
    backward = 2 * traffic.backward // (ranks.inner or ranks.shards)
    backward += traffic.reductions + reductions * sum(unit.reduced for unit in units)
    return forward / machine.memory_bandwidth, backward / machine.memory_bandwidth


@dataclass(frozen=True)
class _Sent:
    """Seconds of communication in each phase, and of what nothing hides at its ends."""

    forward: float
    backward: float
    ends: float


def _communication(
    traffic: Traffic,
    units: Sequence[UnitBytes],
    ranks: Ranks,
    machine: Machine,
    reductions: int,
) -> _Sent:
    replica, inner, holders = _groups(machine, ranks)
    reduced = reductions * sum(unit.gradient > 0 for unit in units)
    forward = replica.ring(traffic.forward, traffic.step_gathers + traffic.forward_gathers)
    inside = inner.ring(traffic.backward, traffic.backward_gathers) + replica.ring(traffic.reductions, reduced)
    times = reductions if machine.gloo else 1  # on devices once in a step: [Note: partial reductions] in csrc
    share = traffic.reductions // reductions // ranks.shards
    across = holders.tree(times * share, times * reduced // reductions)
    ends = 0.0
    if units:
        first = units[0]
        ends = replica.ring(first.gathered, 1) + replica.ring(first.gradient, 1)
        ends += holders.tree(first.gradient // ranks.shards, 1)
    apart = holders.hosts > 1 and replica.hosts == 1
    return _Sent(forward, max(inside, across) if apart else inside + across, ends)
