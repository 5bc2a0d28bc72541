"""The process groups of one sharded model."""

from __future__ import annotations

import functools
import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_zerocompile.config import REPLICATE, SHARD, Config


@dataclass(frozen=True)
class Groups:
    """The process groups of a model's ranks. See [Note: two groups], and [Note: replicas] in csrc/registry.h.

    [Note: two groups] Gathers and reductions overlap, and their relative order may differ between ranks, so each of the
    two has a process group. On devices, if one shard group has all ranks, gathers use the default group, which costs no
    further communicator. gloo does not share a group well
    with the user's collectives (see [Note: gloo gathers]), so on the CPU both groups are our own. There the ranks meet
    in a third group.

    Attributes:
        shards: the shard group, one dimension of W ranks: masters are sharded over it. See [Note: lasting mesh].
        gathers: the gathers' group, of the shard group's ranks.
        reductions: the reductions' group, of the shard group's ranks; on the CPU it is of all ranks.
        replicas: a group of the R ranks that hold the same rows as this one; None: no other rank holds them, or
            ``reductions`` is of all ranks.
        everyone: a group of all ranks, used between forwards only.
        meetings: a group of all ranks; None on devices, where there are no meetings.
        inner: the group of the inner group's ranks, in which this rank gathers from secondary shards, see
            [Note: secondary shards] in csrc/secondary.cpp; None: there are no such shards.
        own: the groups that :meth:`destroy` destroys.
        spans_hosts: whether a shard group has ranks on several hosts, and whether an inner group has.
    """

    shards: DeviceMesh
    gathers: dist.ProcessGroup
    reductions: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    everyone: dist.ProcessGroup
    meetings: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None
    own: tuple[dist.ProcessGroup, ...]
    spans_hosts: tuple[bool, bool]

    @classmethod
    def make(
        cls,
        device: torch.device,
        backend: str,
        timeout: timedelta,
        rows: list[list[int]],
        inner: int | None = None,
        nodes: int = 1,
    ) -> Groups:
        """Makes the groups; collective over the default process group.

        Args:
            device: this rank's device.
            backend: the groups' backend.
            timeout: the timeout of their collectives.
            rows: the ranks of each shard group, from :func:`shard_groups`.
            inner: the number of ranks of an inner group, from :func:`inner_size`; None: there are no inner groups.
            nodes: number of hosts.
        """
        world, on_cpu = dist.get_world_size(), device.type == "cpu"
        keep_garbage_in_forks()

        def new(partition: list[list[int]] | None = None) -> dist.ProcessGroup:
            return new_group(partition or [list(range(world))], backend, timeout)

        parts = [row[at : at + inner] for row in rows for at in range(0, len(row), inner)] if inner else None
        inside = new(parts) if parts else None
        spans = _any_spans_hosts(rows, nodes), _any_spans_hosts(parts or [], nodes)
        one = len(rows) == 1
        if one:
            shards = init_device_mesh(device.type, (world,), mesh_dim_names=(SHARD,))
        else:
            held = _lasting_group(rows, backend, timeout)
            shards = DeviceMesh.from_group(held, device.type, mesh_dim_names=(SHARD,))
        meetings = new() if on_cpu else None
        gathers = new(rows) if on_cpu else shards.get_group()
        reductions = new() if on_cpu or one else new(rows)
        alike = None if on_cpu or one else new([list(ranks) for ranks in zip(*rows, strict=True)])
        everyone = reductions if alike is None else new()
        mine = [meetings, gathers if on_cpu else None, reductions, alike, inside]
        mine += [] if everyone is reductions else [everyone]
        return cls(
            shards=shards,
            gathers=gathers,
            reductions=reductions,
            replicas=alike,
            everyone=everyone,
            meetings=meetings,
            inner=inside,
            own=tuple(group for group in mine if group is not None),
            spans_hosts=spans,
        )

    def connect(self, device: torch.device) -> None:
        """Lets NCCL connect the ranks: it does so at a group's first use, and blocks the host. All ranks must call."""
        if device.type != "cpu":
            for group in (self.reductions, self.replicas, self.inner):
                if group is not None:
                    dist.all_reduce(torch.zeros(1, device=device), group=group)

    def destroy(self) -> None:
        """Destroys the groups in ``own``; none of their collectives may be in flight."""
        for group in self.own:
            dist.destroy_process_group(group)


