"""The stub of the C++ extension, ``runtime/core.pyi``, says what was built: names, arguments and types."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lightning_zerocompile
from lightning_zerocompile.runtime import build

STUB = Path(lightning_zerocompile.__file__).parent / "runtime" / "core.pyi"
OWN = {"__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__", "__cached__"}


def _type(annotation: str) -> str:
    """A type as both sides write it: pybind says what it accepts, and no more of what may be undefined."""
    text = re.sub(r"\b(collections\.abc|typing|lightning_zerocompile\.runtime\.core|torch)\.", "", annotation)
    text = text.replace("SupportsInt | SupportsIndex", "int").replace("SupportsFloat | SupportsIndex", "float")
    text = text.replace("SupportsInt", "int").replace("SupportsFloat", "float").replace("Sequence", "list")
    return ast.unparse(ast.parse(re.sub(r"\bTensor \| None(?=[\]),])", "Tensor", text), mode="eval"))


def _signature(function: ast.FunctionDef) -> str:
    """``name(argument: type = default, ...) -> type``; arguments without a name of their own are ``_``."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    assert not (function.args.vararg or function.args.kwarg or function.args.kwonlyargs), function.name
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + function.args.defaults
    texts = []
    for argument, default in zip(arguments, defaults, strict=True):
        if argument.arg == "self":
            continue
        named = argument not in function.args.posonlyargs and not re.fullmatch(r"arg\d+", argument.arg)
        assert argument.annotation is not None, f"{function.name}: {argument.arg} has no type"
        text = f"{argument.arg if named else '_'}: {_type(ast.unparse(argument.annotation))}"
        texts.append(text if default is None else f"{text} = {ast.unparse(default)}")
    assert function.returns is not None, function.name
    return f"{function.name}({', '.join(texts)}) -> {_type(ast.unparse(function.returns))}"


def _built(name: str, member: object) -> str:
    """What a member of the extension is, as :func:`_stubbed` would say it."""
    if isinstance(member, property):
        return f"{name}: property"
    documentation = getattr(member, "__doc__", None) or ""
    first = documentation.partition("\n")[0]
    if not re.match(rf"{name}\(", first):
        return f"{name}: {type(member).__name__}"
    (function,) = ast.parse(f"def {first}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return _signature(function)


def _stubbed(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign):
        assert isinstance(node.target, ast.Name)
        return f"{node.target.id}: {ast.unparse(node.annotation).removeprefix('ClassVar[').removesuffix(']')}"
    assert isinstance(node, ast.FunctionDef), ast.unparse(node)
    if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        return f"{node.name}: property"
    return _signature(node)


def _members(cls: type) -> set[str]:
    found = {_built(name, member) for name, member in vars(cls).items() if not name.startswith("_")}
    own = vars(cls).get("__init__")  # a class that is not made by pybind may have none
    return found | ({_built("__init__", own)} if own is not None and "self: " in (own.__doc__ or "") else set())


def differences(stub: str) -> set[str]:
    """What only one of the two has."""
    module, body = build.load(), ast.parse(stub).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    functions = {_stubbed(node) for node in body if isinstance(node, ast.FunctionDef)}
    built = {name: value for name, value in vars(module).items() if name not in OWN}
    found = functions ^ {_built(name, value) for name, value in built.items() if not isinstance(value, type)}
    for name in classes.keys() | {name for name, value in built.items() if isinstance(value, type)}:
        if name not in classes or name not in built:
            found.add(f"class {name}")
            continue
        inside = [node for node in classes[name].body if isinstance(node, (ast.AnnAssign, ast.FunctionDef))]
        found |= {f"{name}.{text}" for text in {_stubbed(node) for node in inside} ^ _members(built[name])}
    return found


def test_the_stub_is_what_was_built() -> None:
    assert differences(STUB.read_text()) == set()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    def arm(self) -> None: ...\n", ""),
        ("    def arm(self) -> None: ...\n", "    def arm(self) -> None: ...\n    def disarm(self) -> None: ...\n"),
        ("def leave(self, units: Sequence[int], /)", "def leave(self, /)"),
        ("def leave(self, units: Sequence[int], /)", "def leave(self, units: Sequence[int], last: bool, /)"),
        ("def leave(self, units: Sequence[int], /)", "def leave(self, units: Sequence[int])"),
        ("def leave(self, units: Sequence[int], /)", "def leave(self, units: Sequence[str], /)"),
        ("cast: torch.dtype | None = None", "cast: torch.dtype | None"),
        ("raised: bool = False", "failed: bool = False"),
        ("    EARLY: ClassVar[Unbound]\n", ""),
        ("    EARLY: ClassVar[Unbound]\n", "    EARLY: ClassVar[Unbound]\n    LATE: ClassVar[Unbound]\n"),
        ("    @property\n    def backwards(self) -> int: ...\n", ""),
        ("    @property\n    def backwards(self) -> int: ...\n", "    def backwards(self) -> int: ...\n"),
        ("@final\nclass Saved: ...\n", ""),
        ("def never_used(value: Tensor, /) -> bool: ...", ""),
    ],
)
def test_a_difference_is_found(before: str, after: str) -> None:
    stub = STUB.read_text()
    assert before in stub
    assert differences(stub.replace(before, after, 1)) != set()
