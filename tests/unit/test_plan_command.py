"""The plan of a run, made on one process without a device: its figures, its choice, its command, and bad input."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.__main__ import main
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.plan import Plan, make_plan
from lightning_zerocompile.plan.trace import PlanError
from lightning_zerocompile.sharding.plan import plan_units

WIDTH, BLOCKS, ROWS = 32, 4, 16
UNIT = 2 * WIDTH * WIDTH  # elements
EAGER = Config(compile=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [rows, WIDTH]
        return x + self.down(torch.relu(self.up(x)))


class Stack(L.LightningModule):
    """Equal blocks, whose figures are known in closed form."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpointed = checkpointed
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # [rows, WIDTH]
        x = batch
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        self.seen.append(x.detach())
        self.log("loss", x.sum())
        return x.square().mean()

    def train_dataloader(self) -> list[Tensor]:
        return [torch.zeros(ROWS, WIDTH, device="cpu")]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Allocates(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, device="cpu"))


class Reads(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.slope = self.layers[0].weight.sum().item()


class Manual(Stack):
    automatic_optimization = False


class Unreadable(Stack):
    def train_dataloader(self) -> Any:
        raise OSError("it is gone")


class Two(Stack):
    def train_dataloader(self) -> Any:
        return {name: DataLoader(torch.zeros(4, WIDTH, device="cpu"), batch_size=2) for name in ("a", "b")}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["a"] + batch["b"], batch_idx)


def no_batch() -> Tensor:
    raise RuntimeError("no file\nand more")


def bad_batch() -> Tensor:
    return torch.zeros(ROWS, WIDTH + 1)


def _plan(world: int = 4, checkpointed: bool = False, **options: Any) -> Plan:
    return make_plan(Stack(checkpointed), torch.zeros(ROWS, WIDTH), world_size=world, **({"config": EAGER} | options))


