"""Who starts the processes and who ends them: torchrun, SLURM and its resubmission, SIGTERM, notebooks.

Everything runs on the CPU, whatever ``--device`` is.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import lightning.fabric.strategies.launchers as fabric_launchers
import pytest
import torch
from lightning.fabric import connector
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_zerocompile import ZeroCompileFabricStrategy, ZeroCompileStrategy
from lightning_zerocompile.plugins.launcher import ForkLauncher
from tests.support import models
from tests.support.harness import IMPORTED, free_port

ROOT = Path(__file__).parents[3]
STEPS = 6  # of a whole run
END = 3  # the step in which a signal comes
EXTERNAL = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "LOCAL_", "GROUP_", "NODE_")


class Signalled(models.Module):
    """Gets a signal in a step, on every rank at another moment of it."""

    def __init__(self, event: str = "") -> None:
        super().__init__(optimizer="adamw", lr=0.01)
        self.event = event

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        name, _, late = self.event.partition(" late ")
        if name and self.global_step == END - 1 and late == str(self.global_rank):
            time.sleep(0.5)  # the other rank waits for this one by then
        if name and self.global_step == END - 1:
            os.kill(os.getpid(), getattr(signal, name))
        # by step: Lightning begins a list anew when it resumes within an epoch
        return super().training_step(models.Batches(self.global_rank)[self.global_step], batch_idx)


def run(folder: str, event: str = "", checkpoint: str = "full", path: str | None = None) -> dict[str, Any]:
    """A rank's training; what it was, and its losses."""
    torch.manual_seed(0)
    module = Signalled(event)
    strategy = ZeroCompileStrategy(3, compile=False, state_dict_type=checkpoint)  # type: ignore[arg-type]
    trainer = models.make_trainer(
        strategy, accelerator="cpu", devices=2, max_steps=STEPS, default_root_dir=folder, enable_checkpointing=True,
        callbacks=[
            ModelCheckpoint(folder, "term", save_on_exception=True, save_top_k=0), OnExceptionCheckpoint(folder),
        ],
    )  # fmt: skip
    environment, rank = trainer.strategy.cluster_environment, trainer.global_rank
    try:
        trainer.fit(module, models.Batches(rank, STEPS), ckpt_path=path, weights_only=False)
        ended = "done"
    except SIGTERMException:
        ended = "terminated"
    return {
        "rank": rank, "environment": type(environment).__name__, "children": len(trainer.strategy.launcher.procs),
        "ended": ended, "losses": module.losses,
    }  # fmt: skip


def _whole() -> list[list[float]]:
    """Both ranks' losses of an undisturbed run, in plain torch."""
    torch.manual_seed(0)
    module, losses = Signalled(), [[], []]
    optimizer = module.configure_optimizers()
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            loss = module.loss(models.Batches(rank)[step])
            losses[rank].append(loss.item())
            (loss / 2).backward()
        optimizer.step()
    return losses


def _serve(variables: dict[str, str], stacks: str, arguments: tuple[Any, ...], pipe: Any) -> None:
    import faulthandler

    faulthandler.dump_traceback_later(50, file=open(stacks, "w"), exit=True)  # noqa: SIM115 - open until the end
    for name in [n for n in os.environ if n.startswith(EXTERNAL)]:
        del os.environ[name]
    os.environ |= variables
    torch.set_num_threads(1)
    try:
        pipe.send(run(*arguments))
    except BaseException as error:
        pipe.send(repr(error))
    faulthandler.cancel_dump_traceback_later()
    pipe.recv()  # the other rank may still need the store, which lives in rank 0
    os._exit(0)


