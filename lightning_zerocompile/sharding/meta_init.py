"""Where each parameter of a model lives, and how one on the meta device gets its initial values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from torch import Tensor, nn

from lightning_zerocompile.sharding.pretrained import forget_sources, source_of


class Places:
    """The modules that hold each parameter, by its fully qualified name; a tied parameter has several.

    [Note: meta device] A model that was built on the meta device is initialised module by module. Each module is
    initialised when the unit of its first parameter is sharded, so no more than that unit is ever whole. A module
    initialises its own parameters and buffers (``reset_parameters``), or the model around it does (``_init_weights``,
    Hugging Face's convention). Parameters that `load_pretrained` has found in a folder are read from there instead.

    Args:
        model: a model that is not sharded yet.
        device: the device on which parameters on the meta device are initialised.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for local_name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(names[parameter], []).append((module, local_name))
        self._name_at = {place: name for name, places in self._places.items() for place in places}
        found = {name: source_of(*places[0]) for name, places in self._places.items()}
        self._sources = {name: source for name, source in found.items() if source is not None}

    def of(self, name: str) -> list[tuple[nn.Module, str]]:
        """Every ``(module, local name)`` that holds the parameter."""
        return self._places[name]

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter itself, on a real device: initialises its module if it is on the meta device.

        Raises:
            RuntimeError: nothing says how to initialise the parameter, or its module's initialiser leaves it on the
                meta device or uses a tensor there; or the parameter has disappeared.
        """
        module, local_name = self._places[name][0]
        parameter = module._parameters[local_name]
        if parameter is None:
            raise RuntimeError(f"Parameter `{name}` disappeared while the model was being sharded.")
        if parameter.is_meta:
            self._initialize(module, f"Parameter `{name}`")
            parameter = module._parameters[local_name]
            if parameter is None or parameter.is_meta:
                raise RuntimeError(f"Parameter `{name}` is still on the meta device after its module initialised it.")
        return parameter

    def rows(self, name: str, rank: int, world: int) -> tuple[nn.Parameter, Tensor] | None:
        """A parameter on the meta device, and one rank's rows of its pretrained value, on the CPU.

        See [Note: pretrained weights].

        Args:
            name: the parameter's fully qualified name.
            rank: the rank, by its place in a group of ``world`` ranks.
            world: how many ranks the rows are divided among.

        Returns:
            The parameter and the rows, [<=ceil(d0 / world), ...]; None: the parameter has no pretrained value.

        Raises:
            RuntimeError: the file cannot be read any more.
        """
        source = self._sources.get(name)
        module, local_name = self._places[name][0]
        parameter = module._parameters[local_name]
        if source is None or parameter is None:
            return None
        return parameter, source.rows(rank, world)

    def check(self) -> None:
        """Raises, before anything is changed, if a parameter on the meta device cannot be initialised.

        Raises:
            RuntimeError: names the first such parameter, and the remedy.
        """
        for name, [(module, local_name), *_] in self._places.items():
            parameter = module._parameters[local_name]
            if parameter is not None and parameter.is_meta and name not in self._sources:
                self._initializer_of(module, f"Parameter `{name}`")

    def finish(self) -> None:
        """Initialises modules whose buffers are still on the meta device, and forgets where pretrained values are.

        After this nothing of the model is on the meta device.

        Raises:
            RuntimeError: nothing says how to initialise such a module.
        """
        for name, module in self._model.named_modules():
            if any(b is not None and b.is_meta for b in module._buffers.values()):
                self._initialize(module, f"A buffer of `{name}`")
        forget_sources(self._model)

    def _initialize(self, module: nn.Module, what: str) -> None:
        initialize = self._initializer_of(module, what)
        # A tensor that is real already (a tied parameter that was sharded before) stays as it is. The initialiser
        # writes to a stand-in for it.
        parameters = {n: p for n, p in module._parameters.items() if p is not None}
        kept = {n: p for n, p in parameters.items() if not p.is_meta}
        kept_buffers = {n: b for n, b in module._buffers.items() if b is not None and not b.is_meta}
        for local_name, parameter in kept.items():
            stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            module._parameters[local_name] = nn.Parameter(stand_in, requires_grad=False)
        module.to_empty(device=self._device, recurse=False)
        try:
            with torch.no_grad():
                initialize()
        except NotImplementedError as error:  # torch raises it for a tensor without data
            raise RuntimeError(
                f"{what} is on the meta device, and its initialiser ({type(module).__name__}) uses a tensor that is "
                f"still there: {error} Modules are initialised in the order in which the model holds them, so let it "
                "use no tensor of a later module, or build the model on a real device."
            ) from error
        module._parameters.update(kept)
        module._buffers.update(kept_buffers)
        for local_name, old in parameters.items():
            new = module._parameters[local_name]
            if local_name in kept or new is None:
                continue
            new.__dict__.update(old.__dict__)  # marks that users put on a parameter
            for other, other_name in self._places[self._name_at[module, local_name]]:
                other._parameters[other_name] = new  # ties survive

    def _initializer_of(self, module: nn.Module, what: str) -> Callable[[], object]:
        initialize = self._initializer(module)
        if initialize is None:
            raise RuntimeError(
                f"{what} is on the meta device, and its module {type(module).__name__} has no `reset_parameters` "
                "that says how to initialise it. Add that method (it must set the module's own parameters and "
                "buffers), or build the module on a real device."
            )
        return initialize

    def _initializer(self, module: nn.Module) -> Callable[[], object] | None:
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            return lambda: reset()
        for ancestor in self._model.modules():
            init_weights = getattr(ancestor, "_init_weights", None)
            if callable(init_weights) and any(m is module for m in ancestor.modules()):
                return lambda: init_weights(module)
        return None


def initialize_all(model: nn.Module, device: torch.device) -> None:
    """Initialises on ``device`` all that ``model`` has on the meta device, see [Note: meta device].

    Raises:
        RuntimeError: nothing says how to initialise a module.
    """
    places = Places(model, device)
    for name, _ in list(model.named_parameters()):
        places.parameter(name)
    places.finish()


def place(model: nn.Module, device: torch.device) -> None:
    """Moves modules without parameters that have an ``_apply`` of their own, such as torchmetrics' metrics.

    Such a module may keep tensors that are neither parameters nor buffers. This also sets the ``device`` attribute of
    LightningModules.
    """
    for module in model.modules():
        if isinstance(module, _DeviceDtypeModuleMixin):
            module._device = device
        elif type(module)._apply is not nn.Module._apply and next(module.parameters(), None) is None:
            module.to(device)
