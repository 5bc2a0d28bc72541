"""The benchmark: its arithmetic on numbers made by hand, and one run of it on the CPU."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports one of the examples, which find each other as scripts do."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
            del sys.modules[name]


def device_event(name: str, stream: int, begin: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": begin, "dur": duration, "args": {"stream": stream}}


def test_spans_are_merged(examples: Any) -> None:
    merge = examples("benchmark_measures").merge
    assert merge([]) == []
    assert merge([(4, 5), (0, 2), (1, 3), (3, 4), (0, 1)]) == [(0, 5)]
    assert merge([(7, 8), (0, 2)]) == [(0, 2), (7, 8)]


def test_exposed_communication(examples: Any) -> None:
    exposed = examples("benchmark_measures").exposed
    found = exposed([(0, 4000), (10_000, 13_000)], [(1000, 2000), (3000, 5000), (12_000, 20_000)])
    assert found == {
        "communication_ms": 7.0,
        "compute_ms": 11.0,
        "exposed_ms": 4.0,  # 0..1, 2..3 and 10..12
        "idle_ms": 5.0,  # 5..10
        "span_ms": 20.0,
        "longest_exposed_ms_at_ms": [(2.0, 10.0), (2.0, 0.0)],
    }
    assert exposed([], [])["exposed_ms"] == 0
    assert exposed([(0, 1000)], [])["exposed_ms"] == 1.0


def test_what_communicates(examples: Any) -> None:
    """Kernels beside collectives on their stream neither communicate nor hide; the rest computes."""
    events = [
        {"cat": "cpu_op", "name": "nccl:all_gather", "ts": 0, "dur": 100},
        {"cat": "gpu_user_annotation", "name": "zerocompile: gather layers.0", "ts": 0, "dur": 100, "tid": 7},
        device_event("gemm", 7, 0, 10),
        device_event("ncclDevKernel_ReduceScatter", 7, 10, 1),  # launched on the stream that computes
        device_event("Memcpy DtoD (Device -> Device)", 7, 11, 2, "gpu_memcpy"),
        device_event("cast", 20, 12, 3),
        device_event("ncclDevKernel_AllGather", 20, 15, 4),
        device_event("zerocompile_barrier", 21, 20, 5),
        device_event("Memcpy DtoD (Device -> Device)", 21, 25, 6, "gpu_memcpy"),
        device_event("Memset (Device)", 22, 40, 1, "gpu_memset"),
        device_event("Memcpy PtoP (Device -> Device)", 23, 41, 2, "gpu_memcpy"),
    ]
    measures = examples("benchmark_measures")
    communication, compute = measures.classify(events)
    assert sorted(communication) == [(10, 11), (15, 19), (20, 25), (25, 31), (41, 43)]
    assert sorted(compute) == [(0, 10), (11, 13), (40, 41)]
    assert measures.exposure(events)["exposed_ms"] == 0.02  # 18 µs
    assert measures.classify([]) == ([], [])


def test_rates_of_copies(examples: Any) -> None:
    """From a unit's first copy to its last one's end; a gather's begin after its barrier, a reduction's before."""

    def copy(stream: int, begin: float, duration: float, megabytes: float) -> dict[str, Any]:
        event = device_event("Memcpy PtoP (Device -> Device)", stream, begin, duration, "gpu_memcpy")
        return event | {"args": {"stream": stream, "bytes": megabytes * 1e6}}

    def barrier(stream: int, begin: float) -> dict[str, Any]:
        return device_event("zerocompile_barrier", stream, begin, 1)

    events = [
        *(barrier(7, 0), copy(7, 10, 100, 20), copy(7, 20, 190, 20)),  # together: 40 MB in 200 us
        *(barrier(7, 1000), copy(7, 1010, 100, 30)),
        *(copy(8, 500, 100, 36), barrier(8, 700), device_event("zerocompile_sum", 8, 710, 5)),
        *(copy(8, 800, 100, 1), barrier(8, 900)),  # too few bytes to count
        copy(9, 0, 1, 1000),  # of another stream: an offload's, or the user's
    ]
    rates = examples("benchmark_measures").copy_rates
    assert rates(events) == {"pulled_in_forward": 200, "pulled_in_backward": 300, "pushed": 360}
    assert set(rates([]).values()) == {None}


@pytest.mark.parametrize(
    ("system", "accumulate", "reduce_fp32", "passes"),
    [
        ("limit", 4, False, 0),
        ("stage_1", 1, False, 2 + 2),
        ("stage_1_trainer", 4, False, 2 + 2),
        ("stage_2_model", 4, False, 2 + 4 * 2),
        ("stage_3", 1, False, 2 * 2 + 2),
        ("stage_3_trainer", 4, True, 4 * 2 * 2 + 4 * 4),
        ("stage_3_beside", 1, False, 2 * 2 + 2),
        ("stage_3_spare", 4, False, 2 + 4 * 2),
        ("fsdp2_prefetch2", 1, True, 2 * 2 + 4),
        ("fsdp2_keep_prefetch1", 4, False, 4 * 2 + 4 * 2),
        ("limit_fp8", 1, False, 0),
        ("stage_3_fp8", 1, False, 2 * 2 + 2),
        ("stage_3_fp8_gathers", 1, False, 2 * 1 + 2),
        ("fsdp2_fp8", 1, False, 2 * 1 + 2),
        ("ddp", 4, False, 2 + 2),
        ("ddp", 1, True, 4 + 4),
        ("deepspeed_1_compile", 4, False, 2 + 2),
        ("deepspeed_3", 1, False, 2 * 2 + 2),
        ("deepspeed_3_offload_torch", 1, False, 2 * 2 + 2),
    ],
)
def test_moved_bytes(examples: Any, system: str, accumulate: int, reduce_fp32: bool, passes: int) -> None:
    """`passes`: bytes for each of 1000 parameters, of which 3 of 4 come from other ranks."""
    assert system in examples("benchmark_systems").SYSTEMS
    moved = examples("benchmark_measures").moved_bytes(system, 1000, 4, accumulate, reduce_fp32)
    assert moved == passes * 750


def test_moved_bytes_of_a_frozen_model(examples: Any) -> None:
    """All of it is gathered twice, and of the 10 trained ones of 1000 there are gradients."""
    moved = examples("benchmark_measures").moved_bytes("stage_3", 1000, 4, 1, False, 10)
    assert moved == (2 * 2 * 1000 + 2 * 10) * 3 / 4


def raw_row(system: str, seq: int, seconds: float, accumulate: int = 1) -> dict[str, Any]:
    return {
        "system": system, "model": "tiny", "world": 2, "batch": 1, "accumulate": accumulate, "checkpointing": False,
        "optimizer": "adamw", "clip": 0.0, "reduce_fp32": False, "lora": 0, "options": {}, "numel": 10**9,
        "trained": None, "seq": seq, "exposed": None, "allocated": None, "reserved": None, "device": None, "hosts": 1,
        "groups": 1, "crossed": None, "seconds": seconds, "min": seconds, "max": seconds, "first": 9.0, "losses": [1.0],
    }  # fmt: skip


def test_rows_are_completed(examples: Any) -> None:
    benchmark = examples("benchmark")
    rows = benchmark.complete(
        [raw_row("stage_3", 64, 0.3), raw_row("stage_3", 32, 0.2), {"bandwidth": 5e10}], {(1, 64): 20}
    )
    assert [row["bound"] for row in rows] == [0.06, 0.06]  # 6 bytes each for half of the parameters
    assert [row["bandwidth"] for row in rows] == [50.0, 50.0]
    assert [(row["first"], row["first_warm"]) for row in rows] == [(20, 9.0), (9.0, 9.0)]
    (interrupted,) = benchmark.complete([raw_row("stage_3", 64, 0.3)], {})
    assert interrupted["bound"] is None and interrupted["first"] == 9.0 and interrupted["first_warm"] is None
    (played,) = benchmark.complete([raw_row("stage_3", 64, 0.3) | {"hosts": 2, "groups": 2}, {"bandwidth": 5e10}], {})
    assert played["bandwidth"] == 50.0 and played["bound"] is None  # not all links are as fast as that


def test_rows_of_an_offload_are_completed(examples: Any) -> None:
    """What a step copies has a time at the rate of the link, and a plan's peak stands beside the run's."""
    benchmark = examples("benchmark")
    raw = raw_row("stage_3", 64, 0.3) | {"host": 12.0, "moved": 50.0}
    (row,) = benchmark.complete([raw, {"bandwidth": 5e10, "link": 2**30 * 100.0}], {}, {(1, 64): 30.5})
    assert row["link"] == 107.0 and row["link_bound"] == 0.5 and row["predicted"] == 30.5 and row["host"] == 12.0
    (without,) = benchmark.complete([raw_row("stage_3", 64, 0.3), {"bandwidth": 5e10, "link": None}], {})
    assert [without[name] for name in ("predicted", "host", "moved", "link", "link_bound")] == [None] * 5


def test_what_is_measured_in_one_process(examples: Any) -> None:
    together = examples("benchmark").in_one_process
    assert together([1, 4], "stage_3") == together([1, 4], "fsdp2") == [[1, 4]]
    assert together([1, 4], "stage_3_trainer") == together([1, 4], "deepspeed_3_offload") == [[1], [4]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--lora=-1"], "--lora -1: a rank is 1 or more"),
        (["--lora=4", "--systems", "stage_3", "limit", "ddp"], "--lora does not work with limit, ddp; choose from"),
        (["--meta", "--systems", "stage_3_trainer"], "--meta does not work with stage_3_trainer; choose from"),
        (["--meta", "--systems", "fsdp2", "--model=byte-lm"], "--meta does not work with --model byte-lm"),
        (["--hosts=2", "--gpus=3"], "the 3 ranks cannot be split"),
        (["--systems", "limit", "stage_1_hybrid"], "need --hosts or --groups of 2 or more"),
        (["--processes", "4", "--groups", "3"], "--groups 3: each of 1 hosts must have as many"),
        (["--optimizer=muon", "--systems", "stage_3", "stage_3_trainer"], "muon does not work with stage_3_trainer"),
        (["--optimizer=muon", "--systems", "stage_3", "--lora=4"], "which --lora freezes"),
    ],
)
def test_what_cannot_be_run(
    examples: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--device=cpu", *options])
    with pytest.raises(SystemExit):
        examples("benchmark").parse()
    assert text in capsys.readouterr().err


@pytest.mark.long
def test_peaks_are_predicted(
    examples: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For this strategy only, by number of micro-batches and length; with adapters it has fewer states."""
    pytest.importorskip("peft")
    benchmark = examples("benchmark")

    def peaks(system: str, *options: str) -> dict[tuple[int, int], float]:
        argv = ["benchmark.py", "--device=cpu", "--model=tiny", "--seq", "32", "64", "--gpus=2", "--predict", *options]
        monkeypatch.setattr(sys, "argv", [*argv, "--systems", system])
        return benchmark.predict(benchmark.parse(), system, [1, 2])

    whole, adapters = peaks("stage_3"), peaks("stage_3", "--lora=4")
    assert list(whole) == [(1, 32), (1, 64), (2, 32), (2, 64)] and 0 < whole[1, 32] < whole[1, 64]
    assert 0 < adapters[1, 64] < whole[1, 64]
    assert peaks("fsdp2") == peaks("stage_3_trainer") == {}


