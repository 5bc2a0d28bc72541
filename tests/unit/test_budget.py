"""How large each room is at most: a change that needs more raises the number here, and its commit says why."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

from lightning_zerocompile.config import Config

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_zerocompile"

LINES = {
    "face": 2400,  # the files beside the rooms: strategies, options, commands, the monitor
    "engine": 600,
    "report": 520,
    "plan": 3450,
    "plugins": 1150,
    "checkpoint": 1720,
    "optim": 4050,
    "compile": 1560,
    "runtime": 2700,
    "sharding": 4900,
    "ranks": 2700,
    "csrc": 9300,
    "tests": 40500,
}
OPTIONS = 26
NOTES = 140


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_rooms_keep_to_their_lines() -> None:
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py*"):
        if path.suffix in (".py", ".pyi") and "_csrc" not in path.parts:
            room, *inside = path.relative_to(PACKAGE).parts
            found[room if inside else "face"] += _lines(path)
    for path in (ROOT / "csrc").iterdir():
        found["csrc"] += _lines(path)
    for path in (ROOT / "tests").rglob("*.py"):
        found["tests"] += _lines(path)
    over = {room: lines for room, lines in found.items() if lines > LINES.get(room, 0)}
    assert not over, f"lines above the budget of {LINES}"
    far = {room: lines for room, lines in found.items() if lines < 0.9 * LINES[room] - 50}
    assert not far, "these rooms are smaller than their budget by more than a tenth: lower it, so that it stays so"


def test_options() -> None:
    assert len(dataclasses.fields(Config)) <= OPTIONS


def test_notes() -> None:
    """A note is a paragraph that other places refer to. What a type or an assertion can say needs none."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "csrc").iterdir()]
    found = [note for path in files for note in re.findall(r"^[^`]*\[Note: [^]]+\] [A-Z]", path.read_text(), re.M)]
    assert len(found) <= NOTES
