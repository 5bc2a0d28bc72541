"""The end of a run: exceptions in every hook, interrupts, and what is left of the module."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile.checkpoint.checkpoints import Checkpoints
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.ranks.errors import CommunicationError
from lightning_zerocompile.sharding import module_swap
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, failing, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, STAGES


class Boom(Exception):
    """The user's."""


# ---- exceptions in hooks ----

HOOKS = (
    "setup", "configure_model", "configure_optimizers", "on_load_checkpoint", "on_fit_start", "on_train_start",
    "on_train_batch_start", "training_step", "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_end", "validation_step", "on_save_checkpoint", "on_train_end", "teardown", "predict_step",
)  # fmt: skip


def _raising(hook: str) -> models.Module:
    def method(self: models.Module, *_: Any, **__: Any) -> None:
        raise Boom(hook)

    return type("Raising", (models.Module,), {hook: method})()  # type: ignore[no-any-return]


@on_ranks()
def test_exception_in_every_hook(tmp_path: Path) -> None:
    """On all ranks: the user's exception comes out as it is, and the same strategy serves another module."""
    folder = str(tmp_path)
    path, seconds = f"{folder}/one.ckpt", []
    good = models.Module()
    trainer = models.make_trainer(failing.strategy(), max_steps=1, limit_val_batches=0)
    trainer.fit(good, models.Batches(models.rank()))
    trainer.save_checkpoint(path)
    for number, hook in enumerate(HOOKS):
        module, strategy = _raising(hook), failing.strategy(stage=1 + number % 3)
        arguments: dict[str, Any] = {"max_steps": 2, "num_sanity_val_steps": 0, "limit_val_batches": 1}
        arguments |= {"val_check_interval": 2} if hook == "validation_step" else {}
        trainer = models.make_trainer(strategy, **arguments)
        start = time.monotonic()
        with pytest.raises(Boom) as raised:
            data = models.Batches(models.rank())
            if hook == "predict_step":
                trainer.predict(module, data)
            else:
                resumes = path if hook == "on_load_checkpoint" else None
                trainer.fit(module, data, models.Batches(models.rank(), 1), ckpt_path=resumes, weights_only=True)
                trainer.save_checkpoint(f"{folder}/two.ckpt")  # `on_save_checkpoint`
        seconds.append(time.monotonic() - start)
        assert raised.value.args == (hook,) and type(raised.value) is Boom
        assert strategy._engine is None and type(module).__name__ == "Raising", hook
        if number % 5 == 0:  # the strategy that has failed serves another module
            assert len(trainer.validate(models.Module(), models.Batches(models.rank(), 1), verbose=False)) == 1
    failing.works()
    assert len(seconds) == len(HOOKS) and max(seconds) < 10


class Interrupted(models.Module):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            raise KeyboardInterrupt


@on_ranks()
def test_interrupt_on_all_ranks() -> None:
    """Ctrl-C ends the run as Lightning ends it, and the processes can train on."""
    handler, start = signal.getsignal(signal.SIGINT), time.monotonic()
    try:
        with pytest.raises(SystemExit):
            failing.fit(Interrupted(), failing.strategy(stage=3))
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores further ones
    seconds = time.monotonic() - start
    failing.works()
    assert seconds < 10


class _EndsBadly(models.Module):
    def cpu(self) -> Any:
        raise ValueError("at the end")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise Boom("first")


@on_ranks()
def test_the_first_error_comes_out() -> None:
    """What the end of the run raises is logged."""
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logging.getLogger("lightning_zerocompile").addHandler(handler)
    try:
        with pytest.raises(Boom, match="first"):
            failing.fit(_EndsBadly(), failing.strategy())
    finally:
        logging.getLogger("lightning_zerocompile").removeHandler(handler)
    (record,) = logged
    assert "the end of the run raised, too" in record.getMessage()
    assert record.exc_info is not None and str(record.exc_info[1]) == "at the end"
    failing.works()


# ---- ranks that fail at different points ----


class Apart(models.Module):
    """In the second step rank 0 raises after its forward, the others when their backward has reduced some units."""

    def __init__(self, error: type[BaseException], ranks: Container[int]) -> None:
        super().__init__()
        self.error, self.failing, self.step = error, ranks, 0
        self.model.embedding.register_forward_hook(self.watch)

    def watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.step == 1 and models.rank() > 0 and models.rank() in self.failing:
            output.register_hook(lambda _: self.fail())

    def fail(self) -> None:
        raise self.error("boom")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.step = batch_idx
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and models.rank() == 0 and 0 in self.failing:
            self.fail()
        return loss


