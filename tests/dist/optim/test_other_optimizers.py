"""Optimizers that are not torch's own: what they compute on whole parameters, or an error by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import reference


class Plain(torch.optim.Optimizer):
    """The frame of the optimizers below."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1  # kept in the group, as many do
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.update(p, p.grad, self.state[p], group), alpha=-group["lr"])
        return result

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Shampoo(Plain):
    """Preconditions a matrix by the inverse fourth roots of both of its covariances."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if p.dim() != 2:
            return grad
        for name, covariance in (("left", grad @ grad.T), ("right", grad.T @ grad)):
            state[name] = state.get(name, torch.eye(len(covariance), device=p.device)) + covariance
        roots = {}
        for name in ("left", "right"):
            values, vectors = torch.linalg.eigh(state[name])
            roots[name] = vectors @ torch.diag(values**-0.25) @ vectors.T
        state["average"] = state.get("average", torch.zeros_like(p)) * 0.5 + roots["left"] @ grad @ roots["right"]
        return state["average"] / group["step"] ** 0.5


class Lamb(Plain):
    """Scales by norms of the whole parameter, with branches and numbers computed from them."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["average"] = state.get("average", torch.zeros_like(p)) * 0.5 + grad
        ours, theirs = p.norm(), state["average"].norm()
        if ours > 0 and theirs.item() > 0:
            return state["average"] * (ours.item() / float(theirs)) / group["step"] ** 0.5
        return state["average"]


class Newton(Plain):
    """Muon's iteration, in float32: in bfloat16 the order of a product's summands shows."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if p.dim() != 2:
            return grad
        x = grad / grad.norm().clamp(min=1e-7)
        for _ in range(3):
            gram = x.T @ x
            x = torch.addmm(x * 1.5, x, gram, alpha=-0.5)
        return x


class Clipping(Plain):
    """Clips by the norm of all gradients, inside its step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = closure() if closure is not None else None
        with torch.no_grad():
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            self.scale = 0.5 / sum(grad.pow(2).sum().item() for grad in grads if grad is not None) ** 0.5
        super().step()
        return result

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad * (self.scale / 0.02)


class Flat(Plain):
    """Flattens."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        flat = torch.cat([grad.view(-1), p.detach().view(-1)])
        return 5 * flat[: grad.numel()].view_as(p)


class Guessing(Plain):
    """Adapts a step size to all gradients, kept in the group."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = closure() if closure is not None else None
        for group in self.param_groups:
            group["d"] = sum(p.grad.abs().sum().item() for p in group["params"] if p.grad is not None)
        super().step()
        return result

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad * group["d"]


class OwnMuon(torch.optim.Muon):
    """A subclass whose step calls its parent's."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class OwnAdafactor(torch.optim.Adafactor):
    """A subclass of an optimizer that reads norms as numbers."""


KINDS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind for kind in (Shampoo, Lamb, Newton, Clipping, Flat, Guessing, OwnMuon, OwnAdafactor)
}


class Stepped(models.Module):
    """Trained by one of them; the gradient of the logits' common shift is nothing but rounding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.model.shift.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad and (p.dim() == 2 or self.kind != "OwnMuon")]
        return KINDS[self.kind](trained, lr=0.02)  # type: ignore[call-arg]


def _fit(module: Any, epochs: int = 4, path: str | None = None, **options: Any) -> Any:
    strategy = ZeroCompileStrategy(compile=False, **options)
    trainer = models.make_trainer(strategy, max_epochs=epochs)
    trainer.fit(module, models.Batches(models.rank(), 1), ckpt_path=path)
    return trainer


def _twin(start: Any) -> Any:
    twin = copy.deepcopy(start).to(models.device())
    reference(twin, [0] * 4, lambda module, batch: module.loss(batch), optimizer=twin.configure_optimizers())
    assert models.deviation(twin, start) > 1e-2
    return twin


@on_ranks()
def test_they_compute_what_they_compute_on_whole_parameters() -> None:
    """On DTensors, where norms are read as numbers; and on whole values where the user says so."""
    cases = [("Lamb", False, 3), ("Clipping", False, 3), ("Newton", False, 3), ("OwnAdafactor", True, 3)]
    cases = [*cases, ("Shampoo", True, 3), ("Flat", True, 1), ("Lamb", True, 2), ("OwnMuon", True, 3)]
    torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))])  # its step has hooks from now on
    for kind, whole, stage in cases:
        torch.manual_seed(0)
        start = Stepped(kind)
        twin, module = _twin(start), copy.deepcopy(start)
        trainer = _fit(module, stage=stage, full_param_optimizers=[kind] if whole else [])
        assert models.deviation(module, twin) < 2e-6, (kind, whole, models.deviation(module, twin))
        assert all(group.get("step", 4) == 4 for group in trainer.optimizers[0].param_groups)


