"""Small models and the training runs that tests compare."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy

VOCABULARY, LENGTH, BATCH = 13, 6, 4


class Block(nn.Module):
    """Residual MLP whose inner width no small world size divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ByteModel(nn.Module):
    """Embedding, equal blocks, head; with a 0-dim and a 1-element parameter."""

    def __init__(self, width: int = 10, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocabulary]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale + self.shift


class Stacked(nn.Module):
    """Embedding, two blocks of width 10 that `block` makes, head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 10)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(10, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocabulary]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Normed(nn.Module):
    """Embedding, three blocks that `block` makes, a norm, and a head."""

    def __init__(self, block: Callable[[], nn.Module], width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.norm = norm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocabulary]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Whole(nn.Module):
    """A model as the strategy sees it, one level down: `compile="model"` makes it one region."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return self.model(*args)


class Module(L.LightningModule):
    """Next-token training of ``model``; keeps the losses of this rank."""

    def __init__(self, model: Callable[[], nn.Module] = ByteModel, optimizer: str = "sgd", lr: float = 0.5) -> None:
        super().__init__()
        self.model = model()
        self.optimizer, self.lr = optimizer, lr
        self.losses: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:  # [batch, length]
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.lr)
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def ranks_here() -> int:
    """On this node, or what plays one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def device() -> str:
    return "cuda" if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl" else "cpu"


class Batches:
    """Different data on each rank, on the device of the tests: ``[batch, length]`` tokens."""

    def __init__(self, rank: int, count: int = 100) -> None:
        generator = torch.Generator().manual_seed(100 + rank)
        batches = [torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(count)]
        self._batches = [batch.to(device()) for batch in batches]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Tensor:
        return self._batches[index]


def full(value: Any) -> Tensor:
    """The whole value of a DTensor, which all ranks ask for; an ordinary tensor as it is."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def pair(make: Callable[..., nn.Module] = Module, **arguments: Any) -> tuple[Any, Any]:
    """A model to shard, and an equal one that stays whole, on this rank's device."""
    model = make(**arguments)
    return model, copy.deepcopy(model).to(device())


def make_trainer(strategy: ZeroCompileStrategy | str, **arguments: Any) -> L.Trainer:
    """A quiet Trainer over the ranks of this group."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    defaults: dict[str, Any] = {
        "accelerator": device(), "devices": ranks_here(), "num_nodes": world() // ranks_here(), "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "use_distributed_sampler": False,
    }  # fmt: skip
    return L.Trainer(strategy=strategy, **(defaults | arguments))


def make_fabric(strategy: Any, **arguments: Any) -> L.Fabric:
    """A Fabric over the ranks of this group, launched."""
    here = ranks_here()
    fabric = L.Fabric(accelerator=device(), devices=here, num_nodes=world() // here, strategy=strategy, **arguments)
    fabric.launch()
    return fabric


@contextmanager
def heard() -> Iterator[list[str]]:
    """What `rank_zero_info` says on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class Record(L.Callback):
    """What the strategy knew when training ended, before the module was made whole."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.stats = trainer.strategy.stats  # type: ignore[attr-defined]
        self.compiled = trainer.strategy.compile_stats  # type: ignore[attr-defined]
        runtime = trainer.strategy.engine.runtime  # type: ignore[attr-defined]
        self.reads = {name: runtime.core.eager_reads_of(unit) for name, unit in runtime.unit_of.items()}
        self.local_numel = sum(p.to_local().numel() for p in module.parameters())  # type: ignore[attr-defined]
        self.full_numel = sum(p.numel() for p in module.parameters())


def train(module: Module, strategy: ZeroCompileStrategy, steps: int = 5, **arguments: Any) -> Record:
    """Trains on :class:`Batches` of this rank; the module is whole afterwards."""
    record = Record()
    callbacks = [record, *arguments.pop("callbacks", [])]
    make_trainer(strategy, max_steps=steps, callbacks=callbacks, **arguments).fit(module, Batches(rank()))
    return record


def fit_epochs(
    module: L.LightningModule, strategy: Any, epochs: int, path: str | None = None, **arguments: Any
) -> L.Trainer:
    """Three batches an epoch, one of validation after each."""
    trainer = make_trainer(strategy, max_epochs=epochs, num_sanity_val_steps=0, **arguments)
    trainer.fit(module, Batches(rank(), 3), Batches(rank(), 1), ckpt_path=path, weights_only=False)
    return trainer


def reference(module: Module, steps: int = 5, accumulate: int = 1) -> list[float]:
    """What DDP computes, in one process: the mean over ranks of each rank's gradient. Returns this rank's losses."""
    module.to(device())
    data = [Batches(r) for r in range(world())]
    optimizer = module.configure_optimizers()
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            for r in range(world()):
                loss = module.loss(data[r][step * accumulate + micro])
                (loss / world() / accumulate).backward()
                if r == rank():
                    losses.append(loss.item())
        optimizer.step()
    return losses


def deviation(left: nn.Module, right: nn.Module) -> float:
    """The largest absolute difference between two modules' parameters of the same names."""
    ours, theirs = dict(left.named_parameters()), dict(right.named_parameters())
    if ours.keys() != theirs.keys():
        raise AssertionError(f"parameter names differ: {sorted(ours.keys() ^ theirs.keys())}")
    apart = [
        (ours[n].detach().cpu().double() - theirs[n].detach().cpu().double()).abs().max()
        for n in ours
        if ours[n].numel()
    ]
    return float(torch.stack(apart).max())  # NaN if there is one


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    """Two modules have the same parameters and buffers, to the bit."""
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


class Routed(nn.Module):
    """Runs the layers that ``route`` names, in its order. Of ranks that use different layers: :func:`routed_batches`,
    and ``engines.routed_loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 10)
        self.layers = nn.ModuleList(Block(10) for _ in range(4))
        self.head = nn.Linear(10, VOCABULARY)
        self.route = [0]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in self.route:
            x = self.layers[index](x)
        return self.head(x)


def routed_batches(routes: Sequence[Sequence[list[int]]]) -> Callable[[int], list[tuple[list[int], Tensor]]]:
    """What ranks run: by rank, for each step a route and its batch. ``routes``: by step and rank; further ranks take
    them in turn."""
    return lambda rank: [(at[rank % len(at)], batch) for at, batch in zip(routes, Batches(rank), strict=False)]


def fit(module: L.LightningModule, strategy: ZeroCompileStrategy, steps: int, **arguments: Any) -> L.Trainer:
    trainer = make_trainer(strategy, max_steps=steps, **arguments)
    trainer.fit(module, Batches(rank()))
    return trainer


class Evaluated(Module):
    """Keeps what evaluation saw."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: list[float] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_rank", float(rank()), sync_dist=True, reduce_fx="sum")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch)
