"""What blocks save goes to host memory and comes back, and the same is computed, see [Note: activation offload]."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zerocompile.engine import Engine
from tests.support import engines, models
from tests.support.blocks import WIDTH, Block, Net
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

BLOCKS = 5
INDUCTOR: dict[str, Any] = {"compile": "blocks"}
KINDS: dict[str, dict[str, Any]] = {
    "all": {}, "checkpointed": {"recompute": "blocks"}, "least": {"recompute": 1},
}  # fmt: skip


def _net() -> Net:
    torch.manual_seed(1)
    model = Net()
    model.blocks.extend(Block() for _ in range(BLOCKS - len(model.blocks)))
    return model


def _input_bytes() -> int:
    """Of one block's input: the loss does not read the last token."""
    return models.Batches(0)[0][:, 1:].numel() * WIDTH * 4


def _alive_outputs(model: Any) -> list[Callable[[], bool]]:
    """Whether the memory of each block's output is still there; filled by the next forward."""
    found: list[Callable[[], bool]] = []

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        reference = weakref.ref(output.untyped_storage())
        found.append(lambda: reference() is not None)

    for block in model.blocks:
        block.register_forward_hook(note)
    return found


def _train(
    model: nn.Module, stage: int, run: Callable[[Engine, Any], None] | None = None, **options: Any
) -> tuple[nn.Module, Any]:
    """The model after two steps (or what ``run`` makes), and the runtime's counts."""
    model = copy.deepcopy(model)
    torch.manual_seed(5 + models.rank())
    with engines.engine(model, stage, **options) as engine:
        if engine.runtime.activations is not None:
            engine.runtime.activations.least = 8 * WIDTH * 4
        optimizer = engines.sgd(engine, model, lr=0.1)
        if run is not None:
            run(engine, optimizer)
        else:
            for number in range(2):
                batch = models.Batches(models.rank())[number]
                engines.step(engine, optimizer, lambda batch=batch: engines.token_loss(model, batch))
        stats = engine.runtime.stats()
    return model, stats


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_the_same_to_the_bit(stage: int, options: dict[str, Any]) -> None:
    model = _net()
    for name, kind in KINDS.items():
        if name == "least" and options["compile"] is False:
            continue
        torch._dynamo.reset()
        whole, stats = _train(model, stage, **options, **kind)
        less, other = _train(model, stage, activation_offload=True, **options, **kind)
        assert models.deviation(less, whole) == 0.0, name
        assert (other.gathers, other.gather_bytes, other.reductions) == (
            stats.gathers,
            stats.gather_bytes,
            stats.reductions,
        ), name
        assert stats.activations_out_bytes == 0 < other.activations_in_bytes < other.activations_out_bytes, name
        if name == "checkpointed":  # the inputs of all blocks; those of the last one are still there
            assert other.activations_out_bytes == 2 * BLOCKS * _input_bytes()
            assert other.activations_in_bytes == 2 * (BLOCKS - 1) * _input_bytes()


@on_ranks()
def test_inductor() -> None:
    model = _net()
    whole, _ = _train(model, 3, **INDUCTOR)
    less, stats = _train(model, 3, activation_offload=True, **INDUCTOR)
    assert models.deviation(less, whole) == 0.0 and stats.activations_in_bytes > 0


@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_memory_is_free_after_two_blocks(options: dict[str, Any]) -> None:
    """Of the blocks' inputs all but the last two leave; without the offload all stay."""
    for offload in (False, True):
        alive: list[bool] = []

        def run(engine: Engine, optimizer: Any) -> None:
            outputs = _alive_outputs(engine.model)

            def loss() -> Tensor:
                value = engines.token_loss(engine.model, models.Batches(models.rank())[0])
                alive[:] = [one() for one in outputs]  # noqa: B023
                return value

            engines.step(engine, optimizer, loss)

        _train(_net(), 3, run, activation_offload=offload, recompute="blocks", **options)
        assert alive == [True] * BLOCKS if not offload else alive == [False] * (BLOCKS - 2) + [True, True], alive


