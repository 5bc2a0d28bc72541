"""Step time and memory of this strategy beside its peers, measured in one way.

    python examples/benchmark.py --gpus 4 --systems limit stage_1 stage_3 fsdp2 fsdp2_keep --seq 512 4096

Every system trains the same model (random weights) with bf16 compute, bf16 gradient reduction and fp32 AdamW states,
one sequence per GPU, in a process group of its own. One JSON line per row (null: not measured here):

    seconds     median over the timed steps (device events from one step's begin to the next one's), of the slowest rank
    x_limit     that, over the compute limit of the same run
    bound       seconds that the step's communication must take: the bytes that a rank must receive at this stage, over
                the `bandwidth` (GB/s) of a large all-gather in the same process group
    exposed     seconds of one step in which a communication kernel (or a copy between GPUs) runs and nothing computes
    allocated, reserved   peak GiB over the timed steps, of torch's allocator
    device                GiB of the whole GPU in use after them: with NCCL's and mapped buffers and CUDA's own
    predicted   with --predict: peak GiB that the plan of this strategy says (no device is needed for it)
    host, moved           if this strategy offloads: GiB of a rank in host memory, and GiB that a step copies between it
                          and the GPU (mean over all steps, the first ones, too)
    link, link_bound      if something is offloaded: GB/s between pinned host memory and a GPU, both ways at once, while
                          all ranks copy; and the seconds that `moved` takes at that rate
    crossed     with --hosts: bytes of one step, of all ranks together, that went over the links between hosts
    first       seconds from building the model to the end of the first step (compilation included; for all lengths and
                numbers of micro-batches after the first from the beginning of that step); with --cold it starts with an
                empty compile cache, and
    first_warm  is the same with the cache that this run has left

systems: limit        forward, backward and a fused AdamW over 1/W of the parameters, no communication
         stage_1|2|3  this strategy, by a bare loop; with `_model`: the whole model as one graph; with `_trainer`: by
                      Lightning's Trainer
         stage_1|2|3_beside  units are updated beside the backward (optimizer_in_backward=True; without --clip)
         stage_3_spare  with memory to spare: units that fit stay gathered (keep_gathered="auto")
         fsdp2        fully_shard per layer, reshard after forward, layers compiled (ZeRO-3); fsdp2_keep: no reshard
                      after forward (ZeRO-2); each with `_prefetch1`, `_prefetch2`: + explicit prefetch of layers; with
                      `_tuned`: prefetch of one layer, buffers from NCCL and NCCL_CTA_POLICY=2, and symmetric memory and
                      a group of its own for reductions where torch has them
         stage_1|2|3_hybrid, fsdp2_hybrid  each of the --groups (of the --hosts) has a whole model in shards (HSDP)
         stage_3_inner, fsdp2_inner  the backward gathers inside a group, from what the forward has left there (hpZ;
                      reshard_after_forward=ranks of a group)
         limit_fp8, stage_1|2|3_fp8, fsdp2_fp8, fsdp2_keep_fp8  the blocks' linear layers are torchao's Float8Linear;
                      FSDP2 gathers float8, too, and so does stage_3_fp8_gathers, from the third step on. If torchao is
                      installed, on GPUs that multiply float8; `x_limit` is over limit_fp8
         ddp          where it fits, layers compiled
         deepspeed_1|3  if it is installed; with `_compile`: DeepCompile, which needs a larger --limit-seconds
         deepspeed_3_offload  ZeRO-Offload: states and masters in host memory, updated by DeepSpeedCPUAdam, which is
                      compiled at its first use; with `_torch`: by torch's fused AdamW

--lora RANK freezes the model, in bfloat16, and trains LoRA adapters of PEFT on all linear layers of the blocks, in
float32 (here they are what the optimizer updates; FSDP2 keeps their shards in float32, too, and both gather everything
in bfloat16). --meta builds the model without data, so that no rank ever holds it whole; --lora implies it. Both are for
Qwen3's shapes, and for stage_1|2|3, fsdp2 and fsdp2_keep. --options gives the strategy further options, such as
'{"offload": "optimizer"}' or '{"recompute": 0.5}'.

--optimizer muon updates the matrices of the layers by torch.optim.Muon, all else by AdamW. The limit's share is then
the matrices of as many layers as each rank would have. Not for DeepSpeed and the Trainer.

With --trace FOLDER profilers' traces of one step, one of each rank, are written for each row, and what that of rank 0
says of communication is printed, with the GB/s of this strategy's copies between GPUs. Its phases are in a trace by
name ("zerocompile: gather model.layers.0 in backward", "... reduce ..."). To record the host slows it down by half:
--trace-device leaves it, and the names, out.

--with-monitor lets ZeroCompileMonitor log each step to a CSV file, and prints the seconds of a step that the host
spends in it (fastest and median of all steps), for systems with `_trainer`.

--hosts H plays H hosts on this machine: NCCL takes each H-th part of the ranks for a host of its own, and moves what
goes between them through sockets of the loopback device. --gpus may be more than there are then, so that several ranks
share a GPU, but those of one host may not. Nothing is copied between GPUs past NCCL (`copy_engine=False`), since there
it would cross hosts, too. --groups G cuts the ranks into groups inside one host.

Without a GPU everything runs on the CPU (gloo): python examples/benchmark.py --model tiny --seq 64 --steps 3
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark_measures import Meter, bandwidth, link, moved_bytes
from benchmark_systems import BYTE_LM, ON_META, PLANNED, SHAPES, SYSTEMS, System, predicted, set_up

Row = dict[str, Any]
COLUMNS = (
    *("system", "model", "world", "hosts", "groups", "seq", "batch", "accumulate"),
    *("checkpointing", "optimizer", "clip", "reduce_fp32"),
    *("lora", "options"),
    *("seconds", "min", "max", "x_limit", "bound", "bandwidth", "crossed", "exposed"),
    *("allocated", "reserved", "device", "predicted", "host", "moved", "link", "link_bound"),
    *("first", "first_warm", "losses"),
)
DEEPCOMPILE_WARM_UP = 10  # it compiles again in its first steps
GRACE = 60  # seconds to end in
GIB = 2**30


# ---------------------------------------------------------------------------------------------------------------------
# One rank


def worker(args: argparse.Namespace) -> None:
    """One rank of one system; rank 0 appends to `args.out`."""
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    if args.device == "cuda":
        play_hosts(args)
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)  # the processes share the cores
        dist.init_process_group("gloo")
    started: float | None = time.time()
    numbers, args.accumulate = args.accumulate, args.accumulate[0]
    system = set_up(args, device)
    for accumulate in numbers:
        args.accumulate = accumulate
        meters = [make_meter(args, seq, device, None if number else started) for number, seq in enumerate(args.seq)]
        run(args, system, meters, device)
        started = None
    if not args.first_only:  # after the steps, so that its buffers are in no row's memory
        offloads = device.type == "cuda" and (system.offloaded is not None or "offload" in args.system.split("_"))
        speeds = {"bandwidth": bandwidth(device), "link": link(device) if offloads else None}
        write(args, {**describe(args), **speeds})
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo and of compilers sometimes abort the end of the interpreter


def run(args: argparse.Namespace, system: System, meters: list[Meter], device: torch.device) -> None:
    """Writes a row for each meter."""
    before, copied = loopback_bytes(), system.offloaded()[1] if system.offloaded is not None else 0
    for meter in system.train(meters):
        row = {**describe(args), "numel": system.numel, "trained": system.trained, "crossed": None}
        if args.hosts > 1 and device.type == "cuda":
            row["crossed"] = (loopback_bytes() - before) // meter.steps
        if system.offloaded is not None:
            host, now = system.offloaded()
            row |= {"host": digits(host / GIB, 4), "moved": digits((now - copied) / meter.steps / GIB, 4)}
            copied = now
        write(args, row | meter.result)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        before = loopback_bytes()


def play_hosts(args: argparse.Namespace) -> None:
    """Tells NCCL in which host this rank is, before it starts."""
    if args.hosts > 1:
        host = int(os.environ["RANK"]) * args.hosts // int(os.environ["WORLD_SIZE"])
        os.environ |= {"NCCL_HOSTID": f"host-{host}", "NCCL_SOCKET_IFNAME": "lo"}
    if "tuned" in args.system.split("_"):
        os.environ.setdefault("NCCL_CTA_POLICY", "2")


def loopback_bytes() -> int:
    """What this machine has received from itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:")), 0)


