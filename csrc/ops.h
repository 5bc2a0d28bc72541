#pragma once

#include "runtime.h"

namespace zerocompile {

// The full parameter for eager code, differentiable in `handle` if `requires_grad` and grad mode is on. `cast`: in that
// dtype, see [Note: low gathers].
Tensor read(const std::shared_ptr<Runtime>& runtime, int64_t parameter, const Tensor& handle, bool requires_grad,
            std::optional<at::ScalarType> cast);

}  // namespace zerocompile
