"""The end of a process group: what is pending on this rank's device returns, and nothing communicates any more.

[Note: ended groups] On a device a collective that another rank never comes to blocks its stream, and then the host at
the next look at a number. Nothing but an end of the communicator brings it back. So after ranks have come apart each of
them ends all its groups of devices: Lightning's tear-down looks at numbers, and this rank's error must leave it.
Barriers of mapped memory, of which no group knows, are ended first: the end of a communicator frees memory, and so
waits for whatever looks at numbers. A group that has ended stays known to torch. Each later collective in it raises, on
this rank, at once; a new one could not be made beside it in the same store. The store keeps why it has ended, for
errors of later runs. On the CPU nothing is ended: there our own waits raise, see [Note: ranks that wait for each
other].
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

_KEY = "zerocompile/ended"  # in the default store; the first rank that ends its groups says why
_NONE = "zerocompile/none"
_ENDS_WITHIN = 30.0  # seconds that the end of a group may take; NCCL waits for its own kernels

START_ANEW = "This run's process group has ended, so start the processes anew, from the last checkpoint (`ckpt_path=`)."


def end_groups(reason: str, barriers: Sequence[Callable[[], None]] = ()) -> None:
    """Ends all process groups of this process that communicate on devices. It does not wait for other ranks.

    Args:
        reason: why, for the errors of later runs.
        barriers: each ends barriers on this rank's device that no process group knows of.
    """
    for end in barriers:
        end()
    with suppress(RuntimeError):  # a store whose host has died raises it
        dist.distributed_c10d._get_default_store().compare_set(_KEY, "", reason)
    # all at once: one group's end may wait for the device, where another group's kernels wait
    threads = [
        threading.Thread(target=_abort, args=(group,), daemon=True, name="zerocompile-abort")
        for group in groups_of_devices()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _ENDS_WITHIN
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def groups_of_devices() -> list[dist.ProcessGroup]:
    """The process groups of this process that have a backend for devices."""
    known = dist.distributed_c10d._world.pg_map
    return [group for group, (backend, _) in list(known.items()) if "nccl" in backend]


def ended_group() -> str | None:
    """Why the default process group has ended; None: as far as this process can know it has not."""
    if not dist.is_initialized() or not groups_of_devices():
        return None
    store = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError):
        found = str(store.compare_set(_KEY, _NONE, _NONE).decode())
        return None if found == _NONE else found
    return None


def refuse_ended_group() -> None:
    """Called before a run.

    Raises:
        RuntimeError: an earlier run has ended the process group.
    """
    reason = ended_group()
    if reason is not None:
        raise RuntimeError(
            f"zerocompile: rank {dist.get_rank()} cannot begin a run, since an earlier one in the same processes has "
            f"ended their process group. Start the processes anew. The earlier run said: {reason}"
        )


def destroy_group_at_exit() -> None:
    """Called after Lightning has made the default process group: destroys all groups before the interpreter ends.

    Lightning does so for NCCL. gloo's threads may drop their last tensors a moment after a collective has returned, and
    a thread that needs the interpreter lock for that after the interpreter has ended aborts the process
    (https://github.com/pytorch/pytorch/pull/179291). The end of a group waits for those threads, so whoever has it last
    must not hold that lock: the runtime drops its references when it shuts down, before this is called. After an
    unhandled exception the groups stay as they are: a collective that waits for other ranks would keep this process
    from ending.
    """
    if dist.is_initialized() and not groups_of_devices():
        atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # it has failed or ended before
        group.abort()
