#pragma once

#include "runtime.h"

namespace zerocompile {

// The full parameter for eager code, differentiable in `handle` if `requires_grad` and grad mode is on.
Tensor read(const std::shared_ptr<Runtime>& runtime, int64_t parameter, const Tensor& handle, bool requires_grad);

}  // namespace zerocompile
