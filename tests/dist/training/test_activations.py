"""Less is saved for the backward, and the same is computed: by the partitioner's budget, and by checkpointed blocks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support import engines, graph_breaks, models
from tests.support.blocks import Net
from tests.support.graph_breaks import WIDTH
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, assert_trains_like_ddp


def _saved_by_graphs(loss: Tensor) -> int:
    """Bytes that compiled graphs hold for their backward."""
    seen, waiting, storages = set(), [loss.grad_fn], {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in type(node).__name__:
            for tensor in node.saved_tensors:  # type: ignore[attr-defined]
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        waiting += [following for following, _ in node.next_functions]
    return sum(storages.values())


def _train(model: nn.Module, stage: int, **options: Any) -> tuple[nn.Module, int, Any]:
    """The model after three steps, bytes that its blocks saved in the last one, and the runtime's counts."""
    model, saved = copy.deepcopy(model), [0]
    torch.manual_seed(5 + models.rank())
    with engines.engine(model, stage, **options) as engine:
        optimizer = engines.sgd(engine, model, lr=0.1)
        core, storages = engine.runtime.core, dict[int, int]()

        def pack(tensor: Tensor) -> Any:
            if tensor.dim() == 3:  # an activation
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return core.pack(tensor)

        for number in range(3):
            batch = models.Batches(models.rank())[number]

            def loss(batch: Tensor = batch) -> Tensor:
                storages.clear()
                if options["compile"] is False:
                    with torch.autograd.graph.saved_tensors_hooks(pack, core.unpack):
                        value = engines.token_loss(model, batch)
                    saved[0] = sum(storages.values())
                else:
                    value = engines.token_loss(model, batch)
                    if options.get("recompute") != "blocks":  # whoever looks at them there runs the blocks again
                        saved[0] = _saved_by_graphs(value)
                return value

            engines.step(engine, optimizer, loss)
        stats = engine.runtime.stats()
    return model, saved[0], stats


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
def test_budget(stage: int) -> None:
    model = Net()
    whole, most, stats = _train(model, stage, **AOT)
    last = most
    for share in (0, 0.5, 1):
        less, saved, other = _train(model, stage, recompute=share, **AOT)
        assert models.deviation(less, whole) == 0.0
        assert (other.gathers, other.gather_bytes, other.reductions) == (
            stats.gathers,
            stats.gather_bytes,
            stats.reductions,
        )
        assert saved == most if share == 0 else saved < last, (share, saved, last)
        last = saved
    assert torch._functorch.config.activation_memory_budget == 1.0  # it is not the process's


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("options", [EAGER, pytest.param(AOT, marks=pytest.mark.long)], ids=["eager", "aot_eager"])
@on_ranks()
def test_checkpointed_blocks(stage: int, options: dict[str, Any]) -> None:
    model = Net()
    whole, most, stats = _train(model, stage, **options)
    less, saved, other = _train(model, stage, recompute="blocks", **options)
    assert models.deviation(less, whole) == 0.0
    assert (other.gathers, other.reductions) == (stats.gathers, stats.reductions)
    if options["compile"] is False:
        assert saved < 0.5 * most


class _NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch_norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, WIDTH]
        return x + torch.tanh(self.batch_norm(self.linear(x).flatten(0, 1)).view(x.shape))


class _NormAgain(_NormBlock):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_statistics_of_checkpointed_blocks(stage: int, options: dict[str, Any]) -> None:
    """As of torch's checkpoint under DDP: a block that runs again counts its batch twice."""
    model, twin = graph_breaks.Net(_NormBlock), graph_breaks.Net(_NormAgain)
    twin.load_state_dict(model.state_dict())
    batches = [models.Batches(models.rank())[number] for number in range(4)]
    ddp = nn.parallel.DistributedDataParallel(twin.to(models.device()))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        engines.token_loss(ddp, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with engines.engine(model, stage, **options, recompute="blocks") as engine:
        optimizer = engines.sgd(engine, model, lr=0.1)
        for batch in batches:
            engines.step(engine, optimizer, lambda batch=batch: engines.token_loss(model, batch))
    found = model.state_dict()
    assert all(found[f"layers.{k}.batch_norm.num_batches_tracked"] == 8 for k in range(3))
    for name, value in twin.state_dict().items():
        assert torch.allclose(found[name].cpu(), value.cpu(), rtol=0, atol=1e-5), name


@on_ranks()
def test_a_model_without_blocks() -> None:
    with pytest.raises(RuntimeError, match=r"Sequential has no repeated blocks.*use a number"):
        engines.make_engine(nn.Sequential(nn.Linear(3, 3)), 3, compile=False, recompute="blocks")


class Dropped(nn.Module):
    """What it returns is its weight times the gradient that the weight must get, if the loss is the sum."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.weight, self.again = nn.Parameter(torch.rand(64) + 0.5), again

    def forward(self, x: Tensor) -> Tensor:  # [batch, 64]
        if self.again:
            return checkpoint(self.dropped, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.dropped(x)

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(self.weight * x, 0.3, self.training)


class TwoDropped(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Dropped(again), Dropped(again)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("share", [1, 0.5])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
def test_the_backward_has_the_masks_of_the_forward(stage: int, share: float, again: bool) -> None:
    """Of an operator that gives a mask beside its result (aot_eager does not decompose dropout), both are kept."""
    torch.manual_seed(models.rank())
    model = TwoDropped(again).to(models.device())
    with engines.engine(model, stage, recompute=share, **AOT) as engine:
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = None
            with engine.training_step():
                outputs = model(torch.randn(4, 64, device=models.device()))
                engines.backward(engine, torch.stack(outputs).sum())
            expected = torch.stack([output.detach().sum(0) for output in outputs])
            torch.distributed.all_reduce(expected)
            for parameter, total in zip(model.parameters(), expected / models.world(), strict=True):
                grad: Any = parameter.grad
                torch.testing.assert_close((grad * parameter.detach()).full_tensor(), total)
        assert engine.runtime.stats().graph_uses > 0


def _keeps_products(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    wanted = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(nn.Module):
    """Its second part runs again in the backward, but for its matrix products; its unit is gathered by then, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(10, 10), nn.Linear(10, 21), nn.Linear(21, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        contexts = partial(create_selective_checkpoint_contexts, _keeps_products)
        return x + checkpoint(self.second, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    def second(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "blocks"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_a_part_of_a_block_is_checkpointed_selectively(stage: int, options: dict[str, Any]) -> None:
    """torch compares the operators of both forwards. How a value is gathered is none of them."""
    torch.manual_seed(0)
    trained = assert_trains_like_ddp(models.Stacked(Selective).to(models.device()), stage, **options)
    assert (trained.stats.graph_uses > 0) == (options == AOT)