class _Launched(L.Callback):
    """Reductions before the step that fails, and when it has."""

    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.calls[:] = [trainer.strategy.stats.reductions]

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.calls.append(trainer.strategy.stats.reductions)


@on_ranks()
def test_teardown_waits_for_nobody() -> None:
    """A reduction that not all ranks have started does not hold them up: far less than `timeout`, then they train."""
    if models.device() == "cuda":
        pytest.skip("a stream that waits in NCCL is freed by its watchdog, which ends the process: LIMITS.md")
    module, strategy, calls = Apart(Boom, range(models.world())), failing.strategy(seconds=60), []
    module.on_exception = lambda *_: calls.append(strategy.stats.reductions)  # type: ignore[assignment, method-assign]
    start = time.monotonic()
    with pytest.raises(Boom):
        failing.fit(module, strategy, callbacks=[_Launched(calls)])
    seconds = time.monotonic() - start
    failing.works()
    result = seconds if models.rank() == 0 or calls[1] > calls[0] else 1e9
    assert result < 20


def _interrupted_alone() -> None:
    handler, start = signal.getsignal(signal.SIGINT), time.monotonic()
    try:
        failing.fit(Apart(KeyboardInterrupt, (1,)), failing.strategy(seconds=4))
    except CommunicationError as error:
        raise CommunicationError(f"{time.monotonic() - start:.0f} s: {error}") from None
    except SystemExit:
        time.sleep(6)  # the process stays: the other rank hears of it through the store
        raise
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.long
def test_interrupt_on_one_rank() -> None:
    """The other rank ends at `timeout`, and says which rank was interrupted."""
    text = failing.expect_error(_interrupted_alone)
    assert "rank 0 lost another rank in backward" in text and "has ended: KeyboardInterrupt" in text, text


# ---- the module after a run ----


@on_ranks()
def test_a_module_that_a_failed_fit_has_left() -> None:
    """One that stays sharded cannot be fitted again: the error names its state and the remedy, before any collective of
    the engine."""
    module, messages = _raising("on_train_batch_end"), []
    with pytest.raises(Boom):
        failing.fit(module, failing.strategy(stage=3, unshard_after_fit=False))
    collectives: list[str] = []
    gather = torch.distributed.all_gather_object
    torch.distributed.all_gather_object = lambda *_: collectives.append("all_gather_object")
    try:
        for stage in (1, 3):
            with pytest.raises(RuntimeError) as raised:
                failing.fit(module, failing.strategy(stage=stage))
            messages.append(str(raised.value))
    finally:
        torch.distributed.all_gather_object = gather
    assert collectives == []
    failing.works()
    assert len(messages) == 2
    for message in messages:
        assert "`model." in message and "is a shard" in message and "ckpt_path" in message


class FailsLate(models.Module):
    """In its second batch it raises on the ranks that ``failing`` names (None: on all): in ``where``."""

    failing: tuple[int, ...] | None = None
    where, error = "training_step", Boom

    def fail(self, where: str) -> None:
        fails = self.failing is None or models.rank() in self.failing
        if where == self.where and fails and self.trainer.global_step == 1:
            raise self.error(where)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.fail("training_step")
        if self.where == "backward":
            loss.register_hook(lambda _: self.fail("backward"))
        return loss

    def on_after_backward(self) -> None:
        self.fail("on_after_backward")


def _whole_again(stage: int, options: dict[str, Any], cases: list[tuple[str, type[BaseException]]]) -> None:
    for where, error in cases:
        module, twin = FailsLate(), models.Module()
        twin.load_state_dict(module.state_dict())
        module.where, module.error = where, error
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
                failing.fit(module, failing.strategy(stage, **options), steps=3)
        finally:
            signal.signal(signal.SIGINT, handler)
        assert type(module.model) is models.ByteModel and all(type(p) is nn.Parameter for p in module.parameters())
        assert not any(isinstance(value, DTensor) for value in module.state_dict().values())
        models.reference(twin, 1)  # the step before the exception
        assert models.deviation(module, twin) < 1e-6
        assert torch.isfinite(module.loss(models.Batches(0)[0].cpu()))
        module.failing = ()
        failing.fit(module, failing.strategy(stage, **options), steps=2)
        models.reference(twin, 2)
        assert models.deviation(module, twin) < 1e-6


EVERYWHERE = [(where, Boom) for where in ("training_step", "backward", "on_after_backward")]


@pytest.mark.parametrize("compile", [False, pytest.param("blocks", marks=pytest.mark.long)])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
def test_a_module_is_whole_after_an_exception(stage: int, compile: Any) -> None:
    """Wherever the ranks raise: it has the values of the last whole step, and is fitted again."""
    options = {"compile": compile, "compile_options": {"backend": "aot_eager"}}
    _whole_again(stage, options, [*EVERYWHERE, ("backward", KeyboardInterrupt)])