@on_ranks()
def test_what_does_not_work_is_named() -> None:
    """An operation that DTensor does not know, an optimizer that mixes parameters, raw pointers, a step past us."""
    for kind in ("Shampoo", "Flat", "OwnAdafactor"):
        with pytest.raises(
            RuntimeError, match=rf"(?s){kind}\.step\(\) failed on row shards.*full_param_optimizers=\['{kind}'\]"
        ):
            _fit(Stepped(kind))
    with pytest.raises(RuntimeError, match=r"Guessing computes \['d'\] of its parameter groups from several param"):
        _fit(Stepped("Guessing"), full_param_optimizers=["Guessing"])
    with pytest.raises(MisconfigurationException, match=r"`full_param_optimizers` names \['Lam'\], but .* \['Lamb'\]"):
        _fit(Stepped("Lamb"), full_param_optimizers=["Lam"])
    apex = type("FusedLamb", (Lamb,), {"__module__": "apex.optimizers.fused_lamb"})
    module: Any = Stepped("Lamb")
    module.configure_optimizers = lambda: apex(module.parameters())
    with pytest.raises(
        MisconfigurationException, match=r"FusedLamb takes the addresses.*full_param_optimizers=\['FusedLamb'\]"
    ):
        _fit(module)
    for kind in ("Lamb", "OwnAdafactor"):
        module = Stepped(kind)
        module.automatic_optimization = False
        module.training_step = lambda *_, module=module: module.optimizers(use_pl_optimizer=False).step()
        with pytest.raises(RuntimeError, match=rf"{kind}\.step\(\) was called past Lightning"):
            _fit(module)


@pytest.mark.parametrize(
    ("kind", "through_lightning"), [(Flat, True), (torch.optim.AdamW, True), (torch.optim.AdamW, False)]
)
@on_ranks()
def test_a_parameter_that_is_not_the_models_raises_before_the_step(
    kind: type[torch.optim.Optimizer], through_lightning: bool
) -> None:
    model, data = models.ByteModel(), models.Batches(models.rank())
    with engines.engine(model, 3, compile=False) as engine:
        optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        engine.attach_optimizers([optimizer])
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, device=engines.place()))]})
        before = [p.to_local().detach().clone() for p in model.parameters()]
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, data[0]))
        with pytest.raises(RuntimeError, match=r"shape \(3,\) that is not one of the sharded model"):
            engine.step(optimizer, lambda: None) if through_lightning else optimizer.step()
        assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))


@on_ranks()
def test_resume(tmp_path: Any) -> None:
    """Preconditioners are on every rank, averages are sharded; both are in either kind of checkpoint."""
    folder = str(tmp_path)
    torch.manual_seed(0)
    start, whole = models.pair(lambda: Stepped("Shampoo"))
    _fit(whole, full_param_optimizers="Shampoo")
    for kind in ("full", "sharded"):
        half, resumed, path = copy.deepcopy(start), copy.deepcopy(start), f"{folder}/{kind}.ckpt"
        _fit(half, 2, stage=1, state_dict_type=kind, full_param_optimizers="Shampoo").save_checkpoint(path)
        _fit(resumed, 4, path, full_param_optimizers="Shampoo")
        assert models.deviation(half, whole) > 1e-3 and models.deviation(resumed, whole) < 1e-6


@on_ranks()
def test_a_step_that_a_mock_has_replaced_is_called_once() -> None:
    """As Lightning's own tests do it, and its users'."""
    model = models.ByteModel()
    with engines.engine(model, 1, compile=False) as engine, mock.patch.object(torch.optim.SGD, "step") as step:
        optimizer = engines.sgd(engine, model)
        engines.accumulate(engine, model, models.Batches(models.rank())[0])
        assert engine.step(optimizer, lambda: None) is step.return_value
    assert step.call_count == 1


class Wrapper(torch.optim.Optimizer):
    """As timm's Lookahead: it shares the groups of an optimizer, and skips the constructor of its own class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Wrapped(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Wrapper(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))


class Bare(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_a_wrapper_without_a_constructor(stage: int) -> None:
    module, twin = models.pair(Wrapped)
    models.fit(module, ZeroCompileStrategy(stage=stage, compile=False), 3)
    other = Bare()
    other.load_state_dict(twin.state_dict())
    models.fit(other, ZeroCompileStrategy(stage=stage, compile=False), 3)
    models.assert_equal(module, other)
    assert models.deviation(module, twin) > 1e-3
