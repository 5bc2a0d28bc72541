"""Evaluations in which ranks have different numbers of batches, or do unequal work in their steps.

[Note: unequal evaluations] Under DDP each rank evaluates its own number of batches. At stage 3 a rank that is done has
to serve the others' gathers (``Runtime.unequal``), and nobody but the loop knows when it is done. So when an evaluation
begins the ranks tell each other how many batches each of them has. Where the numbers differ the shortest loader's last
step, and all that come after it, are unequal work: before it all is as ever, and with equal numbers nothing changes.
With ``unequal_work="evaluation"`` all steps are unequal work. Either way it ends in the last step of each rank (of each
dataloader), right after that step's own work: what Lightning does at the end of a dataloader, as reducing what was
logged, comes after it on all ranks, and so do the hooks after a rank's last step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher

if TYPE_CHECKING:
    from lightning_zerocompile.engine import Engine

_TOPIC = "batches"  # of the messages


class UnequalEvaluation:
    """Says of each evaluation step whether it is unequal work.

    Args:
        whole: whether all steps are.
    """

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._parts: list[int | None] = [None]  # of this rank: batches, by dataloader; None: not known
        self._first: list[int | None] = [None]  # by dataloader: the first step that is unequal; None: none
        self._part, self._done = 0, 0
        self._scope: AbstractContextManager[None] | None = None  # open while steps are unequal work

    def begin(self, engine: Engine, loop: Any) -> None:
        """An evaluation loop of Lightning's begins; all ranks come here.

        Raises:
            RuntimeError: a rank has no batches where others have some, or another number of dataloaders.
        """
        self._parts, self._first, self._part, self._done = [None], [None], 0, 0
        runtime = engine.runtime
        if not runtime.gathers_at_use:
            return
        messages, mine = runtime.messages, _parts(loop)
        number = messages.next_number(_TOPIC)
        what = "the numbers of batches of an evaluation"
        heard: list[list[int | None]] = []
        for rank, said in messages.exchange_numbered(_TOPIC, number, json.dumps(mine), what).items():
            if said is None:
                raise messages.silent(rank, "has begun an evaluation")
            heard.append(json.loads(said))
        if any(None in parts for parts in heard):
            self._first = [0 if self._whole else None]
            return
        if len({len(parts) for parts in heard}) > 1:
            numbers = [len(parts) for parts in heard]
            raise RuntimeError(f"The ranks evaluate different numbers of dataloaders: {numbers}, by rank.")
        self._parts, self._first = mine, []
        for place, sizes in enumerate(zip(*heard, strict=True)):
            least, most = min(map(int, sizes)), max(map(int, sizes))
            if least == 0 < most:
                raise RuntimeError(
                    f"Rank {sizes.index(0)} has no batches of evaluation dataloader {place}, and rank "
                    f"{sizes.index(most)} has {most}. With parameters sharded (stage 3) every rank needs at least one: "
                    "distribute the samples anew, or use stage 1 or 2."
                )
            self._first.append(0 if self._whole else least - 1 if least < most else None)

    @contextmanager
    def step(self, engine: Engine, what: str, fitting: bool, last: Callable[[], bool]) -> Iterator[None]:
        """Around one step.

        Args:
            engine: the model's.
            what, fitting: see ``Engine.evaluation_step``.
            last: says after the step whether it was the loop's last one.
        """
        while self._part + 1 < len(self._parts) and self._done == self._parts[self._part]:
            self._part, self._done = self._part + 1, 0
        first, size = self._first[self._part], self._parts[self._part]
        if first is not None and self._done >= first and self._scope is None:
            if fitting:
                engine.buffers.before_forward()
            scope = engine.runtime.unequal()
            scope.__enter__()
            self._scope = scope
        self._done += 1
        try:
            with engine.evaluation_step(what, fitting):
                yield
        except BaseException:
            self._leave(*sys.exc_info())
            raise
        if self._scope is not None and (last() if size is None else self._done == size):
            self._leave(None, None, None)

    def end(self, error: BaseException | None = None) -> None:
        """The loop has ended, or raised ``error`` between its steps."""
        if error is None:
            self._leave(None, None, None)
        else:
            with suppress(type(error)):
                self._leave(type(error), error, error.__traceback__)

    def _leave(self, *error: Any) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(*error)


def _parts(loop: Any) -> list[int | None]:
    """How many batches this rank will run, by dataloader where they are run one after the other."""
    fetcher = loop._data_fetcher
    if isinstance(fetcher, _DataLoaderIterDataFetcher):  # a step may take any number of batches
        return [None]
    sizes = loop.max_batches if loop._combined_loader._mode == "sequential" else [fetcher.length]
    return [int(size) if size is not None and size != float("inf") else None for size in sizes]