@STAGES
@on_ranks()
def test_a_checkpoint_of_an_exception(stage: int, tmp_path: Path) -> None:
    """`ModelCheckpoint(save_on_exception=True)` saves the values and optimizers of the last whole step."""
    for number, options in enumerate((EAGER, AOT)):
        for where in ("training_step", "backward"):
            module, twin = FailsLate(), models.Module()
            twin.load_state_dict(module.state_dict())
            module.where, folder = where, tmp_path / f"{where}{number}"
            callback = ModelCheckpoint(folder, save_on_exception=True, save_top_k=0)
            with pytest.raises(Boom):
                failing.fit(
                    module, failing.strategy(stage, **options), 3, callbacks=[callback], enable_checkpointing=True
                )
            models.reference(twin, 1)
            (file,) = folder.iterdir()
            saved = torch.load(file, weights_only=True)
            assert saved["global_step"] == 1 and len(saved["optimizer_states"]) == 1
            for name, value in twin.state_dict().items():
                assert torch.allclose(saved["state_dict"][name], value.cpu(), atol=1e-6), name


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
@on_ranks()
def test_no_checkpoint_of_one_rank_s_exception(stage: int, tmp_path: Path, device: str) -> None:
    """The rank waits in a checkpoint, and the others in a backward. They then come to the meeting that it has left, and
    do not go on from there: see [Note: meetings that were left]."""
    if device != "cpu":
        pytest.skip("on devices ranks meet in the store")
    module, start = FailsLate(), time.monotonic()
    module.failing = (0,)
    callback = ModelCheckpoint(tmp_path, save_on_exception=True, save_top_k=0)
    with pytest.raises(CommunicationError, match=r"rank 0 waits in a checkpoint, in `on_exception`.*in `backward`"):
        failing.fit(
            module, failing.strategy(stage, seconds=60, **EAGER), 3, callbacks=[callback], enable_checkpointing=True
        )
    assert time.monotonic() - start < 20 and not any(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [1, 3])
def test_one_process_is_whole_after_an_exception(worlds: Any, stage: int) -> None:
    worlds(1).run(_whole_again, stage, {"compile": "blocks", "compile_options": {"backend": "aot_eager"}}, EVERYWHERE)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks()
def test_a_module_that_stays_sharded_says_so(stage: int) -> None:
    """A rank that fails alone waits for the others for a tenth of the timeout; what is left raises by name."""
    if models.device() == "cuda":
        pytest.skip("NCCL's watchdog may end the other rank first")
    module = FailsLate()
    module.failing = (1,)
    if models.rank() == 0:
        module.on_train_batch_end = lambda *_: time.sleep(3)  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(Boom if models.rank() == 1 else CommunicationError):
        failing.fit(module, failing.strategy(stage, seconds=8))
    assert models.rank() == 0 or time.monotonic() - start < 6  # of the timeout of 8
    for use in (lambda: module.loss(models.Batches(0)[0]), module.state_dict, module.model.layers[0].state_dict):
        with pytest.raises(RuntimeError, match=r"is a shard .* ckpt_path"):
            use()


def _refused_first(what: str) -> None:
    module, twin = models.pair(models.Module)
    if what == "copy engine":
        with pytest.raises(ValueError, match="no copy engines"):
            failing.fit(module, failing.strategy(copy_engine=True))
    else:
        module.tail = nn.Module()
        module.tail.weight = nn.Parameter(torch.empty(3, device="meta"))
        with pytest.raises(RuntimeError, match=r"`tail\.weight` is on the meta device"):
            failing.fit(module, failing.strategy())
        del module.tail
    assert type(module) is models.Module and type(module.model) is models.ByteModel
    assert not any(isinstance(p, DTensor) for p in module.parameters())
    failing.fit(module, failing.strategy())
    models.reference(twin, 2)
    assert models.deviation(module, twin) < 1e-6


def _late_refusal() -> None:
    module, add = models.Module(), Engine._add_regions
    Engine._add_regions = lambda *_: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    try:
        with pytest.raises(ZeroDivisionError):
            failing.fit(module, failing.strategy())
    finally:
        Engine._add_regions = add  # type: ignore[method-assign]
    assert type(module.model) is models.ByteModel and not hasattr(module.model.head, "_zerocompile_parameters")
    with pytest.raises(RuntimeError, match="is a shard"):
        failing.fit(module, failing.strategy())


