// Windows and accumulations: gradients that wait for their end, and units that stay gathered until then.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "runtime.h"
#include "text.h"

namespace zerocompile {

void Runtime::set_deferred(bool deferred) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  deferred_ = deferred;
  pending_ = pending_ || deferred;
}

void Runtime::set_window(std::optional<at::ScalarType> sum_dtype, int64_t max_bytes) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  sum_dtype_ = sum_dtype;
  max_deferred_bytes_ = max_bytes;
}

// [Note: bounded windows] At the end of each backward of a window the largest units are reduced until what is left
// fits. Which ones follows from the used flags and the parameters' sizes, so all ranks choose the same; what comes
// later for such a unit is reduced later and added. Nothing is bound before the window closes: it may be dropped.
void Runtime::reduce_largest() {
  at::NoGradGuard no_grad;
  agree_on_order();
  const auto used = agree_on_used([] {});
  std::vector<std::pair<int64_t, int64_t>> sizes;  // (bytes, unit)
  int64_t total = 0;
  for (auto index : reduce_order_) {
    int64_t bytes = 0;
    for (auto i : units_[index].parameters) {
      const auto& p = parameters_[i];
      if (!used[i] || !p.master.requires_grad()) continue;
      const auto dtype = sum_dtype_.value_or(p.cast_grad ? p.grad_dtype : p.dtype);
      bytes += c10::multiply_integers(p.size) * static_cast<int64_t>(c10::elementSize(dtype));
    }
    if (bytes > 0) sizes.emplace_back(bytes, index);
    total += bytes;
  }
  std::stable_sort(sizes.begin(), sizes.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [bytes, index] : sizes) {
    if (total <= max_deferred_bytes_) break;
    early_ = true;
    launch_reduction({index});
    early_ = false;
    for (auto i : units_[index].parameters) parameters_[i].contributed = parameters_[i].grad.defined();
    units_[index].reduced = false;
    total -= bytes;
  }
  retire(0);
  for (auto& [index, rows] : std::exchange(reduced_, {})) {
    if (used[index] && rows.defined()) parameters_[index].early = rows;
  }
}

void Runtime::check_backward_ended() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(!backward_,
              text("zerocompile: the last backward before this reduction raised or has not ended on rank ", rank_,
                   ", so its gradients are incomplete"));
}

// The window closes (or an accumulation ends without a further backward): one reduction of all that was deferred.
void Runtime::flush() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check_running();
  check_backward_ended();
  try {
    await_reductions();  // of a backward before the window, if none was in it
    reduce_everything(/*merged=*/true);
  } catch (...) {  // a part was reduced: it must not reach the next step
    drop_reductions();
    drop_gradients();
    throw;
  }
}

// [Note: held units] Within a window no parameter changes, so at stage 3 one gather of each unit can serve all of its
// forwards and backwards. All units are gathered when the window opens, in their fixed order: then nothing is gathered
// inside, and ranks may run different numbers of backwards.
void Runtime::hold() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check_running();
  held_ = true;
  std::vector<int64_t> missing;
  for (size_t index = 0; index < units_.size(); ++index) {
    auto& u = units_[index];
    const bool whole = std::all_of(u.parameters.begin(), u.parameters.end(),
                                   [&](int64_t i) { return parameters_[i].full.defined(); });
    if (u.lifetime == Lifetime::Step || (whole && current(u, -1, /*full=*/true))) continue;
    drop(u);
    missing.push_back(static_cast<int64_t>(index));
  }
  try {
    gather_in_runs(missing, /*full=*/true);
  } catch (...) {  // out of memory, say: the window does not open
    let_go(/*raised=*/true);
    throw;
  }
}

// `raised`: see end_forward.
void Runtime::let_go(bool raised) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  held_ = false;
  for (auto& u : units_) {
    if (u.open_modules == 0 && !(raised && u.gathering.any())) drop(u);
  }
  before_last_ = last_ = NOWHERE;  // the same on all ranks, whatever they ran
}

// This rank's own sum; an undefined tensor: nothing waits. The caller may write to it.
Tensor Runtime::deferred_gradient(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!pending_ || backward_) return {};
  auto& p = parameter(index);
  if (!p.grad.defined()) return {};
  if (!p.grad_owned) {
    p.grad = p.grad.clone();
    p.grad_owned = true;
  }
  return p.grad;
}

// User code sets the gradient: nothing of what was there counts any more.
void Runtime::drop_gradient(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (shut_down_) return;
  parameter(index).unread.reset();
  drop_waiting(index);
}

// User code has made the gradient zero in place: what waits to be added to it does not count any more either.
void Runtime::drop_waiting(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (shut_down_ || !pending_ || backward_) return;
  auto& p = parameter(index);
  p.grad.reset();
  p.early.reset();
  p.grad_owned = p.contributed = false;
}

// Names of parameters whose gradient waits although they take none now.
std::vector<std::string> Runtime::frozen_gradients() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<std::string> names;
  for (const auto& p : parameters_) {
    if (p.grad.defined() && !p.master.requires_grad()) names.push_back(p.name);
  }
  return names;
}

int64_t Runtime::deferred_bytes() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& p : parameters_) {
    if (p.grad.defined()) bytes += static_cast<int64_t>(p.grad.nbytes());
  }
  return bytes;
}

}  // namespace zerocompile
