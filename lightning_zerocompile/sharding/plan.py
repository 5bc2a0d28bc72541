"""Divides a model into units (what is gathered and reduced together), and finds the blocks that become regions.

Both follow from the modules, their order and the options alone, so they are the same on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_zerocompile.sharding.islands import NONE, Islands, gathered_dtype


@dataclass
class UnitPlan:
    """Parameters that are gathered together and reduced together."""

    name: str
    parameters: list[str] = field(default_factory=list)  # fully qualified names, the first of each tied group
    bytes: int = 0  # of the gathered values
    block: nn.Module | None = None  # the repeated block that this unit is, if it is one
    kept: bool = False  # stays gathered from one optimizer step to the next, at every stage


def signature(module: nn.Module, kind: type | None = None) -> tuple[object, ...]:
    """What makes two modules equal to the compiler: class (or ``kind``), and parameters' names, shapes and dtypes."""
    parameters = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    return (kind or type(module), parameters)


def places_of_blocks(prefetch: int) -> int:
    """How many fixed addresses equal blocks share, see [Note: fixed places] in csrc/fixed_places.cpp.

    Args:
        prefetch: units that are gathered ahead of their use. If there are none, a unit is still gathered before the one
            that was used last is dropped.
    """
    return 1 + max(prefetch, 1)


def _is_block(module: nn.Module) -> bool:
    """Whether a module is worth a graph of its own: it has parameters, and it is composed of other modules."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    has_children = next(module.children(), None) is not None
    return has_children and not isinstance(module, containers) and next(module.parameters(), None) is not None


def _plain(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The name and the module; if ``torch.compile`` has made the module, those of what it was given."""
    while isinstance(module, torch._dynamo.OptimizedModule):
        name, module = f"{name}._orig_mod", module._orig_mod
    return name, module


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost repeated blocks, ``(name, module)`` in module order.

    A block is one of at least two siblings of the same class with parameters of the same names, shapes and dtypes.
    Blocks inside a block belong to it.
    """
    blocks: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        children = [_plain(n, c) for n, c in module.named_children()]
        counts = Counter(signature(child) for _, child in children if _is_block(child))
        repeated = {s for s, count in counts.items() if count > 1}
        for child_name, child in children:
            full_name = f"{name}.{child_name}" if name else child_name
            if _is_block(child) and signature(child) in repeated:
                blocks.append((full_name, child))
            else:
                visit(full_name, child)

    visit("", model)
    return blocks


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each distinct parameter once, under its first name, in module order."""
    yield from model.named_parameters(remove_duplicate=True)


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    """Whether a parameter is, or lies in, one of the named modules or parameters."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def check_names(model: nn.Module, modules: Sequence[str]) -> None:
    """Checks the names in the option ``keep_gathered``.

    Raises:
        ValueError: the model has no module with parameters, and no parameter, of one of the names; the message also
            lists the model's children.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for module in modules:
        if not any(_is_inside(name, [module]) for name in names):
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"`keep_gathered`: {type(model).__name__} has no module or parameter `{module}`. Names are as in "
                f"`named_modules()`; its children are: {children}."
            )


def plan_units(
    model: nn.Module,
    unit_bytes: int,
    dtype: torch.dtype | None,
    keep_gathered: Sequence[str] = (),
    join_blocks: bool = False,
    islands: Islands = NONE,
) -> list[UnitPlan]:
    """Partitions the model's parameters into units.

    Each repeated block is a unit. The parameters before, between and after the blocks are grouped in module order, into
    units of up to ``unit_bytes`` bytes of gathered values. A larger parameter is a unit of its own.

    Args:
        model: the module to shard.
        unit_bytes: size in bytes that a group does not exceed.
        dtype: the dtype that floating-point parameters are gathered in; ``None``: their own.
        keep_gathered: names of modules or parameters whose units are marked as kept. A block is, as a whole, if any of
            its parameters is among them.
        join_blocks: whether consecutive small blocks form groups, too; for models whose blocks are not compiled alone.
        islands: what is gathered in float32.

    Returns:
        The units in module order; every parameter is in one of them.
    """
    blocks = find_blocks(model)
    block_of = {f"{name}.": (name, block) for name, block in blocks}
    prefixes = tuple(block_of)
    units: list[UnitPlan] = []
    by_block: dict[str, UnitPlan] = {}
    for name, parameter in _owned_parameters(model):
        size = parameter.numel() * gathered_dtype(name, parameter, dtype, islands).itemsize
        kept = _is_inside(name, keep_gathered)
        prefix = next((p for p in prefixes if name.startswith(p)), None) if prefixes else None
        if prefix is None:
            units.append(UnitPlan(name=name, parameters=[name], bytes=size, kept=kept))
            continue
        if prefix not in by_block:
            block_name, block = block_of[prefix]
            by_block[prefix] = UnitPlan(name=block_name, block=block, kept=kept)
            units.append(by_block[prefix])
        by_block[prefix].kept |= kept
        by_block[prefix].parameters.append(name)
        by_block[prefix].bytes += size
    units = _joined(units, unit_bytes, blocks=False)
    return _joined(units, unit_bytes, blocks=True) if join_blocks else units


def _joined(units: list[UnitPlan], unit_bytes: int, blocks: bool) -> list[UnitPlan]:
    """Joins consecutive units into groups of up to ``unit_bytes``, and splits none; with ``blocks``, blocks, too."""
    joined: list[UnitPlan] = []
    for unit in units:
        group = joined[-1] if joined else None
        if (
            group is None
            or group.bytes + unit.bytes > unit_bytes
            or group.kept != unit.kept
            or not (blocks or group.block is unit.block is None)
        ):
            joined.append(unit)
            continue
        group.parameters += unit.parameters
        group.bytes += unit.bytes
        group.block = None
    return joined
