"""`fp32_modules`: what computes in float32 in a model of half precision, against the casts written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.precision import HalfPrecision
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileFabricStrategy, ZeroCompileStrategy
from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.plan import make_plan
from lightning_zerocompile.sharding.islands import find_islands
from tests.support import engines, models
from tests.support.harness import Ranks, on_ranks
from tests.support.parity import AOT, EAGER
from tests.support.precisions import BF16, FP16, FP32

WIDTH = 10


class TinyRMSNorm(nn.Module):
    """A norm as models write it; its buffer is no number of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.arange(WIDTH) / 300)
        self.register_buffer("gain", torch.tensor(1 + 2.0**-12))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.seen.append((x.dtype, self.weight.dtype, self.gain.dtype))
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight * self.gain


class ByHand(TinyRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class NormByHand(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = norm()
        self.up, self.down = nn.Linear(WIDTH, 21), nn.Linear(21, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _model(norm: Callable[[], nn.Module] = TinyRMSNorm, last: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Module:
    return models.Normed(lambda: Block(norm), WIDTH, last)


def _by_hand() -> nn.Module:
    return _model(ByHand, NormByHand)


def _is_wide(name: str) -> bool:
    return "norm" in name


def _reference(twin: nn.Module, micros: list[list[int]], dtype: torch.dtype, lr: float) -> None:
    """DDP of a model with its casts by hand, over casts of float32 masters; gradients move in the dtype of the cast."""
    masters = dict(twin.named_parameters())
    for numbers in micros:
        total: dict[str, Tensor] = {}
        for rank in range(models.world()):
            casts = {n: p.detach().to(FP32 if _is_wide(n) else dtype).requires_grad_() for n, p in masters.items()}
            for number in numbers:

                def model(tokens: Tensor, casts: dict[str, Tensor] = casts) -> Any:
                    return torch.func.functional_call(twin, casts, (tokens,))

                (engines.token_loss(model, models.Batches(rank)[number]) / len(numbers)).backward()
            for name, cast in casts.items():
                assert cast.grad is not None
                total[name] = total[name] + cast.grad if name in total else cast.grad
        with torch.no_grad():
            for name, master in masters.items():
                master -= lr * (total[name] / models.world()).to(FP32)


class Trained(models.Module):
    """What its parameters and norms are in the middle of a fit, and in a checkpoint of it."""

    def __init__(self) -> None:
        super().__init__(_model, lr=0.5)
        self.found: dict[str, Any] = {}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        runtime = self.trainer.strategy.engine.runtime  # type: ignore[attr-defined]
        self.found["gathered"] = {s.name.removeprefix("model."): s.source.dtype for s in runtime.sharded_parameters}
        self.found["masters"] = {p.dtype for p in self.parameters()}

    def on_train_end(self) -> None:
        self.found["compiled"] = self.trainer.strategy.compile_stats.forward  # type: ignore[attr-defined]
        state = self.trainer.strategy.lightning_module_state_dict()
        self.found["state"] = {value.dtype for value in state.values()}


@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, AOT), pytest.param(2, EAGER, marks=pytest.mark.long), (3, EAGER), (3, AOT)],
    ids=["1-aot", "2-eager", "3-eager", "3-aot"],
)
@on_ranks(2)  # a sum of halves over more ranks depends on their order
def test_norms_compute_in_float32(stage: int, options: dict[str, Any]) -> None:
    """Bit for bit what the same casts by hand give, which is not what half precision gives."""
    torch.manual_seed(0)
    module = Trained()
    twin, plain = _by_hand().to(models.device()), copy.deepcopy(module)
    twin.load_state_dict(module.model.state_dict())
    strategy = ZeroCompileStrategy(stage=stage, copy_engine=False, fp32_modules=["norms"], **options)
    models.fit(module, strategy, 3, precision="bf16-true")
    _reference(twin, [[0], [1], [2]], BF16, module.lr)
    assert models.deviation(module.model, twin) == 0
    gathered = module.found["gathered"]
    assert gathered == {name: FP32 if _is_wide(name) else BF16 for name in gathered} and len(gathered) == 16
    assert module.found["masters"] == {FP32} and module.found["state"] <= {FP32}
    assert (module.found["compiled"] > 0) == (options == AOT)
    norms = [inner for inner in module.modules() if isinstance(inner, TinyRMSNorm)]
    seen = {one for norm in norms for one in norm.seen}
    assert seen == (set() if options == AOT else {(FP32, FP32, FP32)})
    assert {tensor.dtype for tensor in module.state_dict().values()} == {FP32}
    assert all(type(norm) is TinyRMSNorm and norm.gain == 1 + 2.0**-12 for norm in norms)  # as before the fit
    models.fit(plain, ZeroCompileStrategy(stage=stage, copy_engine=False, **options), 3, precision="bf16-true")
    assert models.deviation(plain.model, twin) > 1e-4


@pytest.mark.parametrize(
    ("stage", "options"), [(3, AOT), pytest.param(1, EAGER, marks=pytest.mark.long)], ids=["3-aot", "1-eager"]
)
@on_ranks(2)  # a sum of halves over more ranks depends on their order
def test_islands_in_windows_and_checkpoints(stage: int, options: dict[str, Any]) -> None:
    """Blocks that run again in the backward; two backwards with one reduction; modules by class and by name. Of two
    equal blocks one has an island and the other has none, so one graph cannot serve both."""
    torch.manual_seed(0)
    model, twin = _model(), _by_hand().to(models.device())
    twin.load_state_dict(model.state_dict())
    options = {**options, "recompute": "blocks", "copy_engine": False, "param_dtype": BF16}
    named = [TinyRMSNorm, "*norm"]
    with engines.engine(model, stage, fp32_modules=named, **options) as engine:
        optimizer = engines.sgd(engine, model)
        for numbers in [[0, 1], [2, 3]]:
            with engine.training_step(), engine.windows.open("auto", None, None):
                for number in numbers:
                    loss = engines.token_loss(model, models.Batches(models.rank())[number]) / 2
                    engines.backward(engine, loss)
            engine.step(optimizer, lambda: None)
    _reference(twin, [[0, 1], [2, 3]], BF16, 0.5)
    assert models.deviation(model, twin) < 1e-6
    one, mixed = _model(), _model()
    mixed.layers[1].norm = ByHand()
    mixed.load_state_dict(one.state_dict())
    with engines.engine(one, stage, fp32_modules="layers.1.norm", **options) as engine:
        with engine.evaluation_step():
            ours = one(models.Batches(0)[0])
        dtypes = {sharded.name: sharded.source.dtype for sharded in engine.runtime.sharded_parameters}
    assert [name for name, dtype in dtypes.items() if dtype is FP32] == ["layers.1.norm.weight"]
    for name, parameter in mixed.named_parameters():
        parameter.data = parameter.data.to(FP32 if name == "layers.1.norm.weight" else BF16)
    with torch.no_grad():
        assert torch.equal(mixed.to(models.device())(models.Batches(0)[0]), ours)


def _fit_with(modules: Any, precision: str) -> None:
    models.fit(Trained(), ZeroCompileStrategy(fp32_modules=modules, **EAGER), 1, precision=precision)


def test_what_matches_nothing_raises(ranks: Ranks) -> None:
    """On all ranks, with what there is, before anything is sharded."""
    error = ranks.expect_error(_fit_with, ["norms", "rooter"], "bf16-true")
    assert (
        "'rooter' matches no module" in error and "TinyRMSNorm" in error and "its children are: model" in error.lower()
    )
    error = ranks.expect_error(_fit_with, "norms", "bf16-mixed")
    assert "under autocast in torch.bfloat16" in error and "precision='bf16-true'" in error


def test_what_is_an_island() -> None:
    model = _model()
    assert find_islands(model, ["norms"], BF16).modules == ("layers.0.norm", "layers.1.norm", "layers.2.norm", "norm")
    assert (
        find_islands(model, ["TinyRMSNorm", nn.LayerNorm], FP16).modules == find_islands(model, ["norms"], FP16).modules
    )
    inner = find_islands(model, ["layers.1", "layers.1.norm"], BF16)
    assert inner.modules == ("layers.1",) and inner.has("layers.1.up.weight") and not inner.has("layers.10.up")
    assert not find_islands(model, ["norms"], None).modules  # everything is float32
    assert find_islands(model.to(BF16), ["*.norm"], None).modules == ("layers.0.norm", "layers.1.norm", "layers.2.norm")
    strategy: Any = ZeroCompileFabricStrategy(fp32_modules="norms")
    strategy.precision = HalfPrecision("bf16-true")
    model.register_buffer("offset", torch.zeros(1))
    strategy.precision.convert_module(model.to(FP32))
    assert model.offset.dtype is BF16 and {layer.norm.gain.dtype for layer in model.layers} == {FP32}
    model.head.weight = model.embedding.weight
    with pytest.raises(ValueError, match=r"`head\.weight` is also `embedding\.weight`"):
        find_islands(model, ["head"], BF16)
    assert find_islands(model, ["head", "embedding"], BF16).modules == ("head", "embedding")


def test_the_plan_counts_them() -> None:
    """Gathered parameters and gradients of norms have four bytes, and so have their activations."""
    with torch.device("meta"):
        model = _model()
    tokens = torch.randint(0, models.VOCABULARY, (4, 6))

    def plan(modules: Any) -> Any:
        config = Config(fp32_modules=modules, compile=False)
        made = make_plan(
            model, tokens, world_size=2, config=config, compute_dtype=BF16, step=engines.token_loss, stages=[1],
            optimizer=torch.optim.SGD,
        )  # fmt: skip
        return made.stages[0]

    without, with_norms = plan(()), plan("norms")
    more = 2 * sum(p.numel() for name, p in model.named_parameters() if _is_wide(name))
    assert with_norms.memory.resident - without.memory.resident == more
    assert with_norms.traffic.reductions - without.traffic.reductions == more
    assert with_norms.memory.activations > without.memory.activations
