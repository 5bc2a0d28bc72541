"""The rooms of the package: each imports only those below it."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_zerocompile"

# From the top down. A room is a folder, or a file beside the folders; it may import those that come after it.
ROOMS = (
    "__init__",
    "build",
    "consolidate",
    "monitor",
    "strategy",
    "fabric_strategy",
    "engine_owner",
    "report",
    "plan",
    "plugins",
    "engine",
    "checkpoint",
    "optim",
    "compile",
    "runtime",
    "sharding",
    "ranks",
    "arguments",
    "config",
    "option_types",
)


def _files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "_csrc" not in path.parts)


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported_rooms(path: Path) -> set[str]:
    """Of all imports in a file, also those inside of functions and those for annotations only."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    parts = [name.split(".") for name in names]
    found = {part[1] for part in parts if part[0] == PACKAGE.name and len(part) > 1}
    return {room if room in ROOMS else "__init__" for room in found}


def test_every_file_is_in_a_room() -> None:
    assert {_room(path) for path in _files()} <= set(ROOMS)


def test_imports_point_downward() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in _files()
        for room in _imported_rooms(path)
        if ROOMS.index(room) < ROOMS.index(_room(path))
    ]
    assert upward == []


def test_every_room_says_what_it_is_for() -> None:
    readme = (PACKAGE / "README.md").read_text()
    for room in ROOMS:
        if (PACKAGE / room).is_dir():
            assert ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())), room
            assert f"`{room}/`" in readme, room


def test_tests_import_from_support() -> None:
    """What two test files need is in tests/support: none imports from another."""
    tests = Path(__file__).parents[1]
    wrong = []
    for path in tests.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests":
                modules = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "tests" else []
                for module in modules or [str(node.module)]:
                    file = tests.parent / module.replace(".", "/")
                    there = file.is_dir() or file.with_suffix(".py").exists()
                    if not there or module.split(".")[1] in ("dist", "gpu", "unit"):
                        wrong.append(f"{path.relative_to(tests)} imports {module}")
    assert wrong == []