def _several(engine: Engine, optimizer: Any, retain: bool) -> None:
    """Three forwards, then their backwards, the first one first; each twice if ``retain``."""
    own = models.Batches(models.rank())
    with engine.training_step(), engine.windows.open("auto", None, None):
        losses = [engines.token_loss(engine.model, own[number]) for number in range(3)]
        for loss in (losses[0], losses[2], losses[1]):
            for last in (False, True) if retain else (True,):
                with engine.backward(loss):
                    loss.backward(retain_graph=not last)
    optimizer.step()


@pytest.mark.parametrize("retain", [False, True])
@on_ranks()
def test_several_graphs(retain: bool) -> None:
    for options in (EAGER, AOT | KINDS["checkpointed"]):
        torch._dynamo.reset()
        results = [
            _train(_net(), 3, lambda e, o: _several(e, o, retain), activation_offload=offload, **options)
            for offload in (False, True)
        ]
        assert models.deviation(results[0][0], results[1][0]) == 0.0
        assert results[1][1].activations_in_bytes > 0


class Writes(Net):
    """Writes to the first block's input after ``after`` further blocks."""

    def __init__(self, after: int, copies: bool = False) -> None:
        super().__init__()
        self.blocks.extend(Block() for _ in range(2))
        self.after, self.copies = after, copies

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embed(tokens) * 1.0
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.after:
                x = x + (first + 1 if self.copies else first.add_(1))
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("after", [0, 3])
@on_ranks()
def test_writes_in_place(after: int) -> None:
    """One that could reach the copy raises, as without an offload; a later one finds the copy made."""

    def offloaded(model: nn.Module) -> nn.Module:
        return _train(model, 3, activation_offload=True, **EAGER)[0]

    torch.manual_seed(1)
    model = Writes(after)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _train(model, 3, **EAGER)
    if after == 0:
        with pytest.raises(RuntimeError, match=r"inplace operation: a tensor of sizes .* `activation_offload`"):
            offloaded(model)
        return
    other = copy.deepcopy(model)
    other.copies = True
    assert models.deviation(offloaded(model), _train(other, 3, **EAGER)[0]) == 0.0


class Scaled(Block):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class Table(Net):
    """All blocks take one more tensor, which the model holds on to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        table = torch.sin(x).detach()
        for block in self.blocks:
            x = block(x, table)
        return self.head(x + table)  # type: ignore[no-any-return]


@on_ranks()
def test_what_all_blocks_take_stays() -> None:
    """Two blocks' copies of it are made in one, before it is known that it stays."""
    options = AOT | KINDS["checkpointed"]
    torch.manual_seed(1)
    model = Table()
    whole, _ = _train(model, 3, **options)
    less, stats = _train(model, 3, activation_offload=True, **options)
    assert models.deviation(less, whole) == 0.0
    assert stats.activations_out_bytes == 2 * (BLOCKS + 1) * _input_bytes()


