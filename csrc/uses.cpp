// Using parameters: regions, eager code and graphs say what they read and until when; what user code has written to a
// value goes back to the masters.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "runtime.h"
#include "text.h"
#include "views.h"

namespace zerocompile {

Tensor Runtime::resident_value(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& p = parameter(index);
  TORCH_CHECK(p.unit >= 0 && units_[p.unit].lifetime == Lifetime::Step,
              text("zerocompile: `", p.name, "` has no resident value: its lifetime is one use"));
  return p.value;
}

// With `cast`: in that dtype, in memory of its own.
Tensor Runtime::read(int64_t index, std::optional<at::ScalarType> cast) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& p = parameter(index);
  auto& unit = unit_of(p);
  const auto dtype = cast.value_or(p.dtype);
  ask(p, dtype);
  const auto before = stats_.gathers;
  acquire(p.unit, phase(), index, needs_full(p, dtype));
  await(unit);
  stats_.eager_reads += 1;
  unit.eager_reads += 1;
  stats_.eager_gathers += stats_.gathers - before;
  if (cast.has_value()) return p.value.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  p.read_eagerly = p.read_eagerly || !trusted_;
  return p.value;
}

// What the masters do not hold any more is gathered anew, by all ranks at once.
void Runtime::refresh(const std::vector<int64_t>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check_running();
  abort_failed_backward();
  std::vector<int64_t> missing;
  for (auto index : units) {
    if (!current(unit(index), -1, /*full=*/false)) missing.push_back(index);
  }
  gather_in_runs(missing, /*full=*/false);
}

// A region begins: its units stay gathered until it ends. `trusted`: see [Note: write back]. Both return how often a
// parameter was read outside of graphs.
int64_t Runtime::enter(const std::vector<int64_t>& units, bool trusted) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check_running();
  for (auto index : units) (void)unit(index);  // there is one
  size_t entered = 0;
  try {
    for (; entered < units.size(); ++entered) {
      acquire(units[entered], phase(), -1);
      units_[units[entered]].open_modules += 1;
    }
  } catch (...) {  // nobody will leave
    while (entered > 0) units_[units[--entered]].open_modules -= 1;
    throw;
  }
  trusted_ = trusted;
  return stats_.eager_reads;
}

int64_t Runtime::leave(const std::vector<int64_t>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  trusted_ = false;
  if (shut_down_) return stats_.eager_reads;
  for (auto index : units) {
    auto& u = unit(index);
    u.open_modules = std::max<int64_t>(0, u.open_modules - 1);  // `end_forward` closes all
  }
  return stats_.eager_reads;
}

// [Note: stale backward] A graph saves handles, not weights: in its backward, which gathers again, nothing shows that
// the weights are not those of its forward. So saving a handle keeps the version that the forward saw (`pack`), and
// asking for it, which comes right before the backward graph runs, gives it back (`forward_version`); the graph's use
// of the value compares. A forward whose backward never comes, and a weight that the backward does not read, change
// nothing. Where no hooks are on, the version of the last forward has to do.
void Runtime::forward_saw(int64_t index, int64_t version) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  parameter(index).forward_version = version;
}

// A graph needs values from here on. Those that live for one use stay gathered until its `release`.
void Runtime::need(const std::vector<int64_t>& indices, const std::vector<at::ScalarType>& dtypes, bool expects_grad) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto now = phase();
  if (expects_grad && now != Phase::Backward) now = Phase::Forward;  // autograd disables grad mode inside its functions
  std::set<int64_t> full;  // units that all of the graph's uses take in full precision
  for (size_t k = 0; k < indices.size(); ++k) {
    auto& p = parameter(indices[k]);
    (void)unit_of(p);  // there is one
    ask(p, dtypes[k]);
    if (needs_full(p, dtypes[k])) full.insert(p.unit);
  }
  size_t needed = 0;
  try {
    for (; needed < indices.size(); ++needed) {
      auto& p = parameters_[indices[needed]];
      auto& unit = units_[p.unit];
      acquire(p.unit, now, indices[needed], full.count(p.unit) > 0);
      await(unit);
      TORCH_CHECK(now != Phase::Backward || p.forward_version < 0 || p.forward_version == p.seen_version(),
                  text("zerocompile: parameter `", p.name, "` was modified between its forward and its backward (by an "
                       "optimizer step or an in-place write), so the gradients would be wrong. Run the backward before "
                       "the modification"));
      if (unit.lifetime == Lifetime::Use) unit.graph_uses += 1;
      if (now == Phase::Forward) {
        p.forward_version = p.seen_version();
        if (expects_grad && p.master.requires_grad()) p.graph_outstanding += 1;
      }
      stats_.graph_uses += 1;
    }
  } catch (...) {  // the graph will not come to its `release`
    unneed(indices, needed, now, expects_grad);
    throw;
  }
}

