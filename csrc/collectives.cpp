#include "collectives.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/version.h>

#include <exception>

#include "text.h"

namespace zerocompile {

namespace {

// [Note: gloo gathers] Gloo runs a group's collectives on two threads, which both write the last collective's name to
// one std::string without a lock; names of more than 15 characters live on the heap, and two "ALLGATHER_COALESCED"
// in flight at a time free it twice (torch 2.11 and 2.13). So on the CPU a unit is gathered by one flat all-gather,
// whose name is short, and its parts are copied to their places by the thread that waits for it.
void all_gather_flat(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                     const std::vector<at::Tensor>& inputs) {
  const bool on_cpu = outputs.front().device().is_cpu();
  std::vector<at::Tensor> parts;
  for (const auto& input : inputs) parts.push_back(input.reshape(-1));
  auto input = at::cat(parts).unsqueeze(0);  // [1, sum of n_i]
  auto output = at::empty({group.getSize(), input.numel()}, input.options());
  c10d::AllgatherOptions options;
  options.asyncOp = on_cpu;  // else it runs on the lane's stream, which is asynchronous already
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  launch.add(group.all_gather_single(output, input, options));
#else
  launch.add(group._allgather_base(output, input, options));
#endif
  launch.then([output, outputs = std::move(outputs)] {
    c10::InferenceMode normal_tensors(false);
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> places;
    std::vector<int64_t> sizes;
    for (const auto& full : outputs) {
      sizes.push_back(full.numel() / output.size(0));
      places.push_back(full.view({output.size(0), sizes.back()}));
    }
    at::split_with_sizes_copy_out(places, output, sizes, 1);
  });
}

// The same for gradients, on devices.
void reduce_scatter_flat(c10d::ProcessGroup& group, Lane::Launch& launch, const std::vector<at::Tensor>& outputs,
                         const std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) {
  const auto input = at::_chunk_cat(inputs, 0, group.getSize());  // [world, sum of n_i]
  auto output = at::empty({input.size(1)}, input.options());
  auto flat = input.view({-1});
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  launch.add(group.reduce_scatter_single(output, flat, options));
#else
  launch.add(group._reduce_scatter_base(output, flat, options));
#endif
  std::vector<at::Tensor> places;
  std::vector<int64_t> sizes;
  for (const auto& rows : outputs) {
    sizes.push_back(rows.numel());
    places.push_back(rows.view({-1}));
  }
  at::split_with_sizes_copy_out(places, output, sizes, 0);
}

[[noreturn]] void fail(const std::string& what, int64_t rank, const std::string& why) {
  TORCH_CHECK(false, text("zerocompile: ", what, " failed on rank ", rank, ": ", why));
}

// [Note: gloo reduce-scatters] Gloo's reduce-scatter is an all-reduce of a copy of each input, whose work ignores the
// timeout of a wait: a rank could not look meanwhile whether the others still come. So the all-reduces are done here.
void all_reduce_each(c10d::ProcessGroup& group, int64_t rank, int64_t world, Lane::Launch& launch,
                     std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs,
                     const c10d::ReduceOp& op) {
  const bool average = op == c10d::ReduceOp::AVG;
  std::vector<at::Tensor> sums;
  for (const auto& input : inputs) {
    sums.push_back(input.clone());
    std::vector<at::Tensor> tensors{sums.back()};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::SUM;
    options.asyncOp = true;
    launch.add(group.allreduce(tensors, options));
  }
  launch.then([sums = std::move(sums), outputs = std::move(outputs), rank, world, all = group.getSize(), average] {
    at::NoGradGuard no_grad;
    for (size_t k = 0; k < outputs.size(); ++k) {
      const auto rows = sums[k].size(0) / world;
      outputs[k].copy_(sums[k].narrow(0, rank * rows, rows));
      if (average) outputs[k].div_(all);
    }
  });
}

}  // namespace

void all_gather(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                std::vector<at::Tensor> inputs, Packing packing) {
  const bool flat = packing == Packing::Flat && outputs.size() > 1;
  if (flat || outputs.front().device().is_cpu()) return all_gather_flat(group, launch, std::move(outputs), inputs);
  c10d::AllgatherOptions options;
  options.asyncOp = false;  // as above
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  launch.add(group.all_gather_single_coalesced(outputs, inputs, options));
#else
  launch.add(group.allgather_into_tensor_coalesced(outputs, inputs, options));
#endif
}

void reduce_scatter(c10d::ProcessGroup& group, int64_t rank, int64_t world, Lane::Launch& launch,
                    std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs, const c10d::ReduceOp& op,
                    Packing packing) {
  if (outputs.front().device().is_cpu()) {
    return all_reduce_each(group, rank, world, launch, std::move(outputs), inputs, op);
  }
  TORCH_CHECK(group.getSize() == world && group.getRank() == rank,
              "zerocompile: on devices a reduce-scatter is of the shard group alone");
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  options.asyncOp = false;
  if (packing == Packing::Flat && outputs.size() > 1) {
    return reduce_scatter_flat(group, launch, outputs, inputs, options);
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  launch.add(group.reduce_scatter_single_coalesced(outputs, inputs, options));
#else
  launch.add(group.reduce_scatter_tensor_coalesced(outputs, inputs, options));
#endif
}

void wait_for(Pending& pending, c10::Device device, const std::string& what, int64_t rank,
              const std::function<void()>& look) {
  std::exception_ptr raised;
  std::function<bool()> goes_on;
  if (look != nullptr) {
    goes_on = [&] {
      try {
        look();
      } catch (...) {
        raised = std::current_exception();
      }
      return raised == nullptr;
    };
  }
  try {
    pending.wait(device, goes_on);
  } catch (const c10::Error& error) {
    fail(what, rank, error.what_without_backtrace());
  } catch (const std::exception& error) {  // gloo's
    fail(what, rank, error.what());
  }
  if (raised != nullptr) std::rethrow_exception(raised);
}

}  // namespace zerocompile
