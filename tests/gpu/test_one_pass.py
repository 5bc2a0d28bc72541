"""Updates in one pass over memory (optim/one_pass.py) give the bits of torch's fused optimizers, wherever they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zerocompile.optim.one_pass import OnePass
from tests.support import engines, models, uneven
from tests.support.harness import Worlds

pytestmark = pytest.mark.gpu
# One element, a whole block of the kernel, one more and one less; sizes that no vector divides; many blocks
SIZES = (1, 3, 130, 1023, 1024, 1025, 4096, 100003, 2**20)
ADAM = {
    "plain": {},
    "decays": {"weight_decay": 0.1},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.01},
    "maximize": {"maximize": True, "weight_decay": 0.01},
    "capturable": {"capturable": True, "betas": (0.8, 0.95), "eps": 1e-3},
}
SGD = {
    "plain": {},
    "decays": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "maximize": {"maximize": True, "momentum": 0.9},
}
KINDS = [(torch.optim.AdamW, ADAM), (torch.optim.Adam, ADAM), (torch.optim.SGD, SGD)]
CASES = [
    pytest.param(kind, options, id=f"{kind.__name__}-{name}") for kind, all in KINDS for name, options in all.items()
]


class _Places:
    """In the place of the runtime: a cast goes to two places."""

    def __init__(self, values: list[Tensor], shift: int) -> None:
        self.casts = [
            [torch.full((v.numel() + shift,), 7.0, dtype=torch.bfloat16, device="cuda")[shift:] for _ in range(2)]
            for v in values
        ]

    def place(self, units: Any) -> list[tuple[int, Tensor, Tensor | None]]:
        return [(k, own, staged if k != 3 else None) for k, (own, staged) in enumerate(self.casts)]


def _bits(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().view(torch.int32 if t.dtype == torch.float32 else torch.int16).cpu() for t in tensors]


def _start(shift: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(size + shift, device="cuda", generator=generator)[shift:] for size in SIZES]


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "shifted"])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_bits_are_torchs(kind: Any, options: dict[str, Any], shift: int, capfd: Any) -> None:
    """Four steps, the second with a learning rate of another value, the third and fourth with one on the device.
    Where torch's kernel has no bits that ours gives, `update` says so and changes nothing."""
    values, expected = _start(shift), _start(shift)
    places = _Places(values, shift)
    one_pass = OnePass(places, torch.device("cuda", torch.cuda.current_device()))
    ours, theirs = (kind(tensors, lr=1e-2, fused=True, **options) for tensors in (values, expected))
    generator = torch.Generator("cuda").manual_seed(1)
    made = 0
    for step in range(4):
        scale = (1e-2, 1e3, 1e-21, 1.0)[step]
        grads = [scale * torch.randn(v.numel(), device="cuda", generator=generator) for v in values]
        for value, other, grad in zip(values, expected, grads, strict=True):
            value.grad, other.grad = grad.clone(), grad.clone()
        for optimizer in (ours, theirs):
            if step == 1:
                optimizer.param_groups[0]["lr"] = 3e-3
            if step == 2:
                optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device="cuda")
        theirs.step()
        assert one_pass.takes(ours)
        with torch.no_grad():
            placed = one_pass.update(ours, list(range(len(values))), values, [0])
        if placed is None:
            ours.step()
        else:
            made += 1
            for k, (own, staged) in enumerate(places.casts):
                for cast in (own, staged) if k != 3 else (own,):
                    assert torch.equal(*_bits([cast, values[k].bfloat16()]))
        for mine, other in zip(values, expected, strict=True):
            assert torch.equal(*_bits([mine, other]))
            mine_state, other_state = ours.state[mine], theirs.state[other]
            assert mine_state.keys() == other_state.keys()
            for name, kept in mine_state.items():
                assert torch.equal(*_bits([kept, other_state[name]])), name
    with capfd.disabled():
        print(f"\n{kind.__name__} {options} shift={shift}: {made} of 4 steps in one pass, {one_pass._forms.values()}")
    if kind is torch.optim.AdamW:
        assert made == 4


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_loss_scale_is_divided_out(kind: Any, found: float) -> None:
    """Also in the step after one that was skipped, in which a trial would have changed nothing."""
    values, expected = _start(0), _start(0)
    places = _Places(values, 0)
    one_pass = OnePass(places, torch.device("cuda", torch.cuda.current_device()))
    ours, theirs = (kind(tensors, lr=1e-2, fused=True) for tensors in (values, expected))
    for found_inf in (found, 0.0):
        for optimizer in (ours, theirs):
            optimizer.grad_scale = torch.tensor(1000.0, device="cuda")
            optimizer.found_inf = torch.tensor(found_inf, device="cuda")
        for value, other in zip(values, expected, strict=True):
            value.grad = 1000.0 * torch.randn_like(value)
            other.grad = value.grad.clone()
        theirs.step()
        assert one_pass.takes(ours)
        with torch.no_grad():
            placed = one_pass.update(ours, list(range(len(values))), values, [0])
        if placed is None:
            assert kind is torch.optim.SGD  # torch's compiler contracts some elements of a vector, and not others
            return
        for k, (mine, other) in enumerate(zip(values, expected, strict=True)):
            assert torch.equal(*_bits([mine, other]))
            assert torch.equal(*_bits([mine.grad, other.grad]))  # type: ignore[list-item]
            assert torch.equal(*_bits([places.casts[k][0], mine.bfloat16()]))
            for name, kept in ours.state[mine].items():
                assert torch.equal(*_bits([kept, theirs.state[other][name]])), name


