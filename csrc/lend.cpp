// Units that stay gathered: those that `full_parameters` holds, and those that memory allows.
#include <algorithm>

#include "runtime.h"
#include "text.h"

namespace zerocompile {

// [Note: lent units] While `full_parameters` holds a unit it stays gathered, its modules compute with what user code
// writes to it, and the masters keep their values, so that whatever reads them (a checkpoint, `parameters()`) sees one
// thing. When it is given back the writes reach the masters (`keep`) or the values are gathered again: `together`, on
// all ranks at once, or, where an exception may have met one rank alone, at the next use.
void Runtime::lend(const std::vector<int64_t>& indices) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(!shut_down_, "zerocompile: the strategy was torn down");
  for (auto index : indices) {
    TORCH_CHECK(!units_.at(index).lent,
                text("zerocompile: `full_parameters` inside another one that holds the same parameters, or others of ",
                     "their unit `", units_.at(index).name, "`. Enter once, with a module that contains both"));
  }
  abort_failed_backward();
  for (auto index : indices) {
    auto& unit = units_.at(index);
    const bool whole = std::all_of(unit.parameters.begin(), unit.parameters.end(),
                                   [&](int64_t i) { return current(unit, i, /*full=*/true); });
    if (!whole) {
      drop(unit);
      launch_gather({index}, Way::Forth, /*restores=*/false, /*full=*/true);
    }
    await(unit);
    for (auto i : unit.parameters) write_back(parameters_[i]);  // what was written before counts
    unit.lent = true;
  }
}

Tensor Runtime::lent_value(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& p = parameter(index);
  TORCH_CHECK(units_[p.unit].lent, text("zerocompile: `", p.name, "` is not lent"));
  p.read_eagerly = true;
  return p.value.detach();
}

void Runtime::take_back(const std::vector<int64_t>& indices, bool keep, bool together) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (shut_down_) return;
  for (auto index : indices) {
    auto& unit = units_.at(index);
    unit.lent = false;
    for (auto i : unit.parameters) {
      auto& p = parameters_[i];
      if (keep) write_back(p);
      p.read_eagerly = false;
      p.value_version = static_cast<int64_t>(p.value._version());
    }
    if (unit.lifetime == Lifetime::Use && !held_ && unit.open_modules <= 0 && unit.graph_uses == 0) {
      drop(unit);
    } else if (together) {
      launch_gather({index}, Way::Forth, /*restores=*/!keep);
    } else {
      unit.stale = true;
    }
  }
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
  TORCH_CHECK(!shut_down_, "zerocompile: the strategy was torn down");
  auto& unit = this->unit(index);
  TORCH_CHECK(!held_ && !unit.lent && unit.open_modules == 0 && unit.graph_uses == 0,
              text("zerocompile: unit `", unit.name, "` is in use, so how long it lives cannot change now"));
  if (unit.lifetime == Lifetime::Step) return;
  drop(unit);
  unit.lifetime = Lifetime::Step;
  for (auto i : unit.parameters) {
    parameters_[i].low.reset();
    allocate(parameters_[i], parameters_[i].dtype);
  }
  gathers_in_backward_ =
      std::any_of(units_.begin(), units_.end(), [](const Unit& u) { return u.lifetime == Lifetime::Use; });
}

}  // namespace zerocompile
