"""What an option may be: its check, what it may be written as, and whether a value is of its type."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args, get_origin

import torch


@dataclass(frozen=True)
class Check:
    """What an option's type does not say. It stands in the option's annotation.

    Attributes:
        otherwise: the message for a wrong value; it follows the option's name and value.
        accepts: the type of the argument, if the argument may be more than the option's own type.
        convert: makes the option's value of an argument; an argument that it cannot convert is left as it is.
        holds: what must be true of a value of the right type.
    """

    otherwise: str
    accepts: Any = None
    convert: Callable[[Any], Any] = lambda value: value
    holds: Callable[[Any], bool] = lambda value: True


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_BYTES = re.compile(r"(\d+(?:\.\d+)?) *([KMGT])(i?)B")


def _as_dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    return getattr(torch, _SHORT.get(name, name), value)


def as_bytes(value: Any) -> Any:
    """The number of bytes of ``"80GiB"`` or ``"500MB"``."""
    found = _BYTES.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" KMGT".index(unit)))


def as_names_or_bytes(value: Any) -> Any:
    value = as_bytes(value)
    return value if value == "auto" or isinstance(value, int) else _as_names(value)


def as_time(value: Any) -> Any:
    return timedelta(seconds=value) if type(value) in (int, float) else value


def _as_names(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value


def as_modules(value: Any) -> Any:
    return (value,) if isinstance(value, type) else _as_names(value)


def as_compile_options(given: Any) -> Any:
    """A copy, also of Inductor's options inside it."""
    if not isinstance(given, Mapping):
        return {} if given is None else given
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()}


def fits(value: object, hint: Any) -> bool:
    """Whether ``value`` is of the type ``hint``; a bool is no int, and literals are equal in type, too."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin is tuple:  # tuple[X, ...] or tuple[X, X]
        if not isinstance(value, tuple) or not (inner[-1] is Ellipsis or len(value) == len(inner)):
            return False
        return all(fits(one, inner[0]) for one in value)
    if origin is type:
        return isinstance(value, type) and issubclass(value, inner[0])
    if origin is not None and origin is not dict:  # a union
        return any(fits(value, one) for one in inner)
    return isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool))


DTYPE = Check(
    "is not a floating-point dtype; use for example torch.bfloat16, 'bf16' or None.",
    accepts=torch.dtype | str | None,
    convert=_as_dtype,
    holds=lambda dtype: dtype is None or dtype.is_floating_point,
)
FLAG = Check("is not understood; choose True or False.")


def names_of(what: str) -> Check:
    return Check(f"must be names of {what}", Sequence[str], _as_names, lambda names: "" not in names)
