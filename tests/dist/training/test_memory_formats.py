"""Weights keep their memory format (``channels_last``, transposed rows) in gathers, reductions, states and files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, assert_trains_like_ddp


class ConvBlock(nn.Module):
    """Two ranks do not divide its rows."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.mix = nn.Parameter(torch.randn(width, width + 1, width) / width)  # [o, k, i], of which k goes first

    def forward(self, x: Tensor) -> Tensor:  # [batch, width, height, width]
        assert _kept(self)
        return x + torch.einsum("oki,bihw->bohw", self.mix, torch.tanh(self.conv(x)))


class ConvModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 5 * 4)
        self.layers = nn.ModuleList(ConvBlock() for _ in range(3))
        self.head = nn.Linear(5, models.VOCABULARY)
        self.to(memory_format=torch.channels_last)
        for layer in self.layers:
            layer.mix = nn.Parameter(layer.mix.detach().transpose(1, 2).contiguous().transpose(1, 2))

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocabulary]
        x = self.embedding(tokens).unflatten(-1, (5, 4)).transpose(1, 2)  # as an image of length x 4
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(-1).transpose(1, 2))


def _last(value: Tensor) -> bool:
    return not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)


def _kept(block: Any) -> bool:
    return _last(block.conv.weight) and block.mix.stride() == (30, 1, 6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_it_trains_as_ddp_and_keeps_the_format(stage: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = ConvModel()
    trained = assert_trains_like_ddp(model, stage, **options)
    assert all(_kept(layer) for layer in model.layers)
    assert options == EAGER or trained.stats.graph_uses > 0


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_rows_gradients_and_states_are_laid_out_as_the_weight(stage: int) -> None:
    model = ConvModel()
    with engines.engine(model, stage, **EAGER, keep_gradients=True) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        engine.attach_optimizers([optimizer])
        batch = models.Batches(models.rank())[0]
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, batch))
        optimizer.step()
        master: Any = next(p for name, p in model.named_parameters() if name == "layers.1.conv.weight")
        for value in (master, master.grad, optimizer.state[master]["exp_avg"]):
            assert value._local_tensor.stride() == (45, 1, 15, 5)
        assert _kept(copy.deepcopy(model).layers[1])


class _Saves(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("stage", "kind"), [(1, "full"), (3, "full"), (3, "sharded")])
@on_ranks()
def test_a_checkpoint_has_the_format_and_is_resumed(stage: int, kind: Any, tmp_path: Path) -> None:
    path, batches = tmp_path / "a.ckpt", models.Batches(models.rank(), 2)  # the checkpoint ends an epoch
    fits = []
    for arguments in ({"callbacks": [_Saves(path)]}, {}):
        torch.manual_seed(0)
        module = models.Module(ConvModel, optimizer="adamw", lr=0.01)
        trainer = models.make_trainer(
            ZeroCompileStrategy(stage, state_dict_type=kind, **EAGER), max_steps=4, **arguments
        )
        trainer.fit(module, batches, **({} if arguments else {"ckpt_path": path, "weights_only": False}))
        fits.append(module)
    if kind == "full":
        saved = torch.load(path, weights_only=False)["state_dict"]
        assert _last(saved["model.layers.1.conv.weight"])
    assert all(_kept(module.model.layers[1]) for module in fits)
    assert models.deviation(*fits) == 0
