"""Which parameters are gathered together, and which modules are compiled as blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zerocompile.sharding.plan import find_blocks, plan_units
from tests.support import architectures, models

LARGE = 2**40


def _nested() -> nn.Module:
    model = nn.Module()
    model.encoder = nn.Module()
    model.encoder.stages = nn.ModuleList(nn.ModuleList(models.Block(width) for _ in range(2)) for width in (4, 6))
    model.decoder = nn.ModuleDict({"layers": nn.Sequential(*(models.Block(8) for _ in range(3)))})
    model.head = nn.Linear(8, 3)
    return model


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def test_blocks_in_nested_lists() -> None:
    """Repeated modules are found at any depth of containers, in module order."""
    names = [name for name, _ in find_blocks(_nested())]
    encoder = [f"encoder.stages.{i}.{j}" for i in (0, 1) for j in (0, 1)]
    assert names == encoder + [f"decoder.layers.{i}" for i in range(3)]


def test_different_siblings_are_no_blocks() -> None:
    """A block has an equal sibling: same class, names, shapes and dtypes."""
    model = nn.ModuleList([models.Block(4), models.Block(6), models.Block(6).double()])
    assert find_blocks(model) == []


def test_outermost_block_wins() -> None:
    """Blocks inside a block belong to it."""
    model = nn.ModuleList(nn.Sequential(models.Block(4), models.Block(4)) for _ in range(2))
    assert [name for name, _ in find_blocks(model)] == ["0", "1"]


def test_every_parameter_is_in_one_unit() -> None:
    """Units partition the parameters of every architecture; tied ones count once, under their first name."""
    for make in [*architectures.ARCHITECTURES.values(), _nested, models.ByteModel]:
        model = make()
        planned = [name for unit in plan_units(model, LARGE, None) for name in unit.parameters]
        assert sorted(planned) == sorted(_names(model)), make
        assert len(set(planned)) == len(planned)


def test_tied_across_blocks() -> None:
    """A parameter of two blocks is gathered with the first."""
    units = {unit.name: unit for unit in plan_units(architectures.Tied(), LARGE, None)}
    assert "layers.0.down.weight" in units["layers.0"].parameters
    assert not any("down" in name for name in units["layers.1"].parameters)
    assert all("head.weight" not in unit.parameters for unit in units.values())


def test_without_blocks_groups_by_size() -> None:
    """Without blocks consecutive parameters form groups of at most `unit_bytes`, unless one alone is larger."""
    model = nn.Sequential(*(nn.Linear(8, 10 - i, bias=False) for i in range(6)))
    sizes = {n: p.numel() * 4 for n, p in model.named_parameters()}
    units = plan_units(model, 2 * 4 * 8 * 10, None)
    assert [name for unit in units for name in unit.parameters] == _names(model)
    assert all(unit.block is None for unit in units)
    assert len(units) == 3 and all(unit.bytes == sum(sizes[n] for n in unit.parameters) for unit in units[:2])
    assert len(plan_units(model, 1, None)) == 6
    assert len(plan_units(model, LARGE, None)) == 1


def test_large_embedding_is_its_own_unit() -> None:
    """A parameter above `unit_bytes` is alone; small ones around it are not gathered with it."""
    model = nn.Module()
    model.small = nn.Linear(4, 4)
    model.embedding = nn.Embedding(1000, 8)
    model.after = nn.Linear(4, 4)
    units = plan_units(model, 4096, None)
    assert [unit.parameters for unit in units] == [
        ["small.weight", "small.bias"], ["embedding.weight"], ["after.weight", "after.bias"],
    ]  # fmt: skip


def test_sizes_are_of_gathered_values() -> None:
    """In bfloat16 twice as many parameters fit; integers keep their dtype."""
    whole = nn.Parameter(torch.zeros(8, dtype=torch.int32), requires_grad=False)
    model = nn.ParameterList([nn.Parameter(torch.zeros(8)), whole])
    (unit,) = plan_units(model, LARGE, torch.bfloat16)
    assert unit.bytes == 8 * 2 + 8 * 4


def test_rest_is_split_by_blocks() -> None:
    """Parameters before and after the blocks are different units: they are used at different times."""
    units = plan_units(models.ByteModel(), LARGE, None)
    names = [unit.name for unit in units]
    assert names[1:4] == [f"layers.{i}" for i in range(3)] or names[-1] == "head.weight"
    of = {name: unit.name for unit in units for name in unit.parameters}
    assert len({of["layers.0.up.weight"], of["layers.1.up.weight"], of["head.weight"]}) == 3


def test_small_blocks_are_joined() -> None:
    """Where no block is compiled alone, consecutive units are one, up to `unit_bytes`; none is split."""
    model = models.ByteModel()
    alone = plan_units(model, 1, None)
    block = next(unit.bytes for unit in alone if unit.name == "layers.1")
    blocks = plan_units(model, block, None)
    for limit, expected in ((1, alone), (block, blocks)):  # no two fit
        joined = plan_units(model, limit, None, join_blocks=True)
        assert [unit.parameters for unit in joined if unit.bytes >= block] == [
            unit.parameters for unit in expected if unit.bytes >= block
        ]
    pairs = plan_units(model, 2 * block, None, join_blocks=True)
    assert [name for unit in pairs for name in unit.parameters] == [name for unit in alone for name in unit.parameters]
    of = {name: number for number, unit in enumerate(pairs) for name in unit.parameters}
    numbers = [{of[name] for name in unit.parameters} for unit in blocks if unit.block is not None]
    assert all(len(number) == 1 for number in numbers)  # whole blocks
    assert len(set.union(*numbers)) == 2 and all(unit.bytes <= 2 * block for unit in pairs)
    (whole,) = plan_units(model, LARGE, None, join_blocks=True)
    assert whole.bytes == sum(unit.bytes for unit in alone) and whole.block is None


def test_kept_blocks_are_not_joined_with_others() -> None:
    units = plan_units(models.ByteModel(), LARGE, None, ["layers.1"], join_blocks=True)
    assert [unit.kept for unit in units] == [False, True, False]
    assert all(name.startswith("layers.1.") for name in units[1].parameters)


@pytest.mark.parametrize("name", ["layers.1.norm", "layers.1.down", "layers.1.down.weight"])
def test_a_block_is_kept_whichever_of_its_parts_is_named(name: str) -> None:
    units = plan_units(models.ByteModel(), 1, None, [name])
    assert [unit.name for unit in units if unit.kept] == ["layers.1"]


def test_deterministic() -> None:
    """Equal models have equal plans, whatever their values, device or history."""
    plans = []
    for device in ("cpu", "meta", "cpu"):
        with torch.device(device):
            plans.append([(u.name, u.parameters, u.bytes) for u in plan_units(_nested(), 500, None)])
    assert plans[0] == plans[1] == plans[2]
