"""Rules 17 and 18: what comes to the C++ runtime from outside is checked there, and nothing is half done afterwards."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zerocompile.engine import Engine
from lightning_zerocompile.runtime import build
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import Ranks, on_ranks

SIDE = 4
MANY = 2**22  # rows: 64 MiB of float32
FREE = 40 * 2**20  # bytes that may still be allocated where memory is short


def _small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))


# ---- indices and moments ----


def _message(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


def _unplanned() -> dict[str, str]:
    """What a parameter says whose unit is not planned yet."""
    name = dist.group.WORLD.group_name
    core = build.load().Runtime(name, name, "", "", models.world(), models.rank(), str(engines.place()))
    handle = torch.zeros(1, dtype=torch.float64)
    most = -(-SIDE // models.world())
    rows = max(0, min(most, SIDE - most * models.rank()))
    local = torch.randn(rows, SIDE, device=engines.place(), requires_grad=True)
    gradient = torch.ones(SIDE, SIDE, device=engines.place())
    size = [SIDE, SIDE]
    core.add_parameter("one.weight", size, [], torch.float32, torch.float32, None, torch.float32, local, local, handle)
    ops = torch.ops.zerocompile
    anchor = torch.empty(0, device=engines.place())
    calls = {
        "read": lambda: core.read(0, handle, False),
        "resident_value": lambda: core.resident_value(0),
        "lent_value": lambda: core.lent_value(0),
        "asked": core.asked,
        "gather_low": lambda: core.gather_low([0], torch.bfloat16),
        "gather_unit": lambda: ops.gather_unit([anchor], [handle], size, False),
        "wait_": lambda: ops.wait_([gradient], [handle], False),
        "release_": lambda: ops.release_([gradient], [handle], True),
    }
    messages = {name: _message(call) for name, call in calls.items()}
    core.shutdown(wait=False)
    return messages


def _torn_down(stage: int) -> dict[str, str]:
    """What every method says after the end, and what an old graph's backward says."""
    model = _small()
    made = engines.make_engine(model, stage, compile=False)
    core = made.runtime.core
    with made.training_step():
        loss = model(torch.randn(2, SIDE, device=engines.place())).square().sum()
    made.unshard()
    handle = torch.zeros(1, dtype=torch.float64)
    calls = {
        "flush": core.flush, "hold": core.hold, "lend": lambda: core.lend([0]), "enter": lambda: core.enter([0], False),
        "keep": lambda: core.keep(0), "read": lambda: core.read(0, handle, False), "identity": lambda: core.identity(0),
        "resident_value": lambda: core.resident_value(0), "lent_value": lambda: core.lent_value(0),
        "masters_changed": lambda: core.masters_changed([0]), "eager_reads_of": lambda: core.eager_reads_of(0),
        "gathers_of": lambda: core.gathers_of(0), "add_unit": lambda: core.add_unit("x", [0], _lifetime()),
        "read_as_float8": lambda: core.read_as_float8(0, False),
        "gather_low": lambda: core.gather_low([0], torch.bfloat16), "unbound": lambda: core.bound(0, handle, handle),
        "lend_gradients": lambda: core.lend_gradients([0], [handle]), "backward": loss.backward,
    }  # fmt: skip
    messages = {name: _message(call) for name, call in calls.items()}
    core.leave([0])  # what gives back does not mind
    core.take_back([0], True, True)
    core.let_go()
    core.end_forward()
    core.write_back()
    core.drop_gradients()
    core.forget_outstanding()
    core.finish_backward()
    core.shutdown(wait=True)
    assert core.resident_units() == [] and core.lent_unit() == "" and core.asked() == "" and core.unit_order() == []
    return messages


def _lifetime() -> Any:
    return build.load().Lifetime.USE


