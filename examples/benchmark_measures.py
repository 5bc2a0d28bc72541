"""What `benchmark.py` measures of a training step: time, memory, communication with nothing computing beside it."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]  # begin and end
Event = dict[str, Any]  # of a profiler's trace


class Clock:
    """Points in time: events of the device's stream, or the host's clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def seconds(self) -> list[float]:
        """Between each two marks; waits for the device."""
        synchronize(self.device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self.device.type != "cuda":
            return [end - begin for begin, end in pairs]
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------------------
# Steps


class Meter:
    """One row: is told when each step begins and ends, by whoever runs the loop.

    A step's time is that from its beginning to that of the next one, so what a framework does between steps counts.
    After the timed steps one more may run under the profiler.

    Args:
        seq: length of the sequences that its steps train on.
        warm_up, timed: numbers of steps; 0 timed ones: only `first` is measured.
        device: of this rank.
        started: when the system's set-up began; `None`: the first step counts from its own begin.
        trace: file for the profiler's trace of rank 0, or `None`; the other ranks write theirs beside it.
        host: whether what the host does is in it, too.
    """

    def __init__(
        self,
        seq: int,
        warm_up: int,
        timed: int,
        device: torch.device,
        started: float | None,
        trace: Path | None,
        host: bool = True,
    ) -> None:
        self.seq, self.warm_up, self.timed, self.device = seq, warm_up, timed, device
        self.result: dict[str, Any] = {}
        self.steps = warm_up + timed + (timed > 0 and (device.type == "cuda" or trace is not None))
        self._started, self._trace, self._host = started, trace, host
        self._number = 0
        self._clock = Clock(device)
        self._losses: list[Any] = []  # numbers, and the last as a tensor
        self._first = 0.0
        self._profiler: profile | None = None

    def begin(self) -> None:
        if self._started is None:
            self._started = time.time()
        if self._number == self.warm_up:
            synchronize(self.device)
            dist.barrier()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        if self._number >= self.warm_up:
            self._clock.mark()
        if self._number == self.warm_up + self.timed:  # the profiled one
            self._read()
            self._profiler = profile(activities=activities(self.device, self._trace is not None and self._host))
            self._profiler.start()

    def end(self, loss: Tensor) -> None:
        """`loss` is that of the step's last micro-batch."""
        if self._number < self.warm_up or self._number == self.warm_up + self.timed - 1:
            self._losses.append(loss if self._number >= self.warm_up else float(loss))  # no wait between timed steps
        if self._number == 0:
            synchronize(self.device)
            assert self._started is not None
            self._first = time.time() - self._started
        self._number += 1
        if self._number < self.steps:
            return
        if self._profiler is None:
            self._clock.mark()
            self._read()
        else:
            synchronize(self.device)
            self._profiler.stop()
            self._read_trace(self._profiler)
            self._profiler = None

    def _read(self) -> None:
        seconds = self._clock.seconds()
        memory = memory_now() if self.device.type == "cuda" else dict.fromkeys(("allocated", "reserved", "device"))
        seconds = of_slowest(seconds)
        self.result = {
            "seq": self.seq, "exposed": None, **memory,
            "seconds": rounded(statistics.median(seconds)) if seconds else None,
            "min": rounded(min(seconds, default=0.0)), "max": rounded(max(seconds, default=0.0)),
            "first": round(self._first, 1), "losses": [round(float(loss), 3) for loss in self._losses],
        }  # fmt: skip

    def _read_trace(self, profiler: profile) -> None:
        rank = dist.get_rank()
        if rank != 0 and self._trace is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = self._trace or Path(folder, "trace.json")
            if rank != 0:
                path = path.with_stem(f"{path.stem}-rank{rank}")
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            if rank != 0 or self.device.type != "cuda":
                return
            events = json.loads(path.read_text())["traceEvents"]
        found = exposure(events) | copy_rates(events)
        self.result["exposed"] = rounded(found["exposed_ms"] / 1e3)
        if self._trace is not None:
            print(json.dumps({"trace": self._trace.stem, **found}), flush=True)


def of_slowest(seconds: list[float]) -> list[float]:
    """Each step's time on the rank that takes longest; without communication nothing makes them alike."""
    ranks: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, seconds)
    return max(ranks, key=lambda times: statistics.median(times or [0.0]))


