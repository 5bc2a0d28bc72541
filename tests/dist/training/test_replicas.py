"""Several replicas, each sharded over a part of the ranks: gradients are the mean over all of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_zerocompile import ZeroCompileStrategy, load_pretrained
from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.plan.plan import make_plan
from lightning_zerocompile.plan.trace import PlanError
from lightning_zerocompile.ranks.groups import replicas_of
from lightning_zerocompile.report.start import start_line
from tests.support import checkpoints, engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, assert_trains_like_ddp, reference

LONG = pytest.mark.long
# (ranks, replicas): 2 x 2, replicas of 3 ranks, replicas that are not sharded
MESHES = [(4, 2), pytest.param(6, 2, marks=LONG), pytest.param(6, 3, marks=LONG), pytest.param(4, 4, marks=LONG)]
CELLS = [
    pytest.param(3, AOT, id="3-aot_eager"),
    pytest.param(1, EAGER, id="1-eager"),
    pytest.param(3, EAGER, id="3-eager", marks=LONG),
    pytest.param(2, AOT, id="2-aot_eager", marks=LONG),
    pytest.param(2, EAGER, id="2-eager", marks=LONG),
    pytest.param(1, AOT, id="1-aot_eager", marks=LONG),
]


@pytest.mark.parametrize(("stage", "options"), CELLS)
@pytest.mark.parametrize(("world", "replicas"), MESHES)
@on_ranks("world")
def test_it_trains_as_ddp(world: int, replicas: int, stage: int, options: dict[str, Any]) -> None:
    """Over all ranks, each with data of its own; steps outside of windows and accumulations."""
    trained = assert_trains_like_ddp(models.ByteModel(), stage, device_mesh=replicas, **options)
    assert bool(trained.compiled.backward) is (options == AOT)
    assert (trained.stats.gathers > 0) and trained.stats.reductions > 0


@on_ranks(4)
def test_a_rank_holds_the_rows_of_its_part() -> None:
    """And the gathers of a rank are inside of it."""
    for replicas in (1, 2, 4):
        model, size = models.ByteModel(), 4 // replicas
        mine, first = models.rank() % size, models.rank() // size * size
        shapes = [tuple(p.shape) for p in model.parameters()]
        expected = [len(_part(s[0], size, mine)) * math.prod(s[1:]) if s else 1 for s in shapes]
        with engines.engine(model, 3, device_mesh=replicas, **EAGER) as engine:
            assert [p.to_local().numel() for p in model.parameters()] == expected  # type: ignore[attr-defined]
            group = engine.runtime.mesh.get_group()
            assert dist.get_process_group_ranks(group) == list(range(first, first + size))


def _part(rows: int, size: int, rank: int) -> range:
    """The rows of one of ``size`` ranks: as many as any has, fewer at the end."""
    most = -(-rows // size)
    return range(rows)[rank * most : (rank + 1) * most]


@pytest.mark.parametrize(("stage", "options"), CELLS)
@on_ranks(4)
def test_windows_accumulation_and_clipping(stage: int, options: dict[str, Any]) -> None:
    """Two micro-batches in a window; then two in an accumulation, clipped by the norm of all."""
    model, twin = models.pair(models.ByteModel)
    own = models.Batches(models.rank())
    with engines.engine(model, stage, device_mesh=2, **options) as engine:
        optimizer = engines.sgd(engine, model)
        with engine.training_step():
            before = engine.runtime.stats().reductions
            with engine.windows.open("auto", None, None):
                for number in (0, 1):
                    engines.backward(engine, engines.token_loss(model, own[number]) / 2)
                assert engine.runtime.stats().reductions == before
        optimizer.step()
        optimizer.zero_grad()
        with engine.training_step(), engine.accumulation():
            engines.backward(engine, engines.token_loss(model, own[2]))
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, own[3]))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()  # type: ignore[union-attr]
        optimizer.step()
    engines.window_reference(twin, [[0, 1]])
    parameters = list(twin.parameters())
    for parameter in parameters:
        parameter.grad = None
    for number in (2, 3):
        engines.mean_backward(twin, number)
    expected = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    torch.optim.SGD(parameters, lr=0.5).step()
    assert expected > 0.2 and abs(norm - expected) < 1e-5
    assert models.deviation(model, twin) <= 1e-6


class Uneven(nn.Module):
    """A branch that one rank alone takes, and a parameter that is 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.ByteModel()
        self.extra = nn.Linear(models.VOCABULARY, models.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(tokens)
        return self.extra(out) if tokens[0, 0] == 0 else out


@on_ranks(4)
def test_what_one_rank_alone_uses_is_reduced_by_all() -> None:
    """The used flags are those of all ranks: the last rank, of the other replica, alone takes the branch."""
    model, twin = models.pair(Uneven)

    def data(rank: int) -> list[torch.Tensor]:
        batches = [models.Batches(rank)[number].clone() for number in range(3)]
        for batch in batches:
            batch[0, 0] = 0 if rank == 3 else 1
        return batches

    with engines.engine(model, 2, device_mesh=2, **EAGER) as engine:
        optimizer = engines.sgd(engine, model)
        for batch in data(models.rank()):
            engines.step(engine, optimizer, lambda batch=batch: engines.token_loss(model, batch))  # type: ignore[misc]
    reference(twin, 3, data=data)
    start = Uneven().extra.weight
    assert not torch.equal(model.extra.weight, start) and models.deviation(model, twin) <= 1e-6


@pytest.mark.parametrize("kind", [pytest.param("full", marks=LONG), "sharded"])
@on_ranks(4)
def test_checkpoints_of_one_replica_load_at_any_number(kind: str, tmp_path: Path) -> None:
    """Written by two replicas, and read by one and by four, at other stages: the state is the same to the bit."""
    path = f"{tmp_path}/{kind}.ckpt"
    end = checkpoints.Look("end")
    written = checkpoints.fit(
        checkpoints.Saved(), checkpoints.strategy(kind, 3, device_mesh=2), callbacks=[end], enable_checkpointing=False
    )
    written.save_checkpoint(path)
    if kind == "sharded" and models.rank() == 0:  # each shard once, not once a replica
        stored = FileSystemReader(path).read_metadata().storage_data.values()
        size = sum(file.stat().st_size for file in Path(path).glob("*.distcp"))
        assert size == sum(item.length for item in stored) > 0
    for replicas, stage in ((1, 2), (4, 3), (2, 1)):
        start = checkpoints.Look("start")
        again = checkpoints.Saved()
        checkpoints.fit(
            again, checkpoints.strategy(kind, stage, device_mesh=replicas), epochs=2, path=path, callbacks=[start]
        )
        mine, theirs = ({k: v for k, v in look.state.items() if k != "layout"} for look in (end, start))
        if models.rank() == 0:
            assert not checkpoints.differences(mine["weights"], theirs["weights"])
            assert not checkpoints.differences(mine["optimizers"], theirs["optimizers"])


@on_ranks(4)
def test_a_fit_leaves_an_ordinary_module(tmp_path: Path) -> None:
    """Through the Trainer, as DDP, twice; the values are the same on all ranks."""
    module, twin = models.pair(models.Module)
    for _ in range(2):
        trainer = models.make_trainer(ZeroCompileStrategy(3, device_mesh=2, **EAGER), max_steps=2)
        trainer.fit(module, models.Batches(models.rank()))
        models.reference(twin, steps=2)
    assert models.deviation(module, twin) <= 1e-6
    assert all(type(p) is nn.Parameter for p in module.parameters())


@on_ranks(4)
def test_masters_are_rank_zero_s_on_all_replicas() -> None:
    torch.manual_seed(models.rank())
    model = models.ByteModel()
    with engines.engine(model, 3, device_mesh=2, **EAGER) as engine:
        mine = json.dumps([p.to_local().double().sum().item() for p in model.parameters()])  # type: ignore[attr-defined]
        heard = engine.runtime.messages.hear_all("test", mine, "compares")
    assert heard[models.rank() % 2] == heard[models.rank() % 2 + 2] != heard[(models.rank() + 1) % 2]
    torch.manual_seed(0)
    assert models.deviation(model, models.ByteModel()) == 0


@on_ranks(4)
def test_replicas_that_read_other_files(tmp_path: Path) -> None:
    """Each host with a folder of its own, one of them stale: an error on all ranks before anything is trained."""
    node = models.rank() // 2
    model = models.ByteModel()
    with torch.no_grad():
        model.head.weight[-1, -1] += node  # held by the last rank of each replica
    folder = tmp_path / str(node)
    if models.rank() % 2 == 0:
        folder.mkdir()
        safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = models.ByteModel()
    load_pretrained(model, folder)
    with pytest.raises(RuntimeError, match=r"ranks 1 and 3 hold the same rows of parameter `head.weight`, with other"):
        engines.make_engine(model, 3, device_mesh=2, **EAGER)


def _mesh(names: tuple[str, ...], *sizes: int) -> DeviceMesh:
    return init_device_mesh(engines.place().type, sizes, mesh_dim_names=names)


@on_ranks(4)
def test_a_mesh_in_which_replicas_are_of_ranks_that_alternate() -> None:
    """Dimensions `shard`, `replicate`: the shard groups are ranks 0 and 2, and ranks 1 and 3."""
    mesh = _mesh(("shard", "replicate"), 2, 2)
    model, twin = models.pair(models.ByteModel)
    with engines.engine(model, 3, device_mesh=mesh, **EAGER) as engine:
        group = dist.get_process_group_ranks(engine.runtime.mesh.get_group())
        assert group == [models.rank() % 2, models.rank() % 2 + 2]
        optimizer = engines.sgd(engine, model)
        for number in range(3):
            engines.step(engine, optimizer, lambda: engines.token_loss(model, models.Batches(models.rank())[number]))  # noqa: B023
        assert " on 4 ranks in 2 replicas, " in start_line(engine, [optimizer])
    reference(twin, 3)
    assert models.deviation(model, twin) <= 1e-6


@on_ranks(4)
def test_meshes_of_other_shapes() -> None:
    """As FSDPStrategy takes them, and full sharding by a mesh of one dimension."""
    for given, size in ((_mesh(("replicate", "shard"), 4, 1), 1), ((2, 2), 2), (_mesh(("shard",), 4), 4)):
        model, twin = models.pair(models.ByteModel)
        with engines.engine(model, 2, device_mesh=given, **EAGER) as engine:
            assert engine.runtime.mesh.size() == size
            engines.accumulate(engine, model, models.Batches(models.rank())[0])
        assert models.deviation(model, twin) == 0


def _refused(**options: Any) -> str:
    with pytest.raises(ValueError) as raised:
        Engine(models.ByteModel(), engines.place(), Config(**options, **EAGER), None, "gloo")
    return str(raised.value)


@on_ranks(2)
def test_ranks_that_cannot_be_divided() -> None:
    assert re.search(r"`device_mesh=3`: 2 ranks cannot be divided by 3.*choose a divisor", _refused(device_mesh=3))
    assert re.search(r"has 2 x 2 ranks .*and there are 2. Pass a mesh of all ranks", _refused(device_mesh=(2, 2)))
    part = _mesh(("replicate", "shard"), 2, 1)["shard"]
    assert re.search(r"has 1 x 1 ranks .*and there are 2. Pass a mesh of all ranks", _refused(device_mesh=part))
    falling = DeviceMesh(engines.place().type, [1, 0], mesh_dim_names=("shard",))
    assert re.search(r"has the ranks \[\[1, 0\]\].*in rising order", _refused(device_mesh=falling))
    foreign = DeviceMesh("xpu", [[0, 1]], mesh_dim_names=("replicate", "shard"), _init_backend=False)
    assert re.search(r"of devices 'xpu', and the ranks run on '(cpu|cuda)'", _refused(device_mesh=foreign))
    for names in (("data", "shard"), ("replicate", "tensor"), ("replicate",)):
        wrong = _mesh(names, *([2, 1] if len(names) == 2 else [2]))
        assert re.search(r"`device_mesh=.*is not understood.*'replicate' and 'shard'", _refused(device_mesh=wrong))


def _meshes_that_differ() -> str:
    first = [[0, 1], [2, 3]] if models.rank() else [[0, 2], [1, 3]]
    mesh = DeviceMesh(engines.place().type, first, mesh_dim_names=("replicate", "shard"), _init_backend=False)
    with pytest.raises(RuntimeError) as raised:
        Engine(models.ByteModel(), engines.place(), Config(device_mesh=mesh, **EAGER), None, "gloo")
    return str(raised.value)


@on_ranks(4)
def test_ranks_with_other_meshes() -> None:
    expected = "the ranks of `device_mesh` is [[0, 2], [1, 3]] on rank 0 but [[0, 1], [2, 3]] on rank 1"
    assert expected in _meshes_that_differ()


def test_a_plan_of_replicas_is_that_of_a_part() -> None:
    halves = make_plan(models.Module(), world_size=4, config=Config(device_mesh=2)).stages
    two_ranks = make_plan(models.Module(), world_size=2).stages
    assert [stage.memory for stage in halves] == [stage.memory for stage in two_ranks]
    again = make_plan(models.Module(), world_size=4, config=Config(device_mesh=(2, 2)))
    assert [stage.memory for stage in again.stages] == [stage.memory for stage in two_ranks]
    assert again.replicas == 2 and "4 ranks in 2 replicas" in str(again)
    for replicas in (3, "nodes"):
        with pytest.raises(PlanError, match=f"`device_mesh={replicas!r}`"):
            make_plan(models.Module(), world_size=4, config=Config(device_mesh=replicas))  # type: ignore[arg-type]


def test_the_number_of_replicas() -> None:
    nodes = Config(device_mesh="nodes")
    assert replicas_of(nodes, 2, 8) == replicas_of(Config(device_mesh=2), 1, 8) == 2
    assert replicas_of(nodes, 1, 8) == 1
    with pytest.raises(ValueError, match="8 ranks cannot be divided by the 3 nodes"):
        replicas_of(nodes, 3, 8)
    for wrong in (0, -1, True, "node", 1.5, None, (2,), (2, 2, 2), (0, 2), (2.0, 2)):
        with pytest.raises(ValueError, match=r"`device_mesh=.*is not understood.*ranks of each"):
            Config(device_mesh=wrong)  # type: ignore[arg-type]