def _trained(
    stage: int, scope: Any, options: dict[str, Any], kind: Any, together: int, in_one_pass: bool
) -> tuple[list[Tensor], list[float], int, int]:
    """The parameters and losses, how many updates of units were made in one pass, and how many gathers by copies."""
    torch.manual_seed(0)
    model, data, losses = uneven.Net(704), models.Batches(models.rank()), []
    options = {"param_dtype": torch.bfloat16} | options
    with engines.engine(model, stage, compile=scope, **options) as engine:
        if not in_one_pass:
            engine.steps._stepper._one_pass = None
        engine.steps._stepper.together = together
        optimizer = kind(model.parameters(), lr=1e-3, fused=True)
        engine.attach_optimizers([optimizer])
        for number in range(8):  # many updates and gathers in flight, without a pause of the host
            with engine.training_step():
                loss = engines.token_loss(model, data[number])
                engines.backward(engine, loss)
            engine.step(optimizer, lambda: None)
            losses.append(loss.detach())
        stats = engine.runtime.stats()
        seen = [loss.item() for loss in losses]
    return [p.detach().cpu() for p in model.parameters()], seen, stats.updated_in_one_pass, stats.peer_gathers


@pytest.mark.parametrize(
    ("stage", "scope", "options", "kind", "together"),
    [
        (1, "blocks", {}, torch.optim.AdamW, 1),
        (2, False, {"unit_bytes": 1}, torch.optim.Adam, 0),
        (1, False, {"copy_engine": False}, torch.optim.AdamW, 2**25),
        (
            1,
            "blocks",
            {"compile_options": {"backend": "inductor", "mode": "reduce-overhead", "dynamic": False}},
            torch.optim.AdamW,
            1,
        ),
        (3, "blocks", {}, torch.optim.AdamW, 1),
        (3, False, {"optimizer_in_backward": True}, torch.optim.AdamW, 1),
    ],
    ids=["staged", "all-staged", "collectives", "graphs", "stage-3", "in-backward"],
)
def test_a_model_trains_to_the_same_bits(
    worlds: Worlds, stage: int, scope: Any, options: dict[str, Any], kind: Any, together: int
) -> None:
    """Later forwards read what was placed, and what came from the other rank."""
    ran = [worlds(2).run(_trained, stage, scope, options, kind, together, yes, timeout=180) for yes in (True, False)]
    for (one, losses, made, copies), (other, expected, none, _) in zip(*ran, strict=True):
        assert none == 0 and made >= 8 * 4
        assert losses == expected and len(set(losses)) == len(losses)
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
        assert (copies > 0) is options.get("copy_engine", True)
