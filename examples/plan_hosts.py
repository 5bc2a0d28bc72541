"""What plans say of several hosts: seconds of a step, of them communication alone, and the peak, for each mesh.

    python examples/plan_hosts.py --models qwen3-8b 70b --gpus 8 64 512

Nothing is run or allocated, and no GPU is needed. One sequence a GPU, bf16 compute, fp32 AdamW states, compiled blocks.
Hosts have 8 GPUs. The rates are those of H200s. `--memory-bandwidth` and `--node-bandwidth` were measured on two of
them, and `--flops` is such that Qwen3-8B takes as long as it did there (see BENCHMARKS.md). `--bandwidth` is a network
card of 400 Gb/s for each GPU, at 90 %. The latencies are those of NCCL's own model (its src/graph/tuning.cc: ring,
protocol "simple").

    full        shards over all GPUs
    replicas    shards inside each host, replicas across (`device_mesh="nodes"`)
    inside      shards over all GPUs, the backward gathers inside each host (`reshard_after_forward="nodes"`)
"""

from __future__ import annotations

import argparse

import torch
from benchmark_systems import SHAPES, build_model, loss_of

from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.plan import make_plan

GIB = 2**30
MESHES = {
    ("full", 1): {},
    ("full", 3): {},
    ("replicas", 1): {"device_mesh": "nodes"},
    ("replicas", 3): {"device_mesh": "nodes"},
    ("inside", 3): {"reshard_after_forward": "nodes"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=SHAPES, default=["qwen3-8b", "70b"])
    add("--gpus", nargs="+", type=int, default=[8, 64, 512])
    add("--seq", type=int, default=4096)
    add("--ranks-per-node", type=int, default=8)
    add("--flops", type=float, default=612e12, help="FLOP a second that the model reaches")
    add("--memory-bandwidth", type=float, default=4.3e12, help="bytes a second")
    add("--bandwidth", type=float, default=45e9, help="bytes a second of a GPU between hosts")
    add("--node-bandwidth", type=float, default=265e9, help="the same inside a host")
    add("--latency", type=float, default=14e-6, help="seconds of a collective's step between hosts")
    add("--node-latency", type=float, default=3.4e-6, help="the same inside a host")
    args = parser.parse_args()
    machine = Machine(
        bandwidth=args.bandwidth,
        flops=args.flops,
        memory_bandwidth=args.memory_bandwidth,
        ranks_per_node=args.ranks_per_node,
        node_bandwidth=args.node_bandwidth,
        latency=args.latency,
        node_latency=args.node_latency,
    )
    print("| model | GPUs | mesh | stage | seconds | alone | GiB |\n|---|---|---|---|---|---|---|")
    for model in args.models:
        made = build_model(argparse.Namespace(model=model, checkpointing=False), torch.float32, torch.device("meta"))
        batch = torch.randint(SHAPES[model].vocabulary, (1, args.seq))
        for gpus in args.gpus:
            for (mesh, stage), options in MESHES.items():
                if gpus <= args.ranks_per_node and mesh != "full":
                    continue
                plan = make_plan(
                    made,
                    batch,
                    world_size=gpus,
                    config=Config(**options),  # type: ignore[arg-type]
                    machine=machine,
                    compute_dtype=torch.bfloat16,
                    stages=[stage],
                    step=loss_of,
                    optimizer=torch.optim.AdamW,
                )
                found = plan.stages[0]
                row = (model, gpus, mesh, stage, f"{found.seconds:.3f}", f"{found.exposed:.3f}")
                print("|", *(f"{cell} |" for cell in row), f"{found.memory.peak / GIB:.0f} |", flush=True)


if __name__ == "__main__":
    main()
