"""The fast subset names tests that exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.smoke import SMOKE, is_smoke


def test_every_line_names_a_test() -> None:
    root = Path(__file__).parents[2]
    files = sorted({f"tests/{line.partition('::')[0]}" for line in SMOKE})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "smoke", *files]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout
    found = [line for line in listed.splitlines() if "::" in line]
    assert found and all(is_smoke(node) for node in found)
    for line in SMOKE:
        assert any(node == f"tests/{line}" or node.startswith(f"tests/{line}::") for node in found), (line, listed)
