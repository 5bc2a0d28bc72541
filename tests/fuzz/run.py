"""The sharded side: a Trainer with the strategy, in manual optimization, on every rank; and the comparison."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.sharding.full_values import full_value
from tests.fuzz import nets, reference
from tests.fuzz.nets import Boom
from tests.fuzz.play import Note, Side, attribute_of, make_optimizers
from tests.fuzz.program import Clip, Program, Step, Window, sums_early
from tests.support import models

TOLERANCE = 2e-6  # of the larger of 1 and the largest number beside it
_TIMEOUT = timedelta(seconds=20)


class Sharded(Side):
    def __init__(self, program: Program, module: Module) -> None:
        super().__init__(program, module.net)
        self.module, self.rank = module, models.rank()
        self.strategy: Any = module.trainer.strategy

    def _optimizers(self, raw: bool) -> list[Any]:
        found = self.module.optimizers(use_pl_optimizer=not raw)
        return found if isinstance(found, list) else [found]

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers(raw=True)

    def forward(self, number: int, trip: tuple[str, int] | None, penalty: str) -> Any:
        nets.set_calls(self.net, number)
        self.net.trip = trip
        try:
            loss = self.net(self.batch(self.rank, number, self.module.device)).square().mean()
        finally:
            self.net.trip = None
        return loss + reference.penalty_of(self.net, penalty)

    def sum(self, left: Any, right: Any) -> Any:
        return left + right

    def backward(self, loss: Any, retain: bool = False) -> bool:
        if loss.requires_grad:
            self.module.manual_backward(loss, retain_graph=retain)
        return bool(loss.requires_grad)

    def evaluate(self, number: int, how: str) -> None:
        mode = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": contextlib.nullcontext}[how]
        with mode():
            self.net(self.batch(self.rank, number, self.module.device))

    @contextlib.contextmanager
    def window(self, op: Window) -> Iterator[None]:
        try:
            with self.strategy.coalesce_grad_reduction(
                gather=op.gather, max_bytes=op.max_bytes, accumulate_dtype=torch.float32 if op.fp32 else None
            ):
                yield
        except RuntimeError as error:
            if op.fails in ("0", "1") and "failed inside window" in str(error):
                raise Boom("on another rank") from error
            raise
        if op.fails:
            self.note(f"the window of rank {self.rank} ended well although rank {op.fails} failed", {})

    def fail_at_end(self, who: str) -> None:
        if who in ("all", str(self.rank)):
            raise Boom("in a window")

    @contextlib.contextmanager
    def accumulation(self) -> Iterator[None]:
        with self.strategy.block_backward_sync():
            yield

    def step(self, op: Step, closure: Callable[[], None] | None) -> None:
        optimizers = self._optimizers(op.raw)
        optimizer = optimizers[min(op.of, len(optimizers) - 1)]
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure=closure)

    def zero(self, of: str, none: bool) -> None:
        if of == "each":
            for parameter in self.net.parameters():
                parameter.grad = None
        elif of == "module":
            self.net.zero_grad(set_to_none=none)
        else:
            optimizers = self._optimizers(raw=False)
            optimizers[min(int(of), len(optimizers) - 1)].zero_grad(set_to_none=none)

    def clip(self, op: Clip) -> None:
        optimizers = self._optimizers(raw=False)
        optimizer = optimizers[min(op.of, len(optimizers) - 1)]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if op.how == "torch":
            torch.nn.utils.clip_grad_norm_(parameters, op.value)
        elif op.how != "value" or any(p.grad is not None for p in parameters):
            self.module.clip_gradients(optimizer, op.value, op.how)

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else _whole(p.grad) for name, p in self.net.named_parameters()}

    def values(self, how: str) -> dict[str, Tensor | None]:
        if how == "attribute":
            return {name: attribute_of(self.net, name).detach().clone() for name, _ in self.net.named_parameters()}
        if how == "full":
            with self.strategy.full_parameters(self.net, writeback=False) as values:
                return {name: values[name].detach().clone() for name, _ in self.net.named_parameters()}
        return {name: p.clone().detach() for name, p in self.net.named_parameters()}

    def write(self, name: str, how: str) -> None:
        if how == "full":
            with self.strategy.full_parameters(self.net) as values:
                values[name].mul_(0.5)
            return
        with torch.no_grad():
            if how == "attribute":
                attribute_of(self.net, name).mul_(0.5)
            elif how == "attribute_data":
                attribute_of(self.net, name).data.mul_(0.5)
            elif how == "data":
                dict(self.net.named_parameters())[name].data.mul_(0.5)
            else:
                dict(self.net.named_parameters())[name].mul_(0.5)

    def scale(self) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    @contextlib.contextmanager
    def toggled(self, number: int) -> Iterator[None]:
        optimizer = self._optimizers(raw=False)[number]
        self.module.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.module.untoggle_optimizer(optimizer)

    def save(self) -> None:
        self.module.trainer.save_checkpoint(self.module.path)

    def load(self) -> None:
        state = torch.load(self.module.path, weights_only=False)["state_dict"]
        self.net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})


def _whole(value: Tensor) -> Tensor:
    return full_value(value.detach()).clone() if isinstance(value, torch.distributed.tensor.DTensor) else value.clone()


class Module(L.LightningModule):
    automatic_optimization = False

    def __init__(self, program: Program, path: str) -> None:
        super().__init__()
        self.program, self.path = program, path
        self.net = nets.build(program.model)
        self.side: Sharded | None = None

    def training_step(self, batch: Tensor, number: int) -> None:
        if self.side is None:
            self.side = Sharded(self.program, self)
        unequal = self.trainer.strategy.unequal() if self.program.options.unequal else contextlib.nullcontext()
        with unequal:
            self.side.play(number)

    def configure_optimizers(self) -> Any:
        return make_optimizers(self.net, self.program.options)


def body(program: Program, folder: str) -> list[str]:
    """What is wrong on this rank."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    options, steps = program.options, len(program.steps)
    module = Module(program, str(Path(folder) / "saved.ckpt"))
    nets.set_rank(module.net, models.rank())
    mode: Any = False if options.mode == "eager" else options.mode
    strategy = ZeroCompileStrategy(
        stage=options.stage, compile=mode, compile_options={"backend": "aot_eager"}, prefetch=options.prefetch,
        unit_bytes=options.unit_bytes, keep_gathered=options.keep_gathered,
        defer_grad_sync=options.defer_grad_sync, keep_gradients=options.keep_gradients, master_dtype=None,
        timeout=_TIMEOUT, offload="optimizer" if options.offload else False,
        recompute="blocks" if options.activations.startswith("again") else options.recompute,
        activation_offload=options.activations.endswith("host"),
        reshard_after_forward=2 if options.inner and models.world() == 4 else True,
        optimizer_in_backward=options.in_backward,
    )  # type: ignore[arg-type]  # fmt: skip
    trainer = L.Trainer(
        accelerator=models.device(), devices=models.world(), strategy=strategy, max_epochs=1, limit_train_batches=steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(steps, 1)))
    assert module.side is not None
    state = {name: value.clone() for name, value in module.net.state_dict().items()}
    notes: list[Note] = [*module.side.notes, ("in the end: the state", state)]
    right = reference.play(program, models.device(), models.world())
    wrong = differences(right, notes)
    # another order of sums rounds otherwise, and some models make much of that
    if wrong and (models.world() > 2 or sums_early(program)):
        nudged = [reference.play(program, models.device(), models.world(), seed) for seed in range(5)]
        wrong = differences(right, notes, nudged)
    return wrong


def differences(right: list[Note], notes: list[Note], nudged: Sequence[list[Note]] = ()) -> list[str]:
    """What is wrong in ``notes``. Numbers may be off by as much as those of ``nudged`` are."""
    said = [what for what, _ in notes]
    expected = [what for what, _ in right]
    if said != expected:
        return [f"noted {said}, not {expected}"]
    wrong = []
    for number, ((what, theirs), (_, mine)) in enumerate(zip(right, notes, strict=True)):
        if theirs.keys() != mine.keys():
            wrong.append(f"{what}: of {sorted(mine)}, not of {sorted(theirs)}")
            continue
        for name, value in theirs.items():
            other = mine[name]
            if (value is None) != (other is None):
                wrong.append(f"{what}: `{name}` is {_few(other)}, not {_few(value)}")
            elif value is not None and other is not None and value.shape != other.shape:
                wrong.append(f"{what}: `{name}` is {list(other.shape)}, not {list(value.shape)}")
            elif value is not None and other is not None and value.dtype != other.dtype:
                wrong.append(f"{what}: `{name}` is {other.dtype}, not {value.dtype}")
            elif value is not None and other is not None and value.numel():
                off = (value.cpu().double() - other.cpu().double()).abs().max().item()  # Lightning moves a module back
                allowed = TOLERANCE * max(1.0, value.double().abs().max().item())
                apart = [(value.cpu().double() - one[number][1][name].cpu().double()).abs().max() for one in nudged]  # type: ignore[union-attr]
                if not off <= max([allowed, *map(float, apart)]):
                    wrong.append(f"{what}: `{name}` is off by {off:.1e}: {_few(other)}, not {_few(value)}")
    return wrong


def _few(value: Tensor | None) -> str:
    return "None" if value is None else str(value.flatten()[:3].tolist())
