"""Parts of parameters and gradients, and full tensors beside them: what is written to them is there on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import engines, models
from tests.support.harness import on_ranks


def _ramp(like: Tensor, shape: Any = None) -> Tensor:
    shape = like.shape if shape is None else shape
    return torch.linspace(0, 1, torch.Size(shape).numel(), device=like.device).view(shape)


def _numbers(like: Tensor, *numbers: int) -> Tensor:
    return torch.tensor(numbers, device=like.device)


# each takes a matrix of at least five rows; what it returns, if anything, is compared, too
MATRICES: dict[str, Callable[[Any], object]] = {
    "row": lambda x: x[1].zero_(),
    "rows": lambda x: x[2:5].mul_(2),
    "narrow": lambda x: x.narrow(0, 3, 2).add_(1),
    "every second row": lambda x: x[::2].fill_(7),
    "column": lambda x: x[:, 2].fill_(7),
    "columns of the transposed": lambda x: x.t()[:, 1:3].fill_(7),
    "element": lambda x: x[-1, -1].fill_(3),
    "flat": lambda x: x.view(-1)[3:17].zero_(),
    "reshaped": lambda x: x.flatten()[3:17].zero_(),
    "other shape": lambda x: x.view(-1, 2)[3].zero_(),
    "diagonal": lambda x: x.diagonal().zero_(),
    "part of a part": lambda x: x[1:4][1].view(-1)[2:5].fill_(7),
    "data of a part": lambda x: x.data[0].data.fill_(1.5),
    "chunks": lambda x: [part.mul_(3) for part in x.chunk(2)],
    "each row": lambda x: [row.mul_(3) for row in x],
    "last of unbind": lambda x: x.unbind(0)[-1].fill_(2),
    "squeezed": lambda x: x[1:2].squeeze_().mul_(2),
    "a row more": lambda x: x[1:4].add_(_ramp(x, x.shape[1:])),
    "from another part": lambda x: x[1:3].copy_(x[3:5]),
    "clamp": lambda x: x[2:4].clamp_(-0.01, 0.01),
    "list": lambda x: torch._foreach_mul_([x[1:4], x[0]], 2.0),
    "list of full tensors": lambda x: torch._foreach_add_([x[1:4], x[4:]], [_ramp(x[1:4]), _ramp(x[4:])]),
    "out": lambda x: torch.mul(x[1:3], 2.0, out=x[1:3]),
    "set rows": lambda x: x.__setitem__(slice(0, 3), 0),
    "set a full part": lambda x: x.__setitem__(slice(0, 3), _ramp(x, (3, x.shape[1]))),
    "set a column": lambda x: x.__setitem__((slice(None), 2), 0),
    "set all": lambda x: x.__setitem__(..., 2.0),
    "set by numbers": lambda x: x.__setitem__(_numbers(x, 0, 3), 0),
    "set by a mask of rows": lambda x: x.__setitem__(torch.arange(len(x), device=x.device) % 2 == 0, 0),
    "set by a condition": lambda x: x.__setitem__(x > 0, 0.0),
    "get by numbers": lambda x: x[_numbers(x, 0, 3)] * 2,
    "fill by numbers": lambda x: x.index_fill_(0, _numbers(x, 0), 0.0),
    "add by numbers": lambda x: x.index_add_(0, _numbers(x, 0, 1), _ramp(x, (2, x.shape[1]))),
    "scatter": lambda x: x.scatter_(0, torch.zeros_like(_ramp(x, (1, x.shape[1])), dtype=torch.int64), 5.0),
    "a condition": lambda x: x.masked_fill_(_ramp(x) > 0.5, 0.0),
    "values of a condition": lambda x: x.masked_scatter_(_ramp(x) > 0.5, _ramp(x)),
    "renorm": lambda x: x.renorm_(2, 0, 1.0),
    "triangle": lambda x: x.triu_(),
    "times": lambda x: x * _ramp(x),
    "times in place": lambda x: x.mul_(_ramp(x)),
    "plus a row": lambda x: x.add_(_ramp(x, x.shape[1:])),
    "copy": lambda x: x.copy_(_ramp(x)),
    "where": lambda x: torch.where(_ramp(x) > 0.5, x, 0.0),
    "lerp": lambda x: x.lerp_(_ramp(x), 0.5),
    "bounds": lambda x: x.clamp_(max=_ramp(x, x.shape[1:])),
    "product": lambda x: x @ _ramp(x, (x.shape[1], 3)),
    "into a tensor": lambda x: _ramp(x).add_(x.detach()),
    "into a tensor, slowly": lambda x: _ramp(x).lerp_(x.detach(), 0.5),
    "norm": lambda x: [norm := x.norm(), norm.mul_(_ramp(x, ()) + 2), norm][-1],
}
VECTORS: dict[str, Callable[[Any], object]] = {
    "element": lambda x: x[-1].fill_(3),
    "set an element": lambda x: x.__setitem__(-1, 3.0),
    "set elements": lambda x: x.__setitem__(slice(0, 1), 3.0),
    "flat": lambda x: x.view(-1)[0].zero_(),
    "times": lambda x: x.mul_(_ramp(x)),
}


@pytest.mark.parametrize("of", ["parameter", "data", "gradient"])
@on_ranks()
def test_what_is_written_is_there_on_all_ranks(of: str) -> None:
    """As with a whole tensor, outside of steps; with 13 rows, which the ranks do not share evenly."""
    model, data = models.ByteModel(), models.Batches(models.rank())
    problems = []
    with engines.engine(model, 3, compile=False) as engine:
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, data[0]))
        vector = next(p for p in model.parameters() if p.dim() == 1 and len(p) > 2)
        for parameter, table in ((model.get_parameter("embedding.weight"), MATRICES), (vector, VECTORS)):
            for name, change in table.items():
                tensor: Any = {"parameter": parameter, "data": parameter.data, "gradient": parameter.grad}[of]
                with torch.no_grad():
                    whole = tensor.full_tensor().clone()
                    expected, found = change(whole), change(tensor)
                    if not torch.equal(tensor.full_tensor(), whole):
                        problems.append(f"{name}: not there")
                    if isinstance(expected, Tensor) and not torch.allclose(models.full(found), expected, rtol=1e-6):
                        problems.append(f"{name}: another result")
    assert problems == []
