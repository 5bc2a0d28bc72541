"""Kernels that update, cast and place in one pass over memory. They need Triton, which not every build of torch brings.

The arithmetic is that of torch's fused optimizers (aten/src/ATen/native/cuda/fused_adam_utils.cuh, FusedSgdKernel.cu),
operation by operation, in float32. The compiler that torch is built with contracts products and sums. Where it does,
there is an explicit ``fma`` here. Launches say ``enable_fp_fusion=False``, so nothing else is contracted. Where torch's
compiler contracts in some of its kernels only, ``FORM`` chooses.

A table, int64 of [9, ENTRIES], has a column for each array that is updated. Its rows are:

* 0 to 4: the addresses of the parameter, of the gradient and of up to three states; 0 for a state that there is not;
* 5 and 6: the addresses of the two places for the cast (``own`` and ``staged``); 0 where there is none;
* 7: the number of elements;
* 8: the number of the first program that works on the array. Columns beyond the last array have a number here that no
  program has.
"""
# mypy: ignore-errors
# ruff: noqa: SIM108 (what is constant for the compiler chooses a statement, not a value)

import torch
import triton
import triton.language as tl

FORMS = (0, 1)


def dtype_of(dtype):
    """Triton's name of a dtype in which casts are placed; bfloat16 for ``None``, where none is placed."""
    return {torch.float16: tl.float16, torch.float32: tl.float32}.get(dtype, tl.bfloat16)


@triton.jit
def _place(own, staged, offsets, mask, value, COPIES: tl.constexpr):
    if COPIES >= 1:
        tl.store(own + offsets, value.to(own.dtype.element_ty), mask=mask)
    if COPIES >= 2:
        tl.store(staged + offsets, value.to(staged.dtype.element_ty), mask=mask)


@triton.jit
def _found(table, BLOCK: tl.constexpr, ENTRIES: tl.constexpr):
    """The column of the array that this program works on, and its first element in this array."""
    program = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, ENTRIES)
    starts = tl.load(table + 8 * ENTRIES + numbers)
    k = tl.sum((starts <= program).to(tl.int32), 0) - 1
    first = program - tl.load(table + 8 * ENTRIES + k)
    return k, first * BLOCK


@triton.jit
def _adam_span(
    p,
    g,
    m,
    v,
    x,
    own,
    staged,
    offsets,
    mask,
    lr,
    step_size,
    beta1,
    beta2,
    decay,
    eps,
    root,
    scale,
    skip,
    DECOUPLED: tl.constexpr,
    DECAYS: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr,
    COPIES: tl.constexpr,
    FORM: tl.constexpr,
):
    param = tl.load(p + offsets, mask=mask)
    if skip:
        _place(own, staged, offsets, mask, param, COPIES)
    else:
        grad = tl.load(g + offsets, mask=mask)
        first = tl.load(m + offsets, mask=mask)
        second = tl.load(v + offsets, mask=mask)
        if SCALED:
            grad = tl.div_rn(grad, scale)
            tl.store(g + offsets, grad, mask=mask)
        if MAXIMIZE:
            grad = -grad
        if DECAYS:
            if DECOUPLED:
                param = tl.fma(-(lr * decay), param, param)
            elif FORM == 0:
                grad = tl.fma(param, decay, grad)
            else:
                grad = grad + param * decay
        first = tl.fma(beta1, first, tl.fma(-beta1, grad, grad))
        square = grad * grad
        second = tl.fma(beta2, second, tl.fma(-beta2, square, square))
        largest = second
        if AMSGRAD:
            before = tl.load(x + offsets, mask=mask)
            largest = tl.where(before < second, second, before)  # as std::max, also for NaN
            tl.store(x + offsets, largest, mask=mask)
        below = tl.div_rn(tl.sqrt_rn(largest), root) + eps
        param = param - tl.div_rn(step_size * first, below)
        tl.store(p + offsets, param, mask=mask)
        tl.store(m + offsets, first, mask=mask)
        tl.store(v + offsets, second, mask=mask)
        _place(own, staged, offsets, mask, param, COPIES)


