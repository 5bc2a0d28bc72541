"""A list of parameters that was made before the model was sharded is as good as one that is made after it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.sharding.held import Held
from lightning_zerocompile.sharding.master import as_plain_tensors
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL, STAGES, assert_trains_like_ddp, mean_backward, reference

STEPS, LR = 3, 0.5
Lists = dict[str, Any]  # what user code has made of the parameters before


class Case:
    """What user code does with its lists at four places of a step."""

    def before(self, model: nn.Module, lists: Lists, number: int) -> None:
        """Between two steps."""

    def loss(self, model: nn.Module, lists: Lists, batch: Tensor) -> Tensor:
        return engines.token_loss(model, batch)

    def gradients(self, lists: Lists) -> None:
        """After the backward."""

    def after(self, lists: Lists) -> None:
        """After the optimizer's step."""


class Clipped(Case):
    def gradients(self, lists: Lists) -> None:
        norm = nn.utils.clip_grad_norm_(lists["all"], 0.05)
        lists["norms"].append(float(norm))


class ClippedByValue(Case):
    def gradients(self, lists: Lists) -> None:
        nn.utils.clip_grad_value_(lists["matrices"], 0.002)


class Scaled(Case):
    """Gradients are read, written to, replaced and dropped."""

    def gradients(self, lists: Lists) -> None:
        first, second, third, *_ = lists["matrices"]
        first.grad.mul_(0.25)
        second.grad = second.grad * 0.5
        third.grad = None
        assert [p.grad is None for p in lists["matrices"][:3]] == [False, False, True]


class Frozen(Case):
    """Frozen and unfrozen, as GANs do."""

    def before(self, model: nn.Module, lists: Lists, number: int) -> None:
        for p in lists["all"][:5]:
            p.requires_grad_(number != 1)
        lists["all"][6].requires_grad = number == 1
        assert [p.requires_grad for p in model.parameters()][:7] == [number != 1] * 5 + [True, number == 1]


class Clamped(Case):
    """As in WGAN, under `no_grad` and through `data`, by lists and one by one."""

    def after(self, lists: Lists) -> None:
        first, second, *others = lists["matrices"]
        with torch.no_grad():
            assert first.clamp_(-0.2, 0.2) is first
            torch._foreach_mul_(others, 0.75)
        second.data.clamp_(-0.1, 0.1)
        others[0].data = torch.full_like(others[0], 0.03)
        for p, factor in lists["factors"].items():
            p.data *= factor
        if second.device.type == "cpu":
            lists["head"].detach().apply_(lambda value: 0.9 * value)
        lists["norms"] += [lists["head"].tolist()[0][0], lists["head"].norm().item(), float(lists["all"][0])]


class Penalised(Case):
    """The loss has terms over lists, and a layer by a function."""

    def loss(self, model: nn.Module, lists: Lists, batch: Tensor) -> Tensor:
        loss = engines.token_loss(model, batch) + 0.01 * sum(p.square().sum() for p in lists["all"])
        return loss + 0.1 * nn.functional.linear(model.embedding(batch), lists["head"]).square().mean()


class Averaged(Case):
    """An average of one's own, over pairs of lists."""

    def after(self, lists: Lists) -> None:
        for average, p in zip(lists["averages"], lists["all"], strict=True):
            average.mul_(0.5).add_(p.detach(), alpha=0.5)


class Flattened(Case):
    """Of all parameters one vector, and back."""

    def after(self, lists: Lists) -> None:
        vector = nn.utils.parameters_to_vector(lists["all"])
        nn.utils.vector_to_parameters(vector * 0.9, lists["all"])


CASES: list[type[Case]] = [Clipped, ClippedByValue, Scaled, Frozen, Clamped, Penalised, Averaged, Flattened]


def _lists(model: nn.Module) -> Lists:
    parameters = list(model.parameters())
    return {
        "all": parameters,
        "matrices": [p for p in parameters if p.dim() == 2],
        "head": model.head.weight,
        "factors": {model.scale: 0.9, model.shift: 1.1, model.layers[0].norm.weight: 0.95},
        "averages": [p.detach().clone().to(models.device()) for p in parameters],
        "norms": [],
    }


def _run(case: Case, model: nn.Module, lists: Lists, optimizer: Any, step: Callable[[int], None]) -> None:
    for number in range(STEPS):
        case.before(model, lists, number)
        optimizer.zero_grad()
        step(number)
        case.gradients(lists)
        optimizer.step()
        case.after(lists)


