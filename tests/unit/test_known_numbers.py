"""What a plan knows of numbers: a step that looks at integers and booleans of its batch goes the way that the run goes.

See [Note: known numbers] in plan/known_numbers.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.plan import Plan, make_plan
from lightning_zerocompile.plan.trace import FakeStep, PlanError

WIDTH, ROWS = 16, 8
SCOPES = [False, "blocks"]
EAGER = Config(compile=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.hidden = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # [rows, WIDTH], [rows]
        result = torch.relu(self.own(x))
        return result if mask is None else result + self.hidden(x) * mask[:, None]


class Masked(nn.Module):
    """Leaves a mask away that hides nothing, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.told: list[int] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        lengths, x = batch["lengths"], batch["x"]
        lengths[0] += 0  # writes to what the user has given
        mask = torch.arange(ROWS) < lengths[0]
        self.told[:] = [int(lengths.max()), int(mask.nonzero().shape[0]), lengths[0].item()]
        for layer in self.layers:
            x = layer(x, None if mask.all() else mask)
        return x.square().mean()


def _plan(length: int, scope: Any = False, step: Any = Masked.loss, model: nn.Module | None = None) -> Plan:
    batch = {"lengths": torch.tensor([length, 2]), "x": torch.zeros(ROWS, WIDTH)}
    backend = "aot_eager" if scope else "inductor"
    config = Config(compile=scope, compile_options={"backend": backend})
    return make_plan(model or Masked(), batch, world_size=2, config=config, step=step, optimizer=torch.optim.SGD)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_mask_that_hides_nothing(scope: Any) -> None:
    full, partial = _plan(ROWS, scope), _plan(ROWS - 1, scope)
    product = 2 * ROWS * WIDTH * WIDTH
    assert full.flops == 3 * 3 * product - product  # nobody asks for the batch's gradient
    assert partial.flops == 2 * full.flops
    assert partial.stages[0].memory.activations > full.stages[0].memory.activations


def test_numbers_are_those_of_the_batch() -> None:
    model = Masked()
    made: list[int] = []

    def step(module: Masked, batch: dict[str, Tensor]) -> Tensor:
        loss = module.loss(batch)
        made[:] = module.told
        return loss

    _plan(5, step=step, model=model)
    assert made == [5, 5, 5]


def test_nothing_of_the_batch_is_changed() -> None:
    batch = {"lengths": torch.tensor([3, 2]), "x": torch.zeros(ROWS, WIDTH)}

    def step(module: Masked, batch: dict[str, Tensor]) -> Tensor:
        batch["lengths"].fill_(ROWS)
        torch.randint(ROWS, (2,))
        return module.loss(batch)

    model, expected = Masked(), _plan(ROWS).flops
    state = torch.get_rng_state()
    plan = make_plan(model, batch, world_size=2, config=EAGER, step=step, optimizer=torch.optim.SGD)
    assert plan.flops == expected  # what the step has written is known, too
    assert batch["lengths"].tolist() == [3, 2]
    assert torch.get_rng_state().equal(state)


HELD = torch.tensor(3)  # nobody's buffer


def _counts(batch: dict[str, Tensor]) -> list[int]:
    n = batch["lengths"].new_tensor(5)
    n.add_(1)
    n += n
    n -= 2
    index = torch.zeros(2, dtype=torch.long)
    index[0] += 1
    batch["lengths"][1:].mul_(3)
    return [n.item(), int(index[0]), batch["lengths"].tolist()[1]]


def test_numbers_that_are_written_to() -> None:
    """Each write counts once, through views too, and what the step has not made is read only."""
    found: list[Any] = []

    def step(module: Masked, batch: dict[str, Tensor]) -> Tensor:
        found[:] = [*_counts(batch), int(HELD + 1)]
        copied = copy.deepcopy(batch["lengths"])
        found.extend([copied.unsqueeze_(0).squeeze_().tolist(), batch["lengths"].clone().resize_(1).tolist()])
        HELD.add_(1)
        return module.loss(batch)

    plan = _plan(ROWS, step=step)
    assert found == [10, 1, 6, 4, [ROWS, 6], [ROWS]]
    assert plan.flops == _plan(ROWS).flops and HELD.item() == 3


