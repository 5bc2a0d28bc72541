"""Mixed precision: torch's own layers ask for their parameters in autocast's dtype, so that gathers can move that
dtype.

[Note: casting layers] Under autocast a ``Linear`` or a ``Conv`` casts its float32 weight and bias before it computes,
in every frame, compiled or not. The ``forward`` of its subclass (see [Note: class swap]) asks for the cast value
instead, and autocast finds nothing left to do. Nobody else sees the cast value: all other code that reads
``module.weight`` gets the float32 parameter. Which parameters are gathered in low precision follows from what the first
training steps have asked for: see [Note: low gathers] in csrc/low_gathers.cpp.

If code reads a parameter for its ``dtype`` or ``shape`` only, a graph drops that read, while eager code gathers. So a
graph that reads a parameter both cast and in float32 asks for the float32 value only (compile/passes/unify_casts.py).
Otherwise one rank would not know which dtype another needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from lightning_zerocompile.ranks.messages import Messages
from lightning_zerocompile.sharding import float8
from lightning_zerocompile.sharding.module_swap import BASE, CAST, INPUTS, ISLAND, PARAMETERS, ClassCache
from lightning_zerocompile.sharding.parameter import TRACED, Core, ShardedParameter

STEPS = 2  # training steps that are watched before the ranks agree


def _read(module: nn.Module, name: str) -> Any:
    """A module's parameter ``name``; if autocast is on, in the dtype that autocast would cast it to."""
    source = module.__dict__.get(CAST + name)
    if source is None or not torch.is_autocast_enabled(source.device.type):
        return getattr(module, name)
    if torch.get_autocast_dtype(source.device.type) != source.dtype:
        return getattr(module, name)
    if torch.compiler.is_compiling():
        _, handle, size, _ = module.__dict__[TRACED + name]
        return torch.ops.zerocompile.gather_cast.default(source, handle, size)
    return module.__dict__[PARAMETERS][name].read(module._parameters[name], source.dtype)


def _linear(self: Any, input: Tensor) -> Tensor:
    return functional.linear(input, _read(self, "weight"), _read(self, "bias"))


def _conv(self: Any, input: Tensor) -> Tensor:
    return self._conv_forward(input, _read(self, "weight"), _read(self, "bias"))  # type: ignore[no-any-return]


skip_code(_read.__code__)
skip_code(_linear.__code__)  # Dynamo treats it as it does torch's own layers: inlines it, and never starts with it
skip_code(_conv.__code__)

_FORWARDS: dict[type, Callable[..., Any]] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
}


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The ``forward`` of a module whose class may have been swapped, without the wrapper that makes it a region."""
    if (island := module.__dict__.get(ISLAND)) is not None:
        return island  # type: ignore[no-any-return]
    base: Any = getattr(type(module), BASE, type(module))
    casts = any(name.startswith(CAST) for name in module.__dict__)
    return _FORWARDS.get(base, float8.forward) if casts else base.forward


def forward_is_inlined(forward: Callable[..., Any]) -> bool:
    """Whether ``forward`` is a layer's that asks for casts, which Dynamo inlines and never starts with."""
    return forward in (*_FORWARDS.values(), float8.forward)


def cast_inputs(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Lets each module cast the floating-point tensors in its arguments, in whatever structure, to ``dtype``.

    Parameters that are read in ``dtype`` then meet inputs of the same dtype. As in FSDP2
    (``MixedPrecisionPolicy.cast_forward_inputs``), the cast comes before all other hooks.
    """
    for module in modules:
        if INPUTS not in module.__dict__:
            hook = partial(_cast_inputs, dtype)
            handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            module.__dict__[INPUTS] = handle


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return tree_map_only(Tensor, cast, (args, kwargs))


class Casts:
    """The parameters of one model that are cast wherever they are used: by autocast, or to float8 by torchao's layers.

    Args:
        classes: the classes of the sharded modules.
        core: the C++ runtime.
        messages: the conversation in which the ranks agree.
        dtype: autocast's dtype; ``None``: there is no autocast.

    Attributes:
        low: the numbers of the parameters whose gathers move the cast value.
    """

    def __init__(self, classes: ClassCache, core: Core, messages: Messages, dtype: torch.dtype | None) -> None:
        self._classes, self._core, self._messages, self._dtype = classes, core, messages, dtype
        self._sources: dict[tuple[Any, ...], Tensor] = {}
        self._places: dict[int, tuple[nn.Module, str, torch.dtype]] = {}  # and the dtype of the cast
        self._steps = 0
        self.low: list[int] = []

    @property
    def lowers(self) -> bool:
        """Whether layers may ask for parameters of float32 in a lower dtype."""
        return self._dtype is not None

    def add(self, sharded: ShardedParameter, places: list[tuple[nn.Module, str]]) -> None:
        """Lets the module that holds the parameter ask for the cast value, if it computes with that value only.

        Args:
            sharded: the parameter.
            places: the modules that hold it, each with its name there. A tied parameter is left as it is.
        """
        (module, name), *others = places
        if others:
            return
        if float8.asks_for_float8(module, name):
            config: Any = module.config
            self._core.read_as_float8(sharded.index, config.round_scales_to_power_of_2)
            self._ask(sharded, module, name, float8.DTYPE, float8.forward)
            return
        base: Any = getattr(type(module), BASE, type(module))
        torchs_own = base in _FORWARDS and base.forward.__module__ == base.__module__  # nobody has replaced the method
        if self._dtype is None or not torchs_own or name not in ("weight", "bias"):
            return
        if sharded.source.dtype is torch.float32:
            self._ask(sharded, module, name, self._dtype, _FORWARDS[base])

    def _ask(
        self,
        sharded: ShardedParameter,
        module: nn.Module,
        name: str,
        dtype: torch.dtype,
        forward: Callable[..., Any],
    ) -> None:
        like = sharded.source
        key = like.device, dtype, like.shape, like.stride()
        if key not in self._sources:
            self._sources[key] = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)
        module.__dict__[CAST + name] = self._sources[key]
        self._places[sharded.index] = (module, name, dtype)
        self._classes.swap(module, frozenset(module.__dict__[PARAMETERS]), forward)

    def asks(self, sharded: ShardedParameter) -> bool:
        """Whether a module asks for the parameter's cast value."""
        return sharded.index in self._places

    def remove(self, sharded: ShardedParameter) -> None:
        """Undoes :meth:`add`: from now on the module reads the full value, and whoever computes with it casts it."""
        place = self._places.pop(sharded.index, None)
        if place is not None:
            module, name, _ = place
            module.__dict__.pop(CAST + name, None)  # the parameter may have another name now
            self.low = [index for index in self.low if index != sharded.index]

    def begin_step(self) -> None:
        """Called at the start of each training step. After the first ``STEPS`` the ranks agree on what gathers move.

        Raises:
            CommunicationError: another rank did not come here in time, or has ended.
        """
        self._steps += 1
        if not self._sources or self._steps != STEPS + 1:
            return
        heard = self._messages.hear_all("casts", self._core.asked(), f"has begun training step number {self._steps}")
        asked = zip(*heard.values(), strict=True)
        self.low = [index for index, letters in enumerate(asked) if "c" in letters and "f" not in letters]
        for dtype in dict.fromkeys(source.dtype for source in self._sources.values()):
            self._core.gather_low([index for index in self.low if self._places[index][2] is dtype], dtype)
