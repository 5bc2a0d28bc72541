// Backward: when it begins and ends, and how gradients are taken as they are produced.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "runtime.h"
#include "text.h"
#include "views.h"

namespace zerocompile {

namespace {

// Whether the gradient that waits may be added to in place: it was made here, or nobody else holds its memory, as of
// one that a graph has handed over.
bool is_ours(const Parameter& p) {
  return p.grad_owned || (p.grad.storage().use_count() == 1 && p.grad.is_non_overlapping_and_dense());
}

// Called when the backward comes to a node.
struct Entry : torch::autograd::FunctionPreHook {
  explicit Entry(std::function<void()> call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    call_();
    return grads;
  }
  std::function<void()> call_;
};

}  // namespace

// [Note: end of backward] An engine callback, not a graph node, ends a backward: it is the same for any number of
// graphs, breaks and recompilations. It is armed by the first thing that happens in a backward. In a nested backward
// (reentrant checkpoint, GradCache) some node of the outer one is still being evaluated when the callback runs: then
// it leaves everything to the outer backward, which arms again at its next event or is finished by the strategy.
void Runtime::arm() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto task = torch::autograd::get_current_graph_task_id();
  if (failed()) abort_failed_backward();
  accumulates_ = accumulates_ || accumulating();
  if (armed_ || task == -1) return;
  armed_ = true;
  if (!backward_) {
    backward_ = true;
    outermost_ = task;
    pending_ = pending_ || deferred_;
    await_reductions();
    again_ = false;
    next_reduction_ = 0;
    begun_.reset();  // what waits for the end of a window is older than its last backward
    if (!deferred_ && !device_.is_cpu()) begun_ = mark(device_);
    for (auto& u : units_) {
      u.reduced = u.nested = false;
      u.ready.reset();
    }
    for (auto& p : parameters_) p.contributed_now = false;
  }
  agree_on_order();
  auto alive = std::make_shared<int64_t>(task);  // held by the graph task, which dies with its backward
  armed_task_ = alive;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), alive = std::move(alive)] {
    if (auto self = weak.lock()) self->backward_ended();
  });
}

// [Note: entry of backward] Whether a backward reads weights differs between a graph, which may recompute, and eager
// code: so neither decides that the units of a region are gathered; the first gradient of one of its results does, on
// every rank. `compiled`: the region's name, if it is a graph. A CUDA graph returns one tensor again and again, with
// another node: a hook of the tensor would stay with the first.
void Runtime::watch_backward(const Tensor& result, std::vector<int64_t> units, std::string compiled) {
  TORCH_CHECK(result.grad_fn() != nullptr,
              text("zerocompile: a tensor of sizes ", result.sizes(), " that no operation has made (a leaf, or one that ",
                   "requires no grad) is not a result of a region, so the region's backward cannot begin at it"));
  result.grad_fn()->add_tensor_pre_hook(std::make_unique<Entry>(
      [weak = weak_from_this(), units = std::move(units), compiled = std::move(compiled)] {
        if (auto self = weak.lock()) self->enter_backward(units, compiled);
      }));
}

void Runtime::enter_backward(const std::vector<int64_t>& units, const std::string& compiled) {
  TORCH_CHECK(compiled.empty() || !at::GradMode::is_enabled(),
              text("backward with `create_graph=True` through the compiled module `", compiled,
                   "`: compiled graphs have no second derivative. Use ZeroCompileStrategy(compile=False)."));
  enter(units, /*trusted=*/false);
  leave(units);
}

// [Note: autograd.grad] `torch.autograd.grad` with respect to activations runs whole compiled backward graphs, whose
// gradients of parameters torch would drop: only a backward that accumulates into leaves contributes and reduces.
bool Runtime::accumulating() {
  if (torch::autograd::get_current_graph_task_id() == -1) return false;
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen == nullptr || chosen->empty();
}

void Runtime::backward_ended() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  armed_ = false;
  if (torch::autograd::get_current_node() != nullptr) return;  // nested
  finish_backward();
}

