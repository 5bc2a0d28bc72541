#include "collectives.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/version.h>

namespace zerocompile {

namespace {

// [Note: gloo gathers] Gloo runs a group's collectives on two threads, which both write the last collective's name to
// one std::string without a lock; names of more than 15 characters live on the heap, and two "ALLGATHER_COALESCED"
// in flight at a time free it twice (torch 2.11 and 2.13). So on the CPU a unit is gathered by one flat all-gather,
// whose name is short, and its parts are copied to their places by the thread that waits for it.
void all_gather_flat(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                     const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> parts;
  for (const auto& input : inputs) parts.push_back(input.reshape(-1));
  auto input = at::cat(parts).unsqueeze(0);  // [1, sum of n_i]
  auto output = at::empty({group.getSize(), input.numel()}, input.options());
  c10d::AllgatherOptions options;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  launch.add(group.all_gather_single(output, input, options));
#else
  launch.add(group._allgather_base(output, input, options));
#endif
  launch.then([output, outputs = std::move(outputs)] {
    c10::InferenceMode normal_tensors(false);
    at::NoGradGuard no_grad;
    int64_t offset = 0;
    for (const auto& full : outputs) {
      const auto numel = full.numel() / output.size(0);
      full.view({output.size(0), numel}).copy_(output.narrow(1, offset, numel));
      offset += numel;
    }
  });
}

// [Note: gloo sums] Gloo's own reduce-scatter sums everything on every rank and keeps a part, and its wait knows no end:
// a rank could not look whether the others still come (see [Note: blocked ranks]). So the sum is asked for directly.
void reduce_scatter_flat(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                         const std::vector<at::Tensor>& inputs, bool average) {
  std::vector<at::Tensor> parts;
  for (const auto& input : inputs) parts.push_back(input.reshape(-1));
  auto sum = at::cat(parts);  // [sum of n_i]
  std::vector<at::Tensor> tensors{sum};
  c10d::AllreduceOptions options;
  options.asyncOp = true;
  launch.add(group.allreduce(tensors, options));
  const int64_t rank = group.getRank(), world = group.getSize();
  launch.then([sum, outputs = std::move(outputs), rank, world, average] {
    at::NoGradGuard no_grad;
    int64_t offset = 0;
    for (const auto& output : outputs) {
      const auto numel = output.numel();
      auto own = sum.narrow(0, offset + rank * numel, numel);
      if (average) own.div_(world);
      output.copy_(own.view(output.sizes()));
      offset += numel * world;
    }
  });
}

}  // namespace

void all_gather(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                std::vector<at::Tensor> inputs) {
  if (outputs.front().device().is_cpu()) return all_gather_flat(group, launch, std::move(outputs), inputs);
  c10d::AllgatherOptions options;
  options.asyncOp = false;  // the lane's stream is the asynchrony
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  launch.add(group.all_gather_single_coalesced(outputs, inputs, options));
#else
  launch.add(group.allgather_into_tensor_coalesced(outputs, inputs, options));
#endif
}

void reduce_scatter(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                    std::vector<at::Tensor> inputs, const c10d::ReduceOp& op) {
  if (outputs.front().device().is_cpu()) {
    return reduce_scatter_flat(group, launch, std::move(outputs), inputs, op.op_ == c10d::ReduceOp::AVG);
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  options.asyncOp = false;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  launch.add(group.reduce_scatter_single_coalesced(outputs, inputs, options));
#else
  launch.add(group.reduce_scatter_tensor_coalesced(outputs, inputs, options));
#endif
}

}  // namespace zerocompile
