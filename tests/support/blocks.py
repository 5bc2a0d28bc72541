"""A small language model of repeated blocks that draw random numbers and have much to save."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import models

WIDTH = 32


class Block(nn.Module):
    """Draws random numbers in the middle, which its backward must not draw again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, WIDTH]
        hidden = torch.sin(F.gelu(self.up(self.norm(x))))
        return x + torch.tanh(self.down(F.dropout(hidden, 0.3, self.training)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]