def make_meter(args: argparse.Namespace, seq: int, device: torch.device, started: float | None) -> Meter:
    if args.first_only:
        return Meter(seq, 1, 0, device, started, None)
    warm_up = args.warm_up
    if args.system.startswith("deepspeed") and args.system.endswith("_compile"):
        warm_up = max(warm_up, DEEPCOMPILE_WARM_UP)
    trace = Path(args.trace) / f"{args.system}-{seq}-{args.accumulate}.json" if args.trace else None
    return Meter(seq, warm_up, args.steps, device, started, trace, host=not args.trace_device)


def describe(args: argparse.Namespace) -> Row:
    return {
        "system": args.system, "model": args.model, "world": dist.get_world_size(), "hosts": args.hosts,
        "groups": args.groups, "batch": args.batch, "accumulate": args.accumulate, "checkpointing": args.checkpointing,
        "optimizer": args.optimizer, "clip": args.clip, "reduce_fp32": args.reduce_fp32, "lora": args.lora,
        "options": args.options if args.system.startswith("stage") else {},
    }  # fmt: skip


def write(args: argparse.Namespace, row: Row) -> None:
    if dist.get_rank() == 0:
        with Path(args.out).open("a") as out:
            out.write(json.dumps(row) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# All of them


def measure(args: argparse.Namespace, system: str, numbers: list[int]) -> tuple[list[Row], bool]:
    """The rows of one system with these numbers of micro-batches in a step, and whether it came to its end."""
    package = "torchao" if "fp8" in system.split("_") else system.split("_")[0]
    if package in ("torchao", "deepspeed") and importlib.util.find_spec(package) is None:
        print(f"# {system}: {package} is not installed", flush=True)
        return [], True
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        options = ["--system", system, "--accumulate", *map(str, numbers)]
        environment = dict(os.environ)
        if "offload" in system.split("_"):  # its optimizer runs on the CPU, with OpenMP's threads
            environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // args.processes)))
        if not args.cold:
            said: dict[tuple[int, int], float] = {}
            rows, succeeded = launch(
                args, options, Path(folder, "rows"), environment, lambda: said.update(predict(args, system, numbers))
            )
            return complete(rows, {}, said), succeeded
        environment.pop("TRITON_CACHE_DIR", None)
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
        cold, succeeded = launch(args, [*options, "--first-only"], Path(folder, "cold"), environment)
        if not succeeded:
            return [], False
        rows, succeeded = launch(args, options, Path(folder, "rows"), environment)
        return complete(rows, {(row["accumulate"], row["seq"]): row["first"] for row in cold}), succeeded


def launch(
    args: argparse.Namespace,
    options: list[str],
    out: Path,
    environment: dict[str, str],
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[list[Row], bool]:
    """Runs all ranks; the rows that they wrote, and whether they succeeded. `meanwhile` is called beside them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}"]
    command = [*launcher, __file__, *sys.argv[1:], *options, "--out", str(out)]
    began = time.time()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            meanwhile()
            code: int | str = process.wait(max(0.0, began + args.limit_seconds - time.time()))
        except subprocess.TimeoutExpired:
            code = "timeout"
        finally:
            stop(process)
        log.seek(0)
        output = log.read().splitlines()
    verdict = "ok" if code == 0 else f"failed ({code})"
    print(f"# {' '.join(options)}: {verdict} in {time.time() - began:.0f} s", flush=True)
    for line in output if code == 0 else output[-80:]:
        if code != 0 or line.startswith(('{"trace"', '{"monitor"')):
            print(line, flush=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return rows, code == 0


def stop(process: subprocess.Popen[Any]) -> None:
    """Ends the launcher, which ends its ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()


def complete(
    rows: list[Row], cold: dict[tuple[int, int], float], said: dict[tuple[int, int], float] | None = None
) -> list[Row]:
    """Each row with its bounds, if the bandwidths were measured, and with the times of a `cold` start.

    Args:
        rows: of one process group; the last one may hold its bandwidths in bytes per second.
        cold: `first` by number of micro-batches and sequence length.
        said: a plan's peak in GiB, the same way.
    """
    speeds = next((row for row in rows if "bandwidth" in row), {})
    speed, link = speeds.get("bandwidth"), speeds.get("link")
    completed = []
    for row in rows:
        if "bandwidth" in row:
            continue
        cell = row["accumulate"], row["seq"]
        numel, trained = row.pop("numel"), row.pop("trained")
        arrives = moved_bytes(row["system"], numel, row["world"], row["accumulate"], row["reduce_fp32"], trained)
        copied = row.get("moved")
        completed.append({
            **row,
            "bound": digits(arrives / speed) if speed and row["groups"] == 1 else None,
            "bandwidth": digits(speed / 1e9) if speed else None,
            "predicted": (said or {}).get(cell), "host": row.get("host"), "moved": copied,
            "link": digits(link / 1e9) if link else None,
            "link_bound": digits(copied * GIB / link) if link and copied is not None else None,
            "first": cold.get(cell, row["first"]), "first_warm": row["first"] if cold else None,
        })  # fmt: skip
    return completed


def digits(number: float, count: int = 3) -> float:
    """To so many of them."""
    return float(f"{number:.{count}g}")


def predict(args: argparse.Namespace, system: str, numbers: list[int]) -> dict[tuple[int, int], float]:
    """GiB by number of micro-batches and sequence length; empty: this is no system that a plan is made for."""
    if not args.predict or system not in PLANNED:
        return {}
    said = {}
    for accumulate, seq in itertools.product(numbers, args.seq):
        cell = argparse.Namespace(**{**vars(args), "system": system, "accumulate": accumulate})
        try:
            said[accumulate, seq] = digits(predicted(cell, seq) / GIB, 4)
        except Exception as error:  # the run may still succeed
            print(f"# no plan of {system} at {seq}: {error}", flush=True)
    return said


def in_one_process(numbers: list[int], system: str) -> list[list[int]]:
    """Which of these numbers of micro-batches are measured together: DeepSpeed and the Trainer are set up for one."""
    alone = system.startswith("deepspeed") or system.endswith("_trainer")
    return [[number] for number in numbers] if alone else [numbers]


def with_ratios(rows: list[Row]) -> list[Row]:
    """With the ratio to the compute limit of the same sequence length and accumulation, sorted by these."""

    def cell(row: Row) -> tuple[int, int]:
        return row["accumulate"], row["seq"]

    def limit_of(row: Row) -> str:
        return "limit_fp8" if "fp8" in row["system"].split("_") else "limit"

    limits = {(row["system"], *cell(row)): row["seconds"] for row in rows}
    found = []
    for row in sorted(rows, key=cell):
        limit = limits.get((limit_of(row), *cell(row)))
        ratio = {"x_limit": round(row["seconds"] / limit, 3) if limit else None}
        found.append({name: (row | ratio)[name] for name in COLUMNS})
    return found


def plot(rows: list[Row], path: Path) -> None:
    """Seconds per step by system, with the compute limit and each system's bound."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("# no picture: matplotlib is not installed", flush=True)
        return
    cells: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["accumulate"], row["seq"]), []).append(row)
    figure = Figure(figsize=(5 * max(1, len(cells)), 1.5 + 0.3 * max(map(len, cells.values()), default=1)))
    for number, ((accumulate, seq), cell) in enumerate(cells.items()):
        axes = figure.add_subplot(1, len(cells), number + 1)
        places = range(len(cell))
        axes.barh(places, [row["seconds"] for row in cell], color="tab:blue", label="step")
        axes.barh(places, [row["bound"] or 0 for row in cell], height=0.25, color="tab:orange", label="bound")
        for row in cell:
            if row["system"] == "limit":
                axes.axvline(row["seconds"], color="black", linestyle="--", label="compute limit")
        axes.set_yticks(places, [row["system"] for row in cell])
        axes.invert_yaxis()
        axes.set_title(f"sequence {seq}, {accumulate} backward{'s' * (accumulate > 1)} a step")
        axes.set_xlabel("seconds")
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    print(f"# picture: {path}", flush=True)


def parse() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    systems = ["limit", "stage_1", "stage_2", "stage_3", "fsdp2", "fsdp2_keep"]
    add("--systems", nargs="+", choices=SYSTEMS, default=systems, metavar="SYSTEM")
    add("--model", choices=[*SHAPES, BYTE_LM], default="qwen3-8b")
    add("--seq", type=int, nargs="+", default=[4096, 512], help="sequence lengths")
    add("--batch", type=int, default=1, help="sequences in a micro-batch, per GPU")
    add("--accumulate", type=int, nargs="+", default=[1], help="micro-batches (backwards) in a step")
    add("--checkpointing", action="store_true", help="activation checkpointing, layer by layer")
    add("--clip", type=float, default=0.0, help="clip the gradients to this norm; 0: not (the limit never does)")
    add(
        "--with-monitor",
        action="store_true",
        help="with ZeroCompileMonitor, for systems with `_trainer`; prints what it took",
    )
    add("--lora", type=int, default=0, metavar="RANK", help="train LoRA adapters of this rank over a frozen model")
    add("--meta", action="store_true", help="build the model without data; no rank holds it whole")
    add("--same-batch", action="store_true", help="train on one micro-batch again and again, so that the loss falls")
    add("--reduce-fp32", action="store_true", help="reduce gradients in fp32")
    add("--lr", type=float, default=1e-5)
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="see above")
    add("--warm-up", type=int, default=6, help="steps before the timed ones")
    add("--steps", type=int, default=10, help="timed steps")
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--gpus", "--processes", dest="processes", type=int, default=torch.cuda.device_count() or 2)
    add("--hosts", type=int, default=1, help="play so many hosts, see above")
    add("--groups", type=int, default=0, help="of ranks, for `_hybrid` and `_inner`; by default each host is one")
    add("--backend", choices=("inductor", "aot_eager"), default="inductor", help="of torch.compile, for all systems")
    add("--options", type=json.loads, default={}, help="JSON: further options of our Config")
    add("--predict", action="store_true", help="say what this strategy's plan gives as peak")
    add("--cold", action="store_true", help="run each system twice: empty compile cache, then a warm one")
    add("--out", default=str(Path(tempfile.gettempdir()) / "benchmark.jsonl"), help="file for the rows")
    add("--plot", default="", help="file for a picture of the rows (needs matplotlib)")
    add("--trace", default="", help="folder for profiler traces of one step")
    add("--trace-device", action="store_true", help="traces of what the GPUs do alone, which slow the host less")
    add("--limit-seconds", type=int, default=240, help="time that one process group gets for all that it measures")
    add("--system", default="", help=argparse.SUPPRESS)  # these two are for a worker
    add("--first-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm_up < 1 or args.steps < 1:
        parser.error("--warm-up and --steps must be 1 or more")
    if args.with_monitor and not all(system.endswith("_trainer") for system in args.systems):
        parser.error("--with-monitor adds a callback of the Trainer: choose systems with `_trainer`")
    if args.hosts < 1 or args.processes % args.hosts:
        parser.error(f"--hosts {args.hosts}: the {args.processes} ranks cannot be split into as many hosts")
    if args.device == "cuda" and args.processes // args.hosts > torch.cuda.device_count():
        parser.error(f"{args.processes // args.hosts} ranks of a host need as many GPUs")
    args.groups = args.groups or args.hosts
    if args.groups < 1 or args.groups % args.hosts or args.processes % args.groups:
        parser.error(f"--groups {args.groups}: each of {args.hosts} hosts must have as many, all of one size")
    if args.groups == 1 and any({"hybrid", "inner"} & set(system.split("_")) for system in args.systems):
        parser.error("systems with `_hybrid` or `_inner` need --hosts or --groups of 2 or more")
    others = [system for system in args.systems if system.startswith("deepspeed") or system.endswith("_trainer")]
    if args.optimizer == "muon" and others:
        parser.error(f"--optimizer muon does not work with {', '.join(others)}")
    if args.optimizer == "muon" and args.lora:
        parser.error("--optimizer muon trains matrices of layers, which --lora freezes: leave one out")
    option = "--lora" if args.lora else "--meta"
    if args.lora < 0:
        parser.error(f"--lora {args.lora}: a rank is 1 or more")
    args.meta = args.meta or args.lora > 0
    unable = [system for system in args.systems if system not in ON_META]
    if args.meta and unable:
        parser.error(f"{option} does not work with {', '.join(unable)}; choose from {', '.join(ON_META)}")
    if args.meta and args.model == BYTE_LM:
        parser.error(f"{option} does not work with --model {BYTE_LM}; choose from {', '.join(SHAPES)}")
    if args.lora and importlib.util.find_spec("peft") is None:
        parser.error("--lora: peft is not installed")
    return args


def main() -> int:
    args = parse()
    if args.system:
        worker(args)
        return 0
    if any(system.startswith("stage") for system in args.systems):
        from lightning_zerocompile.runtime import build

        build.load()  # no system's time includes the build
    rows: list[Row] = []
    all_succeeded = True
    for system in args.systems:
        for numbers in in_one_process(args.accumulate, system):
            found, succeeded = measure(args, system, numbers)
            all_succeeded = all_succeeded and succeeded
            rows = with_ratios(rows + found)
            Path(args.out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(*map(json.dumps, rows), sep="\n", flush=True)
    if args.plot:
        plot(rows, Path(args.plot))
    return 0 if all_succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
