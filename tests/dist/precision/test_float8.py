"""Models that torchao has converted to float8 train as the same converted models train under DDP.

The products are emulated, on every device: scales, casts and saved tensors are those of real ones.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.sharding.islands import Islands, put_islands
from tests.support import checkpoints, engines, models
from tests.support.harness import Ranks, on_ranks
from tests.support.parity import AOT, EAGER, MODEL, assert_trains_like_ddp
from tests.support.precisions import BF16, FP32

float8 = pytest.importorskip("torchao.float8")

ISLAND = "layers.1.up"
CELLS = [(1, EAGER), (1, AOT), (1, MODEL), (2, EAGER), (2, AOT), (2, MODEL), (3, EAGER), (3, AOT), (3, MODEL)]
ALWAYS = [(1, MODEL), (2, AOT), (3, EAGER), (3, AOT), (3, MODEL)]


def _model(recipe: str = "tensorwise", **options: Any) -> nn.Module:
    """A small model whose blocks' linear layers are torchao's."""
    torch.manual_seed(0)
    model = models.ByteModel(width=16)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    for name, value in {"emulate": True, **options}.items():
        object.__setattr__(config, name, value)  # `dataclasses.replace` would decide on the casts' dtypes anew
    float8.convert_to_float8_training(model.layers, config=config)
    assert _converted(model) == 6
    return model


def _converted(model: nn.Module) -> int:
    return sum(type(module) is float8.float8_linear.Float8Linear for module in model.modules())


class Module(models.Module):
    """Converts the model where Lightning's users do."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw", lr=1e-2)
        torch.manual_seed(0)
        self.model = models.ByteModel(width=16)

    def configure_model(self) -> None:
        if not _converted(self.model):
            float8.convert_to_float8_training(self.model.layers, config=float8.Float8LinearConfig(emulate=True))


@pytest.mark.parametrize(
    ("stage", "options"),
    [pytest.param(*cell, marks=[] if cell in ALWAYS else pytest.mark.long) for cell in CELLS],
    ids=[f"{stage}-{options['compile']}" for stage, options in CELLS],
)
@on_ranks(2)
def test_it_trains_as_ddp(stage: int, options: dict[str, Any]) -> None:
    model = models.Whole(_model())
    trained = assert_trains_like_ddp(model, stage, **options)
    assert _converted(model) == 6 and trained.stats.reductions > 0
    assert (trained.compiled.forward > 0) == bool(options["compile"])


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@on_ranks(2)
def test_other_recipes(recipe: str) -> None:
    """A scale for each row; the gradient of the weight in high precision. The numbers are not those of float32."""
    model = _model(recipe)
    assert_trains_like_ddp(copy.deepcopy(model), 3, **AOT)
    plain = models.ByteModel(width=16)
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(6)[None] % models.VOCABULARY
    assert not torch.allclose(model(tokens), plain(tokens), atol=1e-4)


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (3, AOT)], ids=["1-eager", "3-aot"])
@on_ranks(2)
def test_windows(stage: int, options: dict[str, Any]) -> None:
    model, twin = _model(), _model()
    with engines.engine(model, stage, **options) as engine:
        optimizer = engines.sgd(engine, model)
        for numbers in [[0, 1], [2, 3, 4]]:
            before = engine.runtime.stats().reductions
            with engine.training_step(), engine.windows.open("auto", None, None):
                for number in numbers:
                    loss = engines.token_loss(model, models.Batches(models.rank())[number]) / len(numbers)
                    engines.backward(engine, loss)
            assert engine.runtime.stats().reductions - before == 2  # of all units, and of the 0-dim parameter
            optimizer.step()
            optimizer.zero_grad()
    engines.window_reference(twin, [[0, 1], [2, 3, 4]])
    assert models.deviation(model, twin) <= 1e-6


def _reference(twin: nn.Module, steps: int) -> None:
    """DDP over casts of float32 masters; what the island holds stays float32."""
    masters = dict(twin.named_parameters())
    put_islands(twin, Islands((ISLAND,), BF16))
    for number in range(steps):
        total: dict[str, Tensor] = {}
        for rank in range(models.world()):
            casts = {
                name: master.detach().to(FP32 if name.startswith(ISLAND) else BF16).requires_grad_()
                for name, master in masters.items()
            }

            def model(tokens: Tensor, casts: dict[str, Tensor] = casts) -> Any:
                return torch.func.functional_call(twin, casts, (tokens,))

            engines.token_loss(model, models.Batches(rank)[number]).backward()
            for name, cast in casts.items():
                assert cast.grad is not None
                total[name] = total[name] + cast.grad if name in total else cast.grad
        with torch.no_grad():
            for name, master in masters.items():
                master -= 0.5 * (total[name] / models.world()).to(FP32)