SOME = pytest.mark.parametrize(
    ("stage", "options"),
    [
        pytest.param(1, EAGER, marks=pytest.mark.long), (1, AOT), (2, EAGER),
        pytest.param(2, AOT, marks=pytest.mark.long), (3, EAGER), (3, AOT),
    ],
    ids=["1-eager", "1-blocks", "2-eager", "2-blocks", "3-eager", "3-blocks"],
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@SOME
@on_ranks()
def test_what_is_done_with_a_list_counts(stage: int, options: dict[str, Any], case: type[Case]) -> None:
    model, twin = models.pair(models.ByteModel)
    lists, others, begun = _lists(model), _lists(twin), copy.deepcopy(twin)
    with engines.engine(model, stage, **options) as engine:
        assert all(type(p) is Held for p in lists["all"])
        with as_plain_tensors():
            assert sum(p.untyped_storage().nbytes() for p in lists["all"]) <= 8 * len(lists["all"])
            assert {p.device for p in lists["all"]} == {engine.device}
        optimizer = torch.optim.SGD(lists["all"], lr=LR)
        engine.attach_optimizers([optimizer])
        user = case()

        def step(number: int) -> None:
            batch = models.Batches(models.rank())[number]
            with engine.training_step():
                engines.backward(engine, user.loss(model, lists, batch))

        _run(user, model, lists, optimizer, step)
    assert all(type(p) is nn.Parameter for p in lists["all"])
    assert [p is q for p, q in zip(model.parameters(), lists["all"], strict=True)] == [True] * len(lists["all"])

    def twin_step(number: int) -> None:
        mean_backward(lambda rank: user.loss(twin, others, models.Batches(rank)[number]))

    _run(user, twin, others, torch.optim.SGD(twin.parameters(), lr=LR), twin_step)
    assert models.deviation(twin, begun) > 1e-3
    assert models.deviation(model, twin) <= 1e-6
    assert lists["norms"] == pytest.approx(others["norms"], rel=1e-5)
    for average, other in zip(lists["averages"], others["averages"], strict=True):
        torch.testing.assert_close(average.cpu(), other.cpu(), rtol=0, atol=1e-6)


class Lending(nn.Module):
    """A block that uses a weight of another layer, from a list of its own."""

    def __init__(self, lent: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.lent = [lent]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + nn.functional.linear(x, self.lent[0])


class Borrowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 10)
        self.base = nn.Linear(10, 10)
        self.layers = nn.ModuleList(Lending(self.base.weight) for _ in range(2))
        self.head = nn.Linear(10, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.base(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [EAGER, AOT, MODEL], ids=["eager", "blocks", "model"])
@STAGES
@on_ranks()
def test_a_block_uses_a_list_of_its_own(stage: int, options: dict[str, Any]) -> None:
    model = Borrowed()
    assert_trains_like_ddp(model, stage, **options)
    assert model.layers[0].lent[0] is model.base.weight


class Stepping(models.Module):
    """Manual optimization with an optimizer of its own, of which the Trainer does not hear."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.own = make(self.model.parameters())

    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        self.own.zero_grad()
        self.manual_backward(engines.anchored_loss(self.model, batch))
        self.own.step()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.5),
    "momentum": partial(torch.optim.SGD, lr=0.5, momentum=0.9, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@SOME
@on_ranks()
def test_an_optimizer_that_is_not_returned_trains(
    stage: int, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    module = Stepping(make)
    twin = copy.deepcopy(module.model)
    begun = copy.deepcopy(twin)
    strategy = ZeroCompileStrategy(stage=stage, **options)
    limits = {"max_epochs": 1, "max_steps": -1, "limit_train_batches": STEPS}  # the Trainer counts no steps here
    models.make_trainer(strategy, **limits).fit(module, models.Batches(models.rank()))
    reference(twin, STEPS, engines.anchored_loss, optimizer=make(twin.to(models.device()).parameters()))
    assert models.deviation(twin, begun) > 1e-3
    assert models.deviation(module.model, twin) <= 1e-6
    held = [p for group in module.own.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(held, module.model.parameters(), strict=True))


class Chosen(models.Module):
    """What is trained, and how, is chosen by what `__init__` has noted of the parameters."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.kept = how, list(self.model.parameters())
        self.head = list(self.model.head.parameters())
        self.plain = {id(p) for p in self.kept if p.dim() < 2}
        self.names = {p: name for name, p in self.model.named_parameters()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.model.parameters())
        if self.how == "ids":
            first = [p for p in parameters if id(p) in self.plain]
        elif self.how == "names":
            first = [p for p in parameters if "norm" in self.names[p]]
        else:
            first = self.head
        chosen = {id(p) for p in first}
        rest = [p for p in parameters if id(p) not in chosen]
        assert first and rest and len(first) + len(rest) == len(parameters)
        groups: list[dict[str, Any]] = [{"params": first, "lr": 0.05}, {"params": rest, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.3)


@pytest.mark.parametrize("how", ["ids", "names", "list"])
@SOME
@on_ranks()
def test_parameters_are_chosen_by_what_init_has_noted(stage: int, options: dict[str, Any], how: str) -> None:
    torch.manual_seed(0)
    module = Chosen(how)
    torch.manual_seed(0)
    twin = Chosen(how)  # no copy: that has other `id`s
    models.make_trainer(ZeroCompileStrategy(stage=stage, **options), max_steps=STEPS).fit(
        module, models.Batches(models.rank())
    )
    reference(twin.model, STEPS, optimizer=twin.to(models.device()).configure_optimizers())
    assert models.deviation(module.model, twin.model) <= 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_weak_references_and_what_is_added(stage: int) -> None:
    """An average by weak references, as torch_ema keeps them; a held parameter that an optimizer gets later."""
    model, twin = models.pair(models.ByteModel)
    weak = [weakref.ref(p) for p in model.parameters()]
    averages = [[p.detach().clone().to(models.device()) for p in one.parameters()] for one in (model, twin)]
    late = model.head.weight
    with engines.engine(model, stage, **EAGER) as engine:
        others = [p for name, p in model.named_parameters() if name != "head.weight"]
        ours = torch.optim.SGD(others, lr=LR)
        theirs = torch.optim.SGD([p for n, p in twin.named_parameters() if n != "head.weight"], lr=LR)
        engine.attach_optimizers([ours])
        for number in range(STEPS):
            if number == 1:
                ours.add_param_group({"params": [late]})
                theirs.add_param_group({"params": [twin.head.weight]})
            own = models.Batches(models.rank())[number]
            engines.step(engine, ours, lambda own=own: engines.token_loss(model, own))
            engines.mean_backward(twin, number)
            theirs.step()
            theirs.zero_grad()
            for average, found in zip(averages, ([one() for one in weak], twin.parameters()), strict=True):
                for mean, p in zip(average, found, strict=True):
                    assert p is not None
                    mean.lerp_(p.detach(), 0.5)
    assert models.deviation(model, twin) <= 1e-6
    for ours_mean, mean in zip(*averages, strict=True):
        torch.testing.assert_close(ours_mean.to(mean.device), mean, rtol=0, atol=1e-6)
    assert all(one() is p for one, p in zip(weak, model.parameters(), strict=True))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_clipping_after_an_update_in_the_backward_raises(stage: int) -> None:
    model = models.ByteModel()
    held = list(model.parameters())
    with engines.engine(model, stage, optimizer_in_backward=True, **EAGER) as engine:
        engine.attach_optimizers([torch.optim.SGD(model.parameters(), lr=LR)])
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, models.Batches(models.rank())[0]))
        with pytest.raises(RuntimeError, match="Gradients cannot be clipped here"):
            nn.utils.clip_grad_norm_(held, 0.1)
        engine.steps.last[0].step()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_what_stands_for_no_parameter_raises(stage: int) -> None:
    """After a parameter was replaced its old object is none of the model; after a failure there is none at all."""
    model = models.ByteModel()
    held = list(model.parameters())
    made = engines.make_engine(model, stage, **EAGER)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    made.attach_optimizers([optimizer])
    weight, position = model.head.weight, [n for n, _ in model.named_parameters()].index("head.weight")
    new = nn.Parameter(torch.zeros(weight.shape, device=models.device()))
    model.head.weight = new
    engines.step(made, optimizer, lambda: engines.token_loss(model, models.Batches(models.rank())[0]))
    assert isinstance(new, Held) and torch.equal(new.detach().full_tensor(), torch.zeros_like(weight))
    with pytest.raises(RuntimeError, match="another one was put in its place"):
        held[position].mul_(2)
    made.abandon()
    made = optimizer = None
    gc.collect()
    with pytest.raises(RuntimeError, match="or the run has failed"):
        held[0].mul_(2)
