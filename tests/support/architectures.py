"""Architectures whose parameters are unlike a plain stack of linear layers, and their training beside a reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import models

WIDTH = 6


class Floats:
    """Different ``[4, 5, 6]`` inputs on each rank."""

    def __init__(self, rank: int, count: int = 10) -> None:
        generator = torch.Generator().manual_seed(100 + rank)
        self._batches = [torch.randn(4, 5, WIDTH, generator=generator) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Tensor:
        return self._batches[index]


def tokens_of(x: Tensor) -> Tensor:
    """Tokens from floats, so that every architecture takes the same inputs."""
    return (x[..., 0].abs() * 100).long() % models.VOCABULARY


class Tied(nn.Module):
    """The head is the embedding; a third use is a plain attribute of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(models.Block(WIDTH) for _ in range(2))
        self.layers[1].down.weight = self.layers[0].down.weight  # tied across blocks
        self.head = nn.Linear(WIDTH, models.VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(tokens_of(x))
        for layer in self.layers:
            y = layer(y)
        return self.head(y)


class Frozen(nn.Module):
    """Frozen parameters inside blocks, a frozen block part and a frozen scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.Block(WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        for layer in self.layers:
            layer.up.requires_grad_(False)
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


class Uneven(nn.Module):
    """Rows that the world size does not divide, fewer rows than ranks, no rows, 0 dimensions, strange strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 5)
        self.one_row = nn.Linear(5, 1)
        self.back = nn.Linear(1, WIDTH, bias=False)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.second_scalar = nn.Parameter(torch.tensor(-0.2))
        self.one = nn.Parameter(torch.ones(1))
        self.one_of_two_dimensions = nn.Parameter(torch.ones(1, 1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.no_columns = nn.Parameter(torch.zeros(3, 0))
        self.transposed = nn.Parameter(torch.randn(WIDTH, 3).t() / 4)
        self.cube = nn.Parameter(torch.randn(3, 2, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.back(F.gelu(self.one_row(F.gelu(self.first(x))))) * self.scalar + self.second_scalar
        y = y + (x @ self.transposed.t()) @ self.cube[:, 0]
        return y * self.one * self.one_of_two_dimensions + self.empty.sum() + self.no_columns.sum() + self.cube.mean()


class Buffers(nn.Module):
    """Buffers that the forward writes: persistent, not persistent, integer, replaced by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("replaced", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("temperature", torch.tensor(2.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.average.lerp_(y.mean((0, 1)), 0.1)
                self.replaced = self.replaced * 0.5 + y.amax((0, 1))
                self.count += 1
        return (y - self.average + self.replaced) * self.temperature * (1 + 0.1 * self.count)


class Collections(nn.Module):
    """Parameters in ParameterList and ParameterDict, read by index, slice, key and iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(3)])
        shift = nn.Parameter(torch.randn(5, 1))
        self.dict = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.2)), "shift": shift})
        self.nested = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.ModuleList([nn.Linear(WIDTH, WIDTH)])})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.list:
            x = torch.tanh(x @ weight)
        for key in self.nested:
            inner = self.nested[key]
            x = inner(x) if isinstance(inner, nn.Linear) else inner[0](x)
        total = self.list[1].mean() + sum(v.mean() for v in self.dict.values()) + sum(v.std() for v in self.list[1:])
        return x * self.dict["scale"] + self.dict["shift"] + total


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Embedding(models.VOCABULARY, 7, padding_idx=0)
        self.bag = nn.EmbeddingBag(models.VOCABULARY, 7, mode="mean")
        self.mix = nn.Bilinear(7, 7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = tokens_of(x)
        return self.mix(self.padded(tokens).mean(1), self.bag(tokens))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(5, 4, 3, padding=1)
        self.two = nn.Conv2d(1, 6, 3, groups=1, bias=False)
        self.grouped = nn.Conv2d(6, 6, 1, groups=3)
        self.transposed = nn.ConvTranspose2d(6, 2, 2)
        self.norm = nn.GroupNorm(2, 6)
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x).unsqueeze(1))
        return self.transposed(self.act(self.norm(self.grouped(y))))