@pytest.mark.parametrize(("stage", "options"), [(1, AOT), (3, EAGER), (3, AOT)], ids=["1-aot", "3-eager", "3-aot"])
@on_ranks(2)
def test_half_precision_with_an_island(stage: int, options: dict[str, Any]) -> None:
    """float8 products of bfloat16 values, but for one layer, whose values are float32.

    Without copies between devices, which sum bfloat16 gradients in float32.
    """
    model = _model()
    twin = copy.deepcopy(model).to(models.device())
    options = {"param_dtype": BF16, "fp32_modules": [ISLAND], "copy_engine": False, **options}
    with engines.engine(model, stage, **options) as engine:
        optimizer = engines.sgd(engine, model)
        for number in range(3):
            batch = models.Batches(models.rank())[number]
            engines.step(engine, optimizer, lambda batch=batch: engines.token_loss(model, batch))
        wide = {sharded.name for sharded in engine.runtime.sharded_parameters if sharded.source.dtype is FP32}
    assert wide == {f"{ISLAND}.weight", f"{ISLAND}.bias"}
    _reference(twin, 3)
    assert models.deviation(model, twin) <= 1e-6


@pytest.mark.parametrize(("stage", "options"), [(1, AOT), (3, EAGER), (3, AOT)], ids=["1-aot", "3-eager", "3-aot"])
@on_ranks(2)
def test_mixed_precision(stage: int, options: dict[str, Any]) -> None:
    """With more steps than the ranks watch before gathers move autocast's dtype; float8 layers stay float32."""
    module, twin = Module(), Module()
    models.fit_epochs(module, ZeroCompileStrategy(stage=stage, **options), 2, precision="bf16-mixed")
    models.fit_epochs(twin, "ddp", 2, precision="bf16-mixed")
    assert _converted(module) == 6 and models.deviation(module, twin) <= 1e-6


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (3, AOT)], ids=["1-eager", "3-aot"])
@on_ranks(2)
def test_checkpoints(stage: int, options: dict[str, Any], tmp_path: Path) -> None:
    """They hold float32 values under the names of the plain model; training goes on from them to the bit."""
    whole, first, second = Module(), Module(), Module()
    models.fit_epochs(whole, ZeroCompileStrategy(stage=stage, **options), 2)
    trainer = models.fit_epochs(first, ZeroCompileStrategy(stage=stage, **options), 1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    models.fit_epochs(second, ZeroCompileStrategy(stage=stage, **options), 2, str(tmp_path / "a.ckpt"))
    assert _converted(second) == 6 and models.deviation(whole, second) == 0
    assert models.deviation(whole, first) > 1e-3
    state = checkpoints.load(str(tmp_path / "a.ckpt"))["state_dict"]
    models.ByteModel(width=16).load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    assert {value.dtype for value in state.values()} == {FP32}


@pytest.mark.parametrize(("stage", "options"), [(1, AOT), (3, EAGER)], ids=["1-aot", "3-eager"])
@on_ranks(2)
def test_adapters(stage: int, options: dict[str, Any]) -> None:
    """LoRA by PEFT on frozen float8 layers."""
    peft = pytest.importorskip("peft")
    model = _model()
    adapter = peft.LoraConfig(r=2, target_modules=["up", "down"], lora_dropout=0.0, init_lora_weights=False)
    peft.inject_adapter_in_model(adapter, model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 12 and _converted(model) == 6
    before = copy.deepcopy(model)
    assert_trains_like_ddp(model, stage, **options)
    moved = {
        n for (n, p), q in zip(model.named_parameters(), before.parameters(), strict=True) if not torch.equal(p, q)
    }
    assert moved == trained


def _gathers_float8() -> None:
    torch.manual_seed(0)
    module = models.Module(lambda: _model(enable_fsdp_float8_all_gather=True))
    models.fit(module, ZeroCompileStrategy(**EAGER), 1)


def test_gathers_of_float8_are_refused(ranks: Ranks) -> None:
    """torchao's option for FSDP2 puts another kind of tensor in the place of each weight."""
    error = ranks.expect_error(_gathers_float8)
    assert "`model.layers.0.up.weight`" in error and "enable_fsdp_float8_all_gather=False" in error
