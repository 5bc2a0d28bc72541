"""A barrier of mapped memory that another rank never comes to can be ended on this rank alone."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_zerocompile.ranks.messages import Messages
from lightning_zerocompile.runtime.peer_memory import BarrierRelease, map_buffer
from tests.support import models
from tests.support.harness import Worlds

pytestmark = pytest.mark.gpu
_BARRIERS = 20


def _wait_alone(others_copy: bool) -> tuple[float, float]:
    """Seconds for which rank 1 stood in its barriers until it was released, and seconds for which it was released."""
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",))
    messages = Messages("cuda", f"release/{others_copy}", timedelta(seconds=30))
    buffer = map_buffer(mesh, device, messages, True, 2**20, "gathers")
    assert buffer is not None
    release, symmetric = (
        BarrierRelease(buffer, mesh),
        torch.distributed._symmetric_memory.rendezvous(buffer, mesh.get_group()),
    )
    pinned, end = torch.ones(2**20).pin_memory(), torch.cuda.Event()
    torch.cuda.synchronize()
    dist.barrier()
    stood = released = 0.0
    if models.rank() == 1:
        start = time.monotonic()
        for _ in range(_BARRIERS):
            symmetric.barrier(0, 60_000)
            if others_copy:  # they stand in the queues of the copy engines, after the barrier
                pinned.to(device, non_blocking=True).to("cpu", non_blocking=True)
        end.record()
        time.sleep(1.0)
        assert not end.query()
        stood = time.monotonic() - start
        while not end.query() and time.monotonic() - start < 20.0:
            release()
            time.sleep(1e-3)
        assert end.query()
        released = time.monotonic() - start - stood
    messages.exchange("done", "")
    torch.cuda.synchronize()
    return stood, released


@pytest.mark.parametrize("others_copy", [False, True])
def test_a_rank_alone_in_barriers_is_released(worlds: Worlds, others_copy: bool) -> None:
    (_, none), (stood, released) = worlds.fresh(2).run(_wait_alone, others_copy, timeout=60)
    assert none == 0.0
    assert stood >= 1.0 and released < 10.0
