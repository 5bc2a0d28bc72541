#include "collectives.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/version.h>

#include <exception>

#include "text.h"

namespace zerocompile {

namespace {

// The names of these changed in torch 2.13.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
#define ZEROCOMPILE_NAMED(now, before) now
#else
#define ZEROCOMPILE_NAMED(now, before) before
#endif

// What a collective moves: this rank's part, and the parts of all.
using Tensors = std::vector<at::Tensor>;

void gather_one(c10d::ProcessGroup& group, Lane::Launch& launch, at::Tensor output, at::Tensor input) {
  c10d::AllgatherOptions options;
  options.asyncOp = output.device().is_cpu();  // else it runs on the lane's stream, which is asynchronous already
  launch.add(group.ZEROCOMPILE_NAMED(all_gather_single, _allgather_base)(output, input, options));
}

void gather_each(c10d::ProcessGroup& group, Lane::Launch& launch, Tensors outputs, Tensors inputs) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;  // as above
  launch.add(group.ZEROCOMPILE_NAMED(all_gather_single_coalesced, allgather_into_tensor_coalesced)(outputs, inputs,
                                                                                                  options));
}

void scatter_one(c10d::ProcessGroup& group, Lane::Launch& launch, at::Tensor output, at::Tensor input,
                 const c10d::ReduceScatterOptions& options) {
  launch.add(group.ZEROCOMPILE_NAMED(reduce_scatter_single, _reduce_scatter_base)(output, input, options));
}

void scatter_each(c10d::ProcessGroup& group, Lane::Launch& launch, Tensors outputs, Tensors inputs,
                  const c10d::ReduceScatterOptions& options) {
  launch.add(group.ZEROCOMPILE_NAMED(reduce_scatter_single_coalesced, reduce_scatter_tensor_coalesced)(
      outputs, inputs, options));
}
#undef ZEROCOMPILE_NAMED

// Copies the parts of `flat`, [ranks, sum of n_i], to their places: places[i] has ranks * n_i elements.
void unpack(const at::Tensor& flat, const Tensors& places) {
  Tensors views;
  std::vector<int64_t> sizes;
  for (const auto& place : places) {
    sizes.push_back(place.numel() / flat.size(0));
    views.push_back(place.view({flat.size(0), sizes.back()}));
  }
  at::split_with_sizes_copy_out(views, flat, sizes, 1);
}

// [Note: gloo gathers] Gloo runs a group's collectives on two threads, which both write the last collective's name to
// one std::string without a lock; names of more than 15 characters live on the heap, and two "ALLGATHER_COALESCED"
// in flight at a time free it twice (torch 2.11 and 2.13). So on the CPU a unit is gathered by one flat all-gather,
// whose name is short, and its parts are copied to their places by the thread that waits for it.
void all_gather_packed(c10d::ProcessGroup& group, Lane::Launch& launch, Tensors outputs, const Tensors& inputs) {
  Tensors parts;
  for (const auto& input : inputs) parts.push_back(input.reshape(-1));
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // it refuses other halves
  const auto input = at::cat(parts);
  const auto output = at::empty({group.getSize(), input.numel()}, input.options());
  gather_one(group, launch, output, input.unsqueeze(0));
  launch.then([output, outputs = std::move(outputs)] {
    c10::InferenceMode normal_tensors(false);
    at::NoGradGuard no_grad;
    unpack(output, outputs);
  });
}

// The same for gradients, on devices.
void reduce_scatter_packed(c10d::ProcessGroup& group, Lane::Launch& launch, const Tensors& outputs,
                           const Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const auto input = at::_chunk_cat(inputs, 0, group.getSize());  // [world, sum of n_i]
  const auto output = at::empty({1, input.size(1)}, input.options());
  scatter_one(group, launch, output.view({-1}), input.view({-1}), options);
  unpack(output, outputs);
}

[[noreturn]] void fail(const std::string& what, int64_t rank, const std::string& why) {
  TORCH_CHECK(false, text("zerocompile: ", what, " failed on rank ", rank, ": ", why));
}

// [Note: gloo reduce-scatters] Gloo's reduce-scatter is an all-reduce of a copy of each input, whose work ignores the
// timeout of a wait: a rank could not look meanwhile whether the others still come. So the all-reduces are done here.
void all_reduce_each(c10d::ProcessGroup& group, int64_t rank, int64_t world, Lane::Launch& launch,
                     std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs) {
  const auto all = group.getSize();
  const bool divides_first = inputs.front().scalar_type() == at::kHalf;  // whose sum overflows early
  std::vector<at::Tensor> sums;
  for (const auto& input : inputs) {
    sums.push_back(divides_first ? input.div(all) : input.clone());
    all_reduce(group, launch, sums.back(), c10d::ReduceOp::SUM);
  }
  launch.then([=, sums = std::move(sums), outputs = std::move(outputs)] {
    at::NoGradGuard no_grad;
    for (size_t k = 0; k < outputs.size(); ++k) {
      const auto rows = sums[k].size(0) / world;
      outputs[k].copy_(sums[k].narrow(0, rank * rows, rows));
      if (!divides_first) outputs[k].div_(all);
    }
  });
}

}  // namespace

void all_reduce(c10d::ProcessGroup& group, Lane::Launch& launch, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = tensor.is_cpu();
  launch.add(group.allreduce(tensors, options));
}

void all_gather(c10d::ProcessGroup& group, Lane::Launch& launch, std::vector<at::Tensor> outputs,
                std::vector<at::Tensor> inputs, Packing packing) {
  const bool flat = packing == Packing::Flat && outputs.size() > 1;
  if (flat || outputs.front().device().is_cpu()) {
    return all_gather_packed(group, launch, std::move(outputs), inputs);
  }
  gather_each(group, launch, std::move(outputs), std::move(inputs));
}

void reduce_scatter(c10d::ProcessGroup& group, int64_t rank, int64_t world, Lane::Launch& launch,
                    std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs, Packing packing) {
  if (outputs.front().device().is_cpu()) {
    return all_reduce_each(group, rank, world, launch, std::move(outputs), inputs);
  }
  TORCH_CHECK(group.getSize() == world && group.getRank() == rank,
              "zerocompile: on devices a reduce-scatter is of the shard group alone");
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  options.asyncOp = false;
  if (packing == Packing::Flat && outputs.size() > 1) {
    return reduce_scatter_packed(group, launch, outputs, inputs, options);
  }
  scatter_each(group, launch, std::move(outputs), std::move(inputs), options);
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
  } catch (const std::exception& error) {  // gloo's, or Python's, which has no text here and goes on as it is
    if (*error.what() == '\0') throw;
    fail(what, rank, error.what());
  }
  if (raised != nullptr) std::rethrow_exception(raised);
}

}  // namespace zerocompile
