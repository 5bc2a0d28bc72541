"""One step as a picture: what torch's profiler has seen, a row for each unit, as SVG.

The runtime names its gathers and reductions in a trace. What is drawn of a unit is when the host started them; how long
they took on a device is in the rows of its kernels.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

_NAME = re.compile(r"zerocompile: (?:(gather) (.*) in (forward|backward)|(gather|reduce) (.*))")
_COLORS = {
    "gather in forward": "#55a868",
    "gather in backward": "#4c72b0",
    "gather": "#64b5cd",
    "reduce": "#c44e52",
    "update": "#8172b3",
    "compute": "#ccb974",
    "communication": "#dd8452",
}
_COMPILED = "compiled graphs (host)"
_OPTIMIZERS = "optimizers (host)"
_KERNELS, _COLLECTIVES = "kernels (device)", "NCCL's kernels (device)"
_WIDTH, _LEFT, _ROW = 1100, 230, 22  # pixels


class TimelineError(ValueError):
    """A picture cannot be made; the message says of what, why, and what to do."""


@dataclass(frozen=True)
class Span:
    """Something in a trace; ``start`` and ``length`` in microseconds, ``row`` what it is drawn beside."""

    row: str
    kind: str
    start: float
    length: float


def spans_of(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """What is drawn of a trace's ``traceEvents``, by time.

    Lightning runs a step's forward and backward in a closure of the optimizer's step. Of that, what comes after the
    last graph and reduction in it is drawn as the update.
    """
    spans = list(_spans(events))
    before = [span for span in spans if span.row == _COMPILED or span.kind == "reduce"]
    drawn = [_update_of(span, before) if span.kind == "update" else span for span in spans]
    return sorted(drawn, key=lambda span: span.start)


def _update_of(step: Span, before: Sequence[Span]) -> Span:
    end = step.start + step.length
    inside = [span.start + span.length for span in before if step.start <= span.start < end]
    start = min(max([step.start, *inside]), end)
    return replace(step, start=start, length=end - start)


def _spans(events: Sequence[Mapping[str, Any]]) -> Iterator[Span]:
    for event in events:
        if event.get("ph") != "X":
            continue
        name, start, length = str(event.get("name", "")), float(event["ts"]), float(event.get("dur", 0))
        found = _NAME.fullmatch(name)
        if found is not None and event.get("cat") == "user_annotation":
            kind = f"gather in {found[3]}" if found[1] else found[4]
            yield Span(found[2] or found[5], kind, start, length)
        elif event.get("cat") == "kernel":
            collective = "nccl" in name.lower()
            yield Span(
                _COLLECTIVES if collective else _KERNELS, "communication" if collective else "compute", start, length
            )
        elif name.startswith("Optimizer.step"):
            yield Span(_OPTIMIZERS, "update", start, length)
        elif name.startswith(("Torch-Compiled Region", "CompiledFunctionBackward")):
            yield Span(_COMPILED, "compute", start, length)


def svg(trace: str | os.PathLike[str]) -> str:
    """The picture of a trace that torch's profiler (or Lightning's ``PyTorchProfiler``) has exported as JSON.

    Args:
        trace: the file; of one step, or of few.

    Raises:
        TimelineError: it cannot be read, or nothing of this strategy is in it.
    """
    try:
        events = json.loads(Path(trace).read_text())["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TimelineError(
            f"`{os.fspath(trace)}` is no trace ({type(error).__name__}). Pass a file that `export_chrome_trace` wrote."
        ) from error
    return picture(spans_of(events))


def picture(spans: Sequence[Span]) -> str:
    """The picture of the spans: units in the order in which they come, then what belongs to none.

    Raises:
        TimelineError: there is no unit among them.
    """
    others = (_COMPILED, _OPTIMIZERS, _KERNELS, _COLLECTIVES)
    units = list(dict.fromkeys(span.row for span in spans if span.row not in others))
    if not units:
        raise TimelineError(
            "The trace has no gather and no reduction of this strategy. Record at least one training step, on a rank "
            "of a run with strategy='zerocompile' (`with torch.profiler.profile() as trace:`)."
        )
    rows = [*units, *(row for row in others if any(span.row == row for span in spans))]
    first, last = min(span.start for span in spans), max(span.start + span.length for span in spans)
    scale = (_WIDTH - _LEFT - 20) / max(last - first, 1e-9)
    bottom = 44 + _ROW * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 60}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="24" font-size="15">{(last - first) / 1000:.1f} ms of a rank</text>',
    ]
    for number, row in enumerate(rows):
        top = 40 + number * _ROW
        shade = "#f2f2f2" if number % 2 else "white"
        lines.append(f'<rect x="0" y="{top}" width="{_WIDTH}" height="{_ROW}" fill="{shade}"/>')
        label = row if len(row) <= 34 else f"{row[:31]}..."
        lines.append(f'<text x="10" y="{top + 15}">{escape(label)}<title>{escape(row)}</title></text>')
    for span in spans:
        x, top = _LEFT + (span.start - first) * scale, 40 + rows.index(span.row) * _ROW
        title = escape(f"{span.row}: {span.kind}, {span.length:.0f} µs")
        lines.append(
            f'<rect x="{x:.1f}" y="{top + 4}" width="{max(span.length * scale, 1.5):.1f}" height="{_ROW - 8}" '
            f'fill="{_COLORS[span.kind]}"><title>{title}</title></rect>'
        )
    kinds = [kind for kind in _COLORS if any(span.kind == kind for span in spans)]
    for number, kind in enumerate(kinds):
        x = 10 + number * 150
        lines.append(f'<rect x="{x}" y="{bottom + 20}" width="12" height="12" fill="{_COLORS[kind]}"/>')
        lines.append(f'<text x="{x + 17}" y="{bottom + 31}">{kind}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
