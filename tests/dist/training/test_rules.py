"""The rules of lightning_zerocompile/README.md, one test (or a few) each; rules 8 and 11 have files of their own."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models, parity
from tests.support.architectures import SquareModel
from tests.support.harness import Worlds, on_ranks
from tests.support.parity import SCOPES, STAGES

# ---- rule 2 ----


@STAGES
@on_ranks()
def test_rule_02_getter_and_requires_grad(stage: int) -> None:
    """The getter is never a root frame; a `requires_grad` toggled inside a step counts from the next forward on."""
    model, data = models.ByteModel(), models.Batches(models.rank())
    frames: list[str] = []
    compile_frame = torch._dynamo.convert_frame._compile

    def spy(code: Any, *args: Any, **kwargs: Any) -> Any:
        frames.append(code.co_name)
        return compile_frame(code, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, engines.engine(model, stage) as engine:
        patch.setattr(torch._dynamo.convert_frame, "_compile", spy)
        masters = [p for n, p in model.named_parameters() if "layers.1.up" in n]
        with engine.training_step():
            for wanted in (True, False, True):
                for master in masters:
                    master.requires_grad_(wanted)
                engines.backward(engine, engines.token_loss(model, data[0]))
                assert [master.grad is not None for master in masters] == [wanted] * 2
                for parameter in model.parameters():
                    parameter.grad = None
        assert engine.runtime.stats().graph_reductions == 15 + 13 + 15
    assert set(frames) == {"forward_in_training"}


# ---- rule 3 ----


def _saved(stage: int, scope: Any) -> tuple[list[tuple[int, ...]], int]:
    model = models.ByteModel(width=9)
    weights = {tuple(p.shape) for p in model.layers[0].parameters() if p.dim() == 2}
    weights |= {shape[::-1] for shape in weights}
    saved: list[Tensor] = []
    with engines.engine(models.Whole(model), stage, compile=scope) as engine:
        resident = {
            sharded.source.untyped_storage().data_ptr()
            for sharded in engine.runtime.sharded_parameters
            if sharded.source.numel() > 0
        }
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            loss = engines.token_loss(model, models.Batches(models.rank())[0])
        with engine.backward(loss):
            loss.backward()
        graph_uses = engine.runtime.stats().graph_uses
    held = [tuple(t.shape) for t in saved if t.untyped_storage().data_ptr() not in resident]
    assert saved
    return [shape for shape in held if shape in weights and 9 in shape and 19 in shape], graph_uses


@STAGES
@pytest.mark.parametrize("scope", ["blocks", "model"])
@on_ranks()
def test_rule_03_no_full_weight_is_saved(stage: int, scope: Any) -> None:
    """Compiled graphs save no weight of a block for backward, transposed or not; eager code would."""
    held, graph_uses = _saved(stage, scope)
    assert held == [] and graph_uses > 0
    if stage == 3:  # the probe sees a weight that is saved: eager, outside the runtime's own hooks
        assert _saved(stage, False)[0] != []


# ---- rule 4 ----


def _square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _reused(code: str) -> tuple[int, list[str]]:
    """How many buffers our calls take; those whose memory the code writes to, or frees before the last of the calls."""
    body = code[code.index("def call("):].splitlines()  # fmt: skip
    last: dict[str, int] = {}
    for i, call in enumerate(body):
        if re.search(r"torch\.ops\.zerocompile\.(reduce_unit_|reduce_fence_|release_)", call):
            taken = call[call.index("(") + 1 :].split("]")[0]
            last |= dict.fromkeys(re.findall(r"\bbuf\d+\b", taken), i)
    found = []
    for name, at in last.items():
        for i, line in enumerate(body):
            freed = re.search(rf"del {name}\b", line) and i < at
            if freed or re.search(rf"= (reinterpret_tensor\()?{name}\b.*# reuse", line):
                found.append(f"{name} at {i}, last call at {at}: {line.strip()}")
    return len(last), found


def _freed(code: str) -> int:
    """How many gradients are freed right after the call that hands them over."""
    return len(re.findall(r"reduce_unit_\.one\((buf\d+), .*\n\s+del \1\b", code))


@on_ranks(timeout=240)
def test_rule_04_generated_code_keeps_buffers() -> None:
    """What is gathered or reduced is not written to, nor freed before our last call; the numbers are right."""
    # Inductor's code for the whole model as one graph at stage 3, and the deviation after two steps.
    reduce = "def call(args):\n  torch.ops.zerocompile.reduce_unit_.default([buf1], [primals_1])\n"
    fence = "  torch.ops.zerocompile.reduce_fence_.default([buf1])\n"
    assert _reused(reduce + "  buf2 = buf1; del buf1  # reuse\n")[1]  # the check itself notices
    assert _reused(reduce + "  buf2 = reinterpret_tensor(buf1, (10, 40), (40, 1), 0); del buf1  # reuse\n")[1]
    assert _reused(reduce + "  del buf1\n" + fence)[1] and not _reused(reduce + fence + "  del buf1\n")[1]
    from torch._inductor.utils import run_and_get_code

    model, twin = models.pair(SquareModel)
    data = torch.randn(2, models.world(), 20, 20).to(models.device())  # [steps, ranks, rows, width], alike everywhere
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        engines.engine(model, 3, compile_options={"backend": "inductor"}, compile="model") as engine,
    ):
        optimizer = engines.sgd(engine, model)

        def train() -> None:
            for batches in data:
                mine = batches[models.rank()]
                engines.step(engine, optimizer, lambda x=mine: _square_loss(model, x))

        _, codes = run_and_get_code(train)
    parity.reference(twin, 2, _square_loss, lambda rank: data[:, rank])
    text = "\n".join(codes)
    assert "reduce_fence_" in text and "release_" in text and "gather_unit" in text
    found = [_reused(code) for code in codes]
    assert sum(count for count, _ in found) >= 10
    assert [reused for _, several in found for reused in several] == []
    assert sum(_freed(code) for code in codes) >= 2
    assert models.deviation(model, twin) <= 1e-5


# ---- rule 5 ----


def test_rule_05_options(tmp_path: Path) -> None:
    """No reordering, mode expanded below the user's options, the user's passes first, CUDA graphs if asked for."""
    from lightning_zerocompile.compile.backend import Composed, inductor_options
    from lightning_zerocompile.compile.passes.place_communication import PlaceCommunication
    from lightning_zerocompile.compile.passes.recompute import PrepareJointGraph
    from lightning_zerocompile.config import Config
    from lightning_zerocompile.runtime import build as runtime_build

    runtime_build.load()
    order: list[str] = []
    theirs = {"post_grad_custom_post_pass": lambda graph: order.append("user"), "max-autotune-gemm": False}
    config = Config(
        compile_options={"mode": "max-autotune-no-cudagraphs", "options": {**theirs, "reorder_for_peak_memory": True}}
    )
    options = inductor_options(config, PlaceCommunication(True), True)
    assert options["reorder_for_peak_memory"] is False
    assert options["max_autotune"] is True and options["max_autotune_gemm"] is False  # the mode's; the user's
    assert isinstance(options["joint_custom_pre_pass"], PrepareJointGraph)
    composed = options["post_grad_custom_post_pass"]
    assert isinstance(composed, Composed) and composed.uuid() is None  # an unhashable pass: not cached
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    composed(graph)
    assert order == ["user"]
    with torch._inductor.config.patch(joint_custom_pre_pass=PrepareJointGraph()):  # set globally instead
        assert isinstance(inductor_options(Config(), PlaceCommunication(True), True)["joint_custom_pre_pass"], Composed)
    for graphs in (
        {"compile_options": {"mode": "reduce-overhead"}},
        {"compile_options": {"mode": "max-autotune"}},
        {"compile_options": {"options": {"triton.cudagraphs": True}}},
    ):
        recorded = inductor_options(Config(**graphs), PlaceCommunication(True), True)
        assert recorded["triton.cudagraphs"] is True
        assert recorded["triton.reorder_for_reducing_graph_partitions"] is False
    plain = Config(compile_options={"mode": "max-autotune", "options": {"triton.cudagraphs": False}})
    assert inductor_options(plain, PlaceCommunication(True), True)["triton.cudagraphs"] is False
    with pytest.warns(UserWarning, match="no effect"):
        assert not Config(compile=False, compile_options={"options": {"triton.cudagraphs": True}}).cuda_graphs
    assert PlaceCommunication(True).uuid() != PlaceCommunication(False).uuid()


# ---- rule 6 ----


def _cached(stage: int, folders: list[str]) -> tuple[float, int, int]:
    """Deviation after two steps with this rank's Inductor cache folder, and its cache's hits and misses."""
    model, twin = models.pair(lambda: models.ByteModel(width=6, blocks=2))
    data = models.Batches(models.rank())
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folders[models.rank()])
        with engines.engine(model, stage, compile_options={"backend": "inductor"}) as engine:
            optimizer = engines.sgd(engine, model)
            for number in range(2):
                engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
            assert engine.runtime.stats().graph_reductions > 0
    parity.reference(twin, [0, 1])
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    misses = counters["inductor"]["fxgraph_cache_miss"]
    return models.deviation(model, twin), hits, misses


@pytest.mark.long
def test_rule_06_warm_cache(worlds: Worlds, tmp_path: Path) -> None:
    """A cache filled by rank 0 of two serves rank 1, another stage and another world size, with right numbers."""
    mine, other = str(tmp_path / "a"), str(tmp_path / "b")
    cold = worlds(2).run(_cached, 3, [mine, other], timeout=240)
    assert all(misses > 0 and hits == 0 for _, hits, misses in cold)
    swapped = worlds(2).run(_cached, 3, [other, mine], timeout=240)
    larger = worlds(3).run(_cached, 3, [mine] * 3, timeout=240)
    stage_2 = worlds(2).run(_cached, 2, [mine] * 2, timeout=240)
    again = worlds(2).run(_cached, 1, [mine] * 2, timeout=240)
    assert all(deviation <= 5e-6 for run in (cold, swapped, larger, stage_2, again) for deviation, _, _ in run)
    # on GPUs Inductor's keys hold the device's number: a rank finds what its own number compiled
    warm = [*swapped, *larger, *again] if worlds.device == "cpu" else [larger[0], *again]
    assert all(hits > 0 and misses == 0 for _, hits, misses in warm)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.nn.functional.gelu(self.inner(x)))  # type: ignore[no-any-return]


def _backwards(x: Tensor, stage: int, retain: bool) -> float:
    """Deviation after one step of a new model, whose backward runs once, or twice through one graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated())
    twin = copy.deepcopy(model).to(x.device)
    with engines.engine(model, stage, compile_options={"backend": "inductor"}) as engine:
        optimizer = engines.sgd(engine, model, lr=0.01)
        with engine.training_step():
            y = model(x)
            if retain:
                with engine.backward(first := y.sum()):
                    first.backward(retain_graph=True)
            with engine.backward(last := y.square().mean()):
                last.backward()
        optimizer.step()
    plain = torch.optim.SGD(twin.parameters(), lr=0.01)
    y = twin(x)
    (y.square().mean() + (y.sum() if retain else 0)).backward()
    plain.step()
    return models.deviation(model, twin)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2)), 3])
