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
bool is_ours(const Gradient& g) {
  return g.grad_owned || (g.grad.storage().use_count() == 1 && g.grad.is_non_overlapping_and_dense());
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
    began_deferred_ = deferred_;
    await_reductions();
    again_ = false;
    next_reduction_ = 0;
    begun_.reset();  // what waits for the end of a window is older than its last backward
    if (!deferred_ && !device_.is_cpu()) begun_ = mark(device_);
    for (auto& unit : unit_gradients_) unit = {};
    for (auto& g : gradients_) g.contributed_now = false;
  }
  agree_on_order();
  auto alive = std::make_shared<int64_t>(task);  // held by the graph task, which dies with its backward
  armed_task_ = alive;
  raised_ = false;
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
              text("zerocompile: a tensor of sizes ", result.sizes(), " that no operation has made (a leaf, or one ",
                   "that requires no grad) is not a result of a region, so the region's backward cannot begin at it"));
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
  if (!backward_ || registry_.is_shut_down()) return;
  backward_ = armed_ = false;
  stats_.backwards += 1;
  try {
    follow_producers();
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
  gathers_.end_backward();
}

// For a backward of which the engine told us only what was nested in it.
void Runtime::finish_ended_backward() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!armed_ && !in_backward()) finish_backward();
}

// The outermost backward has left its caller with an exception. On a device, autograd's thread holds the graph task a
// little longer than the caller waits, so the task alone does not tell yet.
void Runtime::backward_raised() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (armed_ && phase() != Phase::Backward) raised_ = true;
}

// A backward whose graph task is gone and that has not ended raised. Its gradients are incomplete on this rank.
void Runtime::abort_failed_backward() {
  if (!failed()) return;
  // What waits for the end of a window must not be dropped in silence, nor be used without the part that is missing.
  TORCH_CHECK(!began_deferred_,
              text("zerocompile: a backward raised inside `coalesce_grad_reduction` or an accumulation, "
                   "so the gradients that wait for its end are incomplete on rank ", registry_.global_rank(),
                   ". Leave it with the exception, which drops them, or call `zero_grad()`, and repeat the step"));
  drop_gradients();
}

// An exception leaves an accumulation: if it was a backward's, what waits is incomplete on this rank.
void Runtime::drop_failed_backward() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (backward_ && phase() != Phase::Backward) drop_gradients();
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
  pending_ = early_ = began_deferred_ = false;
  for (auto& g : gradients_) {
    g.grad.reset();
    g.early.reset();
    g.grad_owned = g.contributed = false;
    g.graph_outstanding = 0;
  }
  for (auto& unit : unit_gradients_) unit.reduced = false;
  reduced_.clear();
  if (failure) std::rethrow_exception(failure);
}

// [Note: order of reductions] One fixed order on all ranks: the reverse of the order in which rank 0 first used the
// units in a forward, told to the others through the store, so that no collective hides in a backward. A unit that is
// ready early waits for its turn; one that is not ready when backward ends is reduced then. Gathers have a process
// group of their own, so only this order has to agree.
void Runtime::agree_on_order() {
  if (!reduce_order_.empty() || registry_.units().empty()) return;
  auto order = gathers_.order().first_uses(static_cast<int64_t>(registry_.units().size()));
  std::reverse(order.begin(), order.end());
  std::stable_partition(order.begin(), order.end(), [&](int64_t index) {  // see [Note: agreed dtype]
    const auto& members = registry_.units()[index].parameters;
    return std::all_of(members.begin(), members.end(), [&](int64_t i) { return record(i).cast_grad; });
  });
  reduce_order_ = questions_.agree != nullptr && registry_.all_ranks() > 1 ? questions_.agree(order) : order;
  TORCH_CHECK(reduce_order_.size() == registry_.units().size(),
              text("zerocompile: rank 0 has ", reduce_order_.size(), " units, rank ",
                   registry_.global_rank(), " has ", registry_.units().size()));
}

// Rank 0's order, for ranks that are in a backward while rank 0 is at a window's end without one.
void Runtime::publish_order() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (registry_.global_rank() == 0) agree_on_order();
}

// ---- taking gradients ----

// What each use's gradient is cast to; none: nothing.
std::optional<at::ScalarType> Runtime::grad_dtype(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto& p = registry_.parameter(index);
  return p.cast_grad ? std::optional(p.grad_dtype) : std::nullopt;
}

Count Runtime::outstanding_reads(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return of(registry_.parameter(index)).eager_outstanding;
}