def _slurm(folder: Path, *arguments: Any) -> list[Any]:
    """Two tasks as ``srun`` starts them; what :func:`run` returns there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    port, tasks = str(free_port()), []
    for rank in range(2):
        variables = {
            "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
            "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": port,
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_ADDR": "127.0.0.1",
            "PATH": f"{folder}:{os.environ['PATH']}",
        }  # fmt: skip
        mine, theirs = context.Pipe()
        stacks = folder / f"stacks-{rank}"
        task = context.Process(target=_serve, args=(variables, str(stacks), (str(folder), *arguments), theirs))
        task.start()
        theirs.close()
        tasks.append((task, mine, stacks))
    answers = []
    for _, pipe, stacks in tasks:
        try:
            answers.append(pipe.recv())
        except EOFError:
            answers.append(stacks.read_text())
    for task, pipe, _ in tasks:
        if task.is_alive():
            pipe.send(None)
        task.join(10)
        task.kill()
    for answer in answers:
        assert isinstance(answer, dict), answer
    return answers


# ---- who starts the processes ----


@pytest.mark.long
def test_torchrun(tmp_path: Path) -> None:
    """The real launcher: its variables give the ranks, and nothing else is started."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\nfrom tests.dist.user_code.test_environments import run\n"
        "answer = run(sys.argv[1])\n"
        "json.dump(answer, open(f'{sys.argv[1]}/{answer[\"rank\"]}.json', 'w'))\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(EXTERNAL)}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
         str(tmp_path)],
        env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, losses in enumerate(_whole()):
        answer = json.loads((tmp_path / f"{rank}.json").read_text())
        assert answer["losses"] == pytest.approx(losses, abs=1e-5)
        answer.pop("losses")
        assert answer == {"rank": rank, "environment": "TorchElasticEnvironment", "children": 0, "ended": "done"}


# ---- notebooks ----


def _interactive(script: str, arguments: list[Any]) -> Any:
    """What ``script`` says in an interactive Python, which is what Lightning takes for a notebook."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(EXTERNAL)}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-i", "-c", script, json.dumps(arguments)],
        env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line.removeprefix("said ") for line in done.stdout.splitlines() if line.startswith("said ")]
    assert len(lines) == 1, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0])


NOTEBOOK = """
import json, sys, torch
torch.set_num_threads(1)
from tests.support import models
from lightning_zerocompile import ZeroCompileStrategy

class Module(models.Evaluated):
    def train_dataloader(self):
        return models.Batches(self.trainer.global_rank)
    def test_dataloader(self):
        return models.Batches(self.trainer.global_rank, 1)
    def on_train_end(self):
        self.trainer.save_checkpoint(path)  # here, where the optimizers and the number of steps are

stage, devices, options, path = json.loads(sys.argv[1])
torch.manual_seed(0)
module = Module()
strategy = ZeroCompileStrategy(stage, **options)
trainer = models.make_trainer(strategy, accelerator="cpu", devices=devices, max_steps=4, limit_val_batches=0)
trainer.fit(module)
torch.manual_seed(0)
again = models.make_trainer(ZeroCompileStrategy(stage, **options), accelerator="cpu", devices=devices, max_steps=6)
resumed = Module()
again.fit(resumed, ckpt_path=path, weights_only=False)
tested = again.test(resumed)
print("said", json.dumps({
    "launcher": type(trainer.strategy.launcher).__name__, "here": len(module.losses),
    "parameters": [p.tolist() for p in module.parameters()], "resumed": [p.tolist() for p in resumed.parameters()],
    "loss": float(trainer.callback_metrics["loss"]), "gathers": strategy.stats.gathers,
    "report": "gathers" in str(strategy.report()),
    "tested": tested[0]["test_loss"],
}))
"""


@pytest.mark.parametrize(
    ("stage", "options", "devices"),
    [
        (3, {"compile": False}, 2),
        (1, {"compile_options": {"backend": "aot_eager"}}, 2),
        pytest.param(3, {"compile_options": {"backend": "aot_eager"}}, 2, marks=pytest.mark.long),
        (3, {"compile": False}, 1),
    ],
    ids=["3-eager", "1-aot", "3-aot", "alone"],
)
def test_notebooks(tmp_path: Path, stage: int, options: dict[str, Any], devices: int) -> None:
    """It trains as DDP does, and what the run has done is known in the notebook."""
    said = _interactive(NOTEBOOK, [stage, devices, options, str(tmp_path / "a.ckpt")])
    torch.manual_seed(0)
    plain = models.Evaluated()
    optimizer, data = plain.configure_optimizers(), [models.Batches(rank) for rank in range(devices)]
    steps = [0, 1, 2, 3, 0, 1]  # the data of a resumed run begins anew
    for number, step in enumerate(steps):
        optimizer.zero_grad()
        losses = [plain.loss(batches[step]) for batches in data]
        torch.stack(losses).mean().backward()
        optimizer.step()
        if number in (3, 5):
            got = said["parameters" if number == 3 else "resumed"]
            for one, other in zip(got, plain.parameters(), strict=True):
                assert torch.allclose(torch.tensor(one), other, rtol=0, atol=1e-6)
        if number == 3:
            assert said["loss"] == pytest.approx(losses[0].item(), abs=1e-6)
    assert said["launcher"] == ("ForkLauncher" if devices == 2 else "Launcher")
    assert said["here"] == (0 if devices == 2 else 4)
    assert said["gathers"] > 0 and said["report"]
    with torch.no_grad():
        expected = torch.stack([plain.loss(batches[0]) for batches in data]).mean().item()
    assert said["tested"] == pytest.approx(expected, abs=1e-6)


LATE_LAYERS = """
import json, sys, torch
torch.set_num_threads(1)
from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models

