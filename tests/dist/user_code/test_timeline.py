"""The picture of a step, from a trace of a run and from one that is written by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zerocompile.report.timeline import TimelineError, spans_of, svg
from tests.support import engines, models
from tests.support.harness import on_ranks


def _event(name: str, cat: str, start: float, length: float, ph: str = "X") -> dict[str, Any]:
    return {"ph": ph, "cat": cat, "name": name, "ts": start, "dur": length, "pid": 1, "tid": 1}


EVENTS = [
    _event("zerocompile: reduce layers.0", "user_annotation", 40, 2),
    _event("zerocompile: gather layers.0 in forward", "user_annotation", 10, 3),
    _event("zerocompile: gather layers.0", "user_annotation", 60, 3),
    _event("zerocompile: gather layers.0 in forward", "gpu_user_annotation", 10, 3),
    _event("ncclDevKernel_AllGather_RING_LL", "kernel", 12, 9),
    _event("triton_poi_fused_0", "kernel", 22, 5),
    _event("aten::mm", "cpu_op", 22, 5),
    _event("zerocompile: gather layers.1 in forward", "user_annotation", 11, 0, ph="i"),
]


def test_what_is_drawn() -> None:
    """Of each unit its gathers and reductions, once; of a device its kernels; and nothing else."""
    spans = [(span.row, span.kind, span.start) for span in spans_of(EVENTS)]
    assert spans == [
        ("layers.0", "gather in forward", 10),
        ("NCCL's kernels (device)", "communication", 12),
        ("kernels (device)", "compute", 22),
        ("layers.0", "reduce", 40),
        ("layers.0", "gather", 60),
    ]


def test_an_update_is_what_follows_the_backward() -> None:
    """Also where the optimizer's step is called with a closure, as Lightning does; one without is drawn whole."""
    events = [
        _event("Optimizer.step#SGD.step", "user_annotation", 0, 100),
        _event("CompiledFunctionBackward", "cpu_op", 30, 30),
        _event("zerocompile: reduce a", "user_annotation", 50, 5),
        _event("Optimizer.step#SGD.step", "user_annotation", 200, 10),
        _event("Torch-Compiled Region: 0/0", "cpu_op", 230, 10),
    ]
    updates = [(span.start, span.length) for span in spans_of(events) if span.kind == "update"]
    assert updates == [(60, 40), (200, 10)]


def test_what_is_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    for content, message in (
        ("[]", "is no trace"),
        ("{", "is no trace"),
        ('{"traceEvents": []}', "at least one training"),
    ):
        file.write_text(content)
        with pytest.raises(TimelineError, match=message):
            svg(file)
    with pytest.raises(TimelineError, match="FileNotFoundError"):
        svg(tmp_path / "none.json")


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks()
def test_the_picture_of_a_step(stage: int, tmp_path: Path) -> None:
    """Every unit has a row with its gathers and its reduction; what is on top is what ran."""
    torch._dynamo.reset()
    model, data = models.ByteModel(), models.Batches(models.rank())
    with engines.engine(model, stage, compile="blocks", unit_bytes=1) as engine:
        trace = engines.profiled_step(engine, model, data[0])
        units = {unit.name for unit in engine.units}
    file = tmp_path / f"trace{models.rank()}.json"
    trace.export_chrome_trace(str(file))
    spans = spans_of(json.loads(file.read_text())["traceEvents"])
    reduced = {span.row for span in spans if span.kind == "reduce"}
    assert {f"layers.{n}" for n in range(3)} <= reduced
    assert {span.row for span in spans if span.kind == "gather in backward"} != set() or stage < 3
    drawn = xml.etree.ElementTree.fromstring(svg(file))
    titles = [element.text or "" for element in drawn.iter() if element.tag.endswith("title")]
    assert {f"layers.{n}" for n in range(3)} <= set(titles) and reduced <= units
    assert sum(": reduce, " in title for title in titles) == sum(span.kind == "reduce" for span in spans)
