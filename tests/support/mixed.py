"""An engine under autocast, which gathers in the low dtype what is low anyway, and how many bytes it gathers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.sharding.autocast import forward_of
from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.module_swap import REGION
from tests.support import engines, models
from tests.support.memory import padded
from tests.support.precisions import BF16

MIXED = "rank 0 compiled, rank 1 eager"


@contextmanager
def engine(model: nn.Module, stage: int = 3, dtype: torch.dtype = BF16, **options: Any) -> Iterator[Engine]:
    mixed = options.get("compile") == MIXED
    if mixed:
        options["compile"] = "blocks"
    config = Config(stage=stage, **({"compile_options": {"backend": "aot_eager"}, "copy_engine": False} | options))
    backend = torch.distributed.get_backend()
    with engines.closing(Engine(model, engines.place(), config, None, backend, dtype)) as made:
        optimizer = engines.sgd(made, model, lr=0.2)
        made.optimizer = optimizer  # type: ignore[attr-defined]
        if mixed and models.rank() == 1:
            stop_compiling(made)
        yield made


def stop_compiling(engine: Engine) -> None:
    """As a rank that is over the recompile limit."""
    for module in engine.model.modules():
        if REGION in module.__dict__:
            module.__dict__[REGION].run = forward_of(module)


def autocast(dtype: torch.dtype = BF16) -> Any:
    return torch.autocast(engines.place().type, dtype=dtype)


def train(engine: Engine, steps: int, micro: int = 1, dtype: torch.dtype = BF16, first: int = 0) -> dict[str, Any]:
    """Steps under autocast, as Lightning's plugin runs them; losses and reduced gradients, these by step and name."""
    data, losses, grads = models.Batches(models.rank()), [], []
    for number in range(first, first + steps):
        for part in range(micro):
            last = part == micro - 1
            with engine.training_step(), nullcontext() if last else engine.accumulation():
                with autocast(dtype):
                    loss = engines.token_loss(engine.model, data[number * micro + part])
                engines.backward(engine, loss)
            losses.append(loss.item())
        grads.append({n: p.grad.to_local().clone() for n, p in engine.model.named_parameters() if p.grad is not None})
        engine.optimizer.step()  # type: ignore[attr-defined]
        engine.optimizer.zero_grad()  # type: ignore[attr-defined]
    return {"losses": losses, "grads": grads}


def masters(engine: Engine) -> dict[str, Tensor]:
    return {n: full_value(p).clone() for n, p in engine.model.state_dict().items()}


def differ(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [name for name in right if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])]


def gathered(engine: Engine, run: Callable[[], Any], path: str) -> int:
    """Bytes of the full values that the process group gathers meanwhile, as torch's profiler sees them."""
    if models.device() == "cuda":  # the profiler does not tell the sizes of NCCL's grouped calls
        before = engine.runtime.stats().gather_bytes
        run()
        return engine.runtime.stats().gather_bytes - before
    engine.apply_writes()
    torch.distributed.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        run()
        engine.apply_writes()
    file = Path(path) / f"{models.rank()}.json"
    profile.export_chrome_trace(str(file))
    sizes = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2}
    total = 0
    for event in json.loads(file.read_text())["traceEvents"]:
        if event.get("name") in ("c10d::_allgather_base_", "c10d::allgather_into_tensor_"):
            arguments = event["args"]
            total += torch.Size(arguments["Input Dims"][0]).numel() * sizes[arguments["Input type"][0]]
    return total


# ByteModel; rows are padded to a multiple of the ranks, see test_invariants.py. What is low has half the bytes. On 2:
#   first: scale (whole on every rank), shift 8 B, embedding 560 B                                        568 B
#   block: norm 40 + 40 B; up 880, its bias 88, down 840 B, low: 904 B              1888 B, low:  984 B, three of them
#   head:  560 B                                                                     560 B, low:  280 B
# A step: `first` twice (see there), the head once (its cast is kept for the backward), the blocks twice.
def bytes_of_a_step(low: bool) -> int:
    first, head = 4 * (padded(1) + 10 * padded(models.VOCABULARY)), 10 * padded(models.VOCABULARY)
    linear = 10 * padded(21) + padded(21) + padded(10) * 21
    width = 2 if low else 4
    return 2 * first + width * head + 6 * (4 * 2 * padded(10) + width * linear)
