// In which order a program uses its units, and which part of that order all ranks know. Nothing here holds a tensor,
// asks another rank or knows a parameter: units are numbers (tests/unit/test_gather_order.py).
//
// `GatherOrder` owns what followed what, `GatherSequence` what was gathered. Lock: whoever calls holds the runtime's
// mutex.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace zerocompile {

// In a forward or in a backward. Prediction and order may depend on no more: whether grad mode is on, for example,
// differs between a graph and eager code.
enum class Way : int64_t { Forth = 0, Back = 1 };

// [Note: order of gathers] Which unit is gathered, dropped or started ahead depends on nothing but the sequence of
// units that the program asked for, never on timing or on what a graph happens to contain: so all ranks launch the
// same collectives in the same order, compiled or not.
class GatherOrder {
 public:
  // The program asks for a unit. Returns false if it has asked for the same unit just before, so that nothing is new.
  bool demand(Way way, int64_t unit);

  // The units that should be gathered after the one in use: what followed the last two demands when they last came in
  // this order is the prediction, and so on. It ends where a backward does: the optimizer may run in between. `count`
  // of them, not counting those that `hides_nothing` is true of; at most `limit` in all.
  std::vector<int64_t> next(int64_t count, size_t limit, const std::function<bool(int64_t)>& hides_nothing) const;

  // The program begins anew. It stays known what followed what.
  void restart() { before_last_ = last_ = NOWHERE; }

  // A forward that records a graph uses the unit.
  void use_in_forward(int64_t unit);

  // Units in the order of their first use in such a forward; those without one come after them, by number.
  std::vector<int64_t> first_uses(int64_t units) const;

  // It is not known any more what followed what.
  void forget() {
    successor_.clear();
    restart();
  }

 private:
  using Use = std::pair<Way, int64_t>;  // of a unit
  static constexpr Use NOWHERE{Way::Forth, -1};

  Use before_last_ = NOWHERE, last_ = NOWHERE;
  std::map<std::pair<Use, Use>, Use> successor_;  // (use before, use) -> the use that came next
  std::vector<int64_t> forward_order_;            // units by their first use
  std::set<int64_t> seen_;
};

// [Note: mismatched gathers] Ranks that gather different units would hang, or mix shards of different parameters. So
// every gather has a number, and before its collective starts the ranks compare through the store which unit each of
// them has at that number. They need not where only one unit has ever followed the last one. That is the same on all
// ranks, since all took part in each gather. So a model without branches compares nothing after its first steps. A rank
// that leaves a known way compares alone, and raises when the others have not answered in time. What no rank notices is
// found at the start of the next step, where the ranks compare all that they have gathered (`course`). Units that the
// runtime gathers together (an optimizer has written them, a window holds them) are one step of this way: their order
// is the runtime's, and would otherwise show each unit with two followers, to be compared for ever.
//
// A gather counts once its collectives have started, and each collective counts. So ranks that compare equal have
// started the same collectives, whatever has failed on them.
class GatherSequence {
 public:
  struct Step {
    int64_t number;  // of its first unit, among all that were gathered
    bool known;      // it is all that ever followed the last one, on all ranks
  };

  // Units are to be gathered together. `units`: their numbers, which are below `count`. A wide one, which is gathered in
  // full precision although the ranks have agreed to move less, has its number plus `count`; one that is gathered from
  // secondary shards has its number plus twice that; one before which the ranks agree on scales, plus three times.
  Step begin(const std::vector<int64_t>& units, Way way, int64_t count);

  // All ranks are known to have begun this step.
  void agreed() { current_->insert(next_.second); }

  // A collective of it has started.
  void started_one() { add(1); }

  // All collectives for so many of its units have started.
  void started(size_t units);

  // It is not known any more what follows what.
  void forget();

  int64_t gathered() const { return gathered_; }  // units
  int64_t course() const { return static_cast<int64_t>(course_ >> 1); }  // digest of them and of their runs

 private:
  using Token = std::pair<Way, int64_t>;  // (way, step)
  void add(uint64_t number) { course_ = course_ * kPrime + number; }

  static constexpr uint64_t kPrime = 1099511628211ULL;
  int64_t gathered_ = 0;
  uint64_t course_ = 0;
  Token last_{Way::Forth, -1}, next_ = last_;  // the step that has started last; the one that has begun last
  std::map<std::pair<Token, Way>, std::set<int64_t>> followers_;  // the steps that followed one on all ranks
  std::set<int64_t>* current_ = nullptr;                          // those of the step before the last one
};

}  // namespace zerocompile