class BatchNorms(nn.Module):
    """Two equal blocks with batch norm, and one without affine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU()) for _ in range(2)
        )
        self.plain = nn.BatchNorm1d(5, affine=False, momentum=None)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.plain(x))


class Attention(nn.Module):
    """Self-attention, and cross-attention with own projections and bias rows."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, 3, kdim=3, vdim=3, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.own(x, x, x, need_weights=True)
        z, _ = self.cross(y, y[..., :3], y[..., 3:], need_weights=False)
        return z + weights.square().sum(-1, keepdim=True)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH + 1, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, self.encoder(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.projected = nn.LSTM(14, 8, proj_size=3, batch_first=True)
        self.gru = nn.GRU(3, 5, batch_first=True)
        self.cell = nn.GRUCell(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, _) = self.lstm(x)
        y, _ = self.gru(self.projected(y)[0])
        return self.cell(y[:, 0], y[:, -1]) + h.mean()


class WeightNorms(nn.Module):
    """Both kinds of weight norm, and spectral norm, whose power iteration writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.old = torch.nn.utils.weight_norm(nn.Linear(WIDTH, 7))
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(7, WIDTH))
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(5, 4, 3))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.spectral(self.conv(self.new(torch.tanh(self.old(x)))))


class Scaled(nn.Module):
    """A spectral norm by hand, which reads its weight without gradients and then uses that value with them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("u", F.normalize(torch.linspace(-1, 1, WIDTH), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight, gain = self.linear.weight, self.gain
            v = F.normalize(weight.T @ self.u, dim=0)
            self.u.copy_(F.normalize(weight @ v, dim=0))
        sigma = self.u.clone() @ weight @ v
        return torch.tanh(F.linear(x, weight / sigma * gain, self.linear.bias))


class ReadWithoutGradients(nn.Module):
    """Values that are read under `no_grad` and used after it, in blocks and outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            weight, bias = self.head.weight, self.head.bias
        return F.linear(x, weight, bias)

    def penalty(self) -> Tensor:
        with torch.no_grad():
            weights = [layer.linear.weight for layer in self.layers]
        return sum(weight.pow(2).sum() for weight in weights)


class Parent(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(torch.tanh(self.inner(x)))


class Shared(nn.Module):
    """One module with two parents, which are blocks; and one block that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Parent(inner), Parent(inner)])
        self.again = models.Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.again(self.again(x))


class Unused(nn.Module):
    """A parameter that nobody uses, and a block that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.Block(WIDTH) for _ in range(3))
        self.never = nn.Parameter(torch.ones(3, 2))
        self.never_scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[0](x))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Autograd saves the weight as a conjugate view, and the mix as a real one."""
        x = self.front(x).to(torch.complex64) @ self.weight.mH
        x = torch.view_as_complex(torch.view_as_real(x) * torch.view_as_real(self.mix))
        return self.linear(x.abs())


class ReadOutside(nn.Module):
    """Its loss reads parameters outside of the modules that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.head.weight * self.scale, self.head.bias)

    def penalty(self) -> Tensor:
        """Read after the forward: of the head, of the blocks and of a 0-dim parameter."""
        blocks = sum(layer.up.weight.pow(2).sum() for layer in self.layers)
        return self.head.weight.pow(2).sum() + blocks + self.scale.square()


class Mixed(nn.Module):
    """Small, with everything that optimizers and clipping must see: blocks, few rows, one element, 0 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale + self.shift


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    c.__name__.lower(): c
    for c in (
        Tied, Frozen, Uneven, Buffers, Collections, Embeddings, Convolutions, BatchNorms, Attention, Transformer,
        Recurrent, WeightNorms, Shared, Unused, Complex, ReadOutside, ReadWithoutGradients,
    )
}  # fmt: skip


def objective(model: nn.Module, x: Tensor) -> Tensor:
    """A loss in which every output counts differently."""
    out = model(x)
    ramp = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    loss = (out * ramp).mean() + out.square().mean()
    return loss + 0.01 * model.penalty() if hasattr(model, "penalty") else loss  # type: ignore[operator]


