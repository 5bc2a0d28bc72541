// The grouped collectives under one name for every supported torch and backend.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <string>
#include <vector>

#include "stream.h"

namespace zerocompile {

// What a collective moves for a tensor: the backends know no complex numbers, and not all of them know float8.
inline at::Tensor on_the_wire(const at::Tensor& tensor) {
  if (c10::isFloat8Type(tensor.scalar_type())) return tensor.view(at::kByte);
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

// [Note: flat collectives] NCCL runs a group of collectives one after the other wherever they share a channel, and each
// has a latency of its own. Inside a host that costs nothing, and every tensor goes straight to its place. Between
// hosts the latencies of a unit's tensors add up to more than its bytes take: over sockets, eleven tensors of one block
// took 3.6 times as long as the same bytes in one (examples/BENCHMARKS.md). So a group that spans hosts moves one flat
// tensor, and the copies between it and the tensors' places run at the speed of the device's memory. That takes the
// memory of one more unit while it is on its way.
enum class Packing { Each, Flat };

// outputs[i]: [world * n_i, ...], inputs[i]: [n_i, ...], all of one dtype. An input may be this rank's rows of its
// output; then nothing is copied, unless it is packed flat. On the CPU it always is, see [Note: gloo gathers].
void all_gather(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                std::vector<at::Tensor> inputs, Packing packing);

// outputs[i]: [n_i, ...], inputs[i]: [world * n_i, ...], all of one dtype. An output gets the rows of `rank`, one of
// `world`. On devices these are the group's own rank and size. On the CPU the group may have more ranks: it is
// the mean over all of them.
void reduce_scatter(c10d::ProcessGroup& group, int64_t rank, int64_t world, Lane::Launch& launch,
                    std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs, Packing packing);

// In place. On the CPU it is started; on a device it runs in the order of the current stream.
void all_reduce(c10d::ProcessGroup& group, Lane::Launch& launch, const at::Tensor& tensor, const c10d::ReduceOp& op);

// Waits for what is on its way. A failure says that it was `what`. `look`, if it is not null, is called about once a
// second on the CPU; if it raises, the wait ends with that error.
void wait_for(Pending& pending, c10::Device device, const std::string& what, int64_t rank,
              const std::function<void()>& look);

}  // namespace zerocompile
