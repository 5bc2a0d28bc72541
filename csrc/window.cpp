// Windows and accumulations: gradients that wait for their end.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "runtime.h"
#include "text.h"

namespace zerocompile {

void Runtime::set_deferred(bool deferred) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  // A backward that raised before the window or the accumulation takes nothing away from what waits for its end.
  if (deferred && !deferred_ && !began_deferred_) abort_failed_backward();
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
    for (auto i : registry_.units()[index].parameters) {
      const auto& p = record(i);
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
    for (auto i : registry_.units()[index].parameters) gradients_[i].contributed = gradients_[i].grad.defined();
    unit_gradients_[index].reduced = false;
    total -= bytes;
  }
  retire(0);
  for (auto& [index, rows] : std::exchange(reduced_, {})) {
    if (!used[index] || !rows.defined()) continue;
    gradients_[index].early = rows;
    gradients_[index].early_dtype = kept_dtype(record(index));
  }
}

void Runtime::check_backward_ended() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(!backward_,
              text("zerocompile: the last backward before this reduction raised or has not ended on rank ",
                   registry_.global_rank(), ", so its gradients are incomplete"));
}

// The window closes (or an accumulation ends without a further backward): one reduction of all that was deferred.
void Runtime::flush() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
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

// This rank's own sum; an undefined tensor: nothing waits. The caller may write to it.
Tensor Runtime::deferred_gradient(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!pending_ || (backward_ && !failed())) return {};  // of one that failed: so that `zero_grad` finds it
  auto& g = of(registry_.parameter(index));
  if (!g.grad.defined()) return {};
  if (!g.grad_owned) {
    g.grad = g.grad.clone();
    g.grad_owned = true;
  }
  return g.grad;
}

// User code sets the gradient: nothing of what was there counts any more. That of all parameters, after a backward that
// raised: nothing is incomplete any more.
void Runtime::drop_gradient(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (registry_.is_shut_down()) return;
  auto& g = of(registry_.parameter(index));
  g.unread.reset();
  const bool incomplete = failed() && phase() != Phase::Backward;
  if (!incomplete && (!pending_ || backward_)) return;
  g.grad.reset();
  g.early.reset();
  g.grad_owned = g.contributed = false;
  if (!incomplete) return;
  const bool any = std::any_of(gradients_.begin(), gradients_.end(),
                               [](const Gradient& other) { return other.grad.defined() || other.early.defined(); });
  if (any) return;
  const bool pending = pending_;  // an accumulation goes on
  drop_gradients();
  pending_ = pending;
}

// User code has made the gradient zero in place: what waits to be added to it does not count any more either. What was
// reduced early may itself be what was made zero: it stays a gradient, of zeros.
void Runtime::drop_waiting(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (registry_.is_shut_down() || !pending_ || backward_) return;
  at::NoGradGuard no_grad;
  auto& g = of(registry_.parameter(index));
  g.grad.reset();
  if (g.early.defined()) g.early.zero_();
  g.grad_owned = g.contributed = false;
}

// Names of parameters whose gradient waits although they take none now.
std::vector<std::string> Runtime::frozen_gradients() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<std::string> names;
  for (const auto& p : registry_.parameters()) {
    if (of(p).grad.defined() && !p.master.requires_grad()) names.push_back(p.name);
  }
  return names;
}

int64_t Runtime::deferred_bytes() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& g : gradients_) {
    if (g.grad.defined()) bytes += static_cast<int64_t>(g.grad.nbytes());
  }
  return bytes;
}

}  // namespace zerocompile
