"""The processes of a run: each one's device and rank, their process group, and what they exchange outside of steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_zerocompile.config import Config
from lightning_zerocompile.plugins.launcher import Launcher
from lightning_zerocompile.ranks.errors import phase
from lightning_zerocompile.ranks.messages import Messages


class ProcessStrategy(ParallelStrategy):
    """One process for each device; a failure of communication names the phase and the rank.

    Args:
        config: the strategy's options.
        process_group_backend: ``None``: NCCL on CUDA, gloo on the CPU.
        kwargs: those of Lightning's strategies.
    """

    def __init__(self, config: Config, process_group_backend: str | None, **kwargs: Any) -> None:
        self.config = config
        super().__init__(**kwargs)
        self._num_nodes = 1
        self._process_group_backend = process_group_backend

    @property
    def messages(self) -> Messages | None:
        """What this rank tells the others through the store while the model is sharded."""
        return None

    # ---- what Lightning asks before anything runs ----

    is_distributed = True  # Lightning injects samplers and synchronises logs for strategies that say so

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise RuntimeError("The strategy has no devices yet; it gets them from the Trainer.")
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is not None:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # ---- set-up ----

    @override
    def setup_environment(self) -> None:
        if self.root_device.type not in ("cpu", "cuda"):
            raise RuntimeError(
                f"`strategy='zerocompile'` runs on CPU (gloo) and CUDA (NCCL), not on {self.root_device.type!r}. Use "
                "accelerator='cpu' or accelerator='cuda'."
            )
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        if self._process_group_backend is None:
            self._process_group_backend = _get_default_process_group_backend_for_device(self.root_device)
        if self.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment; pass it to a Trainer before using it.")
        device_id = None if self.root_device.type == "cpu" else self.root_device
        _init_dist_connection(
            self.cluster_environment, self._process_group_backend, timeout=self.config.timeout, device_id=device_id
        )

    # ---- communication outside of steps ----

    @override
    @phase("a barrier")
    def barrier(self, name: str | None = None) -> None:
        if not _distributed_is_initialized():
            return
        device_ids = None if self.root_device.type == "cpu" else [self.root_device.index]
        dist.barrier(device_ids=device_ids)

    @override
    @phase("a broadcast")
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    @phase("all_gather")
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group, sync_grads)

    @override
    @phase("the reduction of a logged value or of a decision")
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean") -> Any:
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor
