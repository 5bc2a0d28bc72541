"""How each system that `benchmark.py` compares trains: its model, and what runs its steps."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmark_measures import Meter
from byte_lm import ByteLM, ModelConfig, rotary_tables
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Of Hugging Face's Qwen3."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    tied: bool
    key_value_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151936


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 3072, True),
    "qwen3-4b": Shape(2560, 36, 32, 9728, True),
    "qwen3-8b": Shape(4096, 36, 32, 12288, False),
    "qwen3-14b": Shape(5120, 40, 40, 17408, False),
    "20b": Shape(5120, 56, 40, 17408, False),  # Qwen3-14B's layers, and more of them
    "qwen3-32b": Shape(5120, 64, 64, 25600, False),
    "70b": Shape(8192, 80, 64, 28672, False, vocabulary=128256),  # the sizes of Llama 3 70B
    "tiny": Shape(64, 2, 4, 128, False, key_value_heads=2, head_dim=16, vocabulary=512),
}
BYTE_LM = "byte-lm"  # the model of train_lm.py, with the sizes that it has on the device
STAGES = [f"stage_{stage}{scope}" for stage in (1, 2, 3) for scope in ("", "_model", "_beside")] + [
    "stage_3_spare",
    *(f"stage_{stage}_hybrid" for stage in (1, 2, 3)),
    "stage_3_inner",
]
SYSTEMS = (
    "limit",
    "limit_fp8",
    *(f"stage_{stage}_fp8" for stage in (1, 2, 3)),
    "stage_3_fp8_gathers",
    *(f"fsdp2{keep}_fp8" for keep in ("", "_keep")),
    *(name + loop for name in STAGES for loop in ("", "_trainer")),
    *(f"fsdp2{keep}{prefetch}" for keep in ("", "_keep") for prefetch in ("", "_prefetch1", "_prefetch2", "_tuned")),
    "fsdp2_hybrid",
    "fsdp2_inner",
    "ddp",
    *(f"deepspeed_{stage}{scope}" for stage in (1, 3) for scope in ("", "_compile")),
    "deepspeed_3_offload",
    "deepspeed_3_offload_torch",
)
ON_META = ("stage_1", "stage_2", "stage_3", "fsdp2", "fsdp2_keep")  # these can shard a model that is built on meta
PLANNED = (*(f"stage_{stage}{kind}" for stage in (1, 2, 3) for kind in ("", "_fp8")), "stage_3_fp8_gathers")
ADAPTED = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]  # linear layers with a LoRA adapter

Step = Callable[[list[Tensor]], Tensor]  # micro-batches, each [batch, seq] -> the last one's loss


@dataclass
class System:
    """A model that is set up for training.

    Attributes:
        numel: of all parameters.
        train: runs each meter's steps; yields those that are done.
        trained: elements of the parameters that have gradients; `None`: of all.
        offloaded: bytes of this rank that are in host memory now, and those copied between it and the device so far;
            `None`: nothing is offloaded, or nobody counts it.
    """

    numel: int
    train: Callable[[Sequence[Meter]], Iterator[Meter]]
    trained: int | None = None
    offloaded: Callable[[], tuple[int, int]] | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Models and data


class CheckpointedByteLM(ByteLM):
    """Blocks run again in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:  # as in ByteLM
        x = self.embed(tokens.long())
        cos, sin = rotary_tables(tokens.shape[1], self.config.head_dim, x)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if args.model == BYTE_LM:
            return byte_lm(device, device.type, args.checkpointing)
        return qwen3(args, device).train()
    finally:
        torch.set_default_dtype(default)


def byte_lm(device: torch.device, sizes: str, checkpointing: bool = False) -> nn.Module:
    """The model of train_lm.py, with the sizes that it has on that kind of device."""
    from train_lm import PRESETS

    config = ModelConfig(**{name: PRESETS[sizes][name] for name in ("dim", "layers", "heads")})
    with device:
        return (CheckpointedByteLM(config) if checkpointing else ByteLM(config)).train()


def qwen3(args: argparse.Namespace, device: torch.device) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[args.model]
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim, max_position_embeddings=40960, tie_word_embeddings=shape.tied, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with device:
        model = Qwen3ForCausalLM(config)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def wants_fp8(args: argparse.Namespace) -> bool:
    return "fp8" in args.system.split("_")


def to_float8(model: nn.Module, device: torch.device, gathers: bool = False) -> None:
    """Lets torchao compute the linear layers of the blocks in float8, by its recipe for whole tensors.

    Args:
        gathers: gathers move float8 weights, too (``enable_fsdp_float8_all_gather``).
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=device.type == "cpu")
    for layer in layers_of(model):
        convert_to_float8_training(layer, config=config)


def layers_of(model: Any) -> list[nn.Module]:
    if isinstance(model, ByteLM):
        return list(model.blocks)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of a model with adapters
    return list(base.model.layers)


def numel_of(model: nn.Module) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())  # ds_numel: a shard of DeepSpeed's


def trained_in(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# ---------------------------------------------------------------------------------------------------------------------
# Models on the meta device, and adapters


def to_shard(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model as a system gets it that shards it: whole and in float32, or with `--meta` and `--lora` without data.

    With `--lora` the model is frozen and in bfloat16, and adapters in float32 are trained. Each module without data has
    a `reset_parameters`, so that its initial values are the same in every system.
    """
    if not args.meta:
        return build_model(args, torch.float32, device)
    meta = torch.device("meta")
    model = build_model(args, torch.bfloat16 if args.lora else torch.float32, meta)
    if args.lora:
        import peft

        with meta:
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules=ADAPTED)
            )
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.reset_parameters = partial(initialize, module, name)
    return model


def initialize(module: nn.Module, name: str) -> None:
    for local_name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_meta:
            parameter.detach().copy_(initial_value(f"{name}.{local_name}", parameter, parameter.device))


def initial_value(name: str, like: Tensor, device: torch.device) -> Tensor:
    """Whole, and the same wherever it is drawn: ones for norms, zeros where an adapter ends, random numbers else."""
    value = torch.empty(like.shape, dtype=like.dtype, device=device)
    if like.dim() < 2:
        return value.fill_(1)
    if "lora_B" in name:
        return value.zero_()
    return value.normal_(0, 0.02, generator=torch.Generator(device).manual_seed(zlib.crc32(name.encode())))


@torch.no_grad()
def materialize(model: Any, device: torch.device) -> None:
    """Gives a model that FSDP2 has sharded on meta its data; only one parameter at a time is whole."""
    from torch.distributed.tensor import distribute_tensor

    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        value = initial_value(name, parameter, device)
        parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)


def compile_layers(model: nn.Module, args: argparse.Namespace) -> None:
    for layer in layers_of(model):
        layer.compile(dynamic=False, backend=args.backend)


def loss_of(model: Any, tokens: Tensor) -> Tensor:  # [batch, seq] -> []
    if tokens.dtype == torch.uint8:
        return ByteLM.loss(model, tokens)  # `model` may be a wrapper that only forwards calls
    return model(input_ids=tokens, labels=tokens).loss


def micro_batches(args: argparse.Namespace, seq: int, device: torch.device) -> Iterator[Tensor]:
    """Four (`--same-batch`: one) that come again and again, other ones on each rank; `[batch, seq]`, on `device`."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    if args.model == BYTE_LM:  # one byte more than the context, see Windows in byte_lm.py
        options: dict[str, Any] = {"size": (args.batch, seq + 1), "high": 256, "dtype": torch.uint8}
    else:
        options = {"size": (args.batch, seq), "high": min(32000, SHAPES[args.model].vocabulary)}
    count = 1 if args.same_batch else 4
    yield from itertools.cycle([torch.randint(generator=generator, **options).to(device) for _ in range(count)])


# ---------------------------------------------------------------------------------------------------------------------
# Loops


def bare(step: Step, args: argparse.Namespace, device: torch.device) -> Callable[[Sequence[Meter]], Iterator[Meter]]:
    """A loop of steps, with the data on the device."""

    def train(meters: Sequence[Meter]) -> Iterator[Meter]:
        for meter in meters:
            batches = micro_batches(args, meter.seq, device)
            for _ in range(meter.steps):
                meter.begin()
                meter.end(step(list(itertools.islice(batches, args.accumulate))))
            yield meter

    return train


def backward(loss: Tensor, args: argparse.Namespace) -> None:
    """The mean over the micro-batches of a step, as Lightning and DeepSpeed take it."""
    (loss / args.accumulate if args.accumulate > 1 else loss).backward()


def adamw(parameters: Any, args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=args.lr, fused=True)


def muon(parameters: Any, args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=args.lr, adjust_lr_fn="match_rms_adamw")


def matrices_of(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for layer in layers for p in layer.parameters() if p.dim() == 2]


def optimizers(model: nn.Module, args: argparse.Namespace, parameters: Any = None) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices of the layers, and AdamW for all else.

    Args:
        parameters: what is updated in the place of the model's trained parameters, in their order.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    updated = trained if parameters is None else list(parameters)
    if args.optimizer == "adamw":
        return [adamw(updated, args)]
    matrices = set(matrices_of(layers_of(model)))
    parts: dict[bool, list[Any]] = {True: [], False: []}
    for own, one in zip(trained, updated, strict=True):
        parts[own in matrices].append(one)
    return [muon(parts[True], args), adamw(parts[False], args)]


def finish(
    optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, loss: Tensor, args: argparse.Namespace
) -> Tensor:
    if args.clip:
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


# ---------------------------------------------------------------------------------------------------------------------
# Systems


def limit(args: argparse.Namespace, device: torch.device) -> System:
    model = build_model(args, torch.bfloat16, device)
    numel = numel_of(model)
    if wants_fp8(args):
        to_float8(model, device)
    compile_layers(model, args)
    updates = shares(model, args, device)

    def step(batches: list[Tensor]) -> Tensor:
        for tokens in batches:
            loss = loss_of(model, tokens)
            backward(loss, args)
        for optimizer in updates:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return System(numel, bare(step, args, device))


def shares(model: nn.Module, args: argparse.Namespace, device: torch.device) -> list[torch.optim.Optimizer]:
    """This rank's part of the updates, in float32: of all elements, or the matrices of as many layers, and of the rest.

    Where the ranks do not divide the layers, Muon's part is that of the rank with most layers.
    """
    world, numel = dist.get_world_size(), numel_of(model)

    def randoms(*sizes: int) -> nn.Parameter:
        share = nn.Parameter(torch.randn(sizes, device=device))
        share.grad = torch.randn_like(share)
        return share

    if args.optimizer == "adamw":
        return [adamw([randoms(-(-numel // world))], args)]
    layers = layers_of(model)
    rest = numel - sum(p.numel() for p in matrices_of(layers))
    mine = [randoms(*p.shape) for p in matrices_of(layers[::world])]
    return [muon(mine, args), adamw([randoms(-(-rest // world))], args)]


def ddp(args: argparse.Namespace, device: torch.device) -> System:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = build_model(args, torch.float32, device)
    numel = numel_of(model)
    compile_layers(model, args)
    devices = [device.index] if device.type == "cuda" else None
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    if not args.reduce_fp32:
        wrapped.register_comm_hook(None, bf16_compress_hook)
    updates = optimizers(model, args)

    def step(batches: list[Tensor]) -> Tensor:
        for k, tokens in enumerate(batches):
            with contextlib.nullcontext() if k == len(batches) - 1 else wrapped.no_sync():
                with torch.autocast(device.type, torch.bfloat16):
                    loss = loss_of(wrapped, tokens)
                backward(loss, args)
        return finish(updates, model, loss, args)

    return System(numel, bare(step, args, device))


def fsdp2(args: argparse.Namespace, device: torch.device) -> System:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if wants_fp8(args):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    model = to_shard(args, device)
    numel, trained = numel_of(model), trained_in(model)
    reduce_dtype = torch.float32 if args.reduce_fp32 else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    words, world = args.system.split("_"), dist.get_world_size()
    reshard: bool | int = world // args.groups if "inner" in words else "keep" not in words
    sizes = (args.groups, world // args.groups) if "hybrid" in words else (world,)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    if wants_fp8(args):
        to_float8(model, device, gathers=True)
    layers = layers_of(model)
    compile_layers(model, args)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if args.meta:
        materialize(model, device)
    if "tuned" in words and device.type == "cuda":
        tune(model, layers)
    if "_prefetch" in args.system or "tuned" in words:
        ahead = 1 if "tuned" in words else int(args.system[-1])
        for k, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[k + 1 : k + 1 + ahead])
            layer.set_modules_to_backward_prefetch(layers[max(0, k - ahead) : k][::-1])
    updates = optimizers(model, args)

    def step(batches: list[Tensor]) -> Tensor:
        for tokens in batches:
            loss = loss_of(model, tokens)
            backward(loss, args)
        result = finish(updates, model, loss, args)
        if wants_fp8(args):
            precompute_float8_dynamic_scale_for_fsdp(model)
        return result

    return System(numel, bare(step, args, device), trained)


def tune(model: Any, layers: Sequence[Any]) -> None:
    """What FSDP2 offers for NVLink; some of it is in newer versions of torch only."""
    for module in (*layers, model):
        if hasattr(module, "set_symm_mem_for_comm"):
            module.set_symm_mem_for_comm()
        else:
            module.set_allocate_memory_from_process_group_for_comm(True)
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group()


def our_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of `Config` and of `ZeroCompileStrategy`."""
    _, stage, *words = args.system.split("_")
    spare = {"keep_gathered": "auto"} if "spare" in words else {}
    beside = {"optimizer_in_backward": True} if "beside" in words else {}
    hosts: dict[str, Any] = {"device_mesh": args.groups} if "hybrid" in words else {}
    if "inner" in words:
        hosts = {"reshard_after_forward": args.processes // args.groups}
    return {
        "stage": int(stage),
        "compile": "model" if "model" in words else "blocks",
        "reduce_dtype": torch.float32 if args.reduce_fp32 else None,
        "copy_engine": "auto" if args.hosts == 1 else False,
        **hosts,
        **spare,
        **beside,
        **args.options,
        "compile_options": {"backend": args.backend, "dynamic": False} | args.options.get("compile_options", {}),
    }


def ours(args: argparse.Namespace, device: torch.device) -> System:
    from lightning_zerocompile.config import Config
    from lightning_zerocompile.engine import Engine
    from lightning_zerocompile.plugins.clipping import clip_norm

    model = to_shard(args, device)  # the same start as fsdp2's
    numel, trained = numel_of(model), trained_in(model)
    if wants_fp8(args):
        to_float8(model, device, gathers="gathers" in args.system.split("_"))
    config, nodes = Config(**our_options(args)), args.hosts
    engine = Engine(model, device, config, torch.bfloat16, dist.get_backend(), nodes=nodes)
    updates = optimizers(model, args)
    engine.attach_optimizers(updates)

    def step(batches: list[Tensor]) -> Tensor:
        def closure() -> Tensor:
            if args.clip:  # as the strategy does it
                with engine.runtime.reads.alike():
                    clip_norm(model.parameters(), args.clip)
            return loss

        for k, tokens in enumerate(batches):
            deferred = contextlib.nullcontext() if k == len(batches) - 1 else engine.accumulation()
            with engine.training_step(), deferred:
                loss = loss_of(model, tokens)
                with engine.backward(loss):
                    backward(loss, args)
        for optimizer in updates:
            engine.step(optimizer, closure if optimizer is updates[0] else lambda: loss)
        return loss.detach()

    def offloaded() -> tuple[int, int]:
        stats = engine.runtime.stats()
        return stats.offload_bytes, stats.offload_in_bytes + stats.offload_out_bytes

    return System(numel, bare(step, args, device), trained, offloaded if config.offload else None)


def predicted(args: argparse.Namespace, seq: int) -> int:
    """The peak in bytes that this strategy's plan says of a rank; needs no device, and no other rank."""
    from lightning_zerocompile.config import Config
    from lightning_zerocompile.plan.machine import Machine
    from lightning_zerocompile.plan.plan import make_plan

    config = Config(**our_options(args))
    model = to_shard(argparse.Namespace(**{**vars(args), "meta": True}), torch.device("meta"))
    if wants_fp8(args):
        to_float8(model, torch.device(args.device), gathers="gathers" in args.system.split("_"))
    plan = make_plan(
        model,
        torch.zeros(args.batch, seq, dtype=torch.int64),  # their numbers may choose what is computed
        world_size=args.processes,
        config=config,
        machine=Machine(gloo=args.device == "cpu"),
        compute_dtype=torch.bfloat16,
        stages=[config.chosen_stage],
        accumulate=args.accumulate,
        step=loss_of,
        optimizer=lambda parameters: optimizers(model, args, parameters),
    )
    return plan.stages[0].memory.peak


def ours_by_trainer(args: argparse.Namespace, device: torch.device) -> System:
    """The same through Lightning: its loop, hooks, closure and transfer of batches."""
    from benchmark_trainer import fit

    model = build_model(args, torch.float32, device)
    return System(numel_of(model), lambda meters: fit(model, meters, our_options(args), args, device))


def deepspeed(args: argparse.Namespace, device: torch.device) -> System:
    """With `_compile`: DeepCompile; otherwise eager, as its documentation starts it. With `_offload`: ZeRO-Offload."""
    import deepspeed
    import torch._dynamo  # here, since `zero.Init` replaces functions that it looks at when it is imported

    _, number, *words = args.system.split("_")
    stage, compiled = int(number), "compile" in words
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": args.clip,
        "zero_allow_untested_optimizer": True,  # torch's own fused AdamW, as everywhere here
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if args.reduce_fp32:
        config["communication_data_type"] = "fp32"
    if "offload" in words:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        config["zero_force_ds_cpu_optimizer"] = "torch" not in words
    if compiled:
        config["compile"] = {"deepcompile": True}
    deepspeed.init_distributed(dist.get_backend())
    sharded = deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext()
    with sharded:
        model = build_model(args, torch.bfloat16, device)  # other random numbers than in fp32, so other losses
    numel = numel_of(model)
    optimizer = adamw(model.parameters(), args)
    if "offload" in words and "torch" not in words:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiled at its first use

        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=args.lr, weight_decay=optimizer.defaults["weight_decay"])
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, model_parameters=model.parameters()
    )
    if compiled:
        engine.compile()

    def step(batches: list[Tensor]) -> Tensor:
        for tokens in batches:
            loss = loss_of(engine, tokens)
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()
        return loss.detach()

    return System(numel, bare(step, args, device))


def set_up(args: argparse.Namespace, device: torch.device) -> System:
    families = {"limit": limit, "ddp": ddp, "fsdp2": fsdp2, "stage": ours, "deepspeed": deepspeed}
    family = args.system.split("_")[0]
    return (ours_by_trainer if args.system.endswith("_trainer") else families[family])(args, device)
