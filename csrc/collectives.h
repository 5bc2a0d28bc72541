// The grouped collectives under one name for every supported torch and backend.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <string>
#include <vector>

#include "stream.h"

namespace zerocompile {

// What a collective moves for a tensor: the backends know no complex numbers.
inline at::Tensor on_the_wire(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

// outputs[i]: [world * n_i, ...], inputs[i]: [n_i, ...], all of one dtype; in place where an input is its own rows.
void all_gather(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                std::vector<at::Tensor> inputs);

// outputs[i]: [n_i, ...], inputs[i]: [world * n_i, ...], all of one dtype; the rows of `rank` of `world`. They are the
// group's own; on the CPU the group may have more ranks, which all add.
void reduce_scatter(c10d::ProcessGroup& group, int64_t rank, int64_t world, Lane::Launch& launch,
                    std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs, const c10d::ReduceOp& op);

// Waits for what is on its way; a failure says that it was `what`. `look` may raise, which ends the wait with that;
// null: there is nothing to look at.
void wait_for(Pending& pending, c10::Device device, const std::string& what, int64_t rank,
              const std::function<void()>& look);

}  // namespace zerocompile
