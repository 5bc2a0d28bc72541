// The grouped collectives under one name for every supported torch and backend.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

#include "stream.h"

namespace zerocompile {

// outputs[i]: [world * n_i, ...], inputs[i]: [n_i, ...], all of one dtype; in place where an input is its own rows.
void all_gather(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                std::vector<at::Tensor> inputs);

// outputs[i]: [n_i, ...], inputs[i]: [world * n_i, ...], all of one dtype.
void reduce_scatter(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                    std::vector<at::Tensor> inputs, const c10d::ReduceOp& op);

}  // namespace zerocompile
