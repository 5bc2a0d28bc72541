"""The error on the other ranks when one died, hangs or raised: it names the phase of the training, and the rank.

Gloo notices a dead peer at once, and every wait for a message in the store ends at ``timeout``. NCCL's waits are on the
device, where our code cannot raise. So with NCCL a thread ends the process group, see [Note: ended groups], and the
next call in the main thread raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from lightning_zerocompile.config import Config
from lightning_zerocompile.ranks.abort import ended_group
from lightning_zerocompile.ranks.messages import CommunicationError, Messages

__all__ = [
    "TEARDOWN",
    "CommunicationError",
    "explain",
    "in_phases",
    "is_communication",
    "keep_first_error",
    "phase",
]

_log = logging.getLogger(__name__)

TEARDOWN = "the teardown"  # the name of the phase in which Lightning tears the strategy down
_GRACE = timedelta(seconds=5)  # how long the others may take to say that they live; at most a tenth of the timeout
_SIGNS = (  # torch raises a plain RuntimeError for gloo's failures; the last sign is that of our own runtime
    "/gloo/", "Connection closed by peer", "Connection reset by peer", "Application timeout caused", "NCCL error",
    " failed on rank ", "NCCL communicator was aborted",
)  # fmt: skip


class _Strategy(Protocol):
    @property
    def messages(self) -> Messages | None: ...

    @property
    def config(self) -> Config: ...


S = TypeVar("S", bound=_Strategy)
C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


def phase(name: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorates a strategy's method: a failure of communication inside it names the phase ``name``.

    Where such methods call each other, the innermost one names the phase.

    Raises:
        CommunicationError: raised by the decorated method. Either communication has failed in it, and torch's error is
            the cause; or this rank's process groups have ended, see :func:`raise_if_ended`.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                raise_if_ended(self.messages, name)
                result = method(self, *args, **kwargs)
                raise_if_ended(self.messages, name)
                return result
            except RuntimeError as error:
                if self.messages is not None and self.messages.ended is not None:
                    if str(error) == self.messages.ended:
                        raise
                    text = f"{self.messages.ended}\nThis rank's own error: {_first(error)}"
                    raise CommunicationError(text, explained=True) from error
                if not is_communication(error) or (isinstance(error, CommunicationError) and error.explained):
                    raise
                text = explain(error, name, self.messages, self.config.timeout)
                raise CommunicationError(text, explained=True) from error

        return call

    return decorate


def raise_if_ended(messages: Messages | None, name: str) -> None:
    """Calls :meth:`Messages.raise_if_ended`, except in the teardown, which must do its work after any error."""
    if messages is not None and name != TEARDOWN:
        messages.raise_if_ended()


def in_phases(names: Mapping[str, str]) -> Callable[[type[C]], type[C]]:
    """Decorates a strategy's class: applies :func:`phase` to the methods in ``names``, also to inherited ones.

    Args:
        names: the name of each method's phase, by the method's name.
    """

    def decorate(strategy: type[C]) -> type[C]:
        for method, name in names.items():
            setattr(strategy, method, phase(name)(getattr(strategy, method)))
        return strategy

    return decorate


@contextmanager
def keep_first_error(failed: bool, doing: str) -> Iterator[None]:
    """Around what is done at the end of a run, which may raise, too, where an error has ended the run.

    Args:
        failed: whether an error has ended it. Then what is raised here is logged, since it would come out in the place
            of that error.
        doing: what is done, for the log.
    """
    try:
        yield
    except Exception:
        if not failed:
            raise
        _log.warning("zerocompile: after the error that has ended this run, %s raised, too.", doing, exc_info=True)


def is_communication(error: RuntimeError) -> bool:
    """Whether ``error`` is one that communication raises when another rank has ended."""
    return isinstance(error, (dist.DistError, CommunicationError)) or any(sign in str(error) for sign in _SIGNS)


def explain(error: RuntimeError, name: str, messages: Messages | None, timeout: timedelta) -> str:
    """The message for the user about ``error`` in the phase ``name``. It tells the other ranks that this one ends.

    It also asks them through the store why they have ended, for at most five seconds.
    """
    rank = dist.get_rank() if dist.is_initialized() else "?"
    lines = [f"zerocompile: rank {rank} lost another rank in {name}: {_first(error)}"]
    ended = ended_group()
    if ended is not None:
        lines.append(f"The process group of these processes has ended. {ended}")
    if messages is not None:
        messages.leave(f"it lost another rank in {name}")
        lines += _who(messages, min(_GRACE, timeout / 10))
    lines.append(
        "Look at the output of the rank that ended first for the cause, and train on from the last checkpoint "
        f"(`ckpt_path=`). Ranks wait for each other for ZeroCompileStrategy(timeout=...), now {timeout}."
    )
    return "\n".join(lines)


def _first(error: RuntimeError) -> str:
    return str(error).split("\nException raised from")[0].strip()


def _who(messages: Messages, grace: timedelta) -> list[str]:
    try:
        reasons = messages.reasons(grace)
    except RuntimeError:
        return ["The store does not answer: the process that hosts it (rank 0, or torchrun's agent) died."]
    return [
        f"Rank {rank} says nothing: it died, or hangs." if reason is None else f"Rank {rank} has ended: {reason}"
        for rank, reason in reasons.items()
    ]
