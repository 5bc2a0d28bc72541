"""With memory to spare gathers read what was cast before: the numbers are to the bit those without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile.engine import Engine
from lightning_zerocompile.strategy import ZeroCompileStrategy
from tests.support import engines, models, uneven
from tests.support.harness import Worlds

pytestmark = pytest.mark.gpu
STEPS = 8
Seen = tuple[list[Tensor], list[float], int, int, int]


class Net(uneven.Net):
    """The embedding is larger than a block: without kept casts it does not fit the mapped memory."""

    def __init__(self) -> None:
        super().__init__(300, rows=20 * models.VOCABULARY)


class OneUnit(uneven.Block):
    """The backward gathers the very unit that the forward has gathered last, and so does the next forward."""

    def __init__(self) -> None:
        super().__init__(300)
        self.table = nn.Parameter(torch.randn(models.VOCABULARY, 300))

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length]
        return super().forward(self.table[tokens]) @ self.table.T


def _nothing(engine: Engine, model: Any) -> None: ...


def _one_rank_writes(engine: Engine, model: Any) -> None:
    """Only one rank has to cast anew, and others may still read what it had."""
    if models.rank() == 1:
        master = next(p for name, p in engine.model.named_parameters() if name.endswith("up.weight"))
        assert isinstance(master, DTensor)
        with torch.no_grad():
            master.to_local().mul_(1.01)


def _all_write(engine: Engine, model: Any) -> None:
    with torch.no_grad():
        model.layers[1].up.weight.mul_(1.01)
        model.layers[2].down.weight.data.mul_(0.99)


def _evaluates(engine: Engine, model: Any) -> None:
    with torch.no_grad():
        for _ in range(2):
            model(models.Batches(models.rank())[0])


def _bytes_of_casts(model: nn.Module) -> int:
    """On each of two ranks, with what their places are rounded up by; no unit is so small that it fits the rest."""
    rows = [p.view(1) if p.ndim == 0 else p for p in model.parameters()]
    return sum(-(-len(p) // 2) * (p.numel() // len(p)) * 2 + 512 for p in rows)


def _trained(
    scope: Any,
    keep: bool,
    kind: Callable[..., Any],
    between: Callable[[Engine, Any], None],
    net: Callable[[], nn.Module],
    backwards: int,
    options: dict[str, Any],
) -> Seen:
    torch.manual_seed(0)
    model, data, losses = net(), models.Batches(models.rank()), []
    kept = _bytes_of_casts(model) if keep else ()
    with engines.engine(model, 3, compile=scope, param_dtype=torch.bfloat16, keep_gathered=kept, **options) as engine:
        parameters = list(model.parameters())
        apart = len(parameters) > 12 and not options.get("optimizer_in_backward")  # in the middle of a block
        optimizers = [kind(parameters[:6]), kind(parameters[6:])] if apart else [kind(parameters)]
        engine.attach_optimizers(optimizers)
        for number in range(STEPS):  # many updates and gathers in flight, without a pause of the host
            with engine.training_step():
                for micro in range(backwards):
                    loss = engines.token_loss(model, data[number + micro])
                    engines.backward(engine, loss)
            for optimizer in optimizers:
                engine.step(optimizer, lambda: None)
                optimizer.zero_grad()
            losses.append(loss.detach())
            between(engine, model)
        stats = engine.runtime.stats()
        seen = [loss.item() for loss in losses]
    return [p.detach().cpu() for p in model.parameters()], seen, stats.kept_casts, stats.peer_gathers, stats.gathers


def _adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _foreach(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


@pytest.mark.parametrize(
    ("kind", "between", "net", "backwards", "options"),
    [
        (_adamw, _nothing, Net, 1, {}),
        (_foreach, _nothing, Net, 1, {}),
        (_adamw, _one_rank_writes, Net, 1, {}),
        (_adamw, _all_write, Net, 1, {}),
        (_adamw, _evaluates, Net, 2, {}),
        (_adamw, _nothing, OneUnit, 2, {}),
        (_adamw, _nothing, Net, 1, {"offload": "optimizer"}),
        (_adamw, _all_write, Net, 1, {"optimizer_in_backward": True}),
    ],
    ids=["updates", "foreach", "one-writes", "all-write", "evaluates", "one-unit", "offload", "in-backward"],
)
@pytest.mark.parametrize("scope", [False, "blocks"], ids=["eager", "blocks"])
def test_the_bits_are_those_without(
    worlds: Worlds,
    scope: Any,
    kind: Callable[..., Any],
    between: Callable[[Engine, Any], None],
    net: Callable[[], nn.Module],
    backwards: int,
    options: dict[str, Any],
) -> None:
    arguments = (kind, between, net, backwards, options)
    ran = [worlds(2).run(_trained, scope, keep, *arguments, timeout=180) for keep in (True, False)]
    for (one, losses, kept, copies, gathers), (other, expected, none, _, _) in zip(*ran, strict=True):
        assert losses == expected and len(set(losses)) == len(losses)
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
        assert none == 0 and copies == gathers
        placed = kind is _adamw and not options  # by the kernel that updates
        if placed or scope:  # eager code may have written to what it has read: that is cast anew
            assert kept > (STEPS - 3) * (10 if net is Net else 1)  # they are bought after the second step


def _fitted(keep: bool) -> tuple[list[float], int]:
    """Under autocast masters are float32, and so are gathers until the ranks have agreed to move casts."""
    module = models.Module(lambda: models.ByteModel(64), optimizer="adamw", lr=1e-3)
    kept = _bytes_of_casts(module) if keep else ()
    strategy = ZeroCompileStrategy(3, compile=False, keep_gathered=kept)
    models.fit(module, strategy, 8, precision="bf16-mixed")
    return module.losses, strategy.stats.kept_casts


def test_mixed_precision(worlds: Worlds) -> None:
    for (losses, kept), (expected, none) in zip(
        *(worlds(2).run(_fitted, keep, timeout=120) for keep in (True, False)), strict=True
    ):
        assert losses == expected
        assert none == 0 < kept
