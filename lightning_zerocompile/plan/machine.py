"""What a run has, for each rank."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zerocompile.plan.trace import PlanError


@dataclass(frozen=True)
class Machine:
    """What a run has, for each rank; ``None`` is not known, and what depends on it is left out.

    Attributes:
        memory: bytes that the device has for the run.
        bandwidth: bytes a second that a rank sends, and receives, in a collective of all ranks. With
            ``ranks_per_node``: between hosts, a rank's share of its host's network cards; a collective over hosts uses
            those of all its ranks of a host at once.
        flops: FLOP a second that the model reaches.
        memory_bandwidth: bytes a second that the device's memory reads and writes; where it is known, the optimizer's
            update has a time.
        gloo: whether the ranks are CPU processes.
        host: seconds in which the host issues forward and backward of the model without the strategy.
        call: seconds in which it issues one small operator.
        link: bytes a second between host memory and device, of copies in both directions at once, together.
        node_bandwidth: bytes a second that a rank sends, and receives, in a collective inside a host; ``None``: as
            ``bandwidth``.
        ranks_per_node: ranks of one host. ``None``: hosts are not known, and only ``reshard_after_forward`` says what
            is inside one.
        latency, node_latency: seconds of one step of a collective between two hosts, and inside one, beside those of
            its bytes, see [Note: predicted seconds]. ``None``: steps take no time, or inside a host as much.

    Raises:
        PlanError: one of them is not positive.
    """

    memory: int | None = None
    bandwidth: float | None = None
    flops: float | None = None
    gloo: bool = False
    memory_bandwidth: float | None = None
    host: float | None = None
    call: float | None = None
    link: float | None = None
    node_bandwidth: float | None = None
    ranks_per_node: int | None = None
    latency: float | None = None
    node_latency: float | None = None

    def __post_init__(self) -> None:
        for name, unit in (
            ("memory", "bytes"),
            ("bandwidth", "bytes a second"),
            ("flops", "FLOP a second"),
            ("memory_bandwidth", "bytes a second"),
            ("host", "seconds"),
            ("call", "seconds"),
            ("link", "bytes a second"),
            ("node_bandwidth", "bytes a second"),
            ("ranks_per_node", "ranks"),
            ("latency", "seconds"),
            ("node_latency", "seconds"),
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise PlanError(f"`{name}={value!r}` must be a positive number of {unit}, or None where it is unknown.")
