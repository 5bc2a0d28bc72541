"""Modules that the user has compiled: the strategy takes them as the plain modules, says so, and compiles by itself.

``trainer.fit(torch.compile(module))``: Lightning replaces the module's ``forward`` and its four steps by compiled ones
and keeps what they were made with in ``module._compiler_ctx`` (``lightning.pytorch.utilities.compile.from_compiled``).
A part of the module may have been compiled, too: ``self.net = torch.compile(self.net)``, ``self.net.compile()`` or
``self.net.forward = torch.compile(self.net.forward)``. In any of these cases the strategy's own regions would be traced
a second time, so the plain methods are put back while the module is sharded. Names of parameters stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined, unused-ignore]
from torch import nn

_METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def warn_if_compiled(module: nn.Module) -> None:
    """Says in one line that what the user has compiled of ``module`` is taken as it was before."""
    names = [name for name, inner in module.named_modules() if _is_compiled(inner)]
    if names:
        what = f"module `{names[0]}`" if names[0] else "module"
        rank_zero_warn(
            f"The {what} was compiled by torch.compile, and is taken as the plain module: the strategy compiles the "
            "model itself. Pass it uncompiled, and say how to compile it by ZeroCompileStrategy(compile=..., "
            "compile_options={...})."
        )


def _is_compiled(module: nn.Module) -> bool:
    if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
        return True
    methods = (module.__dict__.get(name) for name in _METHODS)
    return any(hasattr(method, "_torchdynamo_orig_callable") for method in methods)


def put_plain_methods(module: nn.Module) -> Callable[[], None]:
    """Gives the module and its parts their plain methods back; returns a function that puts the compiled ones back."""
    reverts = [_put_plain(inner) for inner in module.modules()]

    def restore() -> None:
        for revert in reverts:
            revert()

    return restore


def _put_plain(module: nn.Module) -> Callable[[], None]:
    members = module.__dict__
    before: dict[str, Any] = {}
    if isinstance(module, torch._dynamo.OptimizedModule):
        before["forward"] = members["forward"]
        members["forward"] = module._orig_mod.__call__
    elif getattr(module, "_compiler_ctx", None) is not None:
        before |= _plain(module, _METHODS)
    else:
        before |= _plain(module, ("forward",))
    call = module._compiled_call_impl
    if call is not None:
        module._compiled_call_impl = None
    lightning_s = getattr(module, "_compiler_ctx", None)

    def restore() -> None:
        if lightning_s is None or module._compiler_ctx is not None:  # else the user has uncompiled it meanwhile
            members.update(before)
        if call is not None:
            module._compiled_call_impl = call

    return restore


def _plain(module: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Puts plain methods where ``module`` has compiled ones of these names; returns the compiled ones."""
    members = module.__dict__
    compiled = {name: members[name] for name in names if hasattr(members.get(name), "_torchdynamo_orig_callable")}
    for name, method in compiled.items():
        while hasattr(method, "_torchdynamo_orig_callable"):
            method = method._torchdynamo_orig_callable
        if getattr(method, "__func__", None) is getattr(type(module), name):
            del members[name]
        else:  # the user's, set on the object
            members[name] = method
    return compiled
