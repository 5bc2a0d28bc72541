"""A byte-level language model in plain PyTorch: the text, the model, a bigram baseline, and sampling.

Nothing here knows about Lightning or about sharding. `train_lm.py` trains this model; afterwards it uses this file
alone to load the checkpoint, to measure it again and to write text with it.
"""

import math
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 256  # every byte is a token
HOLD_OUT = 20  # every 20th file is for validation


# ---------------------------------------------------------------------------------------------------------------------
# Text


def list_files(folder: Path | None) -> list[Path]:
    """The files of `folder`, sorted; the `.py` files of Python's own standard library when it is None."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    skipped = {"__pycache__", "site-packages", "dist-packages"}
    files = []
    for path in sorted(root.rglob("*" if folder else "*.py")):
        parts = path.relative_to(root).parts
        if path.is_file() and skipped.isdisjoint(parts) and not any(part.startswith(".") for part in parts):
            files.append(path)
    return files


def load_text(folder: Path | None) -> tuple[Tensor, Tensor]:
    """The training text and the validation text, each `[bytes]` uint8. No file is in both."""
    files = list_files(folder)
    if len(files) < 2:
        raise ValueError(f"--data {folder}: {len(files)} file(s); one in {HOLD_OUT} is held out, so two are needed")
    validation = join_files(files[::HOLD_OUT])
    del files[::HOLD_OUT]
    return join_files(files), validation


def join_files(files: Iterable[Path]) -> Tensor:
    """`[bytes]` uint8: the contents of `files` with a newline between them."""
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """Pieces of a text: item `i` is `[context + 1]` uint8, the bytes from `starts[i]` on.

    One byte more than the context: bytes 0..context-1 are the input, bytes 1..context the targets.
    """

    def __init__(self, text: Tensor, starts: Tensor, context: int) -> None:
        self.text, self.starts, self.context = text, starts, context  # [bytes] uint8, [windows] int64

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.text[start : start + self.context + 1]

    def stacked(self) -> Tensor:
        """All of them, `[windows, context + 1]` uint8."""
        return self.text[self.starts[:, None] + torch.arange(self.context + 1)]


def adjacent_windows(text: Tensor, context: int) -> Windows:
    """All of `text` (`[bytes]` uint8), one window after the other: what an epoch of training goes through."""
    return Windows(text, torch.arange(0, len(text) - context, context), context)


def spread_windows(text: Tensor, context: int, count: int) -> Windows:
    """`count` windows evenly spread over `text` (`[bytes]` uint8), always the same ones: for validation."""
    room = len(text) - context - 1
    if room < 0:
        raise ValueError(f"the held-out text has {len(text)} bytes, a window {context + 1}: use a shorter --context")
    return Windows(text, torch.linspace(0, room, count, dtype=torch.float64).long(), context)


# ---------------------------------------------------------------------------------------------------------------------
# Model


@dataclass(frozen=True)
class ModelConfig:
    dim: int
    layers: int
    heads: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden_dim(self) -> int:
        """Width inside the MLP: 8/3 of `dim` (three matrices of it cost what two of 4 `dim` do), in steps of 32."""
        return math.ceil(self.dim * 8 / 3 / 32) * 32


class ByteLM(nn.Module):
    """Decoder-only transformer: pre-norm, rotary positions, SwiGLU, untied head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.dim % (2 * config.heads):
            raise ValueError(f"dim={config.dim} must be a multiple of 2 * heads={2 * config.heads}: rotary pairs")
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the byte after each position: `[batch, context]` integer -> `[batch, context, 256]`."""
        x = self.embed(tokens.long())  # [batch, context, dim]
        cos, sin = rotary_tables(tokens.shape[1], self.config.head_dim, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy in bits per byte, a float32 scalar. `windows` is `[batch, context + 1]` uint8."""
        logits = self(windows[:, :-1])  # [batch, context, 256]
        nats = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten().long())
        return nats / math.log(2)