def test_ratio_to_the_limit_of_the_same_cell(examples: Any) -> None:
    benchmark = examples("benchmark")
    raw = [
        raw_row("limit", 64, 0.2),
        raw_row("limit", 32, 0.1),
        raw_row("limit", 64, 0.8, accumulate=4),
        raw_row("stage_3", 64, 0.3),
        raw_row("stage_3", 32, 0.3),
        raw_row("stage_3", 64, 0.9, accumulate=4),
        raw_row("stage_3", 32, 0.9, accumulate=4),
    ]
    rows = benchmark.with_ratios(benchmark.complete(raw, {}))
    ratios = {(row["accumulate"], row["seq"]): row["x_limit"] for row in rows if row["system"] == "stage_3"}
    assert ratios == {(1, 32): 3.0, (1, 64): 1.5, (4, 32): None, (4, 64): 1.125}
    assert list(ratios) == sorted(ratios)
    raw = [raw_row("limit", 64, 0.2), raw_row("limit_fp8", 64, 0.1), raw_row("stage_3_fp8", 64, 0.15)]
    found = {row["system"]: row["x_limit"] for row in benchmark.with_ratios(benchmark.complete(raw, {}))}
    assert found == {"limit": 1.0, "limit_fp8": 1.0, "stage_3_fp8": 1.5}