void Runtime::finish_backward() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!backward_ || shut_down_) return;
  backward_ = armed_ = false;
  stats_.backwards += 1;
  try {
    if (!deferred_ && accumulates_) reduce_everything();
    if (deferred_ && accumulates_ && max_deferred_bytes_ >= 0) reduce_largest();
  } catch (...) {  // out of memory, or another rank is gone: nothing of this backward may reach the next
    accumulates_ = false;
    begun_.reset();
    drop_reductions();
    drop_gradients();
    throw;
  }
  accumulates_ = false;
  begun_.reset();
  write_back();
  for (auto& u : units_) {
    u.graph_uses = 0;
    if (u.open_modules == 0 && !held_) drop(u);
  }
}

// For a backward of which the engine told us only what was nested in it.
void Runtime::finish_ended_backward() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!armed_ && !in_backward()) finish_backward();
}

// A backward whose graph task is gone and that has not ended raised. Its gradients are incomplete on this rank.
void Runtime::abort_failed_backward() {
  if (!failed()) return;
  // What waits for the end of a window must not be dropped in silence, nor be used without the part that is missing.
  TORCH_CHECK(!deferred_,
              text("zerocompile: a backward raised inside `coalesce_grad_reduction` or an accumulation, "
                   "so the gradients that wait for its end are incomplete on rank ", rank_,
                   ". Leave it with the exception, which drops them, and repeat the step"));
  drop_gradients();
}

void Runtime::drop_gradients() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (failed() || torch::autograd::get_current_graph_task_id() == -1) backward_ = armed_ = accumulates_ = false;
  std::exception_ptr failure;
  try {
    retire(0);
  } catch (...) {  // the gradients go all the same
    failure = std::current_exception();
  }
  pending_ = early_ = false;
  for (auto& p : parameters_) {
    p.grad.reset();
    p.early.reset();
    p.grad_owned = p.contributed = false;
    p.graph_outstanding = 0;
  }
  for (auto& u : units_) u.reduced = false;
  reduced_.clear();
  if (failure) std::rethrow_exception(failure);
}

// [Note: order of reductions] One fixed order on all ranks: the reverse of the order in which rank 0 first used the
// units in a forward, told to the others through the store, so that no collective hides in a backward. A unit that is
// ready early waits for its turn; one that is not ready when backward ends is reduced then. Gathers have a process
// group of their own, so only this order has to agree.
void Runtime::agree_on_order() {
  if (!reduce_order_.empty() || units_.empty()) return;
  auto order = forward_order_;
  for (int64_t index = 0; index < static_cast<int64_t>(units_.size()); ++index) {
    if (!seen_forward_[index]) order.push_back(index);
  }
  std::reverse(order.begin(), order.end());
  std::stable_partition(order.begin(), order.end(), [&](int64_t index) {  // see [Note: agreed dtype]
    const auto& members = units_[index].parameters;
    return std::all_of(members.begin(), members.end(), [&](int64_t i) { return parameters_[i].cast_grad; });
  });
  reduce_order_ = agree_ != nullptr && world_ > 1 ? agree_(order) : order;
  TORCH_CHECK(reduce_order_.size() == units_.size(),
              text("zerocompile: rank 0 has ", reduce_order_.size(), " units, rank ",
                   rank_, " has ", units_.size()));
}

// Rank 0's order, for ranks that are in a backward while rank 0 is at a window's end without one.
void Runtime::publish_order() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (rank_ == 0) agree_on_order();
}

// ---- taking gradients ----

// What each use's gradient is cast to; none: nothing.
std::optional<at::ScalarType> Runtime::grad_dtype(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto& p = parameter(index);
  return p.cast_grad ? std::optional(p.grad_dtype) : std::nullopt;
}

Count Runtime::outstanding_reads(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return parameter(index).eager_outstanding;
}

