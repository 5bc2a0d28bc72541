"""Modules that the user has compiled: the strategy takes that as a wish, and compiles the model itself.

``trainer.fit(torch.compile(module))``: Lightning replaces the module's ``forward`` and its four steps by compiled ones
and keeps what they were made with in ``module._compiler_ctx`` (``lightning.pytorch.utilities.compile.from_compiled``).
A part of the module may have been compiled, too: ``self.net = torch.compile(self.net)``, ``self.net.compile()`` or
``self.net.forward = torch.compile(self.net.forward)``. In any of these cases the strategy's own regions would be traced
a second time, so the plain methods are put back while the module is sharded. Names of parameters stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined, unused-ignore]
from torch import nn

from lightning_zerocompile.config import Config

_METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def with_wish(config: Config, module: nn.Module) -> Config:
    """The strategy's options with those of ``torch.compile(module, ...)`` where the strategy has none of its own.

    Args:
        config: of the strategy.
        module: a LightningModule or another; it, or parts of it, may have been compiled.

    Raises:
        MisconfigurationException: an argument of torch.compile cannot be served, or the strategy (or another part of
            the module) was given another one; the message names it and what to pass.
    """
    context = getattr(module, "_compiler_ctx", None)
    wishes = [] if context is None else [("module", _wish("module", context["dynamo_ctx"]))]
    parts = [(f"self.{name}" if name else "self", of_part) for name, _, of_part in _compiled_parts(module)]
    wishes += [(name, _wish(name, of_part)) for name, of_part in parts]
    if wishes and config.compile is False:
        rank_zero_warn(
            f"The {_said(wishes[0][0])} was compiled by torch.compile, and ZeroCompileStrategy(compile=False) compiles "
            "nothing. It is compiled, as with compile='blocks'; pass the module uncompiled to have it run eagerly."
        )
    default = Config()
    for name, wish in wishes:
        chosen = {"backend": config.backend, "dynamic": config.dynamic, "options": _options(config)}
        changes = {key: value for key, value in wish.items() if value not in (getattr(default, key), chosen[key])}
        for key in changes:
            if chosen[key] != getattr(default, key):
                raise MisconfigurationException(
                    f"torch.compile({name}) was given `{key}={wish[key]!r}`, and ZeroCompileStrategy "
                    f"`{key}={chosen[key]!r}` in `compile_options`, or another part of the module was. Pass one of "
                    "them, or the module as it is."
                )
        options = config.compile_options | changes
        config = replace(config, compile=config.compile or "blocks", compile_options=options)
    return config


def _said(name: str) -> str:
    return "module" if name in ("module", "self") else f"module `{name.removeprefix('self.')}`"


def _compiled_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Name, module and torch.compile's context of each part (or the whole) that was compiled by itself."""
    for name, inner in module.named_modules():
        if isinstance(inner, torch._dynamo.OptimizedModule):
            yield name, inner._orig_mod, inner.dynamo_ctx
        for method in (inner._compiled_call_impl, _compiled_forward(inner)):
            if method is not None:
                yield name, inner, inspect.getclosurevars(method).nonlocals.get("self")


def _compiled_forward(module: nn.Module) -> Any:
    """The module's ``forward`` if the user has put ``torch.compile(module.forward)`` there; else None.

    A ``forward`` that Lightning has compiled does not count.
    """
    forward = module.__dict__.get("forward")
    own = isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiler_ctx", None) is not None
    return forward if hasattr(forward, "_torchdynamo_orig_callable") and not own else None


def compiled_parts(module: nn.Module) -> list[nn.Module]:
    """The parts of ``module`` that the user has compiled, the outermost ones first."""
    return list(dict.fromkeys(part for _, part, _ in _compiled_parts(module) if part is not module))


def _options(config: Config) -> dict[str, Any]:
    """Inductor's options: first those that the mode stands for, as in torch.compile, then the user's."""
    mode = {} if config.mode is None else torch._inductor.list_mode_options(config.mode, config.dynamic)
    return mode | config.options


def _wish(name: str, context: Any) -> dict[str, Any]:
    """The arguments of torch.compile, as options of :class:`Config`; a mode appears as the options it stands for."""
    if not hasattr(context, "callback"):
        raise MisconfigurationException(
            f"torch.compile({name}): this version of torch does not say how it was compiled. Pass the module as it is, "
            "and options through ZeroCompileStrategy(compile=..., compile_options=...)."
        )
    if getattr(context, "fullgraph", False) or getattr(context, "error_on_graph_break", False):
        if name == "module":
            raise MisconfigurationException(
                "torch.compile(module, fullgraph=True) would be one graph over the whole step, and "
                "`strategy='zerocompile'` compiles the model's blocks. Leave out `fullgraph`; TORCH_LOGS=graph_breaks "
                "shows where a graph ends."
            )
        rank_zero_warn(
            f"torch.compile({name}, fullgraph=True): `strategy='zerocompile'` compiles it, and a graph break does not "
            "raise; TORCH_LOGS=graph_breaks shows where there is one."
        )
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    backend_name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", repr(backend))
    if backend_name not in ("inductor", "aot_eager"):
        raise MisconfigurationException(
            f"torch.compile({name}, backend={backend_name!r}) cannot be served: `strategy='zerocompile'` compiles with "
            "'inductor' or 'aot_eager'. Pass one of these, or the module as it is with "
            "ZeroCompileStrategy(compile=False)."
        )
    return {"backend": backend_name, "dynamic": context._dynamic, "options": dict(getattr(backend, "config", {}))}


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
