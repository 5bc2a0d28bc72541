"""On GPUs: updates run beside the backward, on a stream of their own, and nobody reads what they have not written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.optim.by_unit import UnitStepper
from tests.support import engines, models
from tests.support.harness import Worlds
from tests.support.memory import Stack

pytestmark = pytest.mark.gpu
WIDTH, BLOCKS, ROWS, STEPS = 1024, 12, 256, 6


def _trained(stage: int, scope: Any, fused: bool, in_backward: bool) -> tuple[list[Tensor], int, int]:
    """The whole parameters on the CPU, how many units a backward has updated, and on how many streams."""
    torch.manual_seed(0)
    model, streams = Stack(WIDTH, BLOCKS), set()
    update = UnitStepper.update_now

    def noted(*args: Any, **kwargs: Any) -> list[int]:
        streams.add(torch.cuda.current_stream().cuda_stream)
        return update(*args, **kwargs)

    options = {"compile": scope, "compile_options": {"backend": "inductor"}, "optimizer_in_backward": in_backward}
    with engines.engine(model, stage, **options) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitStepper, "update_now", noted)
        kind: Any = torch.optim.AdamW if fused else torch.optim.SGD
        arguments = {"lr": 1e-3, "eps": 1e-3, "fused": True} if fused else {"lr": 0.5, "momentum": 0.9}
        optimizer = kind(model.parameters(), **arguments)
        engine.attach_optimizers([optimizer])
        generator = torch.Generator("cuda").manual_seed(models.rank())
        for _ in range(STEPS):
            x = torch.randn(ROWS, WIDTH, device="cuda", generator=generator)
            with engine.training_step():
                engines.backward(engine, model(x).square().mean())
            engine.step(optimizer, lambda: None)
        torch.cuda.synchronize()
        updated = engine.runtime.updated_in_backward
    return [p.detach().cpu() for p in model.parameters()], updated, len(streams)


@pytest.mark.parametrize(
    ("stage", "scope", "fused"), [(1, "blocks", True), (2, False, False), (3, False, True), (3, "blocks", False)]
)
def test_nobody_reads_what_is_not_written(worlds: Worlds, stage: int, scope: Any, fused: bool) -> None:
    """No host waits between these steps: a read on a wrong stream would see old rows, or memory that is used again."""
    plain = worlds(2).run(_trained, stage, scope, fused, False, timeout=300)
    for (expected, none, _), (seen, updated, streams) in zip(
        plain, worlds(2).run(_trained, stage, scope, fused, True, timeout=300), strict=True
    ):
        assert none == 0 and updated >= (STEPS - 1) * (BLOCKS - 2)
        assert streams == 2  # beside the backward, and where it ends
        start = nn.Module.parameters(_start())
        assert max((a - b).abs().max().item() for a, b in zip(expected, start, strict=True)) > 1e-3
        for one, two in zip(expected, seen, strict=True):
            torch.testing.assert_close(two, one, rtol=0, atol=1e-6)


def _start() -> nn.Module:
    torch.manual_seed(0)
    return Stack(WIDTH, BLOCKS)
