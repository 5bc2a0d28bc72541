#include "backward_phase.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <utility>

#include "text.h"

namespace zerocompile {

namespace {

// Called when the backward comes to a node.
struct Entry : torch::autograd::FunctionPreHook {
  explicit Entry(std::function<void()> call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    call_();
    return grads;
  }
  std::function<void()> call_;
};

// [Note: autograd.grad] `torch.autograd.grad` with respect to activations runs whole compiled backward graphs, whose
// gradients of parameters torch would drop: only a backward that accumulates into leaves contributes and reduces.
bool accumulating() {
  if (torch::autograd::get_current_graph_task_id() == -1) return false;
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen == nullptr || chosen->empty();
}

}  // namespace

// A CUDA graph returns one tensor again and again, each time with another node: a hook of the tensor would stay with
// the first node. So the node gets it.
void at_backward_of(const Tensor& result, std::function<void()> call) {
  TORCH_CHECK(result.grad_fn() != nullptr,
              text("zerocompile: a tensor of sizes ", result.sizes(), " that no operation has made (a leaf, or one ",
                   "that requires no grad) is not a result of a region, so the region's backward cannot begin at it"));
  result.grad_fn()->add_tensor_pre_hook(std::make_unique<Entry>(std::move(call)));
}

BackwardPhase::BackwardPhase(const Registry& registry, Gathers& gathers, Gradients& gradients, Reductions& reductions,
                             EndOfTask end_of_task)
    : registry_(registry),
      gathers_(gathers),
      gradients_(gradients),
      reductions_(reductions),
      end_of_task_(std::move(end_of_task)) {}

// [Note: end of backward] An engine callback, not a graph node, ends a backward: it is the same for any number of
// graphs, breaks and recompilations. It is armed by the first thing that happens in a backward. In a nested backward
// (reentrant checkpoint, GradCache) some node of the outer one is still being evaluated when the callback runs: then
// it leaves everything to the outer backward, which arms again at its next event or is finished by the strategy.
void BackwardPhase::arm() {
  const auto task = torch::autograd::get_current_graph_task_id();
  abort_failed();
  accumulates_ = accumulates_ || accumulating();
  if (armed_ || task == -1) return;
  armed_ = true;
  if (!running_) {
    running_ = true;
    began_deferred_ = gradients_.deferred() || gradients_.partial();
    began_waiting_ = gradients_.pending() && gradients_.any_waits();
    gathers_.begin_backward();
    reductions_.begin_backward();
    gradients_.begin_backward(task);
  }
  if (!gathers_.unequal()) reductions_.agree_on_order();  // else rank 0 may come here only with the others' help
  auto alive = std::make_shared<int64_t>(task);  // held by the graph task, which dies with its backward
  armed_task_ = alive;
  raised_ = false;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [end = end_of_task_(), alive = std::move(alive)] { end(); });
}

// Gradients are there. `shared`: see [Note: grad dtype].
void BackwardPhase::contribute(const std::vector<int64_t>& parameters, at::TensorList grads, bool from_graph,
                               bool shared) {
  arm();
  gradients_.produced_here();
  const bool waits = !running_ || gradients_.deferred() || gathers_.unequal();
  if (accumulating()) gradients_.take(parameters, grads, from_graph, shared, waits);
  const auto latest = gradients_.mark_ready(parameters);
  if (waits) return;
  reductions_.launch_complete(latest);
  if (updates_ && update_ != nullptr) update_reduced();
}

// What user code wrote to gathered values counts before the update. The operator that has handed over a gradient may
// run below autograd, where a write to a tensor changes no version; the update is ordinary code.
void BackwardPhase::update_reduced() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard ordinary(
      keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  auto units = reductions_.take_reduced();
  if (units.empty()) return;
  gathers_.write_back(units);
  update_(std::move(units));
  reductions_.retire_updates(2);
}

void BackwardPhase::task_ended() {
  armed_ = false;
  if (torch::autograd::get_current_node() != nullptr) return;  // nested
  finish();
}

void BackwardPhase::finish() {
  if (!running_ || registry_.is_shut_down()) return;
  running_ = armed_ = false;
  reductions_.count_backward();
  try {
    gradients_.follow_producers();
    if (accumulates_) reduce_();
  } catch (...) {  // out of memory, or another rank is gone: nothing of this backward may reach the next
    accumulates_ = false;
    gradients_.end_backward();
    reductions_.drop_in_flight();
    drop_gradients();
    throw;
  }
  accumulates_ = false;
  gradients_.leave_graphs();
  gradients_.end_backward();
  gathers_.end_backward();
  forget_forwards();
}

// A reentrant checkpoint's forward leaves no version, so its next recomputation must find none of an earlier step.
void BackwardPhase::forget_forwards() {
  for (const auto& p : registry_.parameters()) {
    if (!gradients_.expects_from_graph(p.index)) gathers_.forget_forward(p.index);
  }
}

// For a backward of which the engine told us only what was nested in it.
void BackwardPhase::finish_ended() {
  if (!armed_ && phase() != Phase::Backward) finish();
}

// A backward that raised has made nothing incomplete but its own gradients if nothing waited when it began, even where
// an accumulation before it has left a reduction to be made.
void BackwardPhase::forget_failed() {
  if (failed() && !began_deferred_ && !began_waiting_) drop_gradients();
}

void BackwardPhase::check_ended() const {
  TORCH_CHECK(!running_,
              text("zerocompile: the last backward before this reduction raised or has not ended on rank ",
                   registry_.global_rank(), ", so its gradients are incomplete"));
}

// The outermost backward has left its caller with an exception. On a device, autograd's thread holds the graph task a
// little longer than the caller waits, so the task alone does not tell yet.
void BackwardPhase::raised() {
  if (armed_ && phase() != Phase::Backward) raised_ = true;
  if (phase() != Phase::Backward) gathers_.forget_secondary();
}

// A backward whose graph task is gone and that has not ended raised. Its gradients are incomplete on this rank.
void BackwardPhase::abort_failed() {
  if (!failed()) return;
  // What waits for the end of a window must not be dropped in silence, nor be used without the part that is missing.
  TORCH_CHECK(!began_deferred_ && !began_waiting_,
              text("zerocompile: a backward raised inside `coalesce_grad_reduction` or an accumulation, or was its last, "
                   "so the gradients that wait for its end are incomplete on rank ", registry_.global_rank(),
                   ". Leave it with the exception, which drops them, or call `zero_grad()`, and repeat the step"));
  drop_gradients();
}

// An exception leaves an accumulation: if it was a backward's, what waits is incomplete on this rank.
void BackwardPhase::drop_failed() {
  if (running_ && phase() != Phase::Backward) drop_gradients();
}

// Gradients that are not bound yet count no more, and neither does a backward that is not there any more.
void BackwardPhase::drop_gradients() {
  if (failed() || torch::autograd::get_current_graph_task_id() == -1) running_ = armed_ = accumulates_ = false;
  std::exception_ptr failure;
  try {
    reductions_.settle();
  } catch (...) {  // the gradients go all the same
    failure = std::current_exception();
  }
  began_deferred_ = began_waiting_ = false;
  gradients_.drop_all();
  forget_forwards();
  reductions_.forget();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace zerocompile
