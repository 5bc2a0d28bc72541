"""Windows of several backwards with one reduction.

Source: DeepSpeed pull request 7992, ``engine.coalesce_grad_reduction``.

[Note: agreement on windows] If a rank does not open a window, fails inside it or runs another number of backwards, its
collectives would be matched with other collectives of the other ranks. So, where its window ends and before anything is
reduced, every rank says through the store how the window went. A rank that hears something else raises. So does a rank
that waits inside the window for a rank that has failed in it. With parameters gathered at each use, see also
[Note: ranks apart] in csrc/gather.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined, unused-ignore]

from lightning_zerocompile.config import Lifetime
from lightning_zerocompile.ranks.messages import SERIES, CommunicationError
from lightning_zerocompile.runtime.memory_budget import free_memory, smallest_share
from lightning_zerocompile.runtime.runtime import Runtime

Gathers = Literal["auto", "window", "use"]

_TOPIC = "window"  # of the messages at the end of a window
_BOUND = "bound of a window"  # of those where its bound is reached
_GATHERED = "gathered in a window"  # of the messages after a failure
_TOO_LARGE = (
    "`coalesce_grad_reduction(gather='auto')`: the whole model, its gradients and two moments take {:.1f} GiB in the "
    "window, more than half of the {:.1f} GiB that are free. So each use in it gathers, as outside of windows: less "
    "memory, more communication. `gather='use'` asks for that without this line, `gather='window'` holds the model."
)
_SHARE_OF_FREE_MEMORY = 0.5  # what "auto" may fill with gathered parameters; the rest is for activations to come


class Windows:
    """Opens and closes the windows of one model.

    Args:
        runtime: holds the model's parameters.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._core = runtime, runtime.core
        self._messages = runtime.messages
        self._apart: dict[int, str] = {}  # what was gathered when a window failed, see [Note: ranks apart]
        self._world = runtime.world_size
        self._gathers_at_use = runtime.policy.lifetime is Lifetime.USE
        self._number = 0
        self._fits: dict[torch.dtype | None, bool] = {}  # by accumulate_dtype
        self.is_open = False
        self.in_accumulation = False  # of Lightning's, at any stage

    @contextmanager
    def open(self, gather: Gathers, max_bytes: int | None, accumulate_dtype: torch.dtype | None) -> Iterator[None]:
        """See :meth:`ZeroCompileStrategy.coalesce_grad_reduction`."""
        self._check(gather, max_bytes, accumulate_dtype)
        self._runtime.meet_others("the beginning of a window")
        self.meet_again()
        self._number += 1
        held = self._gathers_at_use and self._holds(gather, accumulate_dtype)
        self.is_open = True
        before = self._core.stats().backwards
        apart = self._gathers_at_use and not held
        self._messages.check = self._check_others
        raised = True

        def mine() -> dict[str, int | str]:  # in this all ranks must agree; if it is empty their backwards may differ
            found: dict[str, int | str] = {}
            if apart:
                found["gathers"] = self._core.gathered_so_far()  # without those inside `strategy.unequal()`
            if max_bytes is not None:
                found["backwards"] = self._core.stats().backwards - before
            return found

        try:
            bound = -1 if max_bytes is None else max_bytes
            self._core.set_window(accumulate_dtype, bound, lambda: self._agree_at_bound(mine()))
            self._core.set_deferred(True)
            if held:
                self._core.hold()
            yield
            self._core.check_backward_ended()
            raised = False
        except BaseException as error:
            self._core.drop_gradients()  # no collective: the other ranks may not come to theirs
            with suppress(RuntimeError):  # a store whose host has died raises it
                self._core.publish_order()  # other ranks may wait for it in a backward, and then hear of the error
                failure = json.dumps({"error": f"{type(error).__name__}: {error}"})
                self._messages.tell_numbered(_TOPIC, self._number, failure)
                self._come_apart(apart)
            raise
        finally:
            self.is_open = False
            if raised:
                self._end_checks()
            self._core.set_deferred(False)
            self._core.set_window(None, -1, lambda: None)
            if held:
                self._core.let_go(raised)
        try:
            try:
                self._runtime.meet_others("the end of a window")
                self._core.publish_order()
                self._agree(_TOPIC, self._number, mine(), "the end")
            except BaseException:
                self._come_apart(apart)
                raise
            finally:
                self._end_checks()
            self._core.flush()
        except BaseException:  # another rank has dropped its gradients
            self._core.drop_gradients()
            raise

    # ---- what another rank's failure means here ----

    def _check_others(self) -> None:
        """Called while this rank waits inside a window: raises if another rank has failed in it."""
        for rank in self._messages.some(self._messages.others):
            message = self._messages.heard_now(_TOPIC, self._number, rank)
            if message is not None and "error" in (theirs := json.loads(message)):
                raise self._failed(rank, theirs["error"])

    def _end_checks(self) -> None:
        self._messages.check = lambda: None

    def _come_apart(self, apart: bool) -> None:
        """This rank leaves a window by an exception: before its next gather all compare what they have gathered."""
        if not apart or self._world == 1:
            return
        self._apart[self._number] = self._core.gathered_so_far()
        self._messages.tell_numbered(_GATHERED, self._number, self._apart[self._number])
        self._core.come_apart(self.meet_again)

    def meet_again(self) -> None:
        """Compares what the ranks had gathered when they left earlier windows by exceptions.

        Raises:
            CommunicationError: they have gathered different things, so their next gathers would not match. This call
                raises it, and so does each later one.
        """
        for number, mine in list(self._apart.items()):
            doing = f"has left window {number} of `coalesce_grad_reduction` by an exception and goes on"
            heard = self._messages.ask_numbered(_GATHERED, number, what=f"what ranks had gathered in window {number}")
            for rank, theirs in heard.items():
                if theirs is None:
                    raise self._messages.silent(rank, doing)
                if theirs != mine:
                    raise CommunicationError(
                        f"zerocompile: rank {dist.get_rank()} {doing}, but in that window it had made {mine}, and rank "
                        f"{rank} {theirs}: the next ones would not match. Let all ranks fail at the same place, open "
                        "the window with gather='window', or train on from the last checkpoint (`ckpt_path=`).",
                        explained=True,  # nobody is gone
                    )
            del self._apart[number]

    def _failed(self, rank: int, error: str) -> CommunicationError:
        return CommunicationError(
            f"zerocompile: rank {rank} failed inside window {self._number} of `coalesce_grad_reduction` with {error}. "
            f"Its gradients are lost, so rank {dist.get_rank()} cannot reduce its own.",
            explained=True,  # all ranks may catch theirs and go on: this one has not ended
        )

    def _check(self, gather: object, max_bytes: object, accumulate_dtype: object) -> None:
        if self.is_open:
            raise RuntimeError("`coalesce_grad_reduction` is already open; windows do not nest.")
        if self.in_accumulation:
            raise RuntimeError(
                "`coalesce_grad_reduction` cannot open inside an accumulation (`block_backward_sync`, "
                "`toggle_model(sync_grad=False)`): close that first."
            )
        if gather == "step":  # its name in an earlier version
            raise ValueError("`gather='step'` is now `gather='window'`.")
        if gather not in ("auto", "window", "use"):
            raise ValueError(f"`gather={gather!r}` is not understood; choose 'auto', 'window' or 'use'.")
        if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 0):
            raise ValueError(f"`max_bytes={max_bytes!r}` must be a number of bytes, or None for no limit.")
        if accumulate_dtype not in (None, torch.float32):
            raise ValueError(f"`accumulate_dtype={accumulate_dtype!r}` is not supported; choose None or torch.float32.")

    def _agree_at_bound(self, mine: dict[str, int | str]) -> None:
        """Called at the end of a backward, before what waits is reduced: a rank may have failed, or run another one.

        A rank that has failed in a window may be in the next one meanwhile, so each window has numbers of its own.
        """
        self._agree(_BOUND, self._number * SERIES + int(mine["backwards"]), mine, "the bound")

    def _agree(self, topic: str, number: int, mine: dict[str, int | str], where: str) -> None:
        """Raises if a rank does not come to this place of the window (``where``), or came to it in another way."""
        if self._world == 1:
            return
        what = f"{where} of window {self._number} of `coalesce_grad_reduction`"

        def late(rank: int) -> CommunicationError:
            return CommunicationError(
                f"zerocompile: rank {dist.get_rank()} is at {what}, but rank {rank} has not come to it within "
                f"{self._runtime.config.timeout}. Every rank must open the window in the same step; rank {rank} did "
                "not, died or hangs."
            )

        for message, rank in self._messages.different(topic, number, json.dumps(mine), what, late).items():
            theirs = json.loads(message)
            if "error" in theirs:
                raise self._failed(rank, theirs["error"])
            if theirs != mine:
                raise CommunicationError(
                    f"zerocompile: at {what} rank {dist.get_rank()} has {mine}, rank {rank} has {theirs}. With "
                    "parameters gathered at each use (stage 3), or with `max_bytes`, all ranks must run the same "
                    "forwards and backwards inside it; use gather='window', or stage 1 or 2, without `max_bytes`."
                )

    def _holds(self, gather: Gathers, sum_dtype: torch.dtype | None) -> bool:
        if gather != "auto":
            return gather == "window"
        if sum_dtype not in self._fits:
            self._fits[sum_dtype] = self._all_fit(sum_dtype)
        return self._fits[sum_dtype]

    def _all_fit(self, sum_dtype: torch.dtype | None) -> bool:
        """Whether a held window fits on every rank; asked once, in the first window."""
        mine = [self._runtime.held_window_bytes(sum_dtype), *free_memory(self._runtime.device)]
        doing = "has opened its first window of `coalesce_grad_reduction`, as every rank must in the same step"
        late = partial(self._messages.silent, doing=doing)
        number, message = self._messages.next_number("fits"), json.dumps(mine)
        self._messages.tell_numbered("fits", number, message)
        what = "what is free for a window"
        needed, share = json.loads(self._messages.join_numbered("fits", number, message, _room, what, late))
        fits: bool = needed <= _SHARE_OF_FREE_MEMORY * share
        if not fits:
            rank_zero_warn(_TOO_LARGE.format(needed / 2**30, share / 2**30))
        return fits


def _room(heard: Mapping[int, str]) -> str:
    """What a window needs on the rank that needs most, and what the rank with the least room has."""
    ranks = [json.loads(message) for message in heard.values()]
    return json.dumps([max(one for one, _, _ in ranks), smallest_share([(host, size) for _, host, size in ranks])])