@on_ranks()
def test_inside_hooks_of_the_users() -> None:
    """A checkpoint around the blocks, or `save_on_cpu`: theirs decide what is kept, and nothing is offloaded."""

    class Around(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks[:2]:
                x = checkpoint(block, x, use_reentrant=False)
            with torch.autograd.graph.save_on_cpu():
                x = self.blocks[2](x)
            return self.head(x)  # type: ignore[no-any-return]

    torch.manual_seed(1)
    model = Around()
    for options in (EAGER, AOT):
        torch._dynamo.reset()
        whole, _ = _train(model, 2, **options)
        less, stats = _train(model, 2, activation_offload=True, **options)
        assert models.deviation(less, whole) == 0.0 and stats.activations_out_bytes == 0


class Named(Block):
    def forward(self, *, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class ByName(Net):
    """Its blocks take their input by name, where the default device is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Named() for _ in range(BLOCKS)).eval()  # random numbers would go to that device

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        with torch.device("meta"):
            for block in self.blocks:
                x = block(x=x)
        return self.head(x)  # type: ignore[no-any-return]


@on_ranks()
def test_inputs_by_name_and_another_default_device() -> None:
    """What runs again saves inputs that it gets by name, too, and host memory is the host's."""
    torch.manual_seed(1)
    model = ByName()
    whole, _ = _train(model, 3, **EAGER, **KINDS["checkpointed"])
    less, stats = _train(model, 3, activation_offload=True, **EAGER, **KINDS["checkpointed"])
    assert models.deviation(less, whole) == 0.0
    assert stats.activations_out_bytes == 2 * BLOCKS * _input_bytes()


class _SavesForNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone())
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


class _Forgets(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_SavesForNothing.apply(x))  # type: ignore[no-untyped-call, no-any-return]


@on_ranks()
def test_what_no_backward_asks_for_goes_again() -> None:
    """What one block's backward has not looked at is gone when the next one's begins, and the rest at the end."""
    torch.manual_seed(1)
    model = Net()
    model.blocks = nn.ModuleList(_Forgets() for _ in range(BLOCKS))
    held: list[int] = []

    def run(engine: Engine, optimizer: Any) -> None:
        offload = engine.runtime.activations
        assert offload is not None

        def note(*_: Any) -> None:
            held.append(sum(kept.host.nbytes for kept in offload._coming))

        for block in engine.model.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(lambda _, __, output: output.register_hook(note) and None)
        with engine.training_step():
            engines.backward(engine, engines.token_loss(engine.model, models.Batches(models.rank())[0]))
        note()
        optimizer.step()

    _train(model, 3, run, activation_offload=True, **EAGER)
    # At a block's beginning its own tensors are coming, and one of the block that ran before it.
    assert held[-1] == 0 and held[-2] == held[-3] == held[-4] > 0, held


@on_ranks()
def test_inside_a_transform() -> None:
    """torch.func allows no hooks. A block inside it saves as it would without the offload."""
    torch.manual_seed(1)
    tokens, found = models.Batches(models.rank())[0], []
    model = _net().eval()

    def run(engine: Engine, optimizer: Any) -> None:
        def loss(values: dict[str, Tensor]) -> Tensor:
            return engines.token_loss(lambda x: torch.func.functional_call(engine.model, values, (x,)), tokens)

        with engine.full_parameters(engine.model, writeback=False) as values:
            found.append(torch.func.grad(loss)({name: value.detach() for name, value in values.items()}))

    for offload in (False, True):
        _, stats = _train(model, 3, run, activation_offload=offload, **EAGER)
        assert stats.activations_out_bytes == 0
    assert all(torch.equal(found[0][name], grad) for name, grad in found[1].items())


@on_ranks()
def test_a_retained_graph_comes_again() -> None:
    """The second backward of a graph brings a whole block in at once, too, and leaves nothing."""
    asked: list[list[int]] = []

    def run(engine: Engine, optimizer: Any) -> None:
        offload = engine.runtime.activations
        assert offload is not None
        copy_in, bring, depth = offload._copy_in, offload._bring, [0]

        def counting(kept: Any, group: Any) -> None:
            asked[-1][depth[0]] += 1
            copy_in(kept, group)

        def bringing(group: Any) -> None:
            depth[0] += 1
            bring(group)
            depth[0] -= 1

        offload._copy_in, offload._bring = counting, bringing  # type: ignore[method-assign]
        with engine.training_step():
            loss = engines.token_loss(engine.model, models.Batches(models.rank())[0])
            for retain in (True, False):
                asked.append([0, 0])  # one by one, and by the block
                with engine.backward(loss):
                    loss.backward(retain_graph=retain)
                assert not offload._coming
        optimizer.step()

    _train(_net(), 3, run, activation_offload=True, **EAGER)
    assert asked[1][1] > asked[0][1] > 0 and asked[1][0] == asked[0][0], asked


@on_ranks()
def test_a_model_without_blocks() -> None:
    with pytest.raises(RuntimeError, match=r"activation_offload: Sequential has no repeated blocks.*save_on_cpu"):
        engines.make_engine(nn.Sequential(nn.Linear(3, 3)), 3, compile=False, activation_offload=True)
