"""What the ranks must do alike, compared through the store before a collective could go wrong by it.

The runtime in csrc/ calls these: see [Note: order of reductions], [Note: mismatched gathers], [Note: used flags].
"""

from __future__ import annotations

import json
from datetime import timedelta

import torch.distributed as dist

from lightning_zerocompile.agreement import Agreement


class Comparisons:
    """What one rank tells the others of its gathers and reductions, and hears of theirs.

    Args:
        agreement: the conversation of these ranks.
        timeout: how long it waits, for the messages.
    """

    def __init__(self, agreement: Agreement, timeout: timedelta) -> None:
        self._agreement, self._timeout = agreement, timeout
        self._marks = 0  # that were passed
        self._window = 0
        self._used = ("used", 0)  # the last exchange of used flags: its series and its number there
        self._outside = 0  # of these exchanges
        self._compared = ""  # the last gather that was compared

    def in_window(self, number: int) -> None:
        """What is exchanged from here on belongs to this window; 0: to none.

        A rank that has failed inside a window is in another one, or in none, while others still exchange in the first:
        their messages must not be taken for each other.
        """
        self._window = number
        self._used = ("used in a window", number * 2**20) if number else ("used", self._outside)

    def order(self, order: list[int]) -> list[int]:
        """Rank 0's order of units, on all ranks.

        Raises:
            RuntimeError: rank 0 has not told it in time.
        """
        agreed = self._agreement.of_first("order", json.dumps(order), "has begun its first backward")
        result: list[int] = json.loads(agreed)
        return result

    def gather(self, sequence: int, unit: str) -> str:
        """What is wrong if the ranks' gathers of this number are not of one unit; "" if nothing is."""
        mine, topic = dist.get_rank(), f"gather/{sequence}"
        heard = self._agreement.exchange(topic, unit, f"gather number {sequence} (here of unit `{unit}`)")
        if self._compared:  # who has come to this comparison has read the last one
            self._agreement.forget(self._compared)
        self._compared = topic
        for rank, theirs in heard.items():
            if theirs is None:
                return (
                    f"zerocompile: rank {mine} gathers unit `{unit}` as gather number {sequence}, but rank {rank} "
                    f"has not come to that gather within {self._timeout}: it died, hangs, or does not use the "
                    "same modules."
                )
            if theirs != unit:
                return (
                    f"zerocompile: gather number {sequence} is of unit `{unit}` on rank {mine} but of unit `{theirs}` "
                    f"on rank {rank}. With parameters sharded (stage 3) every rank must use the same modules in the "
                    "same order. Name the modules in which ranks differ in `keep_gathered=[...]`, or use stage 1 or 2."
                )
        return ""

    def mark(self, mine: str) -> None:
        """Passes a mark. At stage 3 a rank that runs one more batch, or generates one more token, would otherwise meet
        another gather of the other ranks.

        Args:
            mine: the mark, and the gathers behind it.

        Raises:
            RuntimeError: another rank came to another mark, or after other gathers.
        """
        rank, theirs = self._agreement.mark("mark", self._marks, mine)
        self._marks += 1
        if theirs != mine:
            raise RuntimeError(
                f"zerocompile: rank {dist.get_rank()} is at {mine}, but rank {rank} came there at {theirs}. With "
                "parameters sharded (stage 3) every rank must run the same number of batches, and of forwards inside "
                "each. Give all ranks equally many batches (a distributed sampler, `drop_last`, `limit_val_batches`), "
                "generate with `synced_gpus=True`, save checkpoints on all ranks, or use stage 1 or 2."
            )

    def used_parameters(self, exchange: int, used: str, asks: bool) -> str:
        """Which parameters have a gradient on some rank, a letter each: "0": none; the largest of all ranks counts.

        Args:
            exchange: of all, the number of this one.
            used: this rank's letters.
            asks: whether to wait for the others' letters; otherwise this rank's are told and returned.

        Raises:
            RuntimeError: a rank has not told its own in time.
        """
        series, number = self._used
        if not asks:
            number += 1
            self._outside += not self._window
            self._used = (series, number)
            self._agreement.tell_numbered(series, number, used)
            return used
        heard = self._agreement.ask_numbered(series, number, f"the end of backward number {exchange}")
        for rank, theirs in heard.items():
            if theirs is None:
                raise self._agreement.silent(rank, f"has ended backward number {exchange}")
            used = "".join(map(max, used, theirs))
        return used
