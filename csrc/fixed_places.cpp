// Places: memory at fixed addresses, for graphs that record where they read.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "gathers.h"
#include "text.h"

namespace zerocompile {

// [Note: fixed places] A CUDA graph reads a weight at the address that it has recorded. A unit that lives for one use
// would have another address in each gather, and would be copied to where the graph reads. So units of equal layout
// (equal blocks) share a few places, as many as are gathered at once: one that is used, and those that are gathered
// ahead (at least one, since the unit that was used last is there until the next one has been asked for). A unit always has the same place, and is gathered straight into it if no other unit is there. That is the
// source of the traced gather, in the role of a resident value: a graph waits for it (`need`) and releases it.
//
// Only graphs read a place. Whoever else asks for the value (eager code, `full_parameters`, autograd for what eager
// code has saved) may keep it for longer, so it gets the value in memory of its own (`move_out`). What is not in its
// place when a graph needs it (a window holds more units than there are places; the value was moved out) is copied
// there, once for each use. What autograd saves for a compiled backward is the place, which is kept as it is: the
// backward's own graph gathers into it.
//
// Streams: a place is written on the lane, or by a copy on the current stream, after all that has read the unit that
// was there before (`take_place`).

// Units share `count` places in turn. `parameters`: of each unit those that have a place, laid out alike. Nothing of
// them is gathered yet.
void Gathers::fix_places(const std::vector<Units>& parameters, int64_t count) {
  TORCH_CHECK(count > 0, "zerocompile: units share one place at least");
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  const auto share = std::min(static_cast<size_t>(count), parameters.size());
  const auto first = static_cast<int64_t>(holders_.size());
  for (size_t k = 0; k < parameters.size(); ++k) {
    const auto& here = parameters[k];
    const auto& there = parameters[k % share];
    TORCH_CHECK(!here.empty() && here.size() == there.size(), "zerocompile: units that share a place are alike");
    const auto& unit = registry_.unit_of(registry_.parameter(here.front()));
    auto& state = of(unit);
    TORCH_CHECK(unit.lifetime == Lifetime::Use && !state.resident && state.place < 0,
                text("zerocompile: unit `", unit.name, "` cannot have a place"));
    for (size_t j = 0; j < here.size(); ++j) {
      const auto& p = registry_.parameter(here[j]);
      const auto& other = registry_.parameter(there[j]);
      TORCH_CHECK(p.unit == unit.index, text("zerocompile: `", p.name, "` is not in unit `", unit.name, "`"));
      TORCH_CHECK(p.size == other.size && p.dtype == other.dtype && p.replicated == other.replicated,
                  text("zerocompile: `", p.name, "` and `", other.name, "` are not laid out alike"));
      if (k >= share) {
        of(p).fixed = of(other).fixed;
        continue;
      }
      GatheredValue v;
      allocate(p, p.dtype, v);
      of(p).fixed = Fixed{v.full, v.value};
    }
    if (k < share) holders_.push_back(-1);
    state.place = first + static_cast<int64_t>(k % share);
  }
}

// The memory that graphs read: [*size], the same object for all parameters that share it.
Tensor Gathers::fixed_value(int64_t index) const {
  const auto& p = registry_.parameter(index);
  TORCH_CHECK(of(p).fixed.has_value(), text("zerocompile: `", p.name, "` has no place"));
  return of(p).fixed->value;
}

bool Gathers::is_in_place(const Parameter& p) const {
  const auto& v = of(p);
  return v.fixed.has_value() && v.full.defined() && v.full.is_alias_of(v.fixed->full);
}

bool Gathers::is_in_place(const Unit& unit) const {
  return std::any_of(unit.parameters.begin(), unit.parameters.end(),
                     [this](int64_t i) { return is_in_place(record(i)); });
}

// Whether the unit may be gathered into its place. If so it has the place from here on.
bool Gathers::take_place(const Unit& unit) {
  const auto place = of(unit).place;
  if (place < 0 || held_) return false;
  const auto before = holders_[place];
  if (before >= 0 && before != unit.index) {
    const auto& other = registry_.units()[before];
    if (is_in_place(other) || of(other).graph_uses > 0 || of(other).gathering.unawaited()) return false;
  }
  if (before >= 0) await_readers(registry_.units()[before]);
  holders_[place] = unit.index;
  return true;
}

// A graph is about to read the place.
void Gathers::put_in_place(const Parameter& p) {
  auto& v = of(p);
  if (is_in_place(p)) return;
  const auto& unit = registry_.units()[p.unit];
  auto& holder = holders_[of(unit).place];
  if (holder >= 0) {
    const auto& other = registry_.units()[holder];
    if (holder != unit.index) {
      TORCH_CHECK(of(other).graph_uses == 0,
                  text("zerocompile: a graph with unit `", unit.name, "` runs inside one with unit `", other.name,
                       "`, which is as large and is in the memory that both read. CUDA graphs cannot run so at stage ",
                       "3: choose another mode than 'reduce-overhead' or 'max-autotune', or stage 2"));
      await(other);
      for (auto i : other.parameters) move_out(record(i));
    }
    await_readers(other);
  }
  holder = unit.index;
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  v.fixed->full.copy_(v.full);
  counts_.place_copies += 1;
}

// From here on the value has memory of its own, until it is dropped.
void Gathers::move_out(const Parameter& p) {
  if (!is_in_place(p)) return;
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  auto& v = of(p);
  const auto place = v.full;
  allocate(p, place.scalar_type(), v);
  v.full.copy_(place);
  v.value_version = static_cast<int64_t>(v.value._version());
  by_storage_[v.full.storage().unsafeGetStorageImpl()] = p.index;
  counts_.place_copies += 1;
}

}  // namespace zerocompile
