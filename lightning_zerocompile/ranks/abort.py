"""Process groups that have ended (see [Note: ended groups] in csrc/watch.h), and the end of all groups of a process.

No new group can be made in the store of a group that has ended. So the store keeps the reason, for the errors of later
runs. On the CPU nothing is ended: there our own waits raise, see [Note: ranks that wait for each other].
"""

from __future__ import annotations

import atexit
import gc
import sys
from contextlib import suppress

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401, its import keeps the default process group if there is one
from torch.distributed.device_mesh import DeviceMesh

_KEY = "zerocompile/ended"  # in the default store; the first rank that ends its groups says why
_NONE = "zerocompile/none"

START_ANEW = "This run's process group has ended, so start the processes anew, from the last checkpoint (`ckpt_path=`)."


def note_end(reason: str) -> None:
    """Called after this process's groups were ended: keeps ``reason`` for the errors of later runs.

    It also lets the process end at once. Lightning destroys the default group at the process's end, and a group of NCCL
    is destroyed only when its watchdog has ended, which sleeps for a minute after it has seen a dead rank.
    """
    with suppress(RuntimeError):  # a store whose host has died raises it
        dist.distributed_c10d._get_default_store().compare_set(_KEY, "", reason)
    if groups_of_devices():
        atexit.register(_forget_groups)


def _forget_groups() -> None:
    dist.group.WORLD = None  # `destroy_process_group` has nothing to do then; the extension keeps what has ended


def groups_of_devices() -> list[dist.ProcessGroup]:
    """The process groups of this process that have a backend for devices."""
    known = dist.distributed_c10d._world.pg_map
    return [group for group, (backend, _) in list(known.items()) if "nccl" in backend]


def ended_group() -> str | None:
    """Why the default process group has ended; None if it has not, or if this process cannot know."""
    if not dist.is_initialized() or not groups_of_devices():
        return None
    store = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError):
        found = str(store.compare_set(_KEY, _NONE, _NONE).decode())
        return None if found == _NONE else found
    return None


def refuse_ended_group() -> None:
    """Called before a run: a run cannot begin in a process group that has ended.

    Raises:
        RuntimeError: an earlier run has ended the process group; the message gives that run's reason.
    """
    reason = ended_group()
    if reason is not None:
        raise RuntimeError(
            f"zerocompile: rank {dist.get_rank()} cannot begin a run, since an earlier one in the same processes has "
            f"ended their process group. Start the processes anew. The earlier run said: {reason}"
        )


def destroy_group_at_exit() -> None:
    """Called after Lightning has made the default process group: on the CPU, destroys all groups at the process's end.

    [Note: gloo's end] With NCCL Lightning does so itself. gloo's threads may drop their last tensors a moment after a
    collective has returned. A thread that needs the interpreter lock for that, while the interpreter ends, aborts the
    process (https://github.com/pytorch/pytorch/issues/190489). The end of a group waits for its threads, but a group
    ends only when nobody holds it any more. So an engine that is left at the process's end lets go of its groups first.
    An engine of an earlier run is garbage, which is collected here. torch holds groups, too: its caches of DTensor
    operations keep the meshes, and `torch.distributed.nn.functional` keeps the default group that exists when it is
    imported. So the meshes are emptied here, and that module is imported above, before there is a group. After an
    unhandled exception the groups stay as they are: a collective that waits for other ranks would keep this process
    from ending.
    """
    if dist.is_initialized() and not groups_of_devices():
        atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
        gc.collect()
        for mesh in [found for found in gc.get_objects() if type(found) is DeviceMesh]:
            getattr(mesh, "_pg_registry", {}).clear()  # private: another torch may have none