// Takes the first `count` uses of a graph back.
void Runtime::unneed(const std::vector<int64_t>& indices, size_t count, Phase phase, bool expects_grad) {
  for (size_t k = 0; k < count; ++k) {
    auto& p = parameters_[indices[k]];
    auto& uses = units_[p.unit].graph_uses;
    uses = std::max<int64_t>(0, uses - 1);  // what was dropped meanwhile has none
    const bool counted = phase == Phase::Forward && expects_grad && p.master.requires_grad();
    if (counted) p.graph_outstanding = std::max<int64_t>(0, p.graph_outstanding - 1);
    stats_.graph_uses -= 1;
  }
}

std::vector<Tensor> Runtime::use(const std::vector<int64_t>& indices, const std::vector<at::ScalarType>& dtypes,
                                 bool expects_grad) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  need(indices, dtypes, expects_grad);
  std::vector<Tensor> values;
  for (size_t k = 0; k < indices.size(); ++k) {
    const auto& p = parameter(indices[k]);
    values.push_back(p.value.scalar_type() != dtypes[k] ? p.value.to(dtypes[k]) : view_of(p.value));
  }
  return values;
}

// The graph's last use of these values is behind it. `last`: the graph ends here. What is asked for next (by the
// backward, behind the forward's last graph) stays.
void Runtime::release(const std::vector<int64_t>& indices, bool last) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const bool keeps_all = last || held_;
  const auto next = keeps_all ? std::vector<int64_t>() : predicted();
  for (auto i : indices) {
    auto& p = parameter(i);
    auto& unit = unit_of(p);
    if (unit.lifetime == Lifetime::Step || !unit.resident) continue;
    unit.graph_uses = std::max<int64_t>(0, unit.graph_uses - 1);
    if (keeps_all || unit.lent || !p.full.defined()) continue;
    if (std::find(next.begin(), next.end(), p.unit) != next.end()) continue;
    write_back(p);
    forget(p);
    const bool empty = std::none_of(unit.parameters.begin(), unit.parameters.end(),
                                    [&](int64_t k) { return parameters_[k].full.defined(); });
    if (empty) drop(unit);
  }
}

Tensor Runtime::value_in_backward(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& p = parameter(index);
  auto& unit = unit_of(p);
  acquire(p.unit, phase(), index, needs_full(p, p.dtype));
  await(unit);
  return p.full;
}

// [Note: write back] User code may write to a value that it read from a module (`weight.data.mul_`, a codebook update).
// Every rank runs the same code, so each takes its own rows from what it wrote; elements that still are the cast of
// the master stay as they are, so a low-precision value never rounds the master. No host synchronisation. Values that
// only torch's own layers read (`trusted_`) are not compared. A write changes the master's version as it changed the
// value's, so a backward through the old value raises as in torch; one through `data` changes neither.
void Runtime::write_back(Parameter& p) {
  const auto writes = p.writes();
  if ((!p.read_eagerly && writes == 0) || units_[p.unit].lent) return;
  p.read_eagerly = false;
  if (p.gathered_version != p.version() || p.own.scalar_type() != p.dtype) return;
  for (int64_t write = 0; write < writes; ++write) p.local.unsafeGetTensorImpl()->bump_version();
  p.value_version += writes;
  p.gathered_version = p.version();
  if (p.local.numel() == 0) return;
  c10::InferenceMode normal_tensors(false);
  at::AutoDispatchBelowADInplaceOrView no_version_change;
  const auto written = p.own.ne(p.local.to(p.own.scalar_type()));
  p.local.copy_(at::where(written, p.own.to(p.local.scalar_type()), p.local));
}

void Runtime::write_back() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto& u : units_) {
    if (!u.resident) continue;
    await(u);
    for (auto i : u.parameters) {
      if (parameters_[i].full.defined()) write_back(parameters_[i]);
    }
  }
}

// Nothing stays gathered for a backward that will not come. `raised`: see [Note: units after an exception].
void Runtime::end_forward(bool raised) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto& u : units_) {
    u.open_modules = 0;
    if (held_) continue;
    if (raised) drop_after_exception(u);
    else drop(u);
  }
  before_last_ = last_ = NOWHERE;
}

}  // namespace zerocompile
