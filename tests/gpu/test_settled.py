"""What waits for a collective that never comes overwrites nothing for good, see [Note: settled masters]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_zerocompile.runtime.settled import MastersState, SettledMasters

pytestmark = pytest.mark.gpu
HELD_UP = 2_000_000_000  # clock cycles, one second or more: the collective that never comes


class _Rank:
    """Two masters, a frozen one, a buffer and an optimizer's count, on one device that is held up."""

    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.masters = [torch.full((1000,), value, device=device) for value in (1.0, 2.0)]
        self.frozen, self.buffer = torch.full((8,), 3.0, device=device), torch.full((8,), 4.0, device=device)
        self.count, self.steps = torch.tensor(5.0), 5.0
        self.settled = SettledMasters(device, self.state, self.written, lambda: [self.buffer], self.keep_on_host, 10.0)
        self.settled.step_begins()
        # What is done for the first time may wait for the device.
        for value in (*self.masters, self.frozen, self.buffer):
            with torch.cuda.stream(torch.cuda.Stream(device)):
                value.cpu()
            value.add_(0)
            value.masked_fill_(value < 0, 0)
            value.fill_(float(value[0]))
        self.settled.step_begins()
        torch.cuda.synchronize()

    def state(self) -> MastersState:
        return MastersState(self.steps, False, [value._version for value in (*self.masters, self.frozen)])

    def written(self, then: MastersState) -> list[Tensor]:
        return [*self.masters, *([self.frozen] if self.frozen._version != then.versions[-1] else [])]

    def keep_on_host(self) -> Callable[[], None]:
        kept = self.count.clone()

        def write_back() -> None:
            self.count.copy_(kept)

        return write_back

    def updates(self, master: Tensor) -> None:
        self.settled.update_begins()
        master.add_(10)

    def step(self, masters: list[Tensor]) -> None:
        """The host asks for an optimizer's step."""
        for master in masters:
            self.updates(master)
        self.count.add_(1)
        self.steps += 1

    def ends(self) -> float:
        """The groups end, and the device goes on."""
        self.settled.groups_end()
        assert not torch.cuda.current_stream().query(), "the device was not held up for long enough"
        torch.cuda.synchronize()
        assert self.settled.hold()
        return self.settled.restore()

    def values(self) -> list[float]:
        held = [*self.masters, self.frozen, self.buffer, self.count]
        assert all(bool((one == one.flatten()[0]).all()) for one in held)
        return [float(one.flatten()[0]) for one in held]


def test_what_a_forward_writes() -> None:
    rank = _Rank()
    torch.cuda._sleep(HELD_UP)
    rank.buffer.fill_(-1)
    assert rank.ends() == 5.0
    assert rank.values() == [1, 2, 3, 4, 5]


def test_an_update_that_has_not_begun() -> None:
    """The step is taken back, also what the optimizer counts on the host."""
    rank = _Rank()
    torch.cuda._sleep(HELD_UP)
    rank.buffer.fill_(-1)
    rank.step(rank.masters)
    rank.frozen.fill_(-1)  # a hook's
    assert rank.ends() == 5.0
    assert rank.values() == [1, 2, 3, 4, 5]


def test_a_host_that_is_ahead_by_steps() -> None:
    """The device is still in the step before, and the values are those where it began."""
    rank = _Rank()
    torch.cuda._sleep(HELD_UP)
    for _ in range(3):
        rank.step(rank.masters)
        rank.settled.step_begins()
        rank.buffer.fill_(-1)
    assert rank.ends() == 5.0
    assert rank.values() == [1, 2, 3, 4, 5]


def test_an_update_that_has_begun() -> None:
    """It stays, as far as it had come, and counts as half a step."""
    rank = _Rank()
    rank.updates(rank.masters[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(HELD_UP)
    rank.step(rank.masters[1:])
    assert rank.ends() == 5.5
    assert rank.values() == [11, 2, 3, 4, 6]


def test_a_device_that_never_began_the_step() -> None:
    """What the device holds is that of an unknown moment."""
    rank = _Rank()
    rank.settled._steps.clear()
    torch.cuda._sleep(HELD_UP)
    rank.settled.step_begins()
    rank.settled.groups_end()
    torch.cuda.synchronize()
    assert not rank.settled.hold()


def test_a_device_that_has_done_all() -> None:
    """Nothing is taken back."""
    rank = _Rank()
    rank.step(rank.masters[:1])
    torch.cuda.synchronize()
    rank.settled.are_whole()
    rank.settled.groups_end()
    assert rank.settled.hold()
    assert rank.settled.restore() == 6.0
    assert rank.values() == [11, 2, 3, 4, 6]
