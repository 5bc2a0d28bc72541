"""Models whose frames Dynamo breaks, skips or shares, for test_graph_breaks.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import models

WIDTH = 10


class Block(models.Block):
    """The plain block: nothing breaks."""

    def __init__(self) -> None:
        super().__init__(WIDTH)


class Loop(nn.Module):
    """Experts in a loop that the data ends: the frame cannot be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = x + torch.tanh(expert(x)) / 4
            if x.abs().mean() > 0.95:
                break
        return x


class Experts(nn.Module):
    """A gate and four experts; those that get a token run. The last gets none, the third one of rank 0's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.rank = models.rank()  # the reference changes it

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights = self.gate(tokens).softmax(-1)
        chosen = torch.arange(len(tokens), device=x.device) % 2
        if self.rank == 0:
            chosen[0] = 2
        result = tokens
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            result = result.index_add(0, rows, self.experts[number](tokens[rows]) * weights[rows, number, None])
        return result.view_as(x)


class Uncompiled(nn.Module):
    """A layer that its author keeps away from the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Disabled(nn.Module):
    """Compiled layers on both sides of one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), Uncompiled()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.inner(F.gelu(self.first(x))))


class Handed(nn.Module):
    """A frame that is not compiled reads weights, and a compiled one uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @torch.compiler.disable
    def read(self) -> list[Tensor]:
        return [self.last.weight, self.last.bias]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        weight, bias = self.read()
        return x + F.linear(y, weight, bias) * weight.std()


class Break(nn.Module):
    """Two graphs: a break between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return x + self.last(y)


class TwoGraphs(nn.Module):
    """One weight on both sides of a break."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        torch._dynamo.graph_break()
        return x + self.linear(y) * self.linear.weight.mean()


class TiedFrames(nn.Module):
    """One weight in a compiled frame and in one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled, self.eager = nn.Linear(WIDTH, WIDTH), Uncompiled()
        self.eager.linear.weight = self.compiled.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.eager(torch.tanh(self.compiled(x)))


class Checkpointed(nn.Module):
    """Recomputes its inner layers in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return x + checkpoint(self.inner, y, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class OneRank(nn.Module):
    """Which of its branches is used depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rank = models.rank()  # the reference changes it

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.left(x) if self.rank == 0 else self.right(x))


class MoreOnOneRank(OneRank):
    """Rank 0 uses all of its parameters, the others a part: their unit is complete on one rank only."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.left(x))
        return x + torch.tanh(self.right(x)) if self.rank == 0 else x


class Front(nn.Module):
    """Embedding followed by a linear layer in a frame that is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.disable
    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens))


class Net(nn.Module):
    """Front, equal blocks, head. It lies one level down, so that `compile="model"` makes it one region."""

    def __init__(self, block: Callable[[], nn.Module], count: int = 3, front: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.front = nn.Embedding(models.VOCABULARY, WIDTH) if front is None else front()
        self.layers = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(WIDTH, models.VOCABULARY)
        self.round: bool | None = None  # checkpoints round the blocks: reentrant or not
        self.drop: tuple[int, ...] = ()

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocabulary]
        x = self.front(tokens)
        for number, layer in enumerate(self.layers):
            if number in self.drop:
                continue
            x = layer(x) if self.round is None else checkpoint(layer, x, use_reentrant=self.round)
        return self.output(x)

    def output(self, x: Tensor) -> Tensor:
        return self.head(x)


class UncompiledTiedHead(Net):
    """The head is the embedding, used in a frame that is not compiled; `bias` is read outside of its module."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.head.weight = self.front.weight

    @torch.compiler.disable
    def output(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head.weight, self.head.bias)


class ReadsOthers(Net):
    """Reads parameters of its blocks and of its head itself."""

    def output(self, x: Tensor) -> Tensor:
        mixed = F.linear(x, self.layers[0].up.weight) @ self.layers[1].down.weight.t()
        return F.linear(x + mixed, self.head.weight * 0.9, self.head.bias)


class UsedByOneRank(Net):
    """Its first block is used by rank 0 alone; its last by rank 1 alone."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.rank = models.rank()  # the reference changes it

    def forward(self, tokens: Tensor) -> Tensor:
        self.drop = (len(self.layers) - 1,) if self.rank == 0 else (0,)
        return super().forward(tokens)


def rounded(reentrant: bool) -> Net:
    """Plain blocks, each inside a checkpoint."""
    net = Net(Block)
    net.round = reentrant
    return net


def dropped(*numbers: int) -> Net:
    """Blocks that nobody calls."""
    net = Net(Block)
    net.drop = numbers
    return net
