"""The operators' contracts: schema, fake kernel, autograd registration, identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zerocompile.runtime.ops import flatten, unflatten
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import Worlds


def _parameters(engine: Any, count: int = 2) -> list[Any]:
    return [sharded for sharded in engine.runtime.sharded_parameters if len(sharded.size) == 2][:count]


def _arguments(engine: Any, name: str) -> tuple[Any, ...]:
    """Arguments that the operator gets in a live model."""
    parameters = _parameters(engine)
    handles = [sharded.frozen_handle for sharded in parameters]
    full = [torch.randn(sharded.size) for sharded in parameters]
    sizes = flatten([sharded.size for sharded in parameters])
    as_float8 = parameters[0].source.to(torch.float8_e4m3fn), parameters[0].handle, list(parameters[0].size)
    if name in ("gather_cast.default", "float8_scale"):
        engine.runtime.core.read_as_float8(parameters[0].index, False)
    if name == "float8_scale":
        torch.ops.zerocompile.gather_cast(*as_float8)
    return {
        "gather": (parameters[0].source, parameters[0].handle, list(parameters[0].size)),
        "gather_cast": (parameters[0].source.to(torch.bfloat16), parameters[0].handle, list(parameters[0].size)),
        "gather_cast.default": as_float8,
        "float8_scale": (full[0], handles[0]),
        "reduce_grad": (full[0], handles[0]),
        "gather_unit": ([parameters[0].source, parameters[1].source.to(torch.bfloat16)], handles, sizes, False),
        "wait_": (full, handles, False),
        "release_": (full, handles, True),
        "reduce_unit_": (full, handles),
        "reduce_fence_": (full,),
        "gather_unit.one": (parameters[0].source.to(torch.bfloat16), handles[0], list(parameters[0].size), False),
        "wait_.one": (full[0], handles[0], False),
        "release_.one": (full[0], handles[0], True),
        "reduce_unit_.one": (full[0], handles[0]),
    }[name]


def _opcheck(name: str, stage: int) -> dict[str, str]:
    model = models.ByteModel()
    with engines.engine(model, stage, compile=False) as engine, torch.no_grad():
        before = engine.runtime.stats()
        arguments = _arguments(engine, name)
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.zerocompile, packet), overload or "default")
        # the values of a gather are shared with the runtime and the lowered operators exist below autograd only
        checks = ["test_faketensor"]
        checks += ["test_schema"] if name != "gather_cast.default" else []  # torch cannot compare float8 numbers
        checks += ["test_autograd_registration"] if packet in ("gather", "gather_cast") else []
        with torch.enable_grad():
            result = torch.library.opcheck(operator, arguments, test_utils=checks)
        after = engine.runtime.stats()
        engine.runtime.core.drop_gradients()
    assert after != before or name.startswith(("release_", "reduce_"))
    return dict(result)


OPERATORS = [
    "gather",
    "gather_cast",
    "gather_cast.default",  # as float8
    "float8_scale",
    "reduce_grad",
    "gather_unit",
    "wait_",
    "release_",
    "reduce_unit_",
    "reduce_fence_",
    "gather_unit.one",
    "wait_.one",
    "release_.one",
    "reduce_unit_.one",
]


# resident values are not gathered by graphs: at stage 1 they take the value itself, after wait_
@pytest.mark.parametrize(
    ("name", "stage"), [(n, s) for n in OPERATORS for s in (1, 3) if s == 3 or not n.startswith("gather_unit")]
)
def test_opcheck(worlds: Worlds, name: str, stage: int) -> None:
    """Schema, fake kernel and (for what autograd sees) registration, inside a live strategy."""
    (result,) = worlds(1).run(_opcheck, name, stage)
    assert len(result) >= 2 and set(result.values()) == {"SUCCESS"}


def _identities() -> dict[str, Any]:
    """Two strategies in one process; then one of them is torn down."""
    first, second = models.ByteModel(), models.ByteModel()
    one, two = engines.make_engine(first, 3, compile=False), engines.make_engine(second, 3, compile=False)
    handles = [[sharded.handle.item() for sharded in engine.runtime.sharded_parameters] for engine in (one, two)]
    a, b = _parameters(one, 1)[0], _parameters(two, 1)[0]
    gather = torch.ops.zerocompile.gather.default
    values = [gather(sharded.source, sharded.handle, sharded.size).detach().clone() for sharded in (a, b)]
    apart = [
        float((value - full_value(sharded.master)).abs().max()) for value, sharded in zip(values, (a, b), strict=True)
    ]
    with pytest.raises(RuntimeError, match="two strategies"):
        torch.ops.zerocompile.gather_unit([a.source, b.source], [a.handle, b.handle], flatten([a.size, b.size]), False)
    one.unshard()
    with pytest.raises(RuntimeError, match="torn down"):
        gather(a.source, a.handle, a.size)
    alive: Tensor = gather(b.source, b.handle, b.size)
    still = float((alive - values[1]).abs().max())
    two.unshard()
    with pytest.raises(RuntimeError, match="a handle is a float64"):
        gather(b.source, torch.zeros(2), b.size)
    return {"handles": handles, "apart": apart, "still": still, "differ": float((values[0] - values[1]).abs().max())}


def test_identity(worlds: Worlds) -> None:
    """Identities are never shared or reused; each reaches its own strategy; a torn-down one raises."""
    for seen in worlds(2).run(_identities):
        one, two = seen["handles"]
        assert len({*one, *two}) == len(one) + len(two)
        assert seen["differ"] > 1e-3 and seen["apart"] == [0.0, 0.0] and seen["still"] == 0.0


@pytest.mark.parametrize("sizes", [[], [[]], [[3]], [[3, 4], [], [5]]])
def test_sizes_survive_flattening(sizes: list[list[int]]) -> None:
    assert unflatten(flatten(sizes)) == sizes