def activities(device: torch.device, host: bool) -> list[ProfilerActivity]:
    """What is recorded: the device, and the host where the trace is to be read by people."""
    recorded = [ProfilerActivity.CPU] if host or device.type != "cuda" else []
    return [*recorded, ProfilerActivity.CUDA] if device.type == "cuda" else recorded


def memory_now() -> dict[str, float]:
    """GiB: see benchmark.py."""
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "device": round((total - free) / 2**30, 2),
    }


def rounded(seconds: float) -> float:
    """To four digits after the point, or to three that count."""
    return round(seconds, 4) if seconds >= 0.1 else float(f"{seconds:.3g}")


# ---------------------------------------------------------------------------------------------------------------------
# The bound


def moved_bytes(
    system: str, numel: int, world: int, accumulate: int, reduce_fp32: bool, trained: int | None = None
) -> float:
    """What each rank must receive in one step of `system`, bf16 parameters gathered, gradients reduced in bf16 or fp32.

    A reduce-scatter is counted as the bytes that arrive of the other ranks' shares, as many as of an all-gather. Only
    `trained` parameters (`None`: all) have gradients.
    """
    gathers, reductions = passes(system, accumulate)
    reduced = 4 if reduce_fp32 else 2
    gathered = reduced if system == "ddp" else 2  # the second half of an all-reduce gathers gradients
    if "fp8" in system.split("_") and (system.startswith("fsdp2") or system.endswith("gathers")):
        gathered = 1  # and a little more: embedding, head and norms are not float8
    return (gathers * gathered * numel + reductions * reduced * (trained or numel)) * (world - 1) / world


def passes(system: str, accumulate: int) -> tuple[int, int]:
    """How often the whole model is gathered and reduced in a step of `accumulate` backwards."""
    each_backward = (2 * accumulate, accumulate)
    once = (1, 1)
    family, *options = system.split("_")
    if family == "limit":
        return 0, 0
    if family == "ddp":
        return once
    if family == "fsdp2":
        return (accumulate, accumulate) if "keep" in options else each_backward
    stage = options[0]
    if stage == "1":
        return once
    if stage == "2" or "spare" in options:  # what is spared stays gathered from one step to the next
        return 1, accumulate
    return each_backward


def bandwidth(device: torch.device, repeats: int = 10) -> float:
    """Bytes per second that a rank receives in a large all-gather."""
    world, numel = dist.get_world_size(), (2**29 if device.type == "cuda" else 2**23)
    part = torch.zeros(numel // world, dtype=torch.bfloat16, device=device)
    whole = torch.empty(part.numel() * world, dtype=torch.bfloat16, device=device)
    clock = Clock(device)
    dist.barrier()
    for number in range(3 + repeats):
        if number >= 3:
            clock.mark()
        dist.all_gather_into_tensor(whole, part)
    clock.mark()
    return whole.nbytes * (world - 1) / world / statistics.median(clock.seconds())


def link(device: torch.device) -> float:
    """Bytes per second between pinned host memory and a GPU, in both directions at once, while all ranks copy so; of
    the rank that has least."""
    from lightning_zerocompile.plan.timing import link_rate

    dist.barrier()
    speeds: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(speeds, link_rate(device))
    return min(speeds)


# ---------------------------------------------------------------------------------------------------------------------
# Exposed communication


def exposure(events: Iterable[Event]) -> dict[str, Any]:
    """What a trace's events of the device say of its communication, see `exposed`."""
    communication, compute = classify(events)
    return exposed(merge(communication), merge(compute))


def classify(events: Iterable[Event]) -> tuple[list[Span], list[Span]]:
    """Spans in µs in which one communicates and one computes.

    Communication is NCCL's kernels, the kernels by which ranks wait for each other before copies between them, and the
    copies on the streams of either. What else runs on these streams (casts, staging) belongs to neither.
    """
    on_device = of_device(events)
    work: dict[Any, float] = {}
    for event in on_device:
        work[stream(event)] = work.get(stream(event), 0.0) + (0.0 if communicates(event) else event["dur"])
    main = max(work, key=work.__getitem__, default=None)  # a collective may be launched on the stream that computes
    lanes = {stream(event) for event in on_device if communicates(event)} - {main}
    communication, compute = [], []
    for event in on_device:
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        copies = event["cat"] == "gpu_memcpy" and (stream(event) in lanes or "PtoP" in event["name"])
        if communicates(event) or copies:
            communication.append(span)
        elif stream(event) not in lanes:
            compute.append(span)
    return communication, compute


def of_device(events: Iterable[Event]) -> list[Event]:
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]