def _out_of_range() -> dict[str, str]:
    model = _small()
    with engines.engine(model, 3, compile=False, unit_bytes=1) as engine:
        core = engine.runtime.core
        leaf = torch.zeros(1, device=engines.place())
        calls = {
            "enter": lambda: core.enter([0, 99], False), "lend": lambda: core.lend([99]), "keep": lambda: core.keep(99),
            "take_back": lambda: core.take_back([99], False, False), "gathers_of": lambda: core.gathers_of(-1),
            "masters_changed": lambda: core.masters_changed([99]), "identity": lambda: core.identity(99),
        }  # fmt: skip
        messages = {name: _message(call) for name, call in calls.items()}
        messages["lend twice"] = _message(lambda: core.lend([0, 0]))
        messages["watch"] = _message(lambda: core.watch_backward(leaf, [0], ""))
        assert core.lent_unit() == "" and core.resident_units() == []
        with torch.no_grad():
            for _ in range(2):
                core.enter([1], False)
                core.leave([1])
        assert len(core.resident_units()) <= 2  # with the one that follows; nothing stays entered
        core.end_forward()
        assert core.resident_units() == []
    return messages


@on_ranks()
def test_rule_18_indices_from_outside() -> None:
    """A parameter without a unit, a runtime that is shut down, a number that is none: an error, never a crash."""
    unplanned, *torn_down, out_of_range = [_unplanned(), *(_torn_down(stage) for stage in (1, 2, 3)), _out_of_range()]
    for call, message in unplanned.items():
        assert "`one.weight`" in message, (call, message)
    for messages in torn_down:
        for call, message in messages.items():
            assert "torn down" in message, (call, message)
    assert "no unit 99" in out_of_range["enter"] and "no unit -1" in out_of_range["gathers_of"]
    assert "no parameter 99" in out_of_range["identity"]
    assert "twice" in out_of_range["lend twice"] and "leaf" in out_of_range["watch"]


# ---- what the store says ----


def _hears(engine: Engine, step: Callable[[], Any], request: str, said: str) -> str:
    """The error of a step in which the other ranks answer a request with this."""
    messages, honest = engine.runtime.messages, getattr(engine.runtime.messages, request)
    setattr(messages, request, lambda *_, **__: said)
    try:
        return _message(step)
    finally:
        setattr(messages, request, honest)


@pytest.mark.parametrize("scope", [False, "model"])
@on_ranks()
def test_rule_18_what_the_store_says(scope: Any) -> None:
    """An order that is none, letters and numbers that are none: an error on each rank, and the next step is right."""
    if models.world() == 1:
        pytest.skip("one rank asks nobody")
    model, x = _small(), torch.randn(2, SIDE, generator=torch.Generator().manual_seed(0)).to(engines.place())
    answers = [
        ("of_first", "[1000000000, 2, 1, 0]"), ("of_first", "[-1000000000, 2, 1, 0]"), ("of_first", "[1, 1, 1, 1]"),
        ("of_first", "[0]"), ("join_numbered", "000"), ("join_numbered", "0009"), ("join_numbered", "+1e1"),
        ("join_numbered", "+"), ("join_numbered", "+5"),
    ]  # fmt: skip
    said = {}
    with engines.engine(model, 3, compile=scope, unit_bytes=1) as engine:
        optimizer = engines.sgd(engine, model)

        def misses_gradients() -> None:
            engines.step(engine, optimizer, lambda: model[0](x).square().mean())

        for request, answer in answers:
            said[answer] = _hears(engine, misses_gradients, request, answer)
            engine.runtime.core.end_forward()
        _trains(engine, model, x)
    for answer, text in said.items():
        expected = "the order of reductions" if answer[0] == "[" else "begun to reduce" if answer[0] == "+" else "ranks"
        assert expected in text, (answer, text)


@pytest.mark.parametrize("said", ["0:", "0:9", "0:1,", "1:0"])
@on_ranks()
def test_rule_18_turns_of_others(said: str) -> None:
    """Inside `strategy.unequal()` another rank decides what is gathered: units of this rank, at this number."""
    if models.world() == 1:
        pytest.skip("one rank asks nobody")
    model = _small()
    with engines.engine(model, 3, compile=False, unit_bytes=1) as engine:
        core, messages = engine.runtime.core, engine.runtime.messages
        core.begin_unequal()
        messages.decide = lambda *_: said  # type: ignore[method-assign]
        text = _message(lambda: core.enter([0], False))
        core.end_unequal(True)
        assert "turn to gather" in text or "names no units" in text or "of another one" in text, text
        engine.abandon()


