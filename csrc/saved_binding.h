// What Python sees of saved.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace zerocompile {

// Adds the class `Saved` to the module, and the methods `pack` and `unpack` to its class `Runtime`.
void bind_saved(pybind11::module_& module, const pybind11::object& runtime_class);

}  // namespace zerocompile