def communicates(event: Event) -> bool:
    return event["cat"] == "kernel" and re.search(r"nccl|barrier", event["name"], re.I) is not None


def stream(event: Event) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def merge(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans that cover the same time."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def exposed(communication: Sequence[Span], compute: Sequence[Span]) -> dict[str, Any]:
    """Milliseconds: communication, compute, communication beside no compute, nothing at all; the longest exposures.

    Args:
        communication, compute: disjoint spans in µs.
    """
    both = merge([*communication, *compute])
    begin, finish = (both[0][0], both[-1][1]) if both else (0.0, 0.0)
    gaps = []
    for start, end in communication:
        covered = sum(max(0.0, min(end, e) - max(start, s)) for s, e in compute if s < end and e > start)
        gaps.append((end - start - covered, start - begin))
    return {
        "communication_ms": milliseconds(length(communication)),
        "compute_ms": milliseconds(length(compute)),
        "exposed_ms": milliseconds(sum(gap for gap, _ in gaps)),
        "idle_ms": milliseconds(finish - begin - length(both)),
        "span_ms": milliseconds(finish - begin),
        "longest_exposed_ms_at_ms": [(milliseconds(g), milliseconds(at)) for g, at in sorted(gaps, reverse=True)[:6]],
    }


SMALL = 2**24  # bytes: what copies less at a time says nothing of the links


def copy_rates(events: Iterable[Event]) -> dict[str, float | None]:
    """GB/s at which this strategy's copies between devices run, the median over units; `None`: there are none.

    What a gather pulls counts apart before the first push of a reduction, in the forward, and after that.
    """
    lanes: dict[Any, list[Event]] = {}
    for event in sorted(of_device(events), key=lambda e: float(e["ts"])):
        lanes.setdefault(stream(event), []).append(event)
    pulls, pushes = [], []
    for lane in lanes.values():
        names = " ".join(event["name"] for event in lane)
        if "zerocompile_barrier" in names:
            (pushes if "zerocompile_sum" in names else pulls).extend(copied_together(lane))
    first = min((begin for begin, _ in pushes), default=float("inf"))
    found = {
        "pulled_in_forward": [rate for begin, rate in pulls if begin < first],
        "pulled_in_backward": [rate for begin, rate in pulls if begin >= first],
        "pushed": [rate for _, rate in pushes],
    }
    return {name: round(statistics.median(rates)) if rates else None for name, rates in found.items()}


def copied_together(lane: Iterable[Event]) -> list[tuple[float, float]]:
    """When copies begin that no barrier is between, and GB/s from the first one's begin to the last one's end."""
    runs: list[list[Event]] = [[]]
    for event in lane:
        if communicates(event):
            runs.append([])
        elif event["cat"] == "gpu_memcpy":
            runs[-1].append(event)
    found = []
    for run in runs:
        moved = sum(event["args"].get("bytes", 0) for event in run)
        if moved >= SMALL:
            begin, end = run[0]["ts"], max(event["ts"] + event["dur"] for event in run)
            found.append((float(begin), moved / (end - begin) / 1e3))  # bytes per microsecond are MB/s
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def milliseconds(microseconds: float) -> float:
    return round(microseconds / 1e3, 2)
