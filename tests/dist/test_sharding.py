"""Every kind of parameter is sharded, keeps its name, and trains as under DDP."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zerocompile import ZeroCompileStrategy
from tests import zoo
from tests.harness import Ranks

EAGER: dict[str, Any] = {"compile": False}
BLOCKS: dict[str, Any] = {"compile": "blocks", "backend": "aot_eager"}
MODEL: dict[str, Any] = {"compile": "model", "backend": "aot_eager"}
CASES = [(1, EAGER), (1, MODEL), (2, EAGER), (3, EAGER), (3, BLOCKS), (3, MODEL)]


def _train(architecture: str) -> list[dict[str, Any]]:
    results = []
    for stage, options in CASES:
        module, twin = zoo.Net(zoo.ARCHITECTURES[architecture]), zoo.Net(zoo.ARCHITECTURES[architecture])
        twin.load_state_dict(module.state_dict())
        names, keys = [n for n, _ in module.named_parameters()], list(module.state_dict())
        watch = zoo.fit(module, ZeroCompileStrategy(stage=stage, **options))
        gradients = zoo.reference(twin)
        results.append({
            "case": (stage, options["compile"]),
            "parameters": zoo.difference(dict(module.named_parameters()), dict(twin.named_parameters())),
            "gradients": max(zoo.difference(a, b) for a, b in zip(watch.gradients, gradients, strict=True)),
            "buffers": zoo.difference(dict(module.named_buffers()), dict(twin.named_buffers())),
            "names": watch.names == names == [n for n, _ in module.named_parameters()],
            "keys": watch.keys == keys == list(module.state_dict()),
            "sharded": watch.local_numel < watch.full_numel,
            "moved": max(g.abs().max().item() for g in gradients[0].values() if g is not None and g.numel()),
        })  # fmt: skip
    return results


@pytest.mark.parametrize("architecture", zoo.ARCHITECTURES)
def test_trains_as_ddp(ranks: Ranks, architecture: str) -> None:
    """Parameters, gradients of every step and buffers equal the reference at every stage, compiled and eager."""
    for results in ranks.run(_train, architecture, timeout=200):
        for result in results:
            case = result["case"]
            assert result["moved"] > 1e-3, case  # the reference trains at all
            assert result["parameters"] <= 1e-6, (case, result)
            assert result["gradients"] <= 1e-6, (case, result)
            assert result["buffers"] <= 1e-6, (case, result)
            assert result["names"] and result["keys"] and result["sharded"], (case, result)
