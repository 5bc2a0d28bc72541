"""Rank 0 says what torch.compile does while it takes long: a start of minutes must not look like a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only  # type: ignore[attr-defined, unused-ignore]
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

_PATIENCE, _HEARTBEAT = 10.0, 30.0  # seconds until the first line, and between later lines


class Progress:
    """Counts the seconds that torch.compile takes, and logs a line on rank 0 where these are many.

    Attributes:
        what: the module whose compiled code runs now, set by the caller of that code; "": no module of ours.
        seconds: how long torch.compile took while this object watched.
        patience: seconds until the first line.
    """

    def __init__(self, patience: float = _PATIENCE) -> None:
        self.what, self.seconds, self.patience = "", 0.0, patience
        self._since = 0.0
        self._done = threading.Event()

    def watch(self) -> Callable[[], None]:
        """Begins to watch; returns a function that ends it."""
        callback_handler.register_start_callback(self._begins)
        callback_handler.register_end_callback(self._ends)
        return partial(_end, self)

    def _begins(self, args: CallbackArgs) -> None:
        self._since, self._done = time.monotonic(), threading.Event()
        what = "a backward" if args.callback_trigger is CallbackTrigger.LAZY_BACKWARD else self.what
        if what and rank_zero_only.rank == 0:  # type: ignore[attr-defined, unused-ignore]
            said = partial(_say, what, self.patience, self._since, self._done)
            threading.Thread(target=said, name="zerocompile-progress", daemon=True).start()

    def _ends(self, args: CallbackArgs) -> None:
        self._done.set()
        self.seconds += time.monotonic() - self._since


def _say(what: str, patience: float, since: float, done: threading.Event) -> None:
    """Logs lines until ``done``; in a thread of its own, since the compilation blocks the thread that it runs in."""
    if done.wait(patience):
        return
    while True:
        rank_zero_info(
            f"torch.compile is at work on {what}, for {time.monotonic() - since:.0f} s so far. Equal modules share "
            "what it makes."
        )
        if done.wait(_HEARTBEAT):
            break
    rank_zero_info(f"torch.compile has finished {what} after {time.monotonic() - since:.0f} s.")


def _end(progress: Progress) -> None:
    progress._done.set()
    with suppress(ValueError):  # `torch._dynamo.reset()` has removed it
        callback_handler.remove_start_callback(progress._begins)
    with suppress(ValueError):
        callback_handler.remove_end_callback(progress._ends)