def test_what_is_not_installed_is_said(
    examples: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    benchmark = examples("benchmark")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert benchmark.measure(argparse.Namespace(), "deepspeed_3_compile", [1]) == ([], True)  # the others go on
    assert capsys.readouterr().out == "# deepspeed_3_compile: deepspeed is not installed\n"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    benchmark.plot([], tmp_path / "picture.png")
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "picture.png").exists()


def run_benchmark(tmp_path: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(EXAMPLES / "benchmark.py"), f"--out={tmp_path / 'rows'}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()], done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_systems_train_alike_on_played_hosts(tmp_path: Path) -> None:
    systems = ["stage_3", "stage_1_hybrid", "stage_3_hybrid", "stage_3_inner", "fsdp2_hybrid", "fsdp2_inner"]
    sizes = ["--model=tiny", "--seq=32", "--steps=2", "--warm-up=3", "--lr=1e-2", "--gpus=4", "--hosts=2"]
    rows, printed = run_benchmark(tmp_path, *sizes, "--backend=aot_eager", "--systems", *systems)
    assert [row["system"] for row in rows] == systems and printed.count(": ok in") == len(systems)
    assert {row["crossed"] for row in rows} == {None}  # gloo's bytes inside a host go over the same device
    for row in rows[1:]:
        assert row["losses"] == pytest.approx(rows[0]["losses"], abs=0.02)


@pytest.mark.long
@pytest.mark.slow
def test_systems_train_alike(examples: Any, tmp_path: Path) -> None:
    """A bare loop, Lightning's Trainer and FSDP2 start, and go on, with the same losses."""
    systems = ["limit", "stage_3", "stage_3_trainer", "fsdp2"]
    sizes = ["--model=tiny", "--seq=32", "--steps=3", "--warm-up=3", "--lr=1e-2", "--processes=2", "--accumulate=2"]
    options = ["--backend=aot_eager", "--clip=1", "--limit-seconds=330", f"--trace={tmp_path / 'traces'}"]
    rows, printed = run_benchmark(tmp_path, *sizes, *options, "--systems", *systems)
    assert [row["system"] for row in rows] == systems and printed.count(": ok in") == len(systems)
    for row in rows:
        assert tuple(row) == examples("benchmark").COLUMNS
        assert 0 < row["min"] <= row["seconds"] <= row["max"] < row["first"]
        assert row["x_limit"] == pytest.approx(row["seconds"] / rows[0]["seconds"], rel=1e-2)
        assert (row["bound"] > 0) is (row["system"] != "limit") and row["bandwidth"] > 0
        assert row["allocated"] is row["exposed"] is row["first_warm"] is None
        for of_rank in ("", "-rank1"):
            trace = json.loads((tmp_path / "traces" / f"{row['system']}-32-2{of_rank}.json").read_text())
            names = " ".join(str(event.get("name")) for event in trace["traceEvents"])
            assert "AdamW" in names
            for phase in ("gather", "reduce"):
                assert (f"zerocompile: {phase} " in names) is row["system"].startswith("stage")
    reference = rows[-1]["losses"]
    assert len(reference) == 4 and reference[-1] < reference[0] - 0.1  # it has trained
    for row in rows[1:]:
        assert row["losses"] == pytest.approx(reference, abs=0.02)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [[], ["--checkpointing"]], ids=["saved", "checkpointed"])
