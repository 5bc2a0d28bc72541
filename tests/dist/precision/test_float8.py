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
from tests.support.harness import on_ranks
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


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module) is float8.float8_linear.Float8Linear]


def _converted(model: nn.Module) -> int:
    return len(_layers(model))


class Module(models.Module):
    """Converts the model where Lightning's users do."""

    def __init__(self, gathers: bool = False) -> None:
        super().__init__(optimizer="adamw", lr=1e-2)
        torch.manual_seed(0)
        self.model = models.ByteModel(width=16)
        self.config = float8.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers)

    def configure_model(self) -> None:
        if not _converted(self.model):
            float8.convert_to_float8_training(self.model.layers, config=self.config)


@pytest.mark.parametrize(
    ("stage", "options"),
    [pytest.param(*cell, marks=[] if cell in ALWAYS else pytest.mark.long) for cell in CELLS],
    ids=[f"{stage}-{options['compile']}" for stage, options in CELLS],
)
@on_ranks()
def test_it_trains_as_ddp(stage: int, options: dict[str, Any]) -> None:
    model = models.Whole(_model())
    trained = assert_trains_like_ddp(model, stage, **options)
    assert _converted(model) == 6 and trained.stats.reductions > 0
    assert (trained.compiled.forward > 0) == bool(options["compile"])


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@on_ranks()
def test_other_recipes(recipe: str) -> None:
    """A scale for each row; the gradient of the weight in high precision. The numbers are not those of float32."""
    model = _model(recipe)
    assert_trains_like_ddp(copy.deepcopy(model), 3, **AOT)
    plain = models.ByteModel(width=16)
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(6)[None] % models.VOCABULARY
    assert not torch.allclose(model(tokens), plain(tokens), atol=1e-4)


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (3, AOT)], ids=["1-eager", "3-aot"])
@on_ranks()
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
@on_ranks(2)  # a sum of halves over more ranks depends on their order
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
@on_ranks(2)  # a sum of halves over more ranks depends on their order
def test_mixed_precision(stage: int, options: dict[str, Any]) -> None:
    """With more steps than the ranks watch before gathers move autocast's dtype; float8 layers stay float32."""
    module, twin = Module(), Module()
    models.fit_epochs(module, ZeroCompileStrategy(stage=stage, **options), 2, precision="bf16-mixed")
    models.fit_epochs(twin, "ddp", 2, precision="bf16-mixed")
    assert _converted(module) == 6 and models.deviation(module, twin) <= 1e-6


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (3, AOT)], ids=["1-eager", "3-aot"])
@on_ranks()
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
@on_ranks()
def test_adapters(stage: int, options: dict[str, Any]) -> None:
    """LoRA by PEFT on frozen float8 layers."""
    peft = pytest.importorskip("peft")
    model = _model()
    adapter = peft.LoraConfig(r=2, target_modules=["up", "down"], lora_dropout=0.0, init_lora_weights=False)
    peft.inject_adapter_in_model(adapter, model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 12 and _converted(model) == 6
    before = copy.deepcopy(model)
    # a sum over more ranks depends on their order, and the next step's casts to float8 may show its last bit
    assert_trains_like_ddp(model, stage, steps=3 if models.world() == 2 else 1, **options)
    moved = {
        n for (n, p), q in zip(model.named_parameters(), before.parameters(), strict=True) if not torch.equal(p, q)
    }
    assert moved == trained


# ---- gathers of float8 ----


def _marked(model: nn.Module) -> nn.Module:
    """The model with torchao's option for float8 gathers in its layers; plain strategies do not see it."""
    for layer in _layers(model):
        object.__setattr__(layer.config, "enable_fsdp_float8_all_gather", True)
    return model


LONG = pytest.mark.long
STEPS = 5  # the ranks agree after two
FLOAT8_CELLS = [(1, AOT), (2, AOT), (3, EAGER), (3, AOT), (3, MODEL)]


def _weights(model: nn.Module) -> int:
    """Elements of the weights of float8 layers, with the rows that a gather pads them by."""
    world, shapes = models.world(), [layer.weight.shape for layer in _layers(model)]
    return sum(-(-rows // world) * world * columns for rows, columns in shapes)


@pytest.mark.parametrize(
    ("stage", "options"),
    [pytest.param(*cell, marks=LONG if cell[0] == 2 else []) for cell in FLOAT8_CELLS],
    ids=[f"{stage}-{options['compile']}" for stage, options in FLOAT8_CELLS],
)
@on_ranks()
def test_gathers_of_float8_train_as_ddp(stage: int, options: dict[str, Any]) -> None:
    """At stage 3 compiled layers take the weights as float8: a byte for each element, not four."""
    model = _marked(_model())
    elements = _weights(model)
    few, many = (
        assert_trains_like_ddp(copy.deepcopy(model), stage, steps=steps, **options).stats for steps in (2, STEPS)
    )
    before = assert_trains_like_ddp(_model(), stage, steps=STEPS, **options).stats
    if stage < 3 or not options["compile"]:
        assert many.gather_bytes == before.gather_bytes
        return
    assert many.gathers > before.gathers  # another dtype is another collective
    saved = before.gather_bytes - many.gather_bytes
    gathers = round(saved / (3 * elements))
    assert saved == 3 * elements * gathers and gathers >= 2 * (STEPS - 2)  # in each forward and backward
    assert few.gather_bytes < many.gather_bytes


def _step(engine: Any, model: nn.Module, optimizer: Any, number: int) -> None:
    batch = models.Batches(models.rank())[number]
    engines.step(engine, optimizer, lambda: engines.token_loss(model, batch))


def _window(engine: Any, model: nn.Module, optimizer: Any, number: int) -> None:
    with engine.training_step(), engine.windows.open("auto", None, None):
        for part in range(2):
            engines.backward(engine, engines.token_loss(model, models.Batches(models.rank())[number + part]))
    optimizer.step()
    optimizer.zero_grad()


def _loaded(engine: Any, model: nn.Module, optimizer: Any, number: int) -> None:
    _step(engine, model, optimizer, number)
    grown = {name: 1.5 * value.full_tensor().cpu() for name, value in model.state_dict().items()}
    model.load_state_dict(grown)


def _written(engine: Any, model: Any, optimizer: Any, number: int) -> None:
    """A write of which no version tells, to the value that the step then computes with."""
    batch = models.Batches(models.rank())[number]

    def loss() -> Tensor:
        model.layers[1].up.weight.data.mul_(2)
        return engines.token_loss(model, batch)

    engines.step(engine, optimizer, loss)


def _lent(engine: Any, model: Any, optimizer: Any, number: int) -> None:
    """Values that `full_parameters` holds, changed while a forward computes with them."""
    _step(engine, model, optimizer, number)
    with torch.no_grad(), engine.full_parameters(model, writeback=True) as values:
        values["layers.0.up.weight"].mul_(3)
        model(models.Batches(models.rank())[number][:, :-1])


def _evaluated(engine: Any, model: Any, number: int) -> None:
    with torch.no_grad(), engine.evaluation_step():
        model(models.Batches(0)[number][:, :-1])


def _alone(engine: Any, model: Any, optimizer: Any, number: int) -> None:
    """After an update one rank alone runs a forward, and more of them than the ones before it."""
    _step(engine, model, optimizer, number)
    with engine.runtime.unequal():
        for _ in range(3 * models.rank()):
            _evaluated(engine, model, number)


def _read_alone(engine: Any, model: Any, optimizer: Any, number: int) -> None:
    """One rank holds in full what the other then gathers as float8; in a window one rank alone reads a value."""
    _window(engine, model, optimizer, number)
    with engine.runtime.unequal(), torch.no_grad():
        if models.rank() == 0:
            model.layers[0].up.weight.sum()
        else:
            _evaluated(engine, model, number)
    with engine.training_step(), engine.windows.open("auto", None, None):
        engines.backward(engine, engines.token_loss(model, models.Batches(models.rank())[number]))
        if models.rank() == 0:
            model.layers[1].up.weight.sum()
    optimizer.step()
    optimizer.zero_grad()


def _written_late(engine: Any, model: Any, optimizer: Any, number: int) -> None:
    """Through `data`, between two forwards: once before the ranks have agreed on what moves, and once after."""
    _evaluated(engine, model, number)
    if number in (1, 4):
        with torch.no_grad(), engine.evaluation_step():
            for layer in model.layers:
                layer.up.weight.data.mul_(4)
    _step(engine, model, optimizer, number)


def _held(engine: Any, model: Any, optimizer: Any, number: int) -> None:
    """Through `data`, to values whose units are dropped by then; what comes next asks for float8."""
    if number >= 3:  # the ranks have agreed on what moves
        with torch.no_grad(), engine.evaluation_step():
            held = [layer.up.weight.data for layer in model.layers]
        for value in held:
            value.mul_(4)
        _evaluated(engine, model, number)
        held[0].mul_(0.5)
    _step(engine, model, optimizer, number)


PROGRAMS = [
    _step, _alone, _read_alone, _written_late, _held,
    *(pytest.param(program, marks=LONG) for program in (_window, _loaded, _written, _lent)),
]  # fmt: skip


def _trained(gathers: bool, scope: dict[str, Any], program: Any, **options: Any) -> tuple[int, dict[str, Tensor], Any]:
    model = _model()
    if gathers:
        _marked(model)
    with engines.engine(model, 3, param_dtype=BF16, **scope, **options) as engine:
        optimizer = engines.sgd(engine, model)
        for number in range(STEPS):
            program(engine, model, optimizer, number)
        low, stats = len(engine.runtime.casts.low), engine.runtime.stats()
    return low, model.state_dict(), stats


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__[1:])
@pytest.mark.parametrize("scope", [AOT, pytest.param(MODEL, marks=LONG)], ids=["aot", "model"])
@on_ranks()
def test_gathers_of_float8_change_no_bit(scope: dict[str, Any], program: Any) -> None:
    """bfloat16 values: what the runtime casts is what torchao casts."""
    _, plain, before = _trained(False, scope, program)
    low, state, stats = _trained(True, scope, program)
    if models.device() == "cpu":
        assert low == 6 or program in (_written, _lent, _read_alone, _written_late)  # these read weights in full, too
        assert low > 0 and (stats.gather_bytes < before.gather_bytes or program not in (_step, _loaded, _alone))
    assert program is not _alone or stats.served > 0 or models.rank() == models.world() - 1
    for name, value in plain.items():
        assert torch.equal(value, state[name]), name


MORE: dict[str, dict[str, Any]] = {
    "updates in the backward": {"optimizer_in_backward": True},
    "checkpointed": {"recompute": "blocks"},
    "offload": {"offload": "optimizer"},
    "no prefetch": {"prefetch": 0},
}


@pytest.mark.parametrize("name", [*list(MORE)[:2], *(pytest.param(name, marks=LONG) for name in list(MORE)[2:])])
@on_ranks()
def test_what_gathers_of_float8_go_together_with(name: str) -> None:
    """torchao's option as users set it, in `configure_model`."""
    options = {**AOT, **MORE[name]}
    plain, module = Module(), Module(gathers=True)
    for one in (plain, module):
        trainer = models.fit_epochs(one, ZeroCompileStrategy(stage=3, **options), 2, precision="bf16-true")
        one.stats = trainer.strategy.stats
    assert module.stats.gather_bytes < plain.stats.gather_bytes
    assert _converted(module) == 6 and models.deviation(plain, module) == 0
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("more", [{"reshard_after_forward": 2}, {"device_mesh": 2}], ids=lambda more: next(iter(more)))
@pytest.mark.long
@on_ranks(4)
def test_gathers_of_float8_inside_hosts(more: dict[str, Any]) -> None:
    """Secondary shards are float8, too; replicas come to the same scales."""
    _, plain, before = _trained(False, AOT, _step, **more)
    low, state, stats = _trained(True, AOT, _step, **more)
    if models.device() == "cpu":
        assert low == 6 and stats.gather_bytes < before.gather_bytes
    assert stats.inner_gathers > 0 or "device_mesh" in more
    assert all(torch.equal(value, state[name]) for name, value in plain.items())


@pytest.mark.parametrize("options", [AOT, pytest.param(MODEL, marks=LONG)], ids=["aot", "model"])
@on_ranks()
def test_gathers_of_float8_of_frozen_layers(options: dict[str, Any]) -> None:
    """Their weights have no gradient; a scale that is rounded down to a power of two; weights that are all zero."""
    model = _marked(_model(round_scales_to_power_of_2=True))
    for name, parameter in model.named_parameters():
        if name.endswith("up.weight"):
            parameter.requires_grad_(False)
    with torch.no_grad():
        model.get_parameter("layers.0.down.weight").zero_()
    before = copy.deepcopy(model)
    moved = assert_trains_like_ddp(model, 3, steps=STEPS, **options).stats.gather_bytes
    few = assert_trains_like_ddp(copy.deepcopy(before), 3, steps=2, **options).stats.gather_bytes
    assert moved / STEPS < 0.9 * few / 2  # from the third step on it is less
    frozen = [name for name, parameter in before.named_parameters() if not parameter.requires_grad]
    assert len(frozen) == 3
    assert all(torch.equal(before.get_parameter(name), model.get_parameter(name)) for name in frozen)
