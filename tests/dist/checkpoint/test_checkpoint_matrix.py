"""Checkpoints of every kind, stage and world size, DDP's and one process's, into every other: state and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

from tests.support import checkpoints, models
from tests.support.checkpoints import Look, Saved
from tests.support.harness import Worlds

SAVES = [
    ("sharded", 1, 1), ("sharded", 2, 2), ("sharded", 3, 3), ("sharded", 2, 4),
    ("full", 3, 1), ("full", 1, 2), ("full", 2, 3), ("full", 3, 4),
]  # fmt: skip


def _save_all(folder: str) -> None:
    world = models.world()
    runs: dict[str, Any] = {
        f"{kind}-{stage}-{world}": checkpoints.strategy(kind, stage) for kind, stage, at in SAVES if at == world
    }
    if world == 2:
        runs["ddp"] = "ddp"
    if world == 1:
        runs["plain"] = "auto"
    for name, strategy in runs.items():
        torch.manual_seed(world)
        look = Look("end")
        checkpoints.fit(Saved(), strategy, callbacks=[look]).save_checkpoint(f"{folder}/{name}.ckpt")
        if models.rank() == 0:
            torch.save(look.state, f"{folder}/{name}.expected")


def _continued(state: dict[str, Any]) -> list[float]:
    """This rank's losses of another epoch from a state of :class:`Look`, in plain torch."""
    module = Saved().to(models.device())
    module.load_state_dict(state["weights"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=state["rates"][0], eps=1e-3)  # as Saved's
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state["optimizers"][0], "param_groups": groups})
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        for r in range(models.world()):
            loss = module.loss(models.Batches(r, 4)[step])
            (loss / models.world()).backward()
            if r == models.rank():
                losses.append(loss.item())
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.8
    return losses


def _continue(strategy: Any, path: Path, expected: Path) -> list[str]:
    """Trains on from a checkpoint; what is not as it should be."""
    look, module = Look("start"), checkpoints.another()
    checkpoints.fit(module, strategy, 2, str(path), callbacks=[look])
    state = torch.load(expected, weights_only=False)
    look.state.pop("layout"), state.pop("layout")
    wrong = checkpoints.differences(look.state, state)
    if module.restored != ["user"] or len(module.losses) != 4:
        wrong.append("hook or steps")
    far = [abs(a - b) for a, b in zip(module.losses, _continued(state), strict=True)]
    return wrong if max(far) < 1e-5 else [*wrong, f"losses deviate by {far}"]


def _load_all(folder: str, stages: int) -> dict[str, list[str]]:
    """Into this world: each checkpoint into so many of the stages, and into one of the kinds."""
    found = {}
    for number, path in enumerate(sorted(Path(folder).glob("*.ckpt"))):
        for shift in range(stages):
            stage = (number + models.world() + shift) % 3 + 1
            kind = ("full", "sharded")[(number + models.world() + shift) % 2]
            name = f"{path.stem} -> {kind}-{stage}-{models.world()}"
            found[name] = _continue(checkpoints.strategy(kind, stage), path, path.with_suffix(".expected"))
    return found


def _load_without(folder: str, strategy: str) -> dict[str, list[str]]:
    """Without this strategy: a single file as it is, a directory after Lightning's consolidation."""
    found = {}
    for path in sorted(Path(folder).glob("*.ckpt")):
        file = path
        if path.is_dir():
            file = path.with_suffix(".consolidated")
            if not file.exists():  # one process comes first
                torch.save(_format_checkpoint(_load_distributed_checkpoint(path)), file)
        name = f"{path.stem} -> {strategy}-{models.world()}"
        found[name] = _continue(strategy, file, path.with_suffix(".expected"))
        loaded = Saved.load_from_checkpoint(file)
        found[f"{path.stem} -> load_from_checkpoint"] = [] if loaded.restored == ["user"] else ["hook"]
    return found


def test_every_kind_stage_and_world_size(worlds: Worlds, tmp_path: Path, long: bool) -> None:
    """Weights, buffers, moments, rates, schedules and loops are equal to the bit after any change of all three.

    Training goes on as plain torch does from that state.
    """
    sizes = (1, 2, 3, 4) if long else (1, 2, 3)
    saves = [save for save in SAVES if save[2] in sizes]
    for world in sizes:
        worlds(world).run(_save_all, str(tmp_path))
    assert {path.stem for path in tmp_path.glob("*.ckpt") if path.is_dir()} == {
        f"{kind}-{stage}-{world}" for kind, stage, world in saves if kind == "sharded"
    }
    results = []
    for world in sizes:
        found = worlds(world).run(_load_all, str(tmp_path), 3 if long else 1, timeout=300)
        assert len(found[0]) == (len(saves) + 2) * (3 if long else 1)
        results += found
    results += worlds(1).run(_load_without, str(tmp_path), "auto")
    results += worlds(2).run(_load_without, str(tmp_path), "ddp")
    wrong = {name: faults for found in results for name, faults in found.items() if faults}
    assert not wrong, wrong
