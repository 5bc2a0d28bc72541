"""Constructors that take the options of :class:`Config`, and know what they are called elsewhere."""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from types import NoneType
from typing import Any, get_type_hints

from lightning_zerocompile.config import Config, checks

# What to write instead of the names of earlier versions.
_RENAMED = {
    "checkpoint": "use `state_dict_type` ('full' or 'sharded')",
    "accumulate": "use `defer_grad_sync` (True for 'local')",
    "whole_values": "use `full_param_optimizers`",
    "backend": "use compile_options={'backend': 'aot_eager'}",
    "mode": "use compile_options={'mode': 'reduce-overhead'}",
    "dynamic": "use compile_options={'dynamic': True}",
    "options": "use compile_options={'options': {...}}",
    "activation_budget": "use `recompute` (the share that is not saved: recompute=0.5 for 0.5, recompute=1 for 0)",
    "activation_checkpointing": "use recompute='blocks'",
    "memory_budget": "use `keep_gathered` (keep_gathered='auto', or bytes)",
    "keep_casts": "use keep_gathered='auto' (or bytes), which buys casts first",
    "memory_limit": "ask python -m lightning_zerocompile.plan --gpu-memory=..., and choose a stage that fits",
    "replicas": "use `device_mesh` (device_mesh=2 or device_mesh='nodes')",
    "cast_forward_inputs": "with `param_dtype` what modules are passed is always cast, so drop it",
    "update_in_one_pass": "one kernel updates and casts wherever it makes torch's update to the bit, so drop it",
    "hierarchical_collectives": "NCCL chooses by topology, so drop it",
    "offload_update": "optimizers stream through the device, so drop it",
    "offload_budget": "with optimizer_in_backward=True large units stay on the device where that costs no memory, so "
    "drop it",
}

_OFFLOAD = "write offload='optimizer' (parameters are sharded, and stay on the GPUs)"
_SIZES = "write `unit_bytes` (unit_bytes='64MiB')"
_PREFETCH = "write `prefetch` (prefetch=2: units that are gathered ahead)"
_ALWAYS = "it is always so here, so drop it"

# What to write here for the names of FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy and DDPStrategy.
_ELSEWHERE = {
    "sharding_strategy": "write stage=3 for FULL_SHARD, 2 for SHARD_GRAD_OP, device_mesh='nodes' for HYBRID_SHARD",
    "zero_optimization": "write stage=1, 2 or 3",
    "config": "write stage=1, 2 or 3, and the other options as arguments",
    "auto_wrap_policy": "repeated blocks are found, so drop it (`unit_bytes` groups what is outside of them)",
    "activation_checkpointing_policy": "write recompute='blocks', or a number from 0 to 1",
    "partition_activations": "write recompute='blocks', or activation_offload=True",
    "cpu_checkpointing": "write activation_offload=True",
    "mixed_precision": "write Trainer(precision='bf16-mixed'), or param_dtype='bf16' and reduce_dtype='fp32'",
    "mp_policy": "write param_dtype='bf16' and reduce_dtype='fp32'",
    "cpu_offload": _OFFLOAD,
    "offload_policy": _OFFLOAD,
    "offload_optimizer": _OFFLOAD,
    "offload_optimizer_device": _OFFLOAD,
    "offload_parameters": _OFFLOAD,
    "offload_params_device": _OFFLOAD,
    "reduce_bucket_size": _SIZES,
    "allgather_bucket_size": _SIZES,
    "bucket_cap_mb": _SIZES,
    "stage3_prefetch_bucket_size": _PREFETCH,
    "prefetch_bucket_size": _PREFETCH,
    "backward_prefetch": _PREFETCH,
    "forward_prefetch": _PREFETCH,
    "param_persistence_threshold": "write keep_gathered='auto', bytes, or names of modules",
    "stage3_param_persistence_threshold": "write keep_gathered='auto', bytes, or names of modules",
    "stage3_max_live_parameters": _PREFETCH,
    "data_parallel_size": "write `device_mesh` (device_mesh=2: a number of replicas)",
    "tensor_parallel_size": "there is no tensor parallelism here, so drop it",
    "save_distributed_checkpoint": "write state_dict_type='sharded', or 'full'",
    "overlap_comm": _ALWAYS,
    "contiguous_gradients": _ALWAYS,
    "use_orig_params": _ALWAYS,
    "limit_all_gathers": _ALWAYS,
    "sync_module_states": _ALWAYS,
    "find_unused_parameters": _ALWAYS,
    "gradient_as_bucket_view": _ALWAYS,
}


def explain(name: str, known: list[str]) -> str:
    """What to write in the place of an argument that there is not."""
    if name in _RENAMED:
        return f"has no argument `{name}` any more; {_RENAMED[name]}."
    if name in _ELSEWHERE:
        return f"has no argument `{name}`; {_ELSEWHERE[name]}."
    near = difflib.get_close_matches(name, known, n=1)
    return f"has no argument `{name}`" + (f"; did you mean `{near[0]}`?" if near else f". It has {', '.join(known)}.")


def takes_options(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates a constructor ``(self, config, ...)``: it takes the options of :class:`Config` in its place.

    Its signature, types and help are those of the options and of its other arguments, which LightningCLI reads. An
    argument of another name raises with what to write instead.
    """
    own = inspect.signature(init)
    this, _, *others = own.parameters.values()
    options = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None if option.default is MISSING else option.default,
            annotation=checks()[option.name][1].accepts or checks()[option.name][0],
        )
        for option in fields(Config)
    ]
    hints = get_type_hints(init)
    others = [parameter.replace(annotation=hints[parameter.name]) for parameter in others]
    signature = own.replace(parameters=[this, *options, *others], return_annotation=None)
    known = [parameter.name for parameter in [*options, *others]]

    @wraps(init)
    def initialise(*args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{type(args[0]).__name__} {explain(name, known)}")
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{type(args[0]).__name__}: {error}") from None
        chosen = {option.name: given.pop(option.name) for option in options if option.name in given}
        init(given.pop(this.name), Config(**chosen), **given)

    initialise.__signature__ = signature  # type: ignore[attr-defined]
    initialise.__annotations__ = {p.name: p.annotation for p in [*options, *others]} | {"return": NoneType}
    initialise.__doc__ = Config.__doc__
    del initialise.__wrapped__  # its signature is not ours
    return initialise
