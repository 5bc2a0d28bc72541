// Secondary shards: of each parameter a part inside the host, from which the backward gathers.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "gathers.h"
#include "views.h"

namespace zerocompile {

// [Note: secondary shards] (`reshard_after_forward`; ZeRO++'s hpZ.) Where the shard group spans hosts, a gather crosses
// the slow links between them. The backward gathers the values that the forward has just had. So when a value of the
// forward is dropped, each rank keeps a part of it: the inner group, of `inner` consecutive ranks of the shard group,
// holds one full value together, and a gather in the backward is inside of it. Rank h of the inner group keeps the
// h-th part of `full`, which is not where the rows of its own master are: the parts in order are the full value.
//
// A secondary shard serves while the master has the version that it was copied at, in the dtype that is asked for, and
// all parameters of the unit have one; otherwise the backward gathers over all shards. All of that follows from the
// program, so all ranks decide alike; a gather from secondary shards counts as one of another unit in [Note:
// mismatched gathers]. It is freed when an optimizer has written its unit, and on every rank that leaves a forward, a
// backward or a window by an exception. What is gathered outside of training steps, in unequal work, or by a window
// that holds its units keeps none.
//
// Streams: it is allocated with the value, where running out of memory is handled, and copied when the value is
// dropped: then user code has written to it what it will (a write through `data` changes no version, see [Note: write
// back]). That is on the stream that drops, which `await` has ordered after the gather. A gather that reads it is
// ordered after that stream, and its memory is used again after that stream and the lane.

// Whether a gather of these units is from secondary shards.
bool Gathers::has_secondary(const Units& units, Way way, bool full) const {
  if (inner_ == nullptr || way != Way::Back || unequal_) return false;
  bool any = false;
  for (auto index : units) {
    for (auto i : registry_.units()[index].parameters) {
      const auto& p = record(i);
      const auto& v = values_[i];
      if (p.replicated || c10::multiply_integers(p.size) == 0) continue;
      if (v.secondary_version != p.version() || v.secondary.scalar_type() != gathered_dtype(p, full)) return false;
      any = true;
    }
  }
  return any;
}

// For a gather of the forward.
void Gathers::allocate_secondary(const Parameter& p) {
  auto& v = of(p);
  const auto& unit = registry_.units()[p.unit];
  const bool wanted = inner_ != nullptr && questions_.in_step && !questions_.evaluates && !unequal_ && !held_;
  if (!wanted || unit.lifetime == Lifetime::Step || p.replicated || v.full.numel() == 0) return;
  if (v.secondary.defined() && v.secondary.scalar_type() == v.full.scalar_type()) return;
  auto size = p.in_order(v.full).sizes().vec();
  size[0] /= inner_->getSize();
  auto secondary = at::empty(size, v.full.options());
  if (v.secondary.defined()) {  // of another dtype
    lane_.keep(v.secondary);
    if (of(unit).copied_on) keep_for(v.secondary, *of(unit).copied_on);
    counts_.secondary_bytes -= static_cast<int64_t>(v.secondary.nbytes());
  }
  v.secondary = std::move(secondary);
  v.secondary_version = -1;
  counts_.secondary_bytes += static_cast<int64_t>(v.secondary.nbytes());
}

// The value, which is dropped after this, is what the masters have now. `written`: user code may have written to it.
void Gathers::write_secondary(const Unit& unit, const Parameter& p, bool written) {
  auto& v = of(p);
  const auto& state = of(unit);
  if (!v.secondary.defined() || unequal_ || (state.gathered_in == Way::Back && !written)) return;
  v.secondary_version = -1;
  if (state.stale || v.gathered_version != p.version() || v.secondary.scalar_type() != v.full.scalar_type()) return;
  copy_to_secondary(p, v.full);
  v.secondary_version = v.gathered_version;
}

// What was written to `full` [world*rows, ...] changes no version: a secondary shard that serves goes on with it.
void Gathers::write_secondary_again(const Parameter& p, const Tensor& full) {
  const auto& v = of(p);
  if (v.secondary.defined() && v.secondary_version == p.version()) copy_to_secondary(p, full);
}

// Its part of `full` [world*rows, ...].
void Gathers::copy_to_secondary(const Parameter& p, const Tensor& full) {
  auto& v = of(p);
  const auto& unit = registry_.units()[p.unit];
  if (!registry_.device().is_cpu()) {
    await_readers(unit);  // they may have written
    follow_secondary(unit);
    of(unit).copied_on = current_stream(registry_.device());
  }
  const auto begin = v.secondary.numel() * inner_->getRank();
  cast_into(p, view_of(full, v.secondary.sizes(), begin), v.secondary);
}

// Orders the current stream after the writes to the unit's secondary shards.
void Gathers::follow_secondary(const Unit& unit) const {
  const auto& copied_on = of(unit).copied_on;
  if (!copied_on) return;
  const auto here = current_stream(registry_.device());
  if (*copied_on != here) mark(*copied_on)->block(here);
}

void Gathers::forget_secondary(const Unit& unit) {
  const auto& copied_on = of(unit).copied_on;
  for (auto i : unit.parameters) {
    auto& v = values_[i];
    v.secondary_version = -1;
    if (!v.secondary.defined()) continue;
    lane_.keep(v.secondary);
    if (copied_on) keep_for(v.secondary, *copied_on);
    counts_.secondary_bytes -= static_cast<int64_t>(v.secondary.nbytes());
    v.secondary.reset();
  }
}

void Gathers::forget_secondary() {
  for (const auto& unit : registry_.units()) forget_secondary(unit);
}

}  // namespace zerocompile
