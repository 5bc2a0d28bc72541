"""torchao's float8 layers: weights that are gathered as float8.

[Note: float8 layers] torchao's option for FSDP2, ``Float8LinearConfig(enable_fsdp_float8_all_gather=True)``, puts a
tensor of its own in the place of each weight, which FSDP2 asks for float8 rows. Here such a weight is a plain parameter
again, before the model is sharded, so that optimizers and checkpoints see float32 or bfloat16 numbers. The layer's
``forward`` in a compiled graph asks for the weight as float8, and for its scale, and gives both to torchao's own
``forward`` as what torchao would have made of the weight. What gathers move follows from that, see
[Note: low gathers] in csrc/low_gathers.cpp and [Note: float8 gathers] in csrc/float8.cpp. In eager code the layer reads
its weight in the parameters' dtype: autograd would keep a float8 weight from forward to backward, since only torchao
knows what it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code

from lightning_zerocompile.sharding.module_swap import BASE, CAST
from lightning_zerocompile.sharding.parameter import TRACED

DTYPE = torch.float8_e4m3fn


def _is_torchaos(kind: type, name: str) -> bool:
    return kind.__name__ == name and kind.__module__.startswith("torchao.float8.")


def plain_weights(model: nn.Module) -> None:
    """Puts a plain parameter in the place of each weight that torchao has wrapped for FSDP2, see [Note: float8 layers].

    It is the parameter that was wrapped, if that is still there.
    """
    plain: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not _is_torchaos(type(parameter), "WeightWithDynamicFloat8CastTensor"):
                continue
            if parameter not in plain:
                inner: Any = parameter
                value = inner._tensor
                plain[parameter] = value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach())
                plain[parameter].requires_grad_(parameter.requires_grad)
            module._parameters[name] = plain[parameter]


def asks_for_float8(module: nn.Module, name: str) -> bool:
    """Whether the module is a linear layer of torchao, whose weight ``name`` is to be gathered as float8."""
    base: Any = getattr(type(module), BASE, type(module))
    if name != "weight" or not _is_torchaos(base, "Float8Linear"):
        return False
    config: Any = module.config
    casts = (config.cast_config_weight, config.cast_config_weight_for_grad_input)
    kinds = {(one.scaling_type.value, one.scaling_granularity.value) for one in casts}
    one_scale = kinds == {("dynamic", "tensorwise")}
    return bool(config.enable_fsdp_float8_all_gather and one_scale and {one.target_dtype for one in casts} == {DTYPE})


@torch._dynamo.allow_in_graph
class _AsWeight(torch.autograd.Function):
    """A float8 value and its scale as torchao's float8 tensor; its gradient is that of the value."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, scale: Tensor, dtype: torch.dtype, config: Any) -> Tensor:
        """``data``: [out, in] of float8. ``scale``: []. ``dtype``: that torchao has cast from. ``config``: its own."""
        import torchao.float8.float8_training_tensor as float8  # type: ignore[import-untyped, unused-ignore]

        made: Tensor = float8.Float8TrainingTensor(data, scale, dtype, config, float8.GemmInputRole.WEIGHT)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None


class _Layer:
    """What torchao's ``forward`` reads of a layer, with a weight that was gathered as float8."""

    def __init__(self, module: Any, weight: Tensor) -> None:
        self.weight, self.bias = weight, module.bias
        self.config, self.linear_mm_config = module.config, module.linear_mm_config


def forward(self: Any, input: Tensor) -> Any:
    """``Float8Linear.forward`` of a layer whose weight can be gathered as float8."""
    base = getattr(type(self), BASE)
    source = self.__dict__.get(CAST + "weight")
    if source is None or not torch.compiler.is_compiling():
        return base.forward(self, input)
    full, handle, size, grad_dtype = self.__dict__[TRACED + "weight"]
    data = torch.ops.zerocompile.gather_cast.default(source, handle, size, grad_dtype)
    scale = torch.ops.zerocompile.float8_scale.default(data, handle)
    weight = _AsWeight.apply(data, scale, full.dtype, self.linear_mm_config)  # type: ignore[no-untyped-call]
    return base.forward(_Layer(self, weight), input)


skip_code(forward.__code__)  # Dynamo inlines it, and never starts with it