class Block(nn.Module):
    """Attention and MLP, each after a norm, and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` is `[batch, context, dim]`, as is the result; `cos` and `sin` are `[context, head_dim / 2]`."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        nn.init.zeros_(self.out.weight)  # every block starts as the identity

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` is `[batch, context, dim]`, as is the result; `cos` and `sin` are `[context, head_dim / 2]`."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))  # [batch, context, 3, heads, head_dim]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, head_dim]
        heads = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        y: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return y


class SwiGLU(nn.Module):
    """The gated MLP: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)
        nn.init.zeros_(self.down.weight)  # as in Attention

    def forward(self, x: Tensor) -> Tensor:  # [..., dim] -> [..., dim]
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def rotary_tables(context: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, each `[context, head_dim / 2]`, with `like`'s device and dtype.

    The angles are computed in float32: bfloat16 cannot tell position 257 from 256.
    """
    half = torch.arange(head_dim // 2, device=like.device, dtype=torch.float32)
    position = torch.arange(context, device=like.device, dtype=torch.float32)
    angle = torch.outer(position, 10_000 ** (-2 * half / head_dim))  # radians
    return angle.cos().type_as(like), angle.sin().type_as(like)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs `(x[i], x[i + head_dim / 2])` by their angles. `x` is `[batch, heads, context, head_dim]`."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Use of a trained model, and what to compare it with


def load_checkpoint(path: Path | str, device: torch.device) -> ByteLM:
    """The model in a Lightning checkpoint, read with torch alone. Parameters keep the dtype that they were saved in."""
    checkpoint = torch.load(path, map_location=device, weights_only=True)
    with torch.device("meta"):  # no memory and no initial values: the checkpoint brings them
        model = ByteLM(ModelConfig(**checkpoint["hyper_parameters"]["model"]))
    weights = {name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()}
    model.load_state_dict(weights, assign=True)
    return model.eval()


@torch.no_grad()
def evaluate(model: ByteLM, windows: Windows, batch_size: int) -> float:
    """Mean loss over `windows` in bits per byte. `batch_size` must divide their number."""
    device = model.head.weight.device
    batches = torch.split(windows.stacked(), batch_size)  # each [batch, context + 1] uint8
    return sum(model.loss(batch.to(device)).item() for batch in batches) / len(batches)


@torch.no_grad()
def sample(model: ByteLM, prompt: bytes, count: int, context: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """`prompt` and `count` bytes after it, each drawn from the model given the last `context` bytes."""
    device = model.head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    text = torch.tensor([list(prompt)], device=device)  # [1, bytes]
    for _ in range(count):
        logits = model(text[:, -context:])[:, -1].float()  # [1, 256]
        following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)  # [1, 1]
        text = torch.cat((text, following), dim=1)
    return bytes(text[0].tolist())


def bigram_entropy(text: Tensor, windows: Windows) -> float:
    """Cross entropy on `windows`, in bits per byte, of a model that looks at the previous byte only.

    Counted on `text` (`[bytes]` uint8), one added to each count. It predicts exactly the bytes that `evaluate` does.
    """
    counts = torch.ones(VOCABULARY * VOCABULARY, dtype=torch.float64)
    for chunk in torch.split(text.unfold(0, 2, 1), 1 << 22):  # [pairs, 2] uint8
        counts += torch.bincount(pair_index(chunk), minlength=len(counts))
    table = counts.view(VOCABULARY, VOCABULARY)
    bits = -(table / table.sum(1, keepdim=True)).log2().flatten()  # [256 * 256]
    pairs = windows.stacked().unfold(1, 2, 1)  # [windows, context, 2] uint8
    return bits[pair_index(pairs)].mean().item()


def pair_index(pairs: Tensor) -> Tensor:
    """Each pair of bytes as one number: `[..., 2]` uint8 -> `[...]` int64 below 65536."""
    return pairs[..., 0].long() * VOCABULARY + pairs[..., 1]
