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

// outputs[i]: [world * n_i, ...], inputs[i]: [n_i, ...], all of one dtype. An input may be this rank's rows of its
// output; then nothing is copied.
void all_gather(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                std::vector<at::Tensor> inputs);

// outputs[i]: [n_i, ...], inputs[i]: [world * n_i, ...], all of one dtype. An output gets the rows of `rank`, one of
// `world`. On devices these are the group's own rank and size. On the CPU the group may have more ranks: all of them
// add.
void reduce_scatter(c10d::ProcessGroup& group, int64_t rank, int64_t world, Lane::Launch& launch,
                    std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs, const c10d::ReduceOp& op);

// Waits for what is on its way. A failure says that it was `what`. `look`, if it is not null, is called about once a
// second on the CPU; if it raises, the wait ends with that error.
void wait_for(Pending& pending, c10::Device device, const std::string& what, int64_t rank,
              const std::function<void()>& look);

}  // namespace zerocompile
