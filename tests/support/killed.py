"""Two ranks of which one is killed, and how the other one ends: processes of their own that share one GPU.

``python -m tests.support.killed`` kills in each of the cases, some side by side, and prints a line for each.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zerocompile import ZeroCompileStrategy

LIMIT = 30.0  # seconds in which the other rank must have ended
SIDE_BY_SIDE = 4
_READY_WITHIN = 180.0  # seconds
_READY, _CASE = "ZEROCOMPILE_TEST_READY", "ZEROCOMPILE_TEST_CASE"


@dataclass(frozen=True)
class Case:
    """What is trained, and which rank is killed.

    Attributes:
        busy: the device takes so long for each step that the host has filled its queue when the rank is killed.
        peers: gathers and reductions are copies between mapped memory; else NCCL's.
    """

    stage: int
    victim: int
    compiled: bool
    busy: bool = False
    peers: bool = True

    def __str__(self) -> str:
        words = [f"stage{self.stage}", f"rank{self.victim}", "compiled" if self.compiled else "eager"]
        return "-".join(words + ["busy"] * self.busy + ["nccl"] * (not self.peers))


CASES = [
    *(Case(*each) for each in itertools.product((1, 2, 3), (0, 1), (True, False))),
    *(Case(stage, victim, compiled=True, busy=True) for stage, victim in itertools.product((1, 2, 3), (0, 1))),
    *(Case(3, victim, compiled=True, busy=True, peers=False) for victim in (0, 1)),
]


@dataclass
class Ending:
    """How the other rank has ended.

    Attributes:
        seconds: from the kill to its end.
        said: what it has written from the kill on.
        code: its exit code; None: it was still there, and ``said`` has the stacks of its threads.
        named: whether it has said which rank has died.
    """

    seconds: float
    said: str
    code: int | None
    named: bool


def kill(case: Case) -> Ending:
    """Trains on two ranks, kills one in a step and waits for the end of the other."""
    with tempfile.TemporaryDirectory() as name:
        return _kill(case, Path(name))


def _kill(case: Case, folder: Path) -> Ending:
    port = 15_000 + 37 * CASES.index(case) + os.getpid() % 37  # not of those that NCCL's sockets get
    processes, outputs = [], [folder / f"{rank}.txt" for rank in (0, 1)]
    for rank in (0, 1):
        places = {"RANK": rank, "GROUP_RANK": rank, "NODE_RANK": rank, "LOCAL_RANK": 0, "CUDA_VISIBLE_DEVICES": 0}
        sizes = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        nccl = {"NCCL_HOSTID": f"{port}-{rank}", "NCCL_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": "killed"}
        own = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": 1, _READY: folder / f"ready{rank}", _CASE: repr(case)}
        added = {key: str(value) for key, value in (places | sizes | nccl | own).items()}
        with outputs[rank].open("w") as output:
            command = [sys.executable, "-m", "tests.support.killed", "rank"]
            processes.append(subprocess.Popen(command, env=os.environ | added, stdout=output, stderr=output))
    try:
        started = time.monotonic()
        while not all((folder / f"ready{rank}").exists() for rank in (0, 1)):
            if time.monotonic() - started > _READY_WITHIN or any(one.poll() is not None for one in processes):
                raise RuntimeError("\n".join(output.read_text()[-3000:] for output in outputs))
            time.sleep(0.2)
        time.sleep(4.0)
        other, output = processes[1 - case.victim], outputs[1 - case.victim]
        before, killed = output.stat().st_size, time.monotonic()
        processes[case.victim].kill()
        try:
            code: int | None = other.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - killed
        stands = "" if code is not None else _stands(other)
        said = output.read_text()[before:] + stands
        named = re.search(f"[Rr]ank {case.victim}(, which)? has ended: its process has died", said)
        return Ending(seconds, said, code, named is not None)
    finally:
        for one in processes:
            one.kill()
            one.wait()


def _stands(process: subprocess.Popen[bytes]) -> str:
    """Where a process's threads stand in the kernel; it writes the stacks of its Python itself."""
    process.send_signal(signal.SIGUSR1)
    time.sleep(2.0)
    lines = []
    for task in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
        parts = []
        for name in ("comm", "wchan", "syscall"):
            try:
                parts.append((task / name).read_text().strip()[:40])
            except OSError as error:
                parts.append(str(error.strerror))
        lines.append(" ".join(parts))
    return "threads of the kernel:\n" + "\n".join(lines)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Runs(LightningModule):
    """Nothing in its steps waits for the device."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.blocks = case, nn.ModuleList(_Block() for _ in range(96))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.case.busy:
            torch.cuda._sleep(100_000_000)  # some 50 ms
        if batch_idx == 3:
            Path(os.environ[_READY]).touch()
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


def _rank() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    case: Case = eval(os.environ[_CASE])
    strategy = ZeroCompileStrategy(
        stage=case.stage, compile=case.compiled, copy_engine=case.peers, timeout=timedelta(minutes=5)
    )
    precision = "bf16-mixed" if case.stage == 1 else "bf16-true"
    trainer = Trainer(
        accelerator="cuda", devices=1, num_nodes=2, strategy=strategy, max_steps=100_000, precision=precision,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(_Runs(case), DataLoader(TensorDataset(torch.randn(200_000, 8, 256)), batch_size=4))


def _main() -> None:
    def line(case: Case) -> str:
        try:
            ending = kill(case)
        except RuntimeError as error:
            return f"NOT STARTED {case}\n{error}"
        good = ending.named and ending.code is not None
        end = "still there" if ending.code is None else f"exit code {ending.code}"
        words = [one for one in ending.said.splitlines() if "zerocompile: " in one]
        text = "\n".join(dict.fromkeys(one[:300] for one in words[:6])) if good else ending.said[-6000:]
        return f"{'ok' if good else 'WRONG'} {case}: {ending.seconds:.1f} s, {end}, named: {ending.named}\n{text}"

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for found in pool.map(line, CASES):
            print(found, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        _rank()
    else:
        _main()