class Module(models.Module):
    def train_dataloader(self):
        return models.Batches(self.trainer.global_rank)
    def configure_model(self):
        if where == "configure_model" and self.model is None:
            with torch.device("meta" if meta else "cpu"):
                self.model = models.Stacked(lambda: torch.nn.Linear(10, 10))
    def setup(self, stage):
        if where == "setup":
            self.model = models.Stacked(lambda: torch.nn.Linear(10, 10))

stage, options, where, meta, path = json.loads(sys.argv[1])
torch.manual_seed(0)
module = Module(lambda: None)
trainer = models.make_trainer(ZeroCompileStrategy(stage, **options), accelerator="cpu", devices=2, max_steps=4)
torch.manual_seed(0)
error = ""
try:
    trainer.fit(module)
    trainer.save_checkpoint(path)
except RuntimeError as raised:
    error = str(raised)
print("said", json.dumps({"error": error, "parameters": [p.tolist() for p in module.parameters()]}))
"""


@pytest.mark.parametrize(
    ("stage", "options"),
    [(3, {"compile": False}), pytest.param(1, {"compile_options": {"backend": "aot_eager"}}, marks=pytest.mark.long)],
)
def test_a_notebook_has_the_layers_that_a_run_has_made(tmp_path: Path, stage: int, options: dict[str, Any]) -> None:
    path = tmp_path / "a.ckpt"
    said = _interactive(LATE_LAYERS, [stage, options, "configure_model", False, str(path)])
    torch.manual_seed(0)
    plain = models.Module(lambda: models.Stacked(lambda: torch.nn.Linear(10, 10)))
    optimizer, data = plain.configure_optimizers(), [models.Batches(rank) for rank in range(2)]
    for step in range(4):
        optimizer.zero_grad()
        torch.stack([plain.loss(batches[step]) for batches in data]).mean().backward()
        optimizer.step()
    saved = torch.load(path, weights_only=False)["state_dict"]
    for one, (name, other) in zip(said["parameters"], plain.named_parameters(), strict=True):
        assert torch.allclose(torch.tensor(one), other, rtol=0, atol=1e-6)
        assert torch.equal(saved[name], torch.tensor(one))


def test_a_notebook_has_layers_of_the_meta_device_and_says_which_it_cannot_have(tmp_path: Path) -> None:
    arguments = [3, {"compile": False}]
    said = _interactive(LATE_LAYERS, [*arguments, "configure_model", True, str(tmp_path / "a.ckpt")])
    assert said["error"] == "" and len(said["parameters"]) == 7
    said = _interactive(LATE_LAYERS, [*arguments, "setup", False, str(tmp_path / "b.ckpt")])
    assert "has trained `model." in said["error"] and "`module.load_state_dict(torch.load(" in said["error"]
    weights = torch.load(said["error"].split("torch.load('")[1].split("'")[0])
    assert len(weights) == 7


FABRIC_NOTEBOOK = """
import json, sys, torch
torch.set_num_threads(1)
import lightning as L
from lightning_zerocompile import ZeroCompileFabricStrategy
from tests.support import models

stage, options, path = json.loads(sys.argv[1])

def train(fabric, steps):
    torch.manual_seed(0)
    model = models.ByteModel()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        optimizer.zero_grad()
        fabric.backward(model(models.Batches(fabric.global_rank)[step]).square().mean())
        optimizer.step()
    fabric.save(path, {"model": model})