@on_ranks()
def test_rule_06_a_cached_backward_that_runs_twice(stage: int, tmp_path: Path) -> None:
    """A backward that may overwrite what is saved, since it was compiled to run once, does not run twice."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(models.device())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / str(models.rank())))
        assert _backwards(x, stage, retain=False) <= 1e-6
        with pytest.raises(RuntimeError, match="donated_buffer=False"):
            _backwards(x, stage, retain=True)
        with functorch.patch(donated_buffer=False):  # type: ignore[no-untyped-call, unused-ignore]
            assert _backwards(x, stage, retain=True) <= 1e-6


# ---- rule 9 ----

SHUTDOWN = """
    import torch, torch.distributed as dist
    import lightning as L
    from tests.support import models
    from lightning_zerocompile import ZeroCompileStrategy
    from lightning_zerocompile.runtime.runtime import Runtime

    shutdown, destroy = Runtime.shutdown, dist.destroy_process_group
    Runtime.shutdown = lambda self: (order.append("shutdown"), shutdown(self))[1]
    dist.destroy_process_group = lambda *a: (order.append("destroy"), destroy(*a))[1]
    for stage in (1, 3):
        order = []
        strategy = ZeroCompileStrategy(stage=stage, compile_options={"backend": "aot_eager"})
        models.train(models.Module(), strategy, steps=2)
        assert order[:2] == ["shutdown", "destroy"] and set(order[1:]) == {"destroy"}, order
        dist.destroy_process_group()
    print("ended")
