"""What it takes to load pretrained weights into a sharded model, and to write them: seconds and host memory.

    torchrun --nproc-per-node 2 examples/benchmark_pretrained.py --model qwen3-8b --folder /tmp/qwen3-8b

The folder gets random weights of that shape in bfloat16, as Hugging Face's safetensors files, if it is not there yet.
Each rank builds the model on the meta device, calls `load_pretrained` and shards it at stage 3. Then all ranks write it
to a second folder beside it (removed at the end) with what `strategy.save_pretrained` calls. Before each part the files
are dropped from the system's cache. One JSON line a part:

    seconds      of the slowest rank
    plain        seconds in which one process reads (or writes, and flushes) the same bytes in order, with no model
    host         the largest rank's peak of host memory above what it held before, in GiB: memory of its own, without
                 pages of files that the system can drop at any time
    bound        this rank's float32 shard, the largest unit in float32 and 10 % more, in GiB

Without a GPU: torchrun --nproc-per-node 2 examples/benchmark_pretrained.py --model tiny --folder /tmp/tiny
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark_systems import SHAPES, build_model
from torch import nn

from lightning_zerocompile import load_pretrained
from lightning_zerocompile.checkpoint.export import export
from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.runtime import build

GIB = 2**30
FILE_BYTES = 4 * GIB
CHUNK = 2**24


def make_folder(args: argparse.Namespace, folder: Path) -> None:
    """Random weights; one file is in memory at a time."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    model = build_model(args, torch.bfloat16, torch.device("meta"))
    model.config.save_pretrained(folder)
    noise = torch.randn(2**22).mul_(0.02).to(torch.bfloat16)  # repeated: to draw billions of numbers takes minutes
    places: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    files = 0

    def write() -> None:
        nonlocal files
        files += 1
        name = f"model-{files}.safetensors"
        save_file(held, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(held, name))
        held.clear()

    for name, parameter in model.named_parameters():
        count = parameter.numel()
        held[name] = noise.repeat(-(-count // len(noise)))[:count].view(parameter.shape)
        if sum(tensor.nbytes for tensor in held.values()) > FILE_BYTES:
            write()
    write()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def forget(folder: Path) -> None:
    """The files are not in the system's cache any more."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(folder: Path) -> float:
    buffer = bytearray(CHUNK)
    start = time.perf_counter()
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - start


def write_plainly(path: Path, size: int) -> float:
    chunk = os.urandom(CHUNK)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as opened:
        for _ in range(-(-size // CHUNK)):
            opened.write(chunk)
        os.fsync(opened.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def own_memory() -> int:
    """Bytes of this process that belong to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not say what memory a process has of its own (no RssAnon in /proc)")


@contextmanager
def watched(seen: dict[str, float]) -> Iterator[None]:
    """Afterwards `seen` has the seconds of the body, and its peak of host memory above that before it."""
    before, peak, done = own_memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, own_memory())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    start = time.perf_counter()
    yield
    seen["seconds"] = time.perf_counter() - start
    done.set()
    thread.join()
    seen["host"] = (max(peak, own_memory()) - before) / GIB


def report(part: str, seen: dict[str, float], plain: Callable[[], float], bound: float) -> None:
    """Collective; rank 0 measures what the disk takes, with no model, and prints."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, seen)
    if dist.get_rank() == 0:
        worst = {name: round(max(one[name] for one in told), 3) for name in seen}
        print(json.dumps({"part": part, **worst, "plain": round(plain(), 3), "bound": round(bound, 3)}), flush=True)
    dist.barrier()


def unit_bytes(model: nn.Module) -> int:
    """The largest layer, embedding or head in float32."""
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    return 4 * max(*sizes, *(p.numel() for p in model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.checkpointing = False
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    first, out = dist.get_rank() == 0, args.folder.with_name(args.folder.name + "-written")
    if first and not args.folder.exists():
        make_folder(args, args.folder)
    dist.barrier()
    if first:
        forget(args.folder)
    build.load()  # no part's time includes the build
    torch.zeros(1, device=device)  # what the device itself takes of the host is not counted
    dist.barrier()

    seen: dict[str, float] = {}
    with watched(seen):
        model = build_model(args, torch.bfloat16, torch.device("meta"))
        load_pretrained(model, args.folder)
        engine = Engine(model, device, Config(stage=3, compile=False), torch.bfloat16, dist.get_backend())
    sizes = sum(file.stat().st_size for file in args.folder.glob("*.safetensors"))
    shard = 4 * sum(p.numel() for p in model.parameters()) / dist.get_world_size()
    bound = 1.1 * (shard + unit_bytes(model)) / GIB

    def plainly() -> float:
        forget(args.folder)
        return read_plainly(args.folder)

    report("load", seen, plainly, bound)
    with watched(seen):
        export(model, out, None, FILE_BYTES)
        if first:
            for file in out.glob("*.safetensors"):
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        dist.barrier()
    report("write", seen, lambda: write_plainly(out / "plain", sizes), bound)
    engine.abandon()
    if first:
        shutil.rmtree(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