def _counted(module: Masked, batch: dict[str, Tensor]) -> Tensor:
    """How many rows go to each expert, as a router says it."""
    routes = (batch["x"] @ batch["x"].t()).argmax(1)
    counts = torch.zeros(4, dtype=torch.long).index_add_(0, routes, torch.ones_like(routes))
    return module.loss(batch | {"lengths": batch["lengths"] * sum(counts.tolist())})


def _hidden(module: Masked, batch: dict[str, Tensor]) -> Tensor:
    """What is unknown was written to a part of a tensor, of which there is a view already."""
    lengths, first = batch["lengths"], batch["lengths"][:1]
    lengths[batch["x"].sum(1)[:2] > 0] = 1
    return module.loss(batch | {"lengths": first})


def test_numbers_that_only_stand_for_others() -> None:
    """A batch may have the right sizes alone: an index that is in no table tells nothing."""

    def step(module: Masked, batch: dict[str, Tensor]) -> Tensor:
        table = torch.arange(4)
        assert type(table[batch["lengths"]]) is not Tensor
        return module.loss(batch)

    assert _plan(ROWS, step=step).flops == _plan(ROWS).flops


def test_nothing_large_is_made_on_the_way() -> None:
    """It would take 80 GB."""

    def step(module: Masked, batch: dict[str, Tensor]) -> Tensor:
        positions = torch.arange(100_000)
        assert type(positions[:, None] - positions[None]) is not Tensor
        return module.loss(batch)

    assert _plan(ROWS, step=step).flops == _plan(ROWS).flops


def _random(module: Masked, batch: dict[str, Tensor]) -> Tensor:
    return module.loss(batch | {"lengths": torch.randint(ROWS, (2,))})


def _of_numbers(module: Masked, batch: dict[str, Tensor]) -> Tensor:
    return module.loss(batch | {"lengths": (batch["x"].sum(1) > 0).long()})


@pytest.mark.parametrize("step", [_random, _of_numbers, _counted, _hidden])
def test_what_nobody_knows(step: Any) -> None:
    with pytest.raises(PlanError, match=r"looks at numbers|unbacked|failed"):
        _plan(ROWS, step=step)


def test_on_meta_nothing_is_known() -> None:
    batch = {"lengths": torch.zeros(2, dtype=torch.int64, device="meta"), "x": torch.zeros(ROWS, WIDTH)}
    with pytest.raises(PlanError):
        make_plan(Masked(), batch, world_size=2, config=EAGER, step=Masked.loss, optimizer=torch.optim.SGD)


def test_too_large_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of a tensor that would need too much memory is not known, and what follows from others still is."""
    from lightning_zerocompile.plan import known_numbers

    monkeypatch.setattr(known_numbers, "LARGEST", 64)
    seen: list[bool] = []

    def step(module: Masked, batch: dict[str, Tensor]) -> Tensor:
        small = batch["lengths"] + 1
        large = small[:, None] + torch.arange(64)
        seen[:] = [type(small) is Tensor, type(large) is Tensor]
        return module.loss(batch)

    _plan(ROWS, step=step)
    assert seen == [True, False]


def test_transformers_leaves_its_mask_away() -> None:
    transformers = pytest.importorskip("transformers", "5.10")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model, masks = transformers.Qwen3ForCausalLM(config), []

    def called(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        masks.append(kwargs["attention_mask"])

    fake = FakeStep.of(model, torch.randint(64, (1, 24)), torch.bfloat16, None)
    for layer in fake.module.model.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(called, with_kwargs=True)
    with fake.around():
        fake.forward(lambda module, tokens: module(input_ids=tokens, labels=tokens).loss)
    assert masks == [None, None]
