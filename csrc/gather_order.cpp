#include "gather_order.h"

namespace zerocompile {

bool GatherOrder::demand(Way way, int64_t unit) {
  const Use use{way, unit};
  if (use == last_) return false;
  successor_[{before_last_, last_}] = use;
  before_last_ = last_;
  last_ = use;
  return true;
}

std::vector<int64_t> GatherOrder::next(int64_t count, size_t limit,
                                       const std::function<bool(int64_t)>& hides_nothing) const {
  std::vector<int64_t> units;
  Use before = before_last_, use = last_;
  for (int64_t ahead = 0; ahead < count && units.size() < limit;) {
    const auto found = successor_.find({before, use});
    if (found == successor_.end()) break;
    const bool over_the_step = use.first == Way::Back && found->second.first == Way::Forth;
    if (over_the_step) break;
    before = use;
    use = found->second;
    units.push_back(use.second);
    if (!hides_nothing(use.second)) ++ahead;
  }
  return units;
}

void GatherOrder::use_in_forward(int64_t unit) {
  if (seen_.insert(unit).second) forward_order_.push_back(unit);
}

std::vector<int64_t> GatherOrder::first_uses(int64_t units) const {
  auto order = forward_order_;
  for (int64_t unit = 0; unit < units; ++unit) {
    if (!seen_.count(unit)) order.push_back(unit);
  }
  return order;
}

GatherSequence::Step GatherSequence::begin(const std::vector<int64_t>& units, Way way, int64_t count) {
  uint64_t digest = 0;
  for (auto unit : units) digest = digest * kPrime + static_cast<uint64_t>(unit) + 1;
  // one unit: its number; several: a number that is no unit's
  const bool one = units.size() == 1;
  const auto step = one ? static_cast<int64_t>(digest) - 1 : 4 * count + static_cast<int64_t>(digest >> 2);
  current_ = &followers_[{last_, way}];
  next_ = {way, step};
  return {gathered_, current_->size() == 1 && current_->count(step) == 1};
}

void GatherSequence::started(size_t units) {
  gathered_ += static_cast<int64_t>(units);
  add(static_cast<uint64_t>(next_.second));
  add(units);
  last_ = next_;
}

void GatherSequence::forget() {
  followers_.clear();
  current_ = nullptr;
  last_ = next_ = {Way::Forth, -1};
}

}  // namespace zerocompile
