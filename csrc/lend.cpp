// Units that stay gathered: those that `full_parameters` holds, and those that memory allows.
#include <algorithm>
#include <set>
#include <utility>

#include "gathers.h"
#include "text.h"

namespace zerocompile {

// [Note: lent units] While `full_parameters` holds a unit it stays gathered, its modules compute with what user code
// writes to it, and the masters keep their values, so that whatever reads them (a checkpoint, `parameters()`) sees one
// thing. When it is given back the writes reach the masters (`keep`) or the values are gathered again: `together`, on
// all ranks at once, or, where an exception may have met one rank alone, at the next use.
void Gathers::lend(const Units& indices) {
  const std::set<int64_t> each(indices.begin(), indices.end());
  TORCH_CHECK(each.size() == indices.size(), "zerocompile: a unit is lent once, not twice in one call");
  for (auto index : indices) {
    TORCH_CHECK(!of(registry_.unit(index)).lent,
                text("zerocompile: `full_parameters` inside another one that holds the same parameters, or others of ",
                     "their unit `", registry_.unit(index).name, "`. Enter once, with a module that contains both"));
  }
  Units lent;
  try {
    for (auto index : indices) {
      const auto& unit = registry_.units()[index];
      const bool whole = std::all_of(unit.parameters.begin(), unit.parameters.end(),
                                     [&](int64_t i) { return current(unit, i, /*full=*/true); });
      if (!whole) {
        if (!unequal_) questions_.ask_outside(unit.name);
        drop(unit);
        launch({index}, Way::Forth, /*full=*/true);
      }
      await(unit);
      for (auto i : unit.parameters) {
        give_late(record(i));
        write_back(record(i));  // what was written before counts
        move_out(record(i));
      }
      lent.push_back(index);
      of(unit).lent = true;
    }
  } catch (...) {  // out of memory, say: nobody will give back what was lent before
    take_back(lent, /*keep=*/false, /*together=*/false);
    throw;
  }
}

Tensor Gathers::lent_value(int64_t index) {
  const auto& p = registry_.parameter(index);
  TORCH_CHECK(of(registry_.unit_of(p)).lent, text("zerocompile: `", p.name, "` is not lent"));
  of(p).read_eagerly = true;
  return of(p).value.detach();
}

void Gathers::take_back(const Units& indices, bool keep, bool together) {
  if (registry_.is_shut_down()) return;
  for (auto index : indices) of(registry_.unit(index)).lent = false;  // whatever happens below
  size_t done = 0;
  try {
    for (; done < indices.size(); ++done) {
      const auto& unit = registry_.units()[indices[done]];
      auto& state = of(unit);
      for (auto i : unit.parameters) {
        if (keep) write_back(record(i));
        forget_writes(record(i), /*held=*/keep && values_[i].held);
      }
      forget_secondary(unit);  // the value has what the masters may not get
      if (unit.lifetime == Lifetime::Use && !held_ && state.open_modules <= 0 && state.graph_uses == 0) {
        drop(unit);
      } else if (together) {
        launch({indices[done]}, Way::Forth);
        const bool held = std::any_of(unit.parameters.begin(), unit.parameters.end(),
                                      [&](int64_t i) { return values_[i].held; });
        if (held) await(unit);  // user code may write to it without another read
      } else {
        state.stale = true;
      }
    }
  } catch (...) {  // the values of this unit and of those after it are gathered anew at their next use
    for (; done < indices.size(); ++done) {
      auto& state = units_[indices[done]];
      state.stale = state.resident;
      for (auto i : registry_.units()[indices[done]].parameters) forget_writes(record(i));
    }
    throw;
  }
}

// What user code has written to the value so far never reaches the master. `held`: what it writes after this may.
void Gathers::forget_writes(const Parameter& p, bool held) {
  auto& v = of(p);
  v.read_eagerly = false;
  v.held = held;
  if (v.value.defined()) v.value_version = static_cast<int64_t>(v.value._version());
}

// The name of a unit that is lent; "": none is.
std::string Gathers::lent_unit() const {
  for (const auto& unit : registry_.units()) {
    if (of(unit).lent) return unit.name;
  }
  return "";
}

// From now on the unit lives from one optimizer step to the next.
void Gathers::keep(int64_t index) {
  const auto& unit = registry_.unit(index);
  const auto& state = of(unit);
  TORCH_CHECK(!held_ && !state.lent && state.open_modules == 0 && state.graph_uses == 0,
              text("zerocompile: unit `", unit.name, "` is in use, so how long it lives cannot change now"));
  if (unit.lifetime == Lifetime::Step) return;
  drop(unit);
  forget_secondary(unit);
  take_late({index});
  for (auto i : unit.parameters) late_.erase(i);
  try {
    for (auto i : unit.parameters) allocate(record(i), record(i).dtype, values_[i]);
  } catch (...) {  // out of memory: the unit lives for one use, as before
    for (auto i : unit.parameters) forget(record(i));
    throw;
  }
  for (auto i : unit.parameters) {
    values_[i].low.reset();
    values_[i].fixed.reset();
  }
  if (const auto place = std::exchange(units_[index].place, -1); place >= 0 && places_[place].unit == index) {
    places_[place].unit = -1;
  }
  registry_.live_for_a_step(index);
}

}  // namespace zerocompile
