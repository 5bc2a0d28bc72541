"""A small language model whose weights have many sizes, and rows that no world size divides."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support import models


class Block(nn.Module):
    """With a scale that all ranks hold."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, 2 * width + 1), nn.LayerNorm(2 * width + 1)
        self.down, self.scale = nn.Linear(2 * width + 1, width), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        return x + 0.1 * self.scale * self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """``rows``: of the embedding."""

    def __init__(self, width: int, rows: int = models.VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