// A forward whose backward never came must not delay the reductions of the next step; only such a one can still find
// its parameters modified.
void Runtime::forget_outstanding() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto& p : parameters_) {
    if (p.graph_outstanding == 0) p.forward_version = -1;
    p.graph_outstanding = 0;
  }
}

// [Note: grad dtype] The raw gradient becomes the leaf's before anything else looks at it: a bf16 parameter whose
// backward computed in fp32 never opens an fp32 bucket. With `grad_dtype=None` each backward decides, see
// [Note: agreed dtype]. `shared`: somebody else holds it and may write to it again.
void Runtime::contribute(const std::vector<int64_t>& indices, at::TensorList grads, bool from_graph, bool shared) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  arm();
  if (accumulating()) {
    at::NoGradGuard no_grad;
    Sums sums;
    shared = shared || copies_gradients_;
    for (size_t k = 0; k < indices.size(); ++k) take(parameter(indices[k]), grads[k], from_graph, shared, sums);
    if (sums.totals.size() == 1) sums.totals.front().add_(sums.parts.front());
    else if (!sums.totals.empty()) at::_foreach_add_(sums.totals, sums.parts);
  }
  mark_ready(indices);
  launch_complete();
  latest_.reset();
}

// One gradient: kept, or among `sums`, for all to be added by one kernel.
void Runtime::take(Parameter& p, const Tensor& handed, bool from_graph, bool shared, Sums& sums) {
  if (from_graph) p.graph_outstanding = std::max<int64_t>(0, p.graph_outstanding - 1);
  if (!p.master.requires_grad()) return;  // frozen after the forward: torch drops the gradient too
  TORCH_CHECK(handed.layout() == at::kStrided,
              text("zerocompile: the gradient of `", p.name,
                   "` is sparse, which cannot be sharded. Use sparse=False for this embedding"));
  TORCH_CHECK(handed.sizes() == at::IntArrayRef(p.size),
              text("zerocompile: the gradient of `", p.name, "` has sizes ",
                   handed.sizes(), ", the parameter ", p.size));
  auto grad = view_of(handed);
  if (p.cast_grad && grad.scalar_type() != p.grad_dtype) grad = grad.to(p.grad_dtype);
  const auto raw = grad.scalar_type();
  p.raw_dtype = p.grad.defined() ? at::promote_types(p.raw_dtype, raw) : raw;
  const bool sums_in_another = deferred_ && sum_dtype_.has_value() && grad.is_floating_point() && raw != *sum_dtype_;
  if (sums_in_another) grad = grad.to(*sum_dtype_);
  if (!p.grad.defined()) {
    p.grad = shared && grad.is_alias_of(handed) ? grad.clone() : grad;
    p.grad_owned = sums_in_another || shared;
  } else if (p.grad.scalar_type() == grad.scalar_type() && is_ours(p)) {
    p.grad_owned = true;
    sums.totals.push_back(p.grad);
    sums.parts.push_back(std::move(grad));
  } else {
    p.grad = p.grad.add(grad);
    p.grad_owned = true;
  }
  p.contributed = p.contributed_now = true;
  auto& unit = unit_of(p);
  unit.nested = unit.nested || torch::autograd::get_current_graph_task_id() != outermost_;
  if (from_graph) stats_.graph_reductions += 1;
}

// [Note: late reductions] A unit of which this rank misses a gradient is reduced at the end of the backward, and so are
// those whose turn comes after it; the other ranks may long have started them, and their streams may wait for them
// before they run what this rank's stream waits for (a gather, a collective of the user's in the backward). So what is
// not reduced right when its last gradient arrives is ordered behind its own gradients alone (without any, behind the
// backward's begin), not behind this rank's stream.
void Runtime::mark_ready(const std::vector<int64_t>& indices) {
  latest_.reset();
  for (auto i : indices) {
    const auto& p = parameter(i);
    if (device_.is_cpu() || deferred_ || !p.grad.defined()) continue;
    if (!latest_) latest_ = mark(device_);
    unit_of(p).ready = latest_;
  }
}

}  // namespace zerocompile