@functools.cache
def keep_garbage_in_forks() -> None:
    """From now on no forked child frees in a garbage collection what this process has left.

    [Note: forks] A group's last references can be in a reference cycle: after a run the engine is one. A forked child
    (a worker of a DataLoader) inherits it. If Python collected that garbage there, the group's destructor would join
    threads that the child does not have, and the child would crash. So what exists at a fork is never collected in the
    child (see ``gc.freeze``). This is once for the process, and cannot be undone.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _lasting_group(partition: list[list[int]], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """The group of DTensors that are sharded by this partition: a later model of the same process gets the same group.

    [Note: lasting mesh] torch caches the layout and the mesh of an operator's result on DTensors, and the cache's key
    has only the mesh's ranks. So results of one model's DTensors may communicate in the group of an earlier model,
    which therefore must still exist. The group is found among torch's own groups by its description, and it is
    destroyed when all of these are.
    """
    description = f"zerocompile: {partition}"
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc == description:
            return group
    return new_group(partition, backend, timeout, description)


def new_group(
    partition: list[list[int]], backend: str, timeout: timedelta, description: str | None = None
) -> dist.ProcessGroup:
    """Makes a group for each part of the ranks, and returns this rank's group. All ranks must call.

    Args:
        partition: the ranks of each part.
        backend: the groups' backend.
        timeout: the timeout of their collectives.
        description: the groups' ``group_desc``; None: torch's.

    Raises:
        ValueError: this rank is in no part.
    """
    mine, found = dist.get_rank(), None
    for ranks in partition:
        group: dist.ProcessGroup = dist.new_group(ranks, timeout, backend, group_desc=description)
        found = group if mine in ranks else found
    if found is None:
        raise ValueError(f"rank {mine} is in no part of {partition}")
    return found


def default_group_position() -> int:
    """How many collectives of the default process group this rank has started; -1 if the backend does not say."""
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())  # missing in torch's stubs
    except (RuntimeError, ValueError, AttributeError):
        return -1


def replicas_of(config: Config, nodes: int, ranks: int) -> int:
    """The number of replicas, R, from the option ``device_mesh``.

    Args:
        config: the options.
        nodes: number of hosts.
        ranks: number of all ranks.

    Raises:
        ValueError: R does not divide the number of ranks, or the mesh is not of all ranks.
    """
    mesh = config.device_mesh
    if isinstance(mesh, int | str):
        replicas = nodes if isinstance(mesh, str) else mesh
        if ranks % replicas:
            what = f"the {nodes} nodes" if mesh == "nodes" else f"{replicas}"
            raise ValueError(
                f"`device_mesh={mesh!r}`: {ranks} ranks cannot be divided by {what}. Each replica of the model is "
                "sharded over the same number of ranks; choose a divisor of their number."
            )
        return replicas
    if isinstance(mesh, tuple):
        sizes = dict(zip((REPLICATE, SHARD), mesh, strict=True))
    else:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    replicas, shards = sizes.get(REPLICATE, 1), sizes[SHARD]
    if replicas * shards != ranks:
        raise ValueError(
            f"`device_mesh={mesh!r}` has {replicas} x {shards} ranks ({REPLICATE} x {SHARD}), and there are {ranks}. "
            "Pass a mesh of all ranks, not a part of one."
        )
    return replicas


def shard_groups(config: Config, nodes: int, device_type: str) -> list[list[int]]:
    """The ranks of each shard group. Ranks at the same place of their groups hold the same rows. No communication.

    Args:
        config: the options.
        nodes: number of hosts.
        device_type: type of the ranks' devices, such as "cuda".

    Returns:
        R lists of W global ranks each, rising.

    Raises:
        ValueError: the options do not fit the ranks; the message says what to do.
    """
    ranks, mesh = dist.get_world_size(), config.device_mesh
    replicas = replicas_of(config, nodes, ranks)
    shards = ranks // replicas
    if not isinstance(mesh, DeviceMesh):
        return [list(range(first, first + shards)) for first in range(0, ranks, shards)]
    if mesh.device_type != device_type:
        raise ValueError(
            f"`device_mesh={mesh!r}` is of devices {mesh.device_type!r}, and the ranks run on {device_type!r}: make it "
            f"by init_device_mesh({device_type!r}, ...)."
        )
    places = mesh.mesh if (mesh.mesh_dim_names or ())[-1] == SHARD else mesh.mesh.t()
    rows: list[list[int]] = places.reshape(replicas, shards).tolist()
    if sorted(rank for row in rows for rank in row) != list(range(ranks)) or any(row != sorted(row) for row in rows):
        raise ValueError(
            f"`device_mesh={mesh!r}` has the ranks {rows} ({REPLICATE} x {SHARD}). Each of the {ranks} ranks must be "
            f"in it once, and the ranks along {SHARD!r} in rising order, as init_device_mesh places them."
        )
    return rows


def _by_host(ranks: list[int], nodes: int) -> list[list[int]]:
    """The rising ``ranks``, by host, if every host has as many of all ranks."""
    ranks_of_host = max(1, dist.get_world_size() // nodes)
    return [list(part) for _, part in groupby(ranks, lambda rank: rank // ranks_of_host)]


def _any_spans_hosts(partition: list[list[int]], nodes: int) -> bool:
    """Whether a part has ranks on several of the ``nodes``: alike on all ranks."""
    return any(len(_by_host(ranks, nodes)) > 1 for ranks in partition)


def inner_size(wanted: int | Literal["nodes"], nodes: int, rows: list[list[int]]) -> int | None:
    """H, the number of ranks of an inner group, from the option ``reshard_after_forward``.

    Args:
        wanted: the option. ``True`` means no inner groups, and "nodes" one for each host's part of a shard group.
        nodes: number of hosts.
        rows: the ranks of each shard group.

    Returns:
        The number; None: there are no inner groups. With "nodes" this is so where nothing would be gained, because each
        shard group is inside one host, or has one rank on each host.

    Raises:
        ValueError: the number is not a divisor of W that is smaller than W, or hosts hold parts of a shard group that
            differ in size.
    """
    if wanted is True:
        return None
    shards = len(rows[0])
    if wanted != "nodes":
        if wanted >= shards or shards % wanted:
            raise ValueError(
                f"`reshard_after_forward={wanted}`: parameters are sharded over {shards} rank{'s' * (shards != 1)}, "
                f"and the backward is to gather inside a part of {wanted} of them. Choose a divisor of {shards} "
                "that is smaller, as a rule the number of ranks of a host, or True."
            )
        return wanted
    sizes = {len(part) for row in rows for part in _by_host(row, nodes)}
    if len(sizes) > 1:
        raise ValueError(
            f"`reshard_after_forward='nodes'`: hosts hold parts of {min(sizes)} to {max(sizes)} ranks of a shard "
            "group. Give each host as many, or choose True."
        )
    size = sizes.pop()
    return size if 1 < size < shards else None
