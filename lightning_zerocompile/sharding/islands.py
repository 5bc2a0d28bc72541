"""Modules that compute in float32 inside a model that computes in half precision.

[Note: float32 islands] Norms, routers and heads lose most in half precision and cost least in float32. An island is a
module that the option ``fp32_modules`` names. Its parameters, and those of the modules inside it, are gathered in
float32. Its ``forward`` casts arguments of lower floating-point precision to float32, and casts float32 results to the
dtype around the island. That is the dtype that the model computes in. Where parameters of several dtypes each keep
their own, it is the dtype of the first floating-point tensor among the arguments. Hooks of the island see arguments and
results as they are outside of it. Where a precision plugin casts buffers, an island's float32 buffers stay in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

NORMS = "norms"
_TORCHS_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
    nn.LocalResponseNorm,
)
_IS_NORM = re.compile(r"Norm(\dd)?$")  # LlamaRMSNorm, T5LayerNorm, FrozenBatchNorm2d


@dataclass(frozen=True)
class Islands:
    """The parts of one model that compute in float32, see [Note: float32 islands].

    Attributes:
        modules: the islands' names, as in ``named_modules()``; "" is the whole model. No island lies inside another.
        around: the dtype that the model computes in; ``None``: each parameter's own.
    """

    modules: tuple[str, ...] = ()
    around: torch.dtype | None = None

    def has(self, name: str) -> bool:
        """Whether a module or parameter of this name is an island or lies in one."""
        return any(name == island or not island or name.startswith(f"{island}.") for island in self.modules)

    def inside(self, name: str) -> Islands:
        """The islands in the submodule ``name``, by their names there; "" if the submodule is in an island."""
        if self.has(name):
            return replace(self, modules=("",))
        prefix = f"{name}." if name else ""
        return replace(self, modules=tuple(m.removeprefix(prefix) for m in self.modules if m.startswith(prefix)))


NONE = Islands()


def gathered_dtype(name: str, parameter: Tensor, dtype: torch.dtype | None, islands: Islands = NONE) -> torch.dtype:
    """The dtype that a parameter is gathered in.

    Args:
        name: the parameter's fully qualified name, as in ``named_parameters()``.
        parameter: the parameter, before it is sharded.
        dtype: the dtype that floating-point parameters are gathered in; ``None``: their own.
        islands: the model's islands, which are gathered in float32 if ``dtype`` is of less than 4 bytes.
    """
    if not parameter.is_floating_point():
        return parameter.dtype
    chosen = parameter.dtype if dtype is None else dtype
    return torch.float32 if chosen.itemsize < 4 and islands.has(name) else chosen


def is_norm(module: nn.Module) -> bool:
    """Whether ``"norms"`` means the module: torch's norms, and modules without children whose class is called a norm.

    Such a class name ends in "Norm", after which a digit and "d" may follow ("FrozenBatchNorm2d").
    """
    if isinstance(module, _TORCHS_NORMS):
        return True
    return bool(_IS_NORM.search(type(module).__name__)) and next(module.children(), None) is None


def find_islands(
    model: nn.Module,
    chosen: Sequence[str | type[nn.Module]],
    dtype: torch.dtype | None,
    autocast: torch.dtype | None = None,
) -> Islands:
    """The islands of a model that is not sharded yet.

    Args:
        chosen: the option ``fp32_modules``: ``"norms"``, classes, class names, and names of modules, in which ``*`` and
            ``?`` stand for any text and any letter.
        dtype: the dtype that floating-point parameters are gathered in; ``None``: their own.
        autocast: the dtype of the autocast that steps run under; ``None``: there is none.

    Returns:
        The islands; none if all parameters are gathered in float32 or more in any case.

    Raises:
        ValueError: an entry matches nothing, autocast decides in which dtype a module computes, or a parameter of an
            island also belongs to a module outside. The message names it.
    """
    if not chosen:
        return Islands((), dtype)
    if autocast is not None:
        raise ValueError(
            f"`fp32_modules={_listed(chosen)}`: under autocast in {autocast} parameters are float32, and autocast "
            "chooses for each operation (norms compute in float32). Drop the option, use precision='bf16-true' or "
            "'16-true', or switch autocast off in the module (`with torch.autocast(..., enabled=False):`)."
        )
    modules = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    found: dict[str, None] = {}
    for entry in chosen:
        names = [name for name, module in modules if _matches(entry, name, module)]
        if not names:
            classes = ", ".join(sorted({type(module).__name__ for _, module in modules}))
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"`fp32_modules`: {_said(entry)} matches no module of {type(model).__name__}. Give 'norms', a class, "
                "the name of a class, or a name as in `named_modules()`, where `*` stands for any text. Its children "
                f"are: {children}; its classes: {classes}."
            )
        found |= dict.fromkeys(names)
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    low = (dtype,) if dtype is not None else {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not any(one.itemsize < 4 for one in low):  # everything computes in float32 or more
        return Islands((), dtype)
    islands = Islands(tuple(outer), dtype)
    _check_shared(model, islands)
    return islands


def _matches(entry: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if not isinstance(entry, str):
        return isinstance(module, entry)
    if entry == NORMS:
        return is_norm(module)
    return fnmatchcase(name, entry) or type(module).__name__ == entry


def _check_shared(model: nn.Module, islands: Islands) -> None:
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for shared in names.values():
        inside = [name for name in shared if islands.has(name)]
        outside = [name for name in shared if not islands.has(name)]
        if inside and outside:
            raise ValueError(
                f"`fp32_modules`: parameter `{inside[0]}` is also `{outside[0]}`, which is gathered in another dtype. "
                "Name both modules or none, or untie them."
            )


def _said(entry: str | type[nn.Module]) -> str:
    return repr(entry) if isinstance(entry, str) else f"class {entry.__name__}"


def _listed(chosen: Sequence[str | type[nn.Module]]) -> str:
    return f"[{', '.join(map(_said, chosen))}]"


# ---- casts ----


def _up(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.is_floating_point() and value.dtype.itemsize < 4 else value


def _back(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype) if value.dtype is torch.float32 else value


def in_fp32(forward: Callable[..., Any], around: torch.dtype | None) -> Callable[..., Any]:
    """A ``forward`` that computes in float32 and returns ``around``, see [Note: float32 islands]."""

    @wraps(forward)
    def island(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer = around
        if outer is None:
            passed = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            floating = [leaf.dtype for leaf in passed if leaf.is_floating_point()]
            outer = floating[0] if floating else torch.float32
        args, kwargs = tree_map_only(Tensor, _up, (args, kwargs))
        return tree_map_only(Tensor, partial(_back, outer), forward(self, *args, **kwargs))

    return island


def put_islands(model: nn.Module, islands: Islands) -> None:
    """Lets the islands of ``model``, a copy that is not sharded, compute in float32; leaves parameters as they are."""
    for name in islands.modules:
        module = model.get_submodule(name)
        computing = in_fp32(type(module).forward, islands.around)
        module.forward = partial(computing, module)
