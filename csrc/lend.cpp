// Units that stay gathered: those that `full_parameters` holds, and those that memory allows.
#include <algorithm>
#include <set>

#include "runtime.h"
#include "text.h"

namespace zerocompile {

// [Note: lent units] While `full_parameters` holds a unit it stays gathered, its modules compute with what user code
// writes to it, and the masters keep their values, so that whatever reads them (a checkpoint, `parameters()`) sees one
// thing. When it is given back the writes reach the masters (`keep`) or the values are gathered again: `together`, on
// all ranks at once, or, where an exception may have met one rank alone, at the next use.
void Runtime::lend(const std::vector<int64_t>& indices) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const std::set<int64_t> each(indices.begin(), indices.end());
  TORCH_CHECK(each.size() == indices.size(), "zerocompile: a unit is lent once, not twice in one call");
  for (auto index : indices) {
    TORCH_CHECK(!unit(index).lent,
                text("zerocompile: `full_parameters` inside another one that holds the same parameters, or others of ",
                     "their unit `", unit(index).name, "`. Enter once, with a module that contains both"));
  }
  abort_failed_backward();
  std::vector<int64_t> lent;
  try {
    for (auto index : indices) {
      auto& unit = units_[index];
      const bool whole = std::all_of(unit.parameters.begin(), unit.parameters.end(),
                                     [&](int64_t i) { return current(unit, i, /*full=*/true); });
      if (!whole) {
        drop(unit);
        launch_gather({index}, Way::Forth, /*restores=*/false, /*full=*/true);
      }
      await(unit);
      for (auto i : unit.parameters) write_back(parameters_[i]);  // what was written before counts
      lent.push_back(index);
      unit.lent = true;
    }
  } catch (...) {  // out of memory, say: nobody will give back what was lent before
    take_back(lent, /*keep=*/false, /*together=*/false);
    throw;
  }
}

Tensor Runtime::lent_value(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& p = parameter(index);
  TORCH_CHECK(unit_of(p).lent, text("zerocompile: `", p.name, "` is not lent"));
  p.read_eagerly = true;
  return p.value.detach();
}

void Runtime::take_back(const std::vector<int64_t>& indices, bool keep, bool together) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (shut_down_) return;
  for (auto index : indices) unit(index).lent = false;  // whatever happens below
  size_t done = 0;
  try {
    for (; done < indices.size(); ++done) {
      auto& unit = units_[indices[done]];
      for (auto i : unit.parameters) {
        auto& p = parameters_[i];
        if (keep) write_back(p);
        forget_writes(p);
      }
      if (unit.lifetime == Lifetime::Use && !held_ && unit.open_modules <= 0 && unit.graph_uses == 0) {
        drop(unit);
      } else if (together) {
        launch_gather({indices[done]}, Way::Forth, /*restores=*/!keep);
      } else {
        unit.stale = true;
      }
    }
  } catch (...) {  // the values of this unit and of those after it are gathered anew at their next use
    for (; done < indices.size(); ++done) {
      auto& unit = units_[indices[done]];
      unit.stale = unit.resident;
      for (auto i : unit.parameters) forget_writes(parameters_[i]);
    }
    throw;
  }
}

// What user code has written to the value so far never reaches the master.
void Runtime::forget_writes(Parameter& p) {
  p.read_eagerly = false;
  if (p.value.defined()) p.value_version = static_cast<int64_t>(p.value._version());
}

// The name of a unit that is lent; "": none is.
std::string Runtime::lent_unit() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (const auto& u : units_) {
    if (u.lent) return u.name;
  }
  return "";
}

// From now on the unit lives from one optimizer step to the next.
void Runtime::keep(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& unit = this->unit(index);
  TORCH_CHECK(!held_ && !unit.lent && unit.open_modules == 0 && unit.graph_uses == 0,
              text("zerocompile: unit `", unit.name, "` is in use, so how long it lives cannot change now"));
  if (unit.lifetime == Lifetime::Step) return;
  drop(unit);
  try {
    for (auto i : unit.parameters) allocate(parameters_[i], parameters_[i].dtype);
  } catch (...) {  // out of memory: the unit lives for one use, as before
    for (auto i : unit.parameters) forget(parameters_[i]);
    throw;
  }
  for (auto i : unit.parameters) parameters_[i].low.reset();
  unit.lifetime = Lifetime::Step;
}

}  // namespace zerocompile
