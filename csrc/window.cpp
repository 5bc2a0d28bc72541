#include "window.h"

#include <utility>

namespace zerocompile {

Window::Window(const Registry& registry, Gathers& gathers, Gradients& gradients, Reductions& reductions,
               BackwardPhase& backward)
    : registry_(registry), gathers_(gathers), gradients_(gradients), reductions_(reductions), backward_(backward) {
  backward_.set_reduce([this] { reduce_at_end(); });
}

void Window::set_deferred(bool deferred) {
  // A backward that raised before the window or the accumulation takes nothing away from what waits for its end.
  if (deferred && !gradients_.deferred() && !backward_.began_deferred()) backward_.abort_failed();
  gradients_.set_deferred(deferred);
}

// See [Note: partial reductions]; without replicas it changes nothing.
void Window::set_partial(bool partial) {
  if (partial && !gradients_.partial() && !backward_.began_deferred()) backward_.abort_failed();
  gradients_.set_partial(partial);
}

void Window::set_bound(int64_t bytes, std::function<void()> reached) {
  max_bytes_ = bytes;
  reached_ = std::move(reached);
}

// [Note: bounded windows] Where the gradients of all parameters that were trained since the window opened take more than
// its bound, all that waits is reduced at the end of the backward, and the window goes on. What a rank has no gradient
// of counts, too, so that all ranks reduce at the same place. Nothing is bound before the window closes: it may be
// dropped.
void Window::reduce_at_end() {
  const bool waits = gradients_.deferred();
  if (waits && !reaches_bound()) return;
  gathers_.meet_others("the end of a backward");  // see [Note: unequal work]: another rank may still be in its own
  if (waits) reached_();
  reductions_.reduce_everything(waits || gradients_.partial(), /*merged=*/waits);
}

bool Window::reaches_bound() const {
  if (max_bytes_ < 0) return false;
  int64_t total = 0;
  for (const auto& p : registry_.parameters()) {
    if (!gradients_.trains(p)) continue;
    const auto dtype = gradients_.sum_dtype().value_or(p.cast_grad ? p.grad_dtype : p.dtype);
    total += c10::multiply_integers(p.size) * static_cast<int64_t>(c10::elementSize(dtype));
  }
  return total > max_bytes_;
}

// The window closes (or an accumulation ends without a further backward): one reduction of all that was deferred.
void Window::flush() {
  registry_.check_running();
  backward_.forget_failed();
  backward_.check_ended();
  gathers_.meet_others("the reduction of what has waited");
  try {
    reductions_.await_all();  // of a backward before the window, if none was in it
    reductions_.reduce_everything(/*partial=*/false, /*merged=*/true);
  } catch (...) {  // a part was reduced: it must not reach the next step
    reductions_.drop_in_flight();
    backward_.drop_gradients();
    throw;
  }
}

// What `grad` is of a master that has none bound; undefined: there is nothing. The reduced one is given away and is to
// be bound; what waits is only asked for with `waiting`. The caller may write to it.
std::pair<Tensor, Unbound> Window::unbound_gradient(int64_t index, bool waiting) {
  if (registry_.is_shut_down()) return {};
  const auto& p = registry_.parameter(index);
  if (gradients_.of(p).unread.defined()) {
    reductions_.await_gradients(-1);
    return {gradients_.take_unread(p), Unbound::Reduced};
  }
  // Of a backward that failed: so that `zero_grad` finds it.
  const bool between_backwards = !backward_.running() || backward_.failed();
  if (!waiting || !gradients_.of(p).waits() || !between_backwards) return {};
  if (gradients_.of(p).early.defined()) {
    reductions_.await_all();
    return {gradients_.lend_early(p), Unbound::Early};
  }
  return {gradients_.own_sum(p), Unbound::Sum};
}

// User code sets the gradient: nothing of what was there counts any more. When it has set those of all parameters after
// a backward that raised, nothing is incomplete any more.
void Window::drop_gradient(int64_t index) {
  if (registry_.is_shut_down()) return;
  const auto& p = registry_.parameter(index);
  gradients_.drop_unread(p);
  const bool incomplete = backward_.failed() && phase() != Phase::Backward;
  if (!incomplete && (!gradients_.of(p).waits() || backward_.running())) return;
  gradients_.drop(p);
  if (!incomplete || gradients_.any_waits()) return;
  const bool pending = gradients_.pending();  // an accumulation goes on
  backward_.drop_gradients();
  gradients_.set_pending(pending);
}

// User code has made the gradient zero in place: what waits to be added to it does not count any more either.
void Window::drop_waiting(int64_t index) {
  if (registry_.is_shut_down() || backward_.running()) return;
  const auto& p = registry_.parameter(index);
  if (!gradients_.of(p).waits()) return;
  reductions_.await_all();
  gradients_.zero(p);
}

}  // namespace zerocompile