def test_adapters_train_alike(tmp_path: Path, checkpointing: list[str]) -> None:
    """Adapters over a frozen model that is built without data, here and by FSDP2: equal starts and equal losses."""
    pytest.importorskip("peft")
    sizes = ["--model=tiny", "--seq=32", "--steps=2", "--warm-up=3", "--lr=1e-2", "--gpus=2", "--accumulate", "1", "2"]
    options = ["--lora=4", "--same-batch", "--predict", "--backend=aot_eager", *checkpointing]
    rows, printed = run_benchmark(tmp_path, *sizes, *options, "--systems", "stage_3", "fsdp2")
    assert [(row["accumulate"], row["system"]) for row in rows] == [
        (1, "stage_3"), (1, "fsdp2"), (2, "stage_3"), (2, "fsdp2"),
    ]  # fmt: skip
    assert printed.count(": ok in") == 2
    for here, peer in (rows[:2], rows[2:]):
        assert here["losses"] == pytest.approx(peer["losses"], abs=0.02)
        assert here["lora"] == peer["lora"] == 4 and here["predicted"] > 0 and peer["predicted"] is None
    assert rows[0]["losses"][-1] < rows[0]["losses"][0] - 0.1  # it has trained


@pytest.mark.long
@pytest.mark.slow
def test_an_offload_trains_as_without(tmp_path: Path) -> None:
    """What is in host memory, and what a step copies, is in the row."""
    sizes = ["--model=tiny", "--seq=32", "--steps=2", "--warm-up=3", "--lr=1e-2", "--gpus=2", "--meta", "--same-batch"]
    found = []
    for options in ({}, {"offload": "optimizer"}):
        more = ["--backend=aot_eager", f"--options={json.dumps(options)}", "--systems", "stage_3"]
        (row,), _ = run_benchmark(tmp_path, *sizes, *more)
        assert row["options"] == options
        found.append(row)
    without, offloaded = found
    assert without["host"] is None and offloaded["host"] > 0
    assert offloaded["moved"] > 0 and without["losses"] == offloaded["losses"]