"""


def test_rule_09_shutdown_before_the_group() -> None:
    """The runtime lets go of the groups before they are destroyed, and the process ends without a complaint."""
    command = [sys.executable, "-c", textwrap.dedent(SHUTDOWN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("ended") and "Traceback" not in done.stderr


# ---- rule 12 ----


class Reader(nn.Module):
    """Reads attributes of its weights many times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(width, width))

    def forward(self, x: Tensor, reads: int) -> Tensor:
        for _ in range(reads):
            x = x.to(self.linear[0].weight.dtype) * (1.0 if self.linear[0].bias.shape else 0.0)
        return self.linear(x)


class ReaderModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Reader(10) for _ in range(3))

    def forward(self, x: Tensor, reads: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, reads)
        return x


def _attribute_reads(reads: int) -> tuple[int, int]:
    model = ReaderModel()
    with engines.engine(model, 3, compile=False) as engine:
        with engine.training_step():
            engines.backward(engine, model(torch.randn(2, 10, device=models.device()), reads).sum())
        stats = engine.runtime.stats()
    return stats.gathers, stats.eager_reads


@on_ranks()
def test_rule_12_reads_do_not_gather() -> None:
    """Twenty reads of a weight's attributes in a block communicate no more than one."""
    few, many = _attribute_reads(1), _attribute_reads(20)
    assert few[0] == many[0] == 5  # three blocks forward, two again backward: the last one is still gathered
    assert many[1] == few[1] + 3 * 19 * 2


