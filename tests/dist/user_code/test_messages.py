"""Messages between ranks: series, in few requests for many ranks."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zerocompile.ranks.messages import HAS_LEFT, SERIES, Messages
from lightning_zerocompile.ranks.relay import by_message, by_rank, ranges_of, ranks_of
from lightning_zerocompile.runtime import build
from tests.support import engines, models
from tests.support.harness import Worlds


class Counting(Messages):
    """Counts what it asks of the store."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requests: Counter[str] = Counter()

    def _store(self) -> Any:
        store, requests = super()._store(), self.requests

        class Watched:
            def __getattr__(self, name: str) -> Any:
                requests[name] += 1
                return getattr(store, name)

        return Watched()


def _messages(name: str, few: int = 3, seconds: float = 20) -> Counting:
    watch = build.load().Watch(dist.get_world_size(), dist.get_rank(), seconds)
    messages = Counting("cpu", name, timedelta(seconds=seconds), watch)
    messages._few = few
    return messages


def _series(name: str, few: int) -> tuple[list[dict[int, Any]], Counter[str]]:
    """More messages than the store keeps, and what the store is asked for one that all have told."""
    messages, rank = _messages(name, few), dist.get_rank()
    heard = [messages.exchange_numbered("topic", n, f"{n}:{rank}") for n in range(SERIES + 3)]
    messages.tell_numbered("last", 0, str(rank))
    dist.barrier()
    messages.requests.clear()
    heard.append(messages.ask_numbered("last", 0))
    return heard, messages.requests


@pytest.mark.parametrize(("world", "few"), [(2, 3), (3, 3), (3, 1)])
def test_series(worlds: Worlds, world: int, few: int) -> None:
    """Each exchange gives that number's messages, also where older ones are in their place; many ranks' at once."""
    joined = []
    for rank, (heard, requests) in enumerate(worlds(world).run(_series, f"series {world} {few}", few, timeout=100)):
        last = heard.pop()
        assert heard == [{other: f"{n}:{other}" for other in range(world)} for n in range(SERIES + 3)]
        assert last == {other: str(other) for other in range(world) if other != rank}
        joins = requests["set"] == 1  # it leaves the answer, from the others' messages and its own
        joined.append(joins)
        if few == 3 or joins:
            assert requests == ({"compare_set": world - 1} if few == 3 else {"compare_set": world + 1, "set": 1})
    assert sum(joined) == (few == 1)


def _late(name: str, few: int) -> tuple[dict[int, Any], float]:
    messages, rank = _messages(name, few, seconds=2), dist.get_rank()
    start = time.monotonic()
    if rank == 1:
        time.sleep(0.5)
    if rank == 2:
        return {}, 0.0
    return messages.exchange_numbered("topic", 7, "here"), time.monotonic() - start


@pytest.mark.parametrize("few", [1, 3])
def test_who_is_late_and_who_does_not_come(worlds: Worlds, few: int) -> None:
    """A late rank is waited for; of one that does not come in time, and of no other, nothing was heard."""
    heard, seconds = worlds(3).run(_late, f"late {few}", few, timeout=60)[0]
    assert heard == {0: "here", 1: "here", 2: None} and 1.5 < seconds < 10


def _goes_elsewhere(name: str) -> tuple[dict[int, Any], float]:
    """Rank 1 says that it joins the answers, and does not do it."""
    messages, rank = _messages(name, few=0), dist.get_rank()
    messages.tell_numbered("topic", 0, str(rank))
    if rank == 1:
        messages.forget("topic", 0)
        assert messages.ask_numbered("topic", 0, within=timedelta(seconds=0.1)).get(1, "") is not None
        messages.tell_numbered("topic", 0, "again")
    dist.barrier()
    start = time.monotonic()
    heard = {} if rank == 1 else messages.ask_numbered("topic", 0)
    return heard, time.monotonic() - start


def test_a_rank_that_joins_and_goes_elsewhere(worlds: Worlds) -> None:
    """The others wait for its answer for a second, and then read by themselves."""
    (zero, seconds), _, (two, _) = worlds(3).run(_goes_elsewhere, "elsewhere", timeout=60)
    assert zero == {1: "again", 2: "2"} and two == {0: "0", 1: "again"} and 0.9 < seconds < 10


def _joins(name: str) -> tuple[str, dict[str, int], dict[int, Any]]:
    messages, rank = _messages(name, few=0), dist.get_rank()
    messages.tell_numbered("sum", 3, str(rank))
    late = partial(messages.silent, doing="tests")
    told = messages.join_numbered("sum", 3, str(rank), lambda said: str(sum(map(int, said.values()))), "a sum", late)
    different = messages.different("parity", 0, str(rank % 2), "the parity", late)
    messages.take_back("sum", 3)
    dist.barrier()
    again = messages.ask_numbered("taken", 0, within=timedelta(seconds=0.1)) if rank == 0 else {}
    return told, different, again


def test_joined_answers(worlds: Worlds) -> None:
    """All ranks get what one has made of all messages; a message that nobody sends is missing on each."""
    for rank, (told, different, again) in enumerate(worlds(3).run(_joins, "joins", timeout=60)):
        assert told == "3" and different == {"0": 0, "1": 1}
        assert again == ({1: None, 2: None} if rank == 0 else {})


def test_ranges() -> None:
    for ranks in ([], [3], [0, 1, 2, 5, 7, 8], list(range(1024))):
        assert ranks_of(ranges_of(ranks)) == ranks
    assert ranges_of(range(1024)) == "0-1023"
    said = {0: "a", 1: "b", 2: "a"}
    assert by_rank(by_message(said)) == said


def _ended(name: str) -> str:
    messages = _messages(name, few=1)
    if dist.get_rank() == 1:
        messages.leave("it had enough")
        return ""
    with pytest.raises(RuntimeError) as error:
        messages.exchange_numbered("topic", 0, "here")
    return str(error.value)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_has_ended(worlds: Worlds, world: int) -> None:
    text = worlds(world).run(_ended, f"ended {world}", timeout=60)[0]
    assert HAS_LEFT in text and "rank 1" in text and "it had enough" in text


def _fits(stage: int) -> list[int]:
    """How many keys of ours the store has after each of three runs."""
    counts = []
    for _ in range(3):
        model, data = models.ByteModel(), models.Batches(models.rank())
        with engines.engine(model, stage, compile=False, unit_bytes=1) as engine:
            optimizer = engines.sgd(engine, model, lr=0.1)
            for number in range(3):
                with engine.training_step():
                    engines.backward(engine, engines.token_loss(model, data[number]))
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()
        counts.append(sum(b"zerocompile" in key.encode() for key in Messages._store().list_keys()))
        dist.barrier()
    return counts


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_leaves_nothing_in_the_store(worlds: Worlds, stage: int) -> None:
    for first, *others in worlds(2).run(_fits, stage):
        assert others == [first, first]