fabric = L.Fabric(strategy=ZeroCompileFabricStrategy(stage, **options), accelerator="cpu", devices=2)
fabric.launch(train, 3)
print("said", json.dumps([p.tolist() for p in torch.load(path)["model"].values()]))
"""


@pytest.mark.parametrize(
    ("stage", "options"),
    [(3, {"compile": False}), pytest.param(1, {"compile_options": {"backend": "aot_eager"}}, marks=pytest.mark.long)],
)
def test_fabric_in_a_notebook(tmp_path: Path, stage: int, options: dict[str, Any]) -> None:
    said = _interactive(FABRIC_NOTEBOOK, [stage, options, str(tmp_path / "a.ckpt")])
    torch.manual_seed(0)
    plain = models.ByteModel()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses = [plain(models.Batches(rank)[step]).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    for one, other in zip(said, plain.state_dict().values(), strict=True):
        assert torch.allclose(torch.tensor(one), other, rtol=0, atol=1e-6)


def test_who_starts_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(EXTERNAL)]:
        monkeypatch.delenv(name)

    def launcher(**options: Any) -> str:
        trainer = models.make_trainer(ZeroCompileStrategy(**options), accelerator="cpu", devices=2)
        fabric = L.Fabric(strategy=ZeroCompileFabricStrategy(**options), accelerator="cpu", devices=2)
        forked = isinstance(trainer.strategy.launcher, ForkLauncher)
        assert forked is isinstance(fabric.strategy.launcher, fabric_launchers._MultiProcessingLauncher)
        return "fork" if forked else "popen"

    assert [launcher(start_method=method) for method in ("auto", "popen", "fork")] == ["popen", "popen", "fork"]
    with pytest.raises(ValueError, match=r"`unshard_after_fit=False` leaves.*use unshard_after_fit=True"):
        launcher(start_method="fork", unshard_after_fit=False)
    for module in (imports, accelerator_connector, connector):
        monkeypatch.setattr(module, "_IS_INTERACTIVE", True)
    assert launcher() == "fork"
    with pytest.raises(MisconfigurationException, match="not compatible with an interactive"):
        launcher(start_method="popen")


# ---- who ends them ----


@pytest.mark.parametrize("checkpoint", ["full", pytest.param("sharded", marks=pytest.mark.long)])
def test_slurm_resubmission(tmp_path: Path, checkpoint: str) -> None:
    """SIGUSR1 as the third step begins: a checkpoint, a call of ``scontrol``; the next job begins with that step."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/called\n")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    whole = _whole()
    for rank, answer in enumerate(_slurm(tmp_path, "SIGUSR1 late 1", checkpoint)):
        assert answer["losses"] == pytest.approx(whole[rank], abs=1e-5)
        answer.pop("losses")
        assert answer == {"rank": rank, "environment": "SLURMEnvironment", "children": 0, "ended": "done"}
    assert (tmp_path / "called").read_text() == "requeue 7\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_dir() is (checkpoint == "sharded")
    for rank, answer in enumerate(_slurm(tmp_path, "", checkpoint)):
        assert answer["losses"] == pytest.approx(whole[rank][END - 1 :], abs=1e-5)


def _terminated(folder: Path, checkpoint: str, late: int) -> None:
    whole = _whole()
    for rank, answer in enumerate(_slurm(folder, f"SIGTERM late {late}", checkpoint)):
        assert answer["ended"] == "terminated" and answer["losses"] == pytest.approx(whole[rank][:END], abs=1e-5)
    saved = sorted(folder.glob("*.ckpt"))
    assert [path.name for path in saved] == ["on_exception.ckpt", "term.ckpt"]
    assert all(path.is_dir() is (checkpoint == "sharded") for path in saved)
    for rank, answer in enumerate(_slurm(folder, "", checkpoint, str(saved[late]))):
        assert answer["losses"] == pytest.approx(whole[rank][END:], abs=1e-5)


def test_sigterm_leaves_checkpoints(tmp_path: Path) -> None:
    """All ranks end after the step in which the signal came; both callbacks' checkpoints go on from there."""
    _terminated(tmp_path, "full", 1)


@pytest.mark.long
def test_sigterm_leaves_sharded_checkpoints(tmp_path: Path) -> None:
    """The same with directories, and with the other rank late."""
    _terminated(tmp_path, "sharded", 0)
