"""What the strategy's arguments allow: a wrong one names itself, what is allowed and what to do instead."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import typing
from datetime import timedelta
from typing import Any

import jsonargparse
import pytest
import torch

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.arguments import _ELSEWHERE, _RENAMED
from lightning_zerocompile.config import Config

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"recompute": 1.5}, "from 0 .* to 1"),
    ({"recompute": -0.1}, "from 0 .* to 1"),
    ({"recompute": True}, "from 0 .* to 1"),
    ({"recompute": "layers"}, "'blocks'"),
    ({"recompute": 0.5, "compile": False}, "use recompute='blocks'"),
    ({"recompute": "blocks", "compile": "model"}, "use a number, recompute=1"),
    ({"activation_offload": "blocks"}, "choose True or False"),
    ({"activation_offload": True, "compile": "model"}, "one graph saves all at its end"),
    (
        {"activation_offload": True, "compile_options": {"mode": "reduce-overhead"}},
        "CUDA graphs .compile_options={'mode': 'reduce-overhead'}. keep it",
    ),
    ({"stage": 0}, "`stage=0`.*choose 1"),
    ({"stage": 4}, "`stage=4`.*choose 1"),
    ({"stage": True}, "`stage=True`"),
    ({"stage": "3"}, "`stage='3'`"),
    ({"compile": "layers"}, "`compile='layers'`.*'blocks'"),
    ({"compile": None}, "`compile=None`.*'blocks'"),
    ({"compile_options": {"backend": "eager"}}, "{'backend': 'eager'}.*aot_eager.*compile=False"),
    ({"compile_options": {"mode": "fast"}}, "{'mode': 'fast'}.*max-autotune-no-cudagraphs"),
    ({"compile_options": {"options": {"cudagraph_policy": "x"}}}, "`cudagraph_policy`.*drop it"),
    (
        {"compile_options": {"mode": "reduce-overhead", "options": {"triton.cudagraph_trees": False}}},
        "cudagraph_trees.*drop the option",
    ),
    (
        {"compile_options": {"mode": "reduce-overhead", "options": {"cpp_wrapper": True}}},
        "`cpp_wrapper`.*another 'mode'",
    ),
    ({"compile_options": {"backend": "aot_eager", "mode": "default"}}, "'mode' and 'options' belong to Inductor"),
    ({"param_dtype": "bf61"}, "`param_dtype='bf61'`.*bfloat16"),
    ({"reduce_dtype": "float61"}, "`reduce_dtype='float61'`.*bfloat16"),
    ({"master_dtype": torch.int64}, "`master_dtype=torch.int64`"),
    ({"param_dtype": 16}, "`param_dtype=16`"),
    ({"unit_bytes": -1}, "`unit_bytes=-1`.*positive"),
    ({"unit_bytes": 0}, "`unit_bytes=0`.*positive"),
    ({"unit_bytes": 1.5}, "`unit_bytes=1.5`.*positive"),
    ({"unit_bytes": True}, "`unit_bytes=True`.*positive"),
    ({"state_dict_type": "dcp"}, "`state_dict_type='dcp'`.*'full'.*'sharded'"),
    ({"state_dict_type": None}, "`state_dict_type=None`.*'full'.*'sharded'"),
    ({"copy_engine": "yes"}, "`copy_engine='yes'`.*'auto'.*True.*False"),
    ({"copy_engine": None}, "`copy_engine=None`.*'auto'.*True.*False"),
    ({"defer_grad_sync": "local"}, "`defer_grad_sync='local'`.*True or False"),
    ({"keep_gathered": [""]}, "`keep_gathered=.*names of modules"),
    ({"keep_gathered": -1}, "`keep_gathered=-1`.*a number of bytes"),
    ({"keep_gathered": None}, "`keep_gathered=None`.*'auto'"),
    ({"fp32_modules": [""]}, "`fp32_modules=.*'norms'"),
    ({"fp32_modules": torch.float32}, "`fp32_modules=torch.float32`.*names of modules"),
    ({"unequal_work": "all"}, "`unequal_work='all'`.*In training write `with strategy.unequal"),
    ({"unequal_work": "batches"}, "`unequal_work='batches'`.*False .ranks may have different numbers of batches"),
    ({"prefetch": -1}, "`prefetch=-1`.*0 or more"),
    ({"timeout": timedelta(seconds=-1)}, "`timeout=.*positive"),
    ({"timeout": 0}, "`timeout=0`.*seconds"),
    ({"timeout": "5"}, "`timeout='5'`.*timedelta"),
    ({"unit_bytes": "64 apples"}, "`unit_bytes='64 apples'`.*'64MiB'"),
    ({"fp32_modules": "norm"}, r"`fp32_modules='norm'` must be 'norms'.*'\*norm'"),
    ({"start_method": "spawn"}, r"`start_method='spawn'`.*'popen'"),
    ({"compile_options": {"options": ["max_autotune"]}}, "'options': .*dictionary"),
    ({"compile_options": ["dynamic"]}, "`compile_options=.*must be a dictionary of torch.compile's"),
    ({"compile_options": {"fullgraph": True}}, "`compile_options=.*`dynamic` and `options`"),
    ({"compile_options": {"dynamic": "yes"}}, "'dynamic': 'yes'.*True, False or None"),
    ({"keep_gradients": 1}, "`keep_gradients=1`.*True or False"),
    ({"unshard_after_fit": "no"}, "`unshard_after_fit='no'`.*True or False"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[str(arguments) for arguments, _ in WRONG])
def test_wrong_argument_is_named_with_the_remedy(arguments: dict[str, Any], message: str) -> None:
    """A wrong value raises in the constructor, before any process is started."""
    with pytest.raises(ValueError, match=message):
        ZeroCompileStrategy(**arguments)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stagee", "did you mean `stage`?"),
        ("kept_gathered", "did you mean `keep_gathered`?"),
        ("xyz", "It has stage, compile, compile_options, "),
        ("cpu_offload", "write offload='optimizer'"),
        ("offload_parameters", "write offload='optimizer' (parameters are sharded"),
        ("sharding_strategy", "write stage=3 for FULL_SHARD"),
        ("auto_wrap_policy", "repeated blocks are found, so drop it"),
        ("activation_checkpointing_policy", "write recompute='blocks'"),
        ("reduce_bucket_size", "write `unit_bytes`"),
        ("stage3_prefetch_bucket_size", "write `prefetch`"),
        ("overlap_comm", "it is always so here, so drop it"),
    ],
)
def test_an_argument_that_there_is_not(name: str, said: str) -> None:
    """A misspelt one, and what FSDPStrategy and DeepSpeedStrategy call it."""
    with pytest.raises(
        TypeError, match=re.escape(f"ZeroCompileStrategy has no argument `{name}`") + ".*" + re.escape(said)
    ):
        ZeroCompileStrategy(**{name: 3})  # type: ignore[arg-type]


def test_all_that_is_advised_exists() -> None:
    """Whatever an error says to write is an argument."""
    names = set(inspect.signature(ZeroCompileStrategy).parameters)
    for advice in [*_RENAMED.values(), *_ELSEWHERE.values()]:
        assert set(re.findall(r"\b(\w+)=", advice)) <= names | {"precision", "memory"}, advice
    assert names.isdisjoint([*_RENAMED, *_ELSEWHERE])


@pytest.mark.parametrize("value", [torch.bfloat16, "bfloat16", "torch.bfloat16", "bf16"])
def test_dtypes_are_taken_by_value_and_by_name(value: torch.dtype | str) -> None:
    assert ZeroCompileStrategy(reduce_dtype=value).config.reduce_dtype is torch.bfloat16


def test_units_and_seconds() -> None:
    config = ZeroCompileStrategy(unit_bytes="64MiB", keep_gathered="1.5GB", timeout=60, master_dtype="fp32").config
    assert (config.unit_bytes, config.keep_gathered, config.timeout) == (2**26, 1_500_000_000, timedelta(minutes=1))
    assert config.master_dtype is torch.float32
    assert ZeroCompileStrategy(keep_gathered="layers.0").config.keep_gathered == ("layers.0",)


def test_defaults() -> None:
    """Without arguments: ZeRO-3, blocks compiled by Inductor, fp32 masters, the module whole after fit."""
    config = ZeroCompileStrategy().config
    assert (config.stage, config.compile, config.backend) == (3, "blocks", "inductor")
    assert (config.param_dtype, config.reduce_dtype, config.master_dtype) == (None, None, torch.float32)
    assert config.unshard_after_fit and not config.keep_gradients


def test_strategy_passes_on_every_option() -> None:
    """The constructor and Config have the same options with the same defaults."""
    parameters = inspect.signature(ZeroCompileStrategy.__init__).parameters
    config = ZeroCompileStrategy().config
    for field in dataclasses.fields(Config):
        assert field.name in parameters
        default = parameters[field.name].default
        assert getattr(config, field.name) == ({} if field.default is dataclasses.MISSING else default)


def test_options_of_the_caller_are_copied() -> None:
    options: dict[str, Any] = {"max_autotune": False}
    config = ZeroCompileStrategy(compile_options={"options": options}).config
    options["max_autotune"] = True
    assert config.options == {"max_autotune": False}


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZeroCompileStrategy().config.stage = 1  # type: ignore[misc]


def test_options_without_compilation_warn() -> None:
    with pytest.warns(UserWarning, match="no effect with compile=False"):
        ZeroCompileStrategy(compile=False, compile_options={"mode": "default"})


def test_every_argument_is_typed_for_the_command_line() -> None:
    """LightningCLI builds its options from the annotations: each must resolve, none may hide in ``**kwargs``."""
    hints = typing.get_type_hints(ZeroCompileStrategy.__init__)
    for name, parameter in inspect.signature(ZeroCompileStrategy.__init__).parameters.items():
        assert parameter.kind is not inspect.Parameter.VAR_KEYWORD
        assert name == "self" or name in hints


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("stage=auto", "auto"),
        ("keep_gathered=20GiB", 20 * 2**30),
        ("keep_gathered=auto", "auto"),
        ("keep_gathered=[layers.0]", ("layers.0",)),
        ("timeout=60", timedelta(minutes=1)),
        ("device_mesh=nodes", "nodes"),
        ("device_mesh=[2, 4]", (2, 4)),
        ("recompute=blocks", "blocks"),
        ("recompute=0.5", 0.5),
        ("compile_options={mode: reduce-overhead, dynamic: false}", {"mode": "reduce-overhead", "dynamic": False}),
        ("compile_options.backend=aot_eager", {"backend": "aot_eager"}),
        ("fp32_modules=[norms]", ("norms",)),
        ("unequal_work=evaluation", "evaluation"),
        ("param_dtype=bf16", torch.bfloat16),
    ],
)
def test_options_on_the_command_line(written: str, value: Any) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ZeroCompileStrategy, "strategy")
    made = parser.instantiate_classes(parser.parse_args([f"--strategy.{written}"])).strategy
    assert getattr(made.config, re.split(r"[.=]", written)[0]) == value


def test_strategy_can_be_pickled_before_launch() -> None:
    """Launchers that spawn send the strategy to the other processes."""
    strategy = pickle.loads(pickle.dumps(ZeroCompileStrategy(stage=2, param_dtype="bfloat16")))
    assert strategy.config == Config(stage=2, param_dtype=torch.bfloat16, timeout=strategy.config.timeout)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"checkpoint": "sharded"}, "state_dict_type"),
        ({"accumulate": "local"}, "defer_grad_sync"),
        ({"whole_values": ["Shampoo"]}, "full_param_optimizers"),
        ({"backend": "aot_eager"}, "compile_options={'backend': 'aot_eager'}"),
        ({"mode": "reduce-overhead"}, "compile_options={'mode': 'reduce-overhead'}"),
        ({"dynamic": False}, "compile_options={'dynamic': True}"),
        ({"options": {}}, "compile_options={'options': "),
        ({"activation_budget": 0}, "recompute"),
        ({"activation_checkpointing": "blocks"}, "recompute='blocks'"),
        ({"replicas": 2}, "device_mesh"),
        ({"memory_budget": "auto"}, "keep_gathered"),
        ({"keep_casts": True}, "keep_gathered='auto'"),
        ({"memory_limit": 10}, "python -m lightning_zerocompile.plan --gpu-memory"),
    ],
)
def test_an_old_name_raises_with_the_new_one(old: dict[str, Any], new: str) -> None:
    with pytest.raises(TypeError, match=f"`{next(iter(old))}` any more; (use|ask) `?{new}"):
        ZeroCompileStrategy(**old)


@pytest.mark.parametrize(
    ("old", "why"),
    [
        ({"cast_forward_inputs": True}, "with `param_dtype` what modules are passed is always cast"),
        ({"update_in_one_pass": True}, "one kernel updates and casts wherever it makes torch's update to the bit"),
        ({"hierarchical_collectives": True}, "NCCL chooses by topology"),
        ({"offload_update": "cpu"}, "optimizers stream through the device"),
        ({"offload_budget": 2**30}, ".*large units stay on the device where that costs no memory"),
    ],
)
def test_an_argument_that_nothing_replaces_raises_with_the_reason(old: dict[str, Any], why: str) -> None:
    with pytest.raises(TypeError, match=rf"`{next(iter(old))}` any more; {why}, so drop it"):
        ZeroCompileStrategy(**old)


def test_the_signature_holds_the_new_names_only() -> None:
    names = inspect.signature(ZeroCompileStrategy).parameters  # what LightningCLI reads
    assert {"state_dict_type", "defer_grad_sync", "full_param_optimizers"} <= set(names)
    assert not {"checkpoint", "accumulate", "whole_values", "args", "kwargs"} & set(names)


def test_compile_true_means_blocks() -> None:
    assert ZeroCompileStrategy(compile=True).config.compile == "blocks"
