"""A sharded module computes what the plain one does, without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import architectures, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

RARE = ("batchnorms", "recurrent", "weightnorms")  # inference is theirs as training is


class Validates(architectures.Net):
    """Keeps the outputs of its validation, with and without gradients enabled inside it."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert not self.model.training
        self.outputs = self.model(batch).detach().cpu()
        with torch.inference_mode(False), torch.enable_grad():
            self.with_grad = self.model(batch.clone()).detach().cpu()

    def on_validation_end(self) -> None:
        state = dcp.get_model_state_dict(self, options=dcp.StateDictOptions(full_state_dict=True))
        self.seen = {n: architectures.whole(v) for n, v in state.items()}
        self.validations = getattr(self, "validations", 0) + 1

    def val_dataloader(self) -> architectures.Floats:
        return architectures.Floats(models.rank())


@pytest.mark.parametrize(("stage", "options"), [(3, EAGER), (3, AOT), pytest.param(1, EAGER, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "architecture",
    ["attention", *(pytest.param(a, marks=pytest.mark.long) for a in ("transformer", *RARE))],
)
@on_ranks()
def test_inference_equals_plain_module(architecture: str, stage: int, options: dict[str, Any]) -> None:
    """Validation (the fast path of attention included) computes what the plain module computes, in either mode."""
    module = Validates(architectures.ARCHITECTURES[architecture])
    arguments: dict[str, Any] = {"inference_mode": stage == 3, "val_check_interval": 1}
    arguments |= {"num_sanity_val_steps": 1, "limit_val_batches": 1}
    architectures.fit(module, ZeroCompileStrategy(stage=stage, **options), steps=2, limit_train_batches=2, **arguments)
    assert module.validations == 3  # the sanity check and one after each step
    module.load_state_dict(module.seen)
    module.to(models.device()).eval()
    with torch.no_grad():
        expected = module.model(architectures.Floats(models.rank())[0].to(models.device())).cpu()
    assert max((output - expected).abs().max() for output in (module.outputs, module.with_grad)) <= 1e-6