def test_figures_of_a_stack() -> None:
    """Every figure of equal blocks is what one computes by hand."""
    plan = _plan()
    elements, activation = BLOCKS * UNIT, 4 * ROWS * WIDTH
    assert [unit.gathered for unit in plan.units] == [4 * UNIT] * BLOCKS
    assert plan.flops == 2 * ROWS * elements * 3 - 2 * ROWS * WIDTH * WIDTH  # nobody asks for the batch's gradient
    for stage in plan.stages:
        memory = stage.memory
        assert (memory.masters, memory.states, memory.reduced) == (elements, 2 * elements, elements)  # 4 P / 4
        assert memory.resident == (4 * elements if stage.stage < 3 else 0)
        assert memory.gathered == (4 * elements if stage.stage < 3 else 8 * UNIT)
        assert memory.gradients == 4 * (2 * UNIT + UNIT // 2)  # of two units, and the next one's first
        # of each block its input (the batch is not an activation) and relu's result; of the loss one of each
        assert abs(memory.activations - 2 * BLOCKS * activation) <= activation, memory
        again = elements - UNIT if stage.stage == 3 else 0  # the last block stays for the backward
        assert (stage.traffic.forward, stage.traffic.backward) == (4 * elements, 4 * again)
        assert stage.traffic.reductions == 4 * elements


def test_the_units_are_those_of_the_run() -> None:
    units = plan_units(Stack(), EAGER.unit_bytes, None)
    assert [(u.name, u.bytes) for u in units] == [(u.name, u.gathered) for u in _plan().units]


def test_checkpointing_keeps_less_and_computes_more() -> None:
    plain, saved = _plan(), _plan(checkpointed=True)
    assert saved.stages[0].memory.activations < 0.6 * plain.stages[0].memory.activations
    # of each block the first product is done again; the second one's result is of no use
    assert saved.flops is not None and plain.flops == saved.flops - BLOCKS * 2 * ROWS * WIDTH * WIDTH


@pytest.mark.parametrize("scope", [False, "blocks"])
def test_the_options_for_activations_count(scope: Any) -> None:
    """As they do in the run: a block that runs again keeps its input alone, and one with a budget less."""
    plain = _plan(config=Config(compile=scope)).stages[0].memory.activations
    again = _plan(config=Config(compile=scope, recompute="blocks"))
    assert not any("eager code" in note for note in again.notes), again.notes
    block = 4 * ROWS * WIDTH
    assert again.stages[0].memory.activations <= min(plain, (BLOCKS + 1) * block)
    if scope:
        tight = _plan(config=Config(compile=scope, recompute=1)).stages[0].memory.activations
        assert tight <= (BLOCKS + 1) * block + 4 < plain  # and the loss


@pytest.mark.parametrize("scope", [False, "blocks"])
def test_offloaded_activations_are_in_host_memory(scope: Any) -> None:
    """As in the run: the last block's input is still on the device, and the backward has two blocks' there."""
    size, module, batch = 2**20, Stack(), torch.zeros(2**18 // WIDTH, WIDTH)
    plans = [
        make_plan(
            module,
            batch,
            world_size=2,
            config=Config(compile=scope, recompute="blocks", activation_offload=offload),
            machine=Machine(flops=1e12, bandwidth=1e12, link=1e6),
            optimizer=torch.optim.SGD,
        ).stages[2]
        for offload in (False, True)
    ]
    (most, less), loss = (plan.memory for plan in plans), 4
    assert (most.activations, most.host) == (BLOCKS * size + loss, 0)
    assert (less.activations, less.host) == (2 * size + loss, BLOCKS * size)
    saved = most.backward_peak - less.backward_peak
    assert 0.9 * size < saved < 2 * size  # of four inputs the first is the batch, and two are there in turn
    seconds = [plan.seconds for plan in plans if plan.seconds is not None]
    assert len(seconds) == 2 and seconds[1] > 4 * BLOCKS * size / 1e6 > seconds[0]  # out and in, at half of the link


def test_pinned_memory_of_activations_is_rounded_up() -> None:
    """torch's allocator takes a power of two for each tensor."""
    config = Config(compile=False, recompute="blocks", activation_offload=True)
    rows = 2**18 // WIDTH + 1
    plan = make_plan(Stack(), torch.zeros(rows, WIDTH), world_size=2, config=config)
    assert plan.stages[2].memory.host == BLOCKS * 2**21


@pytest.mark.parametrize("master_dtype", [torch.float32, None])
def test_frozen_parameters_keep_their_dtype(master_dtype: torch.dtype | None) -> None:
    """In the run they have neither a wide master nor a state nor a gradient."""
    module = Stack().bfloat16()
    module.layers[0].requires_grad_(False)
    plan = make_plan(module, None, world_size=4, config=Config(compile=False, master_dtype=master_dtype))
    frozen, trained = UNIT // 4 * 2, UNIT // 4 * (4 if master_dtype else 2)
    assert [unit.masters for unit in plan.units] == [frozen, *(BLOCKS - 1) * [trained]]
    memory = plan.stages[0].memory
    assert (memory.states, memory.reduced) == (2 * 3 * trained, 3 * trained)


def test_kept_units_are_gathered_once_in_an_accumulation() -> None:
    """Several backwards of stage 3: a unit that stays gathered moves once a step, the others in each."""
    one, three = (
        make_plan(Stack(), None, world_size=4, config=Config(keep_gathered=("layers.1",)), accumulate=n).stages[2]
        for n in (1, 3)
    )
    kept = 4 * UNIT
    assert three.traffic.forward == kept + 3 * (one.traffic.forward - kept)
    assert three.traffic.reductions == 3 * one.traffic.reductions


def test_reduced_gradients_wait_in_an_accumulation() -> None:
    """At stages 2 and 3 what an earlier backward has reduced is there in the next forward, and is added to."""
    one, two = _plan(world=2).stages, _plan(world=2, accumulate=2).stages
    for stage in (1, 2):
        before, now = one[stage].memory, two[stage].memory
        assert now.reduced == before.reduced > 0
        assert now.forward_peak == before.forward_peak + now.reduced and now.step_peak == before.step_peak


class Layer(Block):
    """Runs itself again in the backward, as a layer of transformers does."""

    gradient_checkpointing = True

    def _gradient_checkpointing_func(self, *args: Any) -> Any:
        return checkpoint(*args, use_reentrant=False)

    def forward(self, x: Tensor, *, count: int = 1) -> Tensor:
        run = super().forward
        return self._gradient_checkpointing_func(run, x) if self.gradient_checkpointing else run(x)


def test_layers_that_checkpoint_themselves() -> None:
    """torch.compile sees the checkpoint inside of a block; so does the plan."""
    figures = []
    for layer, options in ((Layer, {}), (Block, {"recompute": "blocks"})):
        module = Stack()
        module.layers = nn.ModuleList(layer() for _ in range(BLOCKS))
        plan = make_plan(module, torch.zeros(ROWS, WIDTH), world_size=2, config=Config(**options))  # type: ignore[arg-type]
        assert not any("eager code" in note for note in plan.notes), plan.notes
        figures.append((plan.flops, plan.stages[0].memory.activations))
    assert figures[0] == figures[1]
    assert all(getattr(layer, "gradient_checkpointing", True) for layer in module.layers)


def test_a_budget_where_blocks_are_called_with_more_than_tensors() -> None:
    """The partitioner asks each input of a graph for its size."""

    class Told(Block):
        def forward(self, x: Tensor, flag: bool = False, scale: float | None = None) -> Tensor:
            return super().forward(x if scale is None else x * scale)

    class Telling(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Told() for _ in range(BLOCKS))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = layer(batch, True, scale=0.5)
            return batch.square().mean()

    kept = []
    for share in (None, 1):
        config = Config(recompute=share)
        plan = make_plan(Telling(), torch.zeros(ROWS, WIDTH), world_size=2, config=config)
        assert not any("eager code" in note for note in plan.notes), plan.notes
        kept.append(plan.stages[0].memory.activations)
    assert kept[1] < 0.8 * kept[0]


def test_compiled_blocks_are_partitioned() -> None:
    """What is saved follows from the partitioner: an elementwise chain keeps its input only."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(torch.cos(torch.sin(torch.cos(self.inner(x)))))

    module = Stack()
    module.layers = nn.ModuleList(Chain() for _ in range(BLOCKS))
    kept = {}
    for scope in ("blocks", False):
        plan = make_plan(module, torch.zeros(ROWS, WIDTH), world_size=2, config=Config(compile=scope))  # type: ignore[arg-type]
        assert not any("eager code" in note for note in plan.notes), plan.notes
        kept[scope] = plan.stages[0].memory.activations
    assert kept["blocks"] < 0.6 * kept[False], kept


def test_what_follows_from_weights_is_not_saved() -> None:
    """As in a run, see passes/recompute.py: each backward computes it again."""

    class Squashed(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(nn.functional.linear(x, torch.tanh(self.up.weight)))
            return x + nn.functional.linear(hidden, torch.tanh(self.down.weight))

    kept = []
    for layer in (Block, Squashed):
        module = Stack()
        module.layers = nn.ModuleList(layer() for _ in range(BLOCKS))
        plan = make_plan(module, torch.zeros(ROWS, WIDTH), world_size=2, config=Config(), stages=[3])
        assert not any("eager code" in note for note in plan.notes), plan.notes
        kept.append(plan.stages[0].memory.activations)
    assert kept[1] < kept[0] + 2 * WIDTH * WIDTH * 4, kept  # at most one block's, while it is computed


def test_nothing_is_changed() -> None:
    """The module, its gradients and its random numbers are as before; a module on meta is planned alike."""
    module = Stack()
    before = [p.clone() for p in module.parameters()]
    state = torch.get_rng_state()
    plan = make_plan(module, torch.zeros(ROWS, WIDTH), world_size=4, config=EAGER)
    assert module.seen == [] and all(p.grad is None for p in module.parameters())
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):
        other = Stack()
    assert make_plan(other, torch.zeros(ROWS, WIDTH), world_size=4, config=EAGER).stages == plan.stages


def test_the_stage_to_take() -> None:
    """The least traffic of what fits; stage 3 where only that fits; none where none does."""
    needed = {stage.stage: math.ceil(stage.memory.peak / 0.9) for stage in _plan().stages}  # a tenth is left free
    assert needed[3] < needed[1]
    chosen = [_plan(machine=Machine(memory=memory)).fastest() for memory in (needed[1], needed[3], needed[3] - 2)]
    assert [None if stage is None else stage.stage for stage in chosen] == [1, 3, None]
    assert "stages that do not fit: 1, 2" in str(_plan(machine=Machine(memory=needed[3])))
    nothing = str(_plan(machine=Machine(memory=1)))
    assert "No stage fits" in nothing and "recompute='blocks'" in nothing
    slow = _plan(machine=Machine(bandwidth=1e3, flops=1e15)).stages
    assert slow[2].seconds is not None and slow[0].seconds is not None and slow[2].seconds > slow[0].seconds


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    arguments = [f"{__name__}:Stack", "--world-size", "4", "--gpu-memory", "1GiB", "--plot", str(picture)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Stage 1 is the one to take" in printed and "peak of the backward" in printed
    assert len(xml.etree.ElementTree.parse(picture).getroot().findall(".//{*}rect")) > 3 * 6
    assert main([*arguments, "--json", "--stage", "3"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [stage["stage"] for stage in made["stages"]] == [3] and made["stages"][0]["memory"]["peak"] > 0


def test_several_loaders(capsys: pytest.CaptureFixture[str]) -> None:
    """The first batch is what the Trainer's own combination of them gives."""
    assert main([f"{__name__}:Two", "--world-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["memory"]["batch"] == 2 * 2 * WIDTH * 4


def test_arguments_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("[1]", "width=3"):
        with pytest.raises(SystemExit):
            main([f"{__name__}:Stack", "--world-size", "2", "--arguments", text])
        assert "is not JSON with arguments by name" in capsys.readouterr().err


def test_a_remedy_is_a_sentence_of_its_own() -> None:
    def step(module: Any, batch: Any) -> Any:
        raise RuntimeError("no end")

    with pytest.raises(PlanError, match=r"RuntimeError: no end\. Is it a batch"):
        _plan(step=step)


def test_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a LightningCLI: its strategy's options and precision count, and its GPUs need not be here."""
    pytest.importorskip("jsonargparse")
    file = tmp_path / "config.yaml"
    strategy = {"class_path": "lightning_zerocompile.ZeroCompileStrategy", "init_args": {"master_dtype": None}}
    trainer = {"accelerator": "gpu", "devices": 8, "precision": "bf16-true", "strategy": strategy}
    file.write_text(json.dumps({"trainer": trainer, "model": {"class_path": f"{__name__}.Stack"}}))
    assert main([str(file), "--world-size", "4", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["units"][0]["gathered"] == 2 * UNIT


def test_a_configuration_of_one_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line `LightningCLI(Stack)` writes its arguments without a `class_path`."""
    pytest.importorskip("jsonargparse")
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"trainer": {}, "model": {"checkpointed": True}}))
    assert main([str(file), "--world-size", "4"]) == 1
    assert "`--model package.module:Class`" in capsys.readouterr().err
    assert main([str(file), "--world-size", "4", "--json", "--model", f"{__name__}:Stack"]) == 0
    assert json.loads(capsys.readouterr().out)["module"] == "Stack"


def test_options_of_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    """Those on the command line count; a wrong one is named."""
    arguments = [f"{__name__}:Stack", "--world-size", "4", "--json"]
    assert main(arguments) == 0 and main([*arguments, "--options", '{"offload": "optimizer"}']) == 0
    before, after = (json.loads(line)["stages"][0]["memory"]["states"] for line in _documents(capsys))
    assert after < before
    for option in ('{"offload": 3}', '{"offloaded": true}'):
        assert main([*arguments, "--options", option]) == 1
        assert "offload" in capsys.readouterr().err


def _documents(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What two calls of the command have printed."""
    first, _, second = capsys.readouterr().out.partition("\n}\n")
    return [first + "}", second]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Stack", "--world-size", "0"], "number of ranks, 1 or more"),
        (["Stack", "--world-size", "2", "--batch", f"{__name__}:bad_batch"], r"float32\[16, 33\] failed"),
        (["Allocates", "--world-size", "2"], "allocates `weight` (12 bytes on cpu)"),
        (["Reads", "--world-size", "2"], "cannot be built on the meta device"),
        (["Manual", "--world-size", "2"], "Pass `step=`"),
        (["None_", "--world-size", "2"], "There is no"),
        (["Stack", "--world-size", "2", "--batch", f"{__name__}:no_batch"], "makes no batch: RuntimeError: no file."),
        (["Unreadable", "--world-size", "2"], "OSError: it is gone. Pass `--batch"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{__name__}:{arguments[0]}", *arguments[1:]]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and message.replace("\\", "") in printed.err


def test_the_strategy_plans_with_its_options() -> None:
    strategy = ZeroCompileStrategy(compile=False, param_dtype="bfloat16")
    plan = strategy.plan(Stack(), torch.zeros(ROWS, WIDTH), world_size=4, gpu_memory=2**30)
    assert plan.units[0].gathered == 2 * UNIT and plan.stages[0].fits


def test_bad_arguments() -> None:
    for options, message in (
        ({"stages": (4,)}, "must be some of"),
        ({"accumulate": 0}, "number of backwards"),
        ({"step": lambda module, batch: None}, "not a loss"),
        ({"step": lambda module, batch: batch.sum().item()}, "not a loss|numbers in a tensor"),
    ):
        with pytest.raises(PlanError, match=message):
            _plan(**options)
    with pytest.raises(PlanError, match="positive number of bytes"):
        Machine(memory=-1)
    with pytest.raises(PlanError, match="positive number of bytes"):
        Machine(memory="80GiB")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="has no parameters"):
        make_plan(nn.ReLU(), None, world_size=2)
