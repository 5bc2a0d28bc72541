// Places: memory at fixed addresses, for graphs that record where they read.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <map>
#include <utility>

#include "gathers.h"
#include "text.h"

namespace zerocompile {

// [Note: fixed places] A CUDA graph reads a weight at the address that it has recorded. A unit that lives for one use
// would have another address in each gather, and would be copied to where the graph reads. So units of equal layout
// (equal blocks) share a few places, as many as are gathered at once: one that is used, and those that are gathered
// ahead (at least one, since the unit that was used last is there until the next one has been asked for). A unit always
// has the same place, and is gathered straight into it if no other unit is there. That is the source of the traced
// gather, in the role of a resident value: a graph waits for it (`need`) and releases it.
//
// Only graphs read a place. Whoever else asks for the value (eager code, `full_parameters`, autograd for what eager
// code has saved) may keep it for longer, so it gets the value in memory of its own (`move_out`). What is not in its
// place when a graph needs it (a window holds more units than there are places; the value was moved out) is copied
// there, once for each use. What autograd saves for a compiled backward is the place, which is kept as it is: the
// backward's own graph gathers into it.
//
// Between a graph's `need` and its `release` no code runs that could need another unit, so a place has one reader at a
// time. (A graph that has raised never comes to its `release`: a count of uses does not tell that a graph runs.) Only
// one graph that reads two units of one place would be wrong. It raises, and a parameter that another block can read,
// too, has no place.
//
// Streams: a place is written on the lane, or by a copy on the current stream, after all that has read it
// (`FixedPlace::readers`). A value that was moved out counts as gathered by the copy (`GatheredUnit::gathering`), which
// comes after whatever has read the unit before.

// Units share `count` places in turn. `parameters`: of each unit those that have a place, laid out alike. Nothing of
// them is gathered yet.
void Gathers::fix_places(const std::vector<Units>& parameters, int64_t count) {
  TORCH_CHECK(count > 0, "zerocompile: units share one place at least");
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  const auto share = std::min(static_cast<size_t>(count), parameters.size());
  const auto first = static_cast<int64_t>(places_.size());
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
      TORCH_CHECK(p.size == other.size && p.stride == other.stride && p.dtype == other.dtype &&
                      p.replicated == other.replicated,
                  text("zerocompile: `", p.name, "` and `", other.name, "` are not laid out alike"));
      if (k >= share) {
        of(p).fixed = of(other).fixed;
        continue;
      }
      GatheredValue v;
      allocate(p, p.dtype, v);
      of(p).fixed = Fixed{v.full, v.value};
    }
    if (k < share) places_.emplace_back();
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
  if (of(unit).place < 0 || held_) return false;
  auto& place = places_[of(unit).place];
  if (place.unit >= 0 && place.unit != unit.index) {
    const auto& other = registry_.units()[place.unit];
    if (is_in_place(other) || of(other).graph_uses > 0 || of(other).gathering.unawaited()) return false;
  }
  await_readers(place);
  place.unit = unit.index;
  return true;
}

// The current stream reads the place.
void Gathers::reads_place(const Unit& unit) {
  if (registry_.device().is_cpu()) return;
  auto& readers = places_[of(unit).place].readers;
  const auto here = current_stream(registry_.device());
  if (std::find(readers.begin(), readers.end(), here) == readers.end()) readers.push_back(here);
}

// The current stream goes on once all others have read the place.
void Gathers::await_readers(FixedPlace& place) const {
  await_streams(place.readers);
  place.readers.clear();
}

// One graph reads all of these parameters: no two of its units may share a place.
void Gathers::check_places(const Units& indices, const std::vector<at::ScalarType>& dtypes) const {
  if (places_.empty()) return;
  std::map<int64_t, int64_t> unit_in;
  for (size_t k = 0; k < indices.size(); ++k) {
    const auto& p = record(indices[k]);
    if (!of(p).fixed.has_value() || dtypes[k] != p.dtype) continue;
    const auto& unit = registry_.units()[p.unit];
    const auto [found, first] = unit_in.emplace(of(unit).place, unit.index);
    TORCH_CHECK(first || found->second == unit.index,
                text("zerocompile: one graph reads parameters of unit `", registry_.units()[found->second].name,
                     "` and of unit `", unit.name, "`, for which CUDA graphs have the same memory at stage 3. Choose "
                     "another mode than 'reduce-overhead' or 'max-autotune', another `prefetch`, or stage 2"));
  }
}

// A graph is about to read the place.
void Gathers::put_in_place(const Parameter& p) {
  auto& v = of(p);
  const auto& unit = registry_.units()[p.unit];
  if (is_in_place(p)) return reads_place(unit);
  auto& place = places_[of(unit).place];
  if (place.unit >= 0 && place.unit != unit.index) {
    const auto& other = registry_.units()[place.unit];
    await(other);
    for (auto i : other.parameters) move_out(record(i));
  }
  await_readers(place);
  place.unit = unit.index;
  reads_place(unit);
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
  const auto& unit = registry_.units()[p.unit];
  const auto place = v.full;
  await_readers(unit);
  reads_place(unit);
  allocate(p, place.scalar_type(), v);
  v.full.copy_(place);
  v.value_version = static_cast<int64_t>(v.value._version());
  values_written(unit);
  by_storage_[v.full.storage().unsafeGetStorageImpl()] = p.index;
  counts_.place_copies += 1;
}

}  // namespace zerocompile
