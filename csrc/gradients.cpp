// Reduced gradients: where they are until an optimizer takes them.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "runtime.h"

namespace zerocompile {

// Whether the user has hooks on the accumulated gradient; they may all have been removed again.
bool has_hooks(const Tensor& master) {
  return torch::autograd::impl::get_autograd_meta(master) != nullptr &&
         torch::autograd::impl::post_acc_grad_hooks(master) != nullptr;
}

// [Note: unread gradients] A DTensor costs the host 10 us, an optimizer of ours needs none, and a model may have
// thousands of parameters. So a reduced gradient is a plain tensor here until somebody reads the master's `grad`: then
// it becomes the DTensor that is bound there, and what is reduced later is added to it through its local part.

// What the reduced gradient is added to: that of earlier in the window, the unread one, or master.grad as we bound it,
// if the optimizer has not dropped it since.
Tensor Runtime::existing_grad(const Parameter& p) {
  auto& g = of(p);
  if (g.early.defined() || early_) return g.early;
  if (g.unread.defined()) return g.unread;
  const auto& outer = p.master.grad();
  if (!outer.defined()) return {};
  auto bound_outer = g.bound_outer.lock();
  auto bound_local = g.bound_local.lock();
  if (!bound_outer || !bound_local || bound_outer.get() != outer.unsafeGetTensorImpl()) return {};
  return Tensor(std::move(bound_local));
}

// A parameter that has a gradient on no rank keeps None. The callback hears of those whose `grad` is somebody else's,
// with what is to be added to it, and of those with hooks.
void Runtime::bind_reduced(const std::vector<char>& used) {
  at::NoGradGuard no_grad;
  std::vector<ReducedGrad> heard;
  const auto bind = [&](int64_t index, Tensor rows) {
    const auto& p = record(index);
    if (rows.defined() && !p.master.grad().defined()) {
      of(p).unread = of(p).unread.defined() ? of(p).unread.add_(rows) : rows;
      rows.reset();
    }
    if (rows.defined() || has_hooks(p.master)) heard.emplace_back(index, std::move(rows));
  };
  for (auto& [index, rows] : std::exchange(reduced_, {})) {
    if (used[index] && !gradients_[index].early.defined()) bind(index, std::move(rows));
  }
  for (size_t i = 0; i < registry_.parameters().size(); ++i) {
    const auto& p = record(i);
    if (of(p).early.defined()) bind(static_cast<int64_t>(i), std::exchange(of(p).early, {}).to(of(p).early_dtype));
  }
  if (bind_ != nullptr && !heard.empty()) bind_(std::move(heard));
}

// [Note: reductions behind a backward] The last units' reductions end long after the last kernel of the backward, on a
// device, and the other units' update needs nothing of them. So they are left on their way, and the optimizer does not
// begin with the units that the forward uses first, which are reduced last: whoever takes a unit's gradients
// (`await_gradients`) orders its stream behind them. Others rely on the stream of the backward, so that one is ordered,
// too: behind what is retired when the backward ends, behind what an optimizer takes then, and behind all as soon as
// user code reads any gradient. What adds to a gradient that is bound already, is seen by hooks or is reduced in two
// parts is waited for at once.
bool Runtime::may_be_late() const {
  if (device_.is_cpu() || again_) return false;
  return std::none_of(registry_.parameters().begin(), registry_.parameters().end(), [this](const Parameter& p) {
    return of(p).early.defined() || p.master.grad().defined() || has_hooks(p.master);
  });
}

void Runtime::leave_in_flight() {
  home_ = current_stream(device_);
  last_retired_.order(*home_);  // what was retired in the backward may have been so on another stream
  for (auto& reduction : in_flight_) {
    reserve(reduction);  // what an earlier backward has left is added to, and may be dropped meanwhile
    reduction.inputs.clear();
  }
}

// Of this unit, or (-1) of all.
void Runtime::await_gradients(int64_t unit) {
  if (in_flight_.empty() || !home_) return;
  const auto here = current_stream(device_);
  for (auto& reduction : in_flight_) {
    const auto& units = reduction.units;
    if (unit >= 0 && std::find(units.begin(), units.end(), unit) == units.end()) continue;
    for (auto& done : reduction.done) {
      done.order(here);
      if (here != *home_) done.order(*home_);
    }
  }
}

// A new backward, or a window's end, begins behind what is still on its way.
void Runtime::await_reductions() {
  await_gradients(-1);
  retire(0);
}

// What `grad` is of a master that has none bound. The reduced one is given away and is to be bound; what waits is only
// asked for with `waiting`. The caller may write to it.
std::pair<Tensor, Unbound> Runtime::unbound_gradient(int64_t index, bool waiting) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (registry_.is_shut_down()) return {};
  const auto& p = registry_.parameter(index);
  if (of(p).unread.defined()) {
    await_gradients(-1);
    return {std::exchange(of(p).unread, {}), Unbound::Reduced};
  }
  if (!waiting || !pending_ || (backward_ && !failed())) return {};
  if (of(p).early.defined()) return {of(p).early, Unbound::Early};
  return {deferred_gradient(index), Unbound::Sum};
}

void Runtime::bound(int64_t index, const Tensor& outer, const Tensor& local) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto& p = registry_.parameter(index);
  of(p).bound_outer = WeakTensor(outer.getIntrusivePtr());
  of(p).bound_local = WeakTensor(local.getIntrusivePtr());
}

// `values`: local parts that an optimizer is to update; each gets the gradient of its parameter. Returns the positions
// of those whose `grad` is not ours.
std::vector<int64_t> Runtime::lend_gradients(const std::vector<int64_t>& indices, const std::vector<Tensor>& values) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(indices.size() == values.size(), "zerocompile: a value for each parameter");
  std::vector<int64_t> others;
  int64_t awaited = -1;
  for (size_t k = 0; k < indices.size(); ++k) {
    const auto& p = registry_.parameter(indices[k]);
    if (p.unit != awaited) await_gradients(p.unit);
    awaited = p.unit;
    auto grad = existing_grad(p);
    if (grad.defined()) values[k].mutable_grad() = std::move(grad);
    else if (p.master.grad().defined()) others.push_back(static_cast<int64_t>(k));
  }
  return others;
}

// Nobody holds a gradient of these parameters, as far as it is ours to say.
void Runtime::release_gradients(const std::vector<int64_t>& indices, const std::vector<Tensor>& values) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (const auto& value : values) value.mutable_grad().reset();
  for (auto index : indices) {
    const auto& p = registry_.parameter(index);
    of(p).unread.reset();
    p.master.mutable_grad().reset();
  }
}

// Whether a reduced gradient has another dtype than its master.
bool Runtime::any_other_dtype() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return std::any_of(registry_.parameters().begin(), registry_.parameters().end(), [this](const Parameter& p) {
    const auto& grad = of(p).unread.defined() ? of(p).unread : p.master.grad();
    return grad.defined() && grad.scalar_type() != p.master.scalar_type();
  });
}

}  // namespace zerocompile