# ---- gathers in flight together ----


@on_ranks()
def test_gathers_in_flight_together() -> None:
    """gloo's threads race when names of collectives are long: see [Note: gloo gathers]."""
    # Starts the gathers of all units at once, again and again; the values must be the masters' at the end.
    rounds = 1000
    model, twin = models.pair(models.ByteModel)
    with engines.engine(model, 1, compile=False, unit_bytes=1) as engine:  # no unit shares a collective
        masters = list(model.parameters())
        for _ in range(rounds):
            engine.runtime.masters_changed(masters)
        with engine.full_parameters(model, writeback=False) as values:
            expected = {name: value.detach().cpu() for name, value in twin.named_parameters()}
            worst = max((value.cpu() - expected[name]).abs().max().item() for name, value in values.items())
        gathers = engine.runtime.stats().gathers
    assert gathers >= 5 * 1000 and worst == 0.0


# ---- rule 14 ----


class Validated(models.Module):
    """Its validation runs in inference mode, as Lightning's does on NCCL."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.inference_mode():
            loss = self.loss(batch)
            assert loss.is_inference()
        self.val_losses = [*getattr(self, "val_losses", []), loss.item()]


@STAGES
@SCOPES
@on_ranks()
def test_rule_14_inference_mode_before_training(stage: int, scope: Any) -> None:
    """The sanity check and validations in inference mode leave no inference tensor behind: training is right."""
    module, twin = Validated(), models.Module()
    twin.load_state_dict(module.state_dict())
    strategy = ZeroCompileStrategy(stage=stage, compile=scope, compile_options={"backend": "aot_eager"})
    trainer = models.make_trainer(
        strategy, max_steps=4, num_sanity_val_steps=2, val_check_interval=2, limit_val_batches=2
    )
    data = models.Batches(models.rank())
    trainer.fit(module, data, data)
    models.reference(twin, 4)
    assert models.deviation(module, twin) <= 1e-6
    assert len(module.val_losses) == 2 + 2 * 2