@on_ranks(1)
def test_one_gradient_twice() -> None:
    """One kernel adds all gradients of a call, so it must not have two of one parameter."""
    model, x = _small(), torch.randn(2, SIDE, device=engines.place(), requires_grad=True)
    with engines.engine(model, 1, compile=False) as engine:
        handle, gradient = engine.runtime.sharded_parameters[0].handle, torch.ones(SIDE, SIDE, device=engines.place())
        twice = [gradient, gradient.clone()], [handle, handle]
        with engine.training_step():
            y = model(x)
            y.register_hook(lambda grad: torch.ops.zerocompile.reduce_unit_(*twice))
            text = _message(lambda: engines.backward(engine, y.square().mean()))
        assert "two gradients of `0.weight`" in text and "Add them before" in text
        _trains(engine, model, x.detach())


# ---- an initialiser that reads another layer ----


class Scaled(nn.Module):
    """Its gain begins as the norms of another layer's rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(SIDE))
        self.__dict__["linear"] = linear  # not a module of this one

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain.copy_(self.linear.weight.norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def _reads_other_layer(stage: int, unit_bytes: int) -> float:
    torch.manual_seed(models.rank())  # rank 0's values count
    with torch.device("meta"):
        linear = nn.Linear(SIDE, SIDE)
        model = nn.Sequential(linear, Scaled(linear))
    with engines.engine(model, stage, compile=False, unit_bytes=unit_bytes):
        weight, gain = full_value(linear._parameters["weight"]), full_value(model[1]._parameters["gain"])
        return (weight.norm(dim=1) - gain).abs().max().item()


def _reads_later_layer() -> str:
    with torch.device("meta"):
        linear = nn.Linear(SIDE, SIDE)
        model = nn.Sequential(Scaled(linear), linear)
    with pytest.raises(RuntimeError) as raised:
        engines.make_engine(model, 3, compile=False)
    return str(raised.value)


@on_ranks()
def test_initialiser_reads_another_layer() -> None:
    """A layer that was initialised before has its values, sharded or not; for one that was not there is a remedy."""
    cells = [(stage, unit_bytes) for stage in (1, 2, 3) for unit_bytes in (1, 2**20)]  # in units of their own, in one
    distances = {f"{stage} {size}": _reads_other_layer(stage, size) for stage, size in cells}
    message = _reads_later_layer()
    assert {cell: distance for cell, distance in distances.items() if not distance <= 1e-6} == {}
    assert "Scaled" in message and "`0.gain`" in message and "real device" in message


# ---- out of memory ----


@contextlib.contextmanager
def _short_of_memory() -> Iterator[None]:
    """What is larger than ``FREE`` cannot be allocated inside."""
    ctypes.CDLL(None).malloc_trim(0)  # else the heap keeps freed shards, and grows by less than it serves
    with open("/proc/self/status") as file:
        used = next(int(line.split()[1]) for line in file if line.startswith("VmSize")) * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + FREE, hard))
    try:
        with pytest.raises(RuntimeError, match="allocate"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _trains(engine: Any, model: nn.Sequential, x: Tensor) -> None:
    """One step of SGD is that of plain torch."""
    start = {name: full_value(p).clone() for name, p in model.state_dict().items()}
    optimizer = engines.sgd(engine, model)
    engines.step(engine, optimizer, lambda: model(x)[..., :SIDE].square().mean())
    twin = copy.deepcopy(_plain(model)).to(x.device)
    twin.load_state_dict(start)
    twin(x)[..., :SIDE].square().mean().backward()
    after = {name: full_value(p) for name, p in model.state_dict().items()}
    for name, p in twin.named_parameters():
        assert p.grad is not None
        assert (start[name] - 0.5 * p.grad - after[name]).abs().max() <= 1e-6, name
    engine.runtime.core.end_forward()


def _plain(model: nn.Sequential) -> nn.Sequential:
    kinds: list[nn.Module] = []
    for module in model:
        if isinstance(module, nn.Embedding):
            kinds.append(nn.Embedding(module.num_embeddings, module.embedding_dim))
        elif isinstance(module, nn.Linear):
            kinds.append(nn.Linear(module.in_features, module.out_features, module._parameters["bias"] is not None))
        else:
            kinds.append(nn.Tanh())
    return nn.Sequential(*kinds)


@pytest.mark.parametrize("scope", [False, "model"])
@on_ranks()
def test_rule_17_gathers_out_of_memory(scope: Any) -> None:
    """Nothing stays lent, held, entered or gathered after one of several gathers could not be started."""
    if models.device() != "cpu":
        pytest.skip("the limit is on the process's memory")
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, MANY, bias=False))
    x = torch.randn(2, SIDE, generator=torch.Generator().manual_seed(0))
    with engines.engine(model, 3, compile=scope, unit_bytes=1) as engine:
        core = engine.runtime.core
        with _short_of_memory(), engine.full_parameters(model, writeback=False):
            pass
        assert core.lent_unit() == "" and core.resident_units() == []
        with engine.full_parameters(model, writeback=False) as values:
            assert len(values) == 3
        with _short_of_memory(), engine.windows.open("window", None, None):
            pass
        core.end_forward()  # nobody holds units any more
        assert core.resident_units() == []
        with _short_of_memory(), engine.evaluation_step(), torch.no_grad():
            model(x)
        with _short_of_memory(), engine.training_step():
            model(x)
        core.end_forward()
        assert core.resident_units() == []
        assert core.stats().resident_bytes == 0
        _trains(engine, model, x)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
def test_rule_17_reductions_out_of_memory(stage: int) -> None:
    """What was reduced before the failure does not reach the next step."""
    # The second of two reductions needs a padded copy.
    if models.device() != "cpu":
        pytest.skip("the limit is on the process's memory")
    model = nn.Sequential(nn.Embedding(MANY + 1, SIDE), nn.Linear(SIDE, SIDE))
    x = torch.arange(3)
    with engines.engine(model, stage, compile=False, unit_bytes=1, defer_grad_sync=True) as engine:
        optimizer = engines.sgd(engine, model)
        with engine.accumulation(), engine.training_step():
            engines.backward(engine, model(x).square().mean())
        with _short_of_memory():
            optimizer.step()
        optimizer.zero_grad()
        _trains(engine, model, x)


def _one_cannot_gather(scope: Any, window: bool) -> list[str]:
    """What a rank says, of which the first alone could not start a gather, and has caught that."""
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, MANY, bias=False))
    x = torch.randn(2, SIDE, generator=torch.Generator().manual_seed(0))
    made = engines.make_engine(model, 3, compile=scope, unit_bytes=1)

    def runs() -> None:
        opened = made.windows.open("use", None, None) if window else contextlib.nullcontext()
        with made.evaluation_step(), torch.no_grad(), opened:
            model(x)

    for _ in range(2):  # from here on what follows what is known
        runs()
    if models.rank() == 0:
        with _short_of_memory():
            runs()
    said = [_message(runs) for _ in range(2 if window or models.rank() == 0 else 1)]
    made.abandon()
    return said


@pytest.mark.parametrize("window", [False, True], ids=["plain", "window"])
@pytest.mark.parametrize("scope", [False, "model"])
def test_rule_17_one_rank_alone_cannot_gather(ranks: Ranks, scope: Any, window: bool) -> None:
    """It is one gather behind: it raises at its next one, and so do the others. Nobody has another unit's values."""
    if ranks.device != "cpu" or ranks.world != 2:
        pytest.skip("the limit is on the process's memory")
    try:
        first, second = ranks.run(_one_cannot_gather, scope, window, timeout=60)
    finally:
        ranks.close(kill=True)
    if window:
        assert "rank 0 failed inside window" in second[0], second
        assert "the next ones would not match" in first[0] and "the next ones would not match" in second[1]
        return
    for text in (first[0], second[0]):
        assert "rank 0 waits in a meeting, since it could not start the gather of unit `1.weight`" in text, text
        assert "rank 1 waits in the gather of unit `1.weight`" in text, text
    assert "could not start the gather of unit `1.weight`" in first[1] and "`ckpt_path=`" in first[1], first[1]


