"""A model whose backward is so slow that what is reduced early is done before its end."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from tests.support import models


class Slow(torch.autograd.Function):
    """Its backward takes so long that what was reduced before it is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if grads[0].device.type == "cpu":
            torch.distributed.barrier()  # the other rank has started its reductions, too, so they need no rank any more
        time.sleep(0.2)
        return grads[0]


class SlowModel(models.ByteModel):
    """The backward of the first block begins late. `seen` is what `look` says when it comes to the embedding."""

    look: Any = staticmethod(lambda: None)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if x.requires_grad:
            x.register_hook(self.at_embedding)
        for number, layer in enumerate(self.layers):
            x = Slow.apply(layer(x)) if number == 0 else layer(x)
        return self.head(x) * self.scale + self.shift

    def at_embedding(self, grad: Tensor) -> None:
        self.seen = self.look()