@on_ranks()
def test_a_refusal_leaves_the_module_as_it_was() -> None:
    """What is refused before anything is sharded; a later failure leaves shards under the module's own classes."""
    if models.device() == "cpu":
        _refused_first("copy engine")
    _refused_first("meta")
    _late_refusal()


@on_ranks()
def test_another_strategy_takes_a_sharded_module() -> None:
    """What `unshard_after_fit=False` has left is fitted by other strategies, in any order."""
    module, twin = models.pair(models.Module)
    data = models.Batches(models.rank(), 1)
    trainers = [failing.fit(module, failing.strategy(stage=stage, unshard_after_fit=False)) for stage in (3, 2)]
    trainers[0].validate(module, data, verbose=False)  # back to the first
    assert isinstance(module.model.head._parameters["weight"], DTensor)
    failing.fit(module, failing.strategy(stage=1))
    for trainer in trainers:  # their engines hold nothing of the module any more
        trainer.validate(models.Module(), data, verbose=False)
    for _ in range(3):
        models.reference(twin, 2)
    assert models.deviation(module, twin) < 1e-6


class _OnDevice(Tensor):
    """A tensor that notes when it is moved to the CPU."""

    events: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[1] == "cpu":
            args[0].events.append("cpu")
            return args[0].as_subclass(Tensor)
        return super().__torch_function__(func, types, args, kwargs)


@on_ranks()
def test_parameters_become_whole_one_by_one() -> None:
    """Each full parameter has left the device before the next one is made: a model may be larger than a device."""
    model, events = models.ByteModel(), []

    def noted(value: DTensor, group: Any = None) -> Tensor:
        whole = full_value(value, group).as_subclass(_OnDevice)
        whole.events = events
        events.append("whole")
        return whole

    engine = engines.make_engine(model, 3, compile=False)
    module_swap.full_value = noted
    try:
        engine.unshard()
    finally:
        module_swap.full_value = full_value
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
    assert events == ["whole", "cpu"] * len(list(model.parameters()))


# ---- what ranks decide together ----


@on_ranks()
def test_a_checkpoint_that_one_rank_does_not_see(tmp_path: Path) -> None:
    folder = str(tmp_path)
    before, here = Path.cwd(), Path(folder, str(models.rank()))
    here.mkdir()
    if models.rank() == 0:
        torch.save({"state_dict": {}}, here / "a.ckpt")
    os.chdir(here)
    try:
        with pytest.raises(RuntimeError) as raised:
            Checkpoints(sharded=False).load("a.ckpt", True, nn.Linear(2, 2), False)
    finally:
        os.chdir(before)
    message = str(raised.value)
    assert (
        "a.ckpt`" in message and "rank 0 finds a file, rank 1 finds nothing" in message and "all ranks see" in message
    )


# ---- the end of the process ----

_ENDING = """
import atexit, sys, torch
from pathlib import Path
import torch.distributed as dist
def tell():
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print("destroyed" if not dist.is_initialized() else "left", sum("gloo" in name for name in threads))
atexit.register(tell)
from tests.support import models
from lightning_zerocompile import ZeroCompileFabricStrategy, ZeroCompileStrategy
if sys.argv[1].startswith("Trainer"):
    strategy = ZeroCompileStrategy(compile=False, unshard_after_fit="kept" not in sys.argv[1])
    trainer = models.make_trainer(strategy, devices=1, max_steps=1, limit_val_batches=0)
    trainer.fit(models.Module(), models.Batches(0))
else:
    import lightning as L
    fabric = L.Fabric(strategy=ZeroCompileFabricStrategy(compile=False), devices=1, accelerator="cpu")
    fabric.launch()
    fabric.setup(torch.nn.Linear(4, 4))
assert dist.is_initialized() and "nccl" not in dist.get_backend()
if sys.argv[2] == "raises":
    raise RuntimeError("the user's")
"""


@pytest.mark.parametrize(
    ("front", "end", "groups"),
    [
        ("Trainer", "ends", "destroyed"),
        pytest.param("Trainer kept", "ends", "destroyed", marks=pytest.mark.long),
        ("Fabric", "ends", "destroyed"),
        pytest.param("Trainer", "raises", "left", marks=pytest.mark.long),
        ("Fabric", "raises", "left"),
    ],
)
def test_gloo_ends_before_the_interpreter(front: str, end: str, groups: str) -> None:
    """Else a thread of gloo may need the interpreter after its end, which aborts the process."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _ENDING, front, end], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.returncode == 0) == (end == "ends"), done.stderr[-3000:]
    assert ("the user's" in done.stderr) == (end == "raises")
    state, threads = done.stdout.split()[-2:]
    assert state == groups and (threads == "0") == (groups == "destroyed")  # no thread of gloo is left