def _one_cannot_reduce(stage: int) -> list[str]:
    """What a rank says, of which the first alone could not start a reduction, and has caught that."""
    model = nn.Sequential(nn.Embedding(MANY + 1, SIDE), nn.Linear(SIDE, SIDE))
    x = torch.arange(3)
    made = engines.make_engine(model, stage, compile=False, unit_bytes=1, defer_grad_sync=True)
    optimizer = engines.sgd(made, model)

    def steps() -> None:
        with made.accumulation(), made.training_step():
            engines.backward(made, model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    if models.rank() == 0:
        with made.accumulation(), made.training_step():
            engines.backward(made, model(x).square().mean())
        with _short_of_memory():
            optimizer.step()
        optimizer.zero_grad()
    said = [_message(steps)]
    made.abandon()
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_rule_17_one_rank_alone_cannot_reduce(ranks: Ranks, stage: int) -> None:
    """Its next reduction would be summed with the one that the others stand in."""
    if ranks.device != "cpu" or ranks.world != 2:
        pytest.skip("the limit is on the process's memory")
    try:
        said = ranks.run(_one_cannot_reduce, stage, timeout=60)
    finally:
        ranks.close(kill=True)
    for (text,) in said:
        assert "rank 1 waits in the reduction of unit `0.weight`" in text, text
        assert stage == 3 or "rank 0 waits in a meeting, since it could not start the reduction of unit `0" in text, (
            text
        )


# ---- signal handlers and threads ----


@on_ranks()
def test_signal_handler_inside_a_gather() -> None:
    """What would mix collectives or free what is in use raises; the step that was interrupted is right."""
    # A handler that runs while the ranks compare a gather; a thread that asks for numbers meanwhile.
    torch.manual_seed(0)
    model = _small()
    x = torch.randn(2, SIDE, generator=torch.Generator().manual_seed(0)).to(engines.place())
    seen: dict[str, str] = {}
    waits: list[bool] = []
    with engines.engine(model, 3, compile=False, unit_bytes=1) as engine:
        core, comparisons = engine.runtime.core, engine.runtime.comparisons

        def handler(*_: Any) -> None:
            calls = {
                "save": engine.apply_writes, "read": lambda: model[0].weight, "step": lambda: core.masters_changed([0]),
                "teardown": lambda: core.shutdown(wait=False), "lend": lambda: core.lend([0]),
            }  # fmt: skip
            for name, call in calls.items():
                try:
                    call()
                    seen[name] = "it ran"
                except RuntimeError as error:
                    seen[name] = str(error)
            core.stats()  # harmless

        def compare(sequence: int, unit: str) -> str:
            if not seen:
                thread = threading.Thread(target=core.stats)
                thread.start()
                os.kill(os.getpid(), signal.SIGUSR2)
                time.sleep(0.2)  # the handler runs, and the thread
                waits.append(thread.is_alive())
            return comparisons.gather(sequence, unit)

        look = engine.runtime.messages.look
        core.set_callbacks(
            lambda reduced: None, comparisons.order, compare, comparisons.used_parameters, look, comparisons.failed
        )
        before = signal.signal(signal.SIGUSR2, handler)
        try:
            _trains(engine, model, x)
        finally:
            signal.signal(signal.SIGUSR2, before)
    assert set(seen) == {"save", "read", "step", "teardown", "lend"}
    for call, message in seen.items():
        assert "signal handler" in message and "between two steps" in message, (call, message)
    assert waits[0]  # for the runtime's mutex, without the GIL