class Net(L.LightningModule):
    """Trains one architecture."""

    def __init__(self, make: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
                 **arguments: Any) -> None:  # fmt: skip
        super().__init__()
        self.model = make()
        self.optimizer, self.arguments = optimizer, {"lr": 0.1, **arguments}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return objective(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], **self.arguments)


def whole(value: Tensor) -> Tensor:
    """A plain copy of a tensor or of all shards of one."""
    return (full_value(value) if isinstance(value, DTensor) else value).detach().cpu().clone()


Gradients = dict[str, Tensor | None]


def gradients_of(module: nn.Module) -> Gradients:
    return {n: None if p.grad is None else whole(p.grad) for n, p in module.named_parameters()}


@dataclass
class Watch(L.Callback):
    """Gradients of every step and names while the module is sharded."""

    gradients: list[Gradients] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    local_numel: int = 0
    full_numel: int = 0

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.gradients.append(gradients_of(module))
        self.names = [n for n, _ in module.named_parameters()]
        self.keys = list(module.state_dict())
        self.local_numel = sum(p.to_local().numel() for p in module.parameters())  # type: ignore[attr-defined]
        self.full_numel = sum(p.numel() for p in module.parameters())


def fit(module: L.LightningModule, strategy: ZeroCompileStrategy, steps: int = 4, **arguments: Any) -> Watch:
    watch = Watch()
    callbacks = [watch, *arguments.pop("callbacks", [])]
    data = Floats(models.rank())
    models.make_trainer(strategy, max_steps=steps, callbacks=callbacks, **arguments).fit(module, data)  # type: ignore[arg-type]
    return watch


def reference(module: Net, steps: int = 4, clip: Callable[[nn.Module], object] | None = None) -> list[Gradients]:
    """DDP in one process: the mean of the ranks' gradients; rank 0's buffers go into every forward; the buffers of
    this rank's last forward stay. Returns the gradients of every step."""
    module.to(models.device())
    data = [Floats(rank) for rank in range(models.world())]
    optimizer = module.configure_optimizers()
    seen = []
    mine: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        before = {n: b.clone() for n, b in module.named_buffers()}
        for rank in reversed(range(models.world())):  # rank 0 last: its buffers stay for the next step
            _load_buffers(module, before)
            loss = module.training_step(data[rank][step].to(models.device()), step)
            (loss / models.world()).backward()
            if rank == models.rank():
                mine = {n: b.clone() for n, b in module.named_buffers()}
        if clip is not None:
            clip(module)
        seen.append(gradients_of(module))
        optimizer.step()
    _load_buffers(module, mine)
    return seen


def _load_buffers(module: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in module.named_buffers():
        buffer.data = values[name].clone()


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest absolute difference of two dictionaries of tensors with the same keys; inf where one has None."""
    if ours.keys() != theirs.keys():
        raise AssertionError(f"keys differ: {sorted(ours.keys() ^ theirs.keys())}")
    worst = 0.0
    for name, left in ours.items():
        right = theirs[name]
        if (left is None) != (right is None):
            raise AssertionError(f"`{name}`: {left} here, {right} in the reference")
        if left is None or left.numel() == 0:
            continue
        if left.shape != right.shape or left.dtype != right.dtype:
            raise AssertionError(f"`{name}`: {left.shape} {left.dtype} here, {right.shape} {right.dtype} expected")
        worst = max(worst, (left.detach().cpu() - right.detach().cpu()).abs().max().item())
    return worst


class Squares(nn.Module):
    """Weights, their gradients and the activations all have one size: Inductor wants to reuse each for another.

    The backward goes on from the gradient of ``shift`` with zeros in some rows: Inductor wants to write them into it.
    """

    rows: Tensor

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.mix = nn.Parameter(0.1 * torch.randn(width, width))
        self.shift = nn.Parameter(0.1 * torch.randn(width, width))
        self.register_buffer("rows", torch.tensor([3, 5]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x)) + (layer.weight * self.mix).cos() @ x / len(x)
        return torch.cos((x @ self.mix).index_put((self.rows,), x.new_zeros(())) + self.shift)


class SquareModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Squares()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)