@triton.jit
def adam(
    table, powers, lr_tensor, scale_tensor, found_inf,
    lr_number, beta1, beta2, decay,
    eps,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, LR_TENSOR: tl.constexpr,
    DECOUPLED: tl.constexpr, DECAYS: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr, MAY_SKIP: tl.constexpr, COPIES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    k, start = _found(table, BLOCK, ENTRIES)
    pointer: tl.constexpr = tl.pointer_type(tl.float32)
    narrow: tl.constexpr = tl.pointer_type(DTYPE)
    p = tl.load(table + 0 * ENTRIES + k).to(pointer) + start
    g = tl.load(table + 1 * ENTRIES + k).to(pointer) + start
    m = tl.load(table + 2 * ENTRIES + k).to(pointer) + start
    v = tl.load(table + 3 * ENTRIES + k).to(pointer) + start
    x = tl.load(table + 4 * ENTRIES + k).to(pointer) + start
    own = tl.load(table + 5 * ENTRIES + k).to(narrow) + start
    staged = tl.load(table + 6 * ENTRIES + k).to(narrow) + start
    left = tl.load(table + 7 * ENTRIES + k) - start
    if LR_TENSOR:
        lr = tl.load(lr_tensor)
    else:
        lr = lr_number
    step_size = tl.div_rn(lr, 1.0 - tl.load(powers + k))
    root = tl.sqrt_rn(1.0 - tl.load(powers + ENTRIES + k))
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_tensor)
    skip = False
    if MAY_SKIP:
        skip = tl.load(found_inf) == 1.0
    if ALIGNED:
        p, g, m = tl.multiple_of(p, 16), tl.multiple_of(g, 16), tl.multiple_of(m, 16)
        v, x = tl.multiple_of(v, 16), tl.multiple_of(x, 16)
        own, staged = tl.multiple_of(own, 16), tl.multiple_of(staged, 16)
    offsets = tl.arange(0, BLOCK)
    if left >= BLOCK:
        _adam_span(
            p, g, m, v, x, own, staged, offsets, None, lr, step_size, beta1, beta2, decay, eps, root, scale, skip,
            DECOUPLED, DECAYS, AMSGRAD, MAXIMIZE, SCALED, COPIES, FORM,
        )  # fmt: skip
    else:
        _adam_span(
            p, g, m, v, x, own, staged, offsets, offsets < left, lr, step_size, beta1, beta2, decay, eps, root, scale,
            skip, DECOUPLED, DECAYS, AMSGRAD, MAXIMIZE, SCALED, COPIES, FORM,
        )  # fmt: skip


@triton.jit
def _sgd_span(
    p,
    g,
    m,
    own,
    staged,
    offsets,
    mask,
    lr,
    momentum,
    rest,
    decay,
    scale,
    skip,
    DECAYS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    FIRST_STEP: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr,
    COPIES: tl.constexpr,
    FORM: tl.constexpr,
):
    param = tl.load(p + offsets, mask=mask)
    if skip:
        _place(own, staged, offsets, mask, param, COPIES)
    else:
        grad = tl.load(g + offsets, mask=mask)
        if SCALED:
            grad = tl.div_rn(grad, scale)
            tl.store(g + offsets, grad, mask=mask)
        if MAXIMIZE:
            grad = -grad
        if DECAYS:
            grad = tl.fma(decay, param, grad)
        if MOMENTUM:
            if FIRST_STEP:
                buffer = grad
            else:
                buffer = tl.fma(rest, grad, momentum * tl.load(m + offsets, mask=mask))
            tl.store(m + offsets, buffer, mask=mask)
            if NESTEROV:
                grad = tl.fma(momentum, buffer, grad)
            else:
                grad = buffer
        if FORM == 0:
            param = tl.fma(-lr, grad, param)
        else:
            param = param - lr * grad
        tl.store(p + offsets, param, mask=mask)
        _place(own, staged, offsets, mask, param, COPIES)


@triton.jit
def sgd(
    table, lr_tensor, scale_tensor, found_inf,
    lr_number, momentum, dampening, decay,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, LR_TENSOR: tl.constexpr,
    DECAYS: tl.constexpr, MOMENTUM: tl.constexpr, FIRST_STEP: tl.constexpr, NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr, SCALED: tl.constexpr, MAY_SKIP: tl.constexpr, COPIES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    k, start = _found(table, BLOCK, ENTRIES)
    pointer: tl.constexpr = tl.pointer_type(tl.float32)
    narrow: tl.constexpr = tl.pointer_type(DTYPE)
    p = tl.load(table + 0 * ENTRIES + k).to(pointer) + start
    g = tl.load(table + 1 * ENTRIES + k).to(pointer) + start
    m = tl.load(table + 2 * ENTRIES + k).to(pointer) + start
    own = tl.load(table + 5 * ENTRIES + k).to(narrow) + start
    staged = tl.load(table + 6 * ENTRIES + k).to(narrow) + start
    left = tl.load(table + 7 * ENTRIES + k) - start
    if LR_TENSOR:
        lr = tl.load(lr_tensor)
    else:
        lr = lr_number
    rest = 1.0 - dampening
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_tensor)
    skip = False
    if MAY_SKIP:
        skip = tl.load(found_inf) == 1.0
    if ALIGNED:
        p, g, m = tl.multiple_of(p, 16), tl.multiple_of(g, 16), tl.multiple_of(m, 16)
        own, staged = tl.multiple_of(own, 16), tl.multiple_of(staged, 16)
    offsets = tl.arange(0, BLOCK)
    if left >= BLOCK:
        _sgd_span(
            p, g, m, own, staged, offsets, None, lr, momentum, rest, decay, scale, skip,
            DECAYS, MOMENTUM, FIRST_STEP, NESTEROV, MAXIMIZE, SCALED, COPIES, FORM,
        )  # fmt: skip
    else:
        _sgd_span(
            p, g, m, own, staged, offsets, offsets < left, lr, momentum, rest, decay, scale, skip,
            DECAYS, MOMENTUM, FIRST_STEP, NESTEROV, MAXIMIZE, SCALED, COPIES, FORM,
        )  # fmt: skip