// A forward whose backward never came must not delay the reductions of the next step; only such a one can still find
// its parameters modified.
void Runtime::forget_outstanding() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (const auto& p : registry_.parameters()) {
    if (of(p).graph_outstanding == 0) gathers_.forget_forward(p.index);
    of(p).graph_outstanding = 0;
  }
}

// [Note: grad dtype] The raw gradient becomes the leaf's before anything else looks at it: a bf16 parameter whose
// backward computed in fp32 never opens an fp32 bucket. With `grad_dtype=None` each backward decides, see
// [Note: agreed dtype]. `shared`: somebody else holds it and may write to it again.
void Runtime::contribute(const std::vector<int64_t>& indices, at::TensorList grads, bool from_graph, bool shared) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  arm();
  follow_producers();
  if (!device_.is_cpu()) producer_ = current_stream(device_);
  if (accumulating()) {
    at::NoGradGuard no_grad;
    Sums sums;
    shared = shared || copies_gradients_;
    for (size_t k = 0; k < indices.size(); ++k) {
      take(registry_.parameter(indices[k]), grads[k], from_graph, shared, sums);
    }
    if (sums.totals.size() == 1) sums.totals.front().add_(sums.parts.front());
    else if (!sums.totals.empty()) at::_foreach_add_(sums.totals, sums.parts);
  }
  mark_ready(indices);
  launch_complete();
  latest_.reset();
}

// [Note: gradients of several dtypes] With `grad_dtype=None` gradients of one leaf may have several. torch adds to what
// an earlier backward has left in place, so the dtype of that stays. Within one backward it adds in place to a sum that
// nobody else holds, and otherwise makes a new one, of the wider dtype. So it is here.

// One gradient: kept, or among `into`, for all to be added by one kernel.
void Runtime::take(const Parameter& p, const Tensor& handed, bool from_graph, bool shared, Sums& into) {
  auto& g = of(p);
  if (from_graph) g.graph_outstanding = std::max<int64_t>(0, g.graph_outstanding - 1);
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
  const bool sums = deferred_ && sum_dtype_.has_value();
  const bool there = g.grad.defined();
  const bool stays = there && (!g.contributed_now || is_ours(g));  // see [Note: gradients of several dtypes]
  g.raw_dtype = stays ? g.raw_dtype : there ? at::promote_types(g.raw_dtype, raw) : raw;
  if (there && several_producers_) keep_for(g.grad, *producer_);  // it may be another stream's memory
  const bool sums_in_another = sums && grad.is_floating_point() && raw != *sum_dtype_;
  if (sums_in_another) grad = grad.to(*sum_dtype_);
  if (!there) {
    g.grad = shared && grad.is_alias_of(handed) ? grad.clone() : grad;
    g.grad_owned = sums_in_another || shared;
  } else if (is_ours(g) && (!sums || g.grad.scalar_type() == grad.scalar_type())) {
    g.grad_owned = true;
    into.totals.push_back(g.grad);
    into.parts.push_back(std::move(grad));
  } else {
    const auto dtype = g.grad.scalar_type();
    g.grad = g.grad.add(grad);
    if (stays && !sums) g.grad = g.grad.to(dtype);
    g.grad_owned = true;
  }
  g.contributed = g.contributed_now = true;
  auto& unit = unit_gradients_[registry_.unit_of(p).index];
  unit.nested = unit.nested || torch::autograd::get_current_graph_task_id() != outermost_;
  if (from_graph) stats_.graph_reductions += 1;
}

// What follows on the current stream is ordered after all gradients so far: see [Note: several streams].
void Runtime::follow_producers() {
  if (device_.is_cpu() || !producer_) return;
  const auto here = current_stream(device_);
  if (*producer_ == here) return;
  mark(*producer_)->block(here);
  several_producers_ = true;
}

// [Note: late reductions] A unit of which this rank misses a gradient is reduced at the end of the backward, and so are
// those whose turn comes after it; the other ranks may long have started them, and their streams may wait for them
// before they run what this rank's stream waits for (a gather, a collective of the user's in the backward). So what is
// not reduced right when its last gradient arrives is ordered behind its own gradients alone (without any, behind the
// backward's begin), not behind this rank's stream.
void Runtime::mark_ready(const std::vector<int64_t>& indices) {
  latest_.reset();
  for (auto i : indices) {
    const auto& p = registry_.parameter(i);
    if (device_.is_cpu() || deferred_ || !of(p).grad.defined()) continue;
    if (!latest_) latest_ = mark(device_);
    unit_gradients_[registry_.unit_of(p).index].ready = latest_;
  }
}

}  // namespace zerocompile
