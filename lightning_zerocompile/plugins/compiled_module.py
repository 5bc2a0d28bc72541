"""``trainer.fit(torch.compile(module))``: taken as the wish to compile, which the strategy then does itself.

Lightning replaces the module's ``forward`` and its four steps by compiled ones and keeps what they were made with in
``module._compiler_ctx`` (``lightning.pytorch.utilities.compile.from_compiled``). Inside such a step the strategy's own
regions would be traced a second time, so the plain methods are put back while the module is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined, unused-ignore]

from lightning_zerocompile.config import Config

_METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def with_wish(config: Config, module: pl.LightningModule) -> Config:
    """The strategy's options with those of ``torch.compile(module, ...)`` where the strategy has none of its own.

    Raises:
        MisconfigurationException: an argument of torch.compile cannot be served, or the strategy was given another
            one; the message names it and what to pass.
    """
    context = getattr(module, "_compiler_ctx", None)
    if context is None:
        return config
    wish = _wish(context["dynamo_ctx"])
    if config.compile is False:
        rank_zero_warn(
            "The module was compiled by torch.compile, and ZeroCompileStrategy(compile=False) compiles nothing. The "
            "first is done, as compile='blocks' does it; pass the module as it is to have it run eagerly."
        )
    chosen = {"backend": config.backend, "dynamic": config.dynamic, "options": _options(config)}
    default = Config()
    changes = {name: value for name, value in wish.items() if value not in (getattr(default, name), chosen[name])}
    for name in changes:
        if chosen[name] != getattr(default, name):
            raise MisconfigurationException(
                f"torch.compile(module) was given `{name}={wish[name]!r}`, and ZeroCompileStrategy "
                f"`{name}={chosen[name]!r}`. Pass one of them, or the module as it is."
            )
    return replace(config, compile=config.compile or "blocks", **changes)


def _options(config: Config) -> dict[str, Any]:
    """Inductor's options, those of the mode first, as torch.compile writes a mode out."""
    mode = {} if config.mode is None else torch._inductor.list_mode_options(config.mode, config.dynamic)
    return mode | config.options


def _wish(context: Any) -> dict[str, Any]:
    """What torch.compile was told, as options of :class:`Config`; a mode comes as its options."""
    if getattr(context, "fullgraph", False) or getattr(context, "error_on_graph_break", False):
        raise MisconfigurationException(
            "torch.compile(module, fullgraph=True) would be one graph over the whole step, and "
            "`strategy='zerocompile'` compiles the model's blocks. Leave out `fullgraph`; `strategy.compile_stats` "
            "counts the graph breaks."
        )
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", repr(backend))
    if name not in ("inductor", "aot_eager"):
        raise MisconfigurationException(
            f"torch.compile(module, backend={name!r}) cannot be served: `strategy='zerocompile'` compiles with "
            "'inductor' or 'aot_eager'. Pass one of these, or the module as it is with "
            "ZeroCompileStrategy(compile=False)."
        )
    return {"backend": name, "dynamic": context._dynamic, "options": dict(getattr(backend, "config", {}))}


def put_plain_methods(module: pl.LightningModule) -> Callable[[], None]:
    """Gives the module its own methods instead of those that Lightning compiled; returns what takes that back."""
    compiled = {
        name: module.__dict__[name]
        for name in _METHODS
        if hasattr(module.__dict__.get(name), "_torchdynamo_orig_callable")
    }
    if getattr(module, "_compiler_ctx", None) is None:
        return lambda: None
    for name, method in compiled.items():
        while hasattr(method, "_torchdynamo_orig_callable"):
            method = method._torchdynamo_orig_callable
        if getattr(method, "__func__", None) is getattr(type(module), name):
            del module.__dict__[name]
        else:  # the user's, set on the object
            module.__dict__[name] = method

    def restore() -> None:
        if module._compiler_ctx is not None:
            module.__dict__.update(compiled)

    return restore
