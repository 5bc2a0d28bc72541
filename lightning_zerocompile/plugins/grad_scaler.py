"""Dynamic loss scaling for gradients of which each rank holds a part."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class ShardedGradScaler(GradScaler):
    """torch's GradScaler; all ranks take or skip a step together, whichever rank's shard overflowed.

    [Note: one decision] Only the rank that owns a row sees an overflow in it; an overflow in a replicated 0-dim
    gradient is seen by all. Each rank checks its local shards, and the verdicts are reduced by maximum once per
    optimizer. (DTensor's own handler reduces only if the first gradient of the list is sharded.) Gradients may be
    float16: they are if the optimizer's values are.
    """

    @classmethod
    def like(cls, scaler: GradScaler) -> ShardedGradScaler:
        """A scaler with the settings and the current scale of ``scaler``.

        Raises:
            MisconfigurationException: ``scaler`` is of a class whose rules are not torch's.
        """
        if isinstance(scaler, cls):
            return scaler
        if type(scaler) not in (GradScaler, torch.cuda.amp.GradScaler):
            raise MisconfigurationException(
                f"The scaler `{type(scaler).__name__}` checks gradients in its own way, which knows nothing of shards. "
                "Pass a torch.amp.GradScaler, or derive yours from "
                "lightning_zerocompile.plugins.grad_scaler.ShardedGradScaler."
            )
        if not scaler.is_enabled():
            return cls(device=scaler._device, enabled=False)
        made = cls(
            device=scaler._device,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )
        made._init_growth_tracker = scaler._get_growth_tracker()
        return made

    def skips(self, optimizer: Optimizer) -> bool:
        """Whether some rank found an overflow when the optimizer's gradients were unscaled; the same on all ranks."""
        found: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(value.item() > 0 for value in found.values())

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        group: dist.ProcessGroup | None = None
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for parameter in (p for param_group in optimizer.param_groups for p in param_group["params"]):
            grad = parameter.grad
            if isinstance(grad, DTensor):
                group, grad = grad.device_mesh.get_group(), grad._local_tensor
            if grad is not None and grad.numel() > 0:
                grad = torch.view_as_real(grad) if grad.is_complex() else grad
                by_dtype[grad.dtype].append(grad)
        for grads in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)  # ranks agree already which grads are None
        return {found_inf.device: found_inf}
