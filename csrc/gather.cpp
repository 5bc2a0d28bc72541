// Gathering: a unit is gathered as a whole, in place, from the masters; the value lives for one use or for one step.
// Who uses it, and until when: uses.cpp.
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "collectives.h"
#include "runtime.h"
#include "text.h"

namespace zerocompile {

// Whether the unit is gathered, what is gathered is what the masters hold (`full`: to the bit), and `needed` (-1: any)
// is still in it.
bool Runtime::current(const Unit& unit, int64_t needed, bool full) const {
  if (!unit.resident || unit.stale || (needed >= 0 && !parameters_[needed].full.defined())) return false;
  return std::all_of(unit.parameters.begin(), unit.parameters.end(), [&](int64_t i) {
    const auto& p = parameters_[i];
    if (!p.full.defined()) return true;
    return p.gathered_version == p.version() && (!full || p.full.scalar_type() == p.dtype);
  });
}

// [Note: mismatched gathers] Ranks that gather different units would hang, or mix shards of different parameters. Every
// gather has a sequence number; unless one unit is known to be all that ever followed the last one, the ranks compare
// through the store, before the collective starts, which unit each of them has at that number. What is known is the
// same on all ranks, since all were there; a model without branches compares nothing in a steady state. A rank that
// leaves a known way compares alone, and raises when the others have not answered in time; what neither notices is
// found at the start of the next step, where the ranks compare all that they have gathered (`gathered_so_far`).
// Units that the runtime gathers together (an optimizer has written them, a window holds them) are one step of this way:
// their order is the runtime's, and would otherwise show each unit with two followers, to be compared for ever.
// `full`: see [Note: low gathers].
void Runtime::check_order(const std::vector<int64_t>& units, Way way, bool full) {
  if (units.empty()) return;
  if (meet_ != nullptr) {  // see [Note: ranks apart]
    auto meet = std::exchange(meet_, nullptr);
    try {
      meet();
    } catch (...) {
      meet_ = std::move(meet);
      throw;
    }
  }
  const auto count = static_cast<int64_t>(units_.size());
  const int64_t sequence = launched_;
  uint64_t digest = 0;
  bool any_full = false;
  for (auto index : units) {
    const bool wide = widens(units_[index], full);
    const int64_t number = index + (wide ? count : 0);
    any_full = any_full || wide;
    digest = digest * 1099511628211ULL + static_cast<uint64_t>(number) + 1;
    add_to_course(static_cast<uint64_t>(number) + 1);
    ++launched_;
  }
  // one unit: its number; several: a number that is no unit's
  const auto step = units.size() == 1 ? static_cast<int64_t>(digest) - 1 : 2 * count + static_cast<int64_t>(digest >> 2);
  auto& followers = followers_[{last_launched_, way}];
  last_launched_ = {way, step};
  if (world_ == 1 || compare_ == nullptr || (followers.size() == 1 && followers.count(step))) return;
  const auto message = compare_(sequence, names_of(units) + (any_full ? " (in full precision)" : ""));
  TORCH_CHECK(message.empty(), message);
  followers.insert(step);
}

// [Note: ranks apart] A rank that fails inside a window whose parameters are gathered at each use has started fewer
// gathers than the others, which stand in one that it does not come to. If all of them catch what they raise and train
// on, their next gathers would be paired with the old ones. So every rank that leaves a window by an exception says what
// it has gathered in it, and before its next gather takes part in what it has missed (`catch_up`). From there all start
// from the same state: nothing is gathered, and nothing is known of what follows what.
void Runtime::log_runs(bool logs) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  logs_runs_ = logs;
  runs_logged_.clear();
}

std::vector<Runtime::Run> Runtime::logged_runs() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return runs_logged_;
}

// `meet` is called before the next gather; until then nothing that is gathered counts.
void Runtime::come_apart(std::function<void()> meet) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (shut_down_) return;
  meet_ = std::move(meet);
  for (auto& u : units_) {
    u.open_modules = u.graph_uses = 0;
    u.stale = u.stale || (u.lifetime == Lifetime::Use && u.resident);
  }
  before_last_ = last_ = NOWHERE;
}

void Runtime::catch_up(const std::vector<Run>& runs) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check_running();
  const bool logs = std::exchange(logs_runs_, false);  // a new window may be open
  for (const auto& [units, full] : runs) {
    for (auto index : units) {
      drop(unit(index));
      add_to_course(static_cast<uint64_t>(index + (full ? static_cast<int64_t>(units_.size()) : 0)) + 1);
      ++launched_;
    }
    launch_gather(units, Way::Forth, /*restores=*/true, full, /*checked=*/true);
  }
  for (auto& u : units_) {
    if (u.lifetime == Lifetime::Use) drop(u);
  }
  logs_runs_ = logs;
  successor_.clear();
  followers_.clear();
  last_launched_ = before_last_ = last_ = NOWHERE;
}

// [Note: in-place gather] Each rank casts its master straight into its own rows of the result, and the collective
// runs in place on it: no second copy of the shard in the model's dtype, nothing to unpack afterwards.
// `restores`: an older forward saw the same values. `full`: what is gathered anew must be exact. `checked`: the ranks
// know that they gather the same.
void Runtime::launch_gather(const std::vector<int64_t>& units, Way way, bool restores, bool full, bool checked) {
  RECORD_USER_SCOPE(text("zerocompile: gather ", names_of(units), way == Way::Back ? " in backward" : " in forward"));
  if (!checked) check_order(units, way, full);
  if (logs_runs_) {
    const bool wide = std::any_of(units.begin(), units.end(), [&](int64_t i) { return widens(units_[i], full); });
    runs_logged_.emplace_back(units, wide);
  }
  c10::InferenceMode normal_tensors(false);  // a validation step must not leave inference tensors behind
  at::NoGradGuard no_grad;
  std::vector<Pending> started;
  try {
    for (auto index : units) {
      units_[index].gathered_in = static_cast<int64_t>(way);
      await(units_[index]);  // an earlier gather into the same memory must not finish after this one
      for (auto i : units_[index].parameters) {
        auto& p = parameters_[i];
        if (!p.full.defined()) allocate(p, gathered_dtype(p, full));
      }
    }
    start_gather(units, restores, started);
  } catch (...) {
    abandon_gather(units, started);
    throw;
  }
  for (auto index : units) {
    auto& unit = units_[index];
    unit.gathering = started.front();
    unit.stale = false;
    if (unit.resident) continue;
    unit.resident = true;
    stats_.resident_bytes += unit.bytes;
    stats_.peak_resident_bytes = std::max(stats_.peak_resident_bytes, stats_.resident_bytes);
  }
}

// Into the units' memory. `started`: see [Note: unfinished launches].
void Runtime::start_gather(const std::vector<int64_t>& units, bool restores, std::vector<Pending>& started) {
  Lane::Launch launch(gather_lane_, started);
  RowsByDtype calls, unmoved;
  for (auto index : units) add_rows(units_[index], restores, calls, unmoved);
  for (const auto& [dtype, call] : unmoved) fill_rows(call);
  add_to_course(units.size());
  for (auto& [dtype, call] : calls) {
    stats_.gathers += 1;
    if (peers_ != nullptr && peers_->holds(call)) {
      stats_.peer_gathers += 1;
      peers_->all_gather(call);
      continue;
    }
    fill_rows(call);
    if (world_ == 1) continue;
    std::vector<Tensor> outputs, inputs;
    for (auto& rows : call) {
      outputs.push_back(std::move(rows.full));
      inputs.push_back(std::move(rows.rows));
    }
    all_gather(*gather_group_, launch, std::move(outputs), std::move(inputs));
  }
  launch.finish();
}

// A gather has failed before all of it was started. What was not gathered before is not half there now: memory that a
// later gather would find could have another dtype than that one asks for. What was there stays, and is stale.
void Runtime::abandon_gather(const std::vector<int64_t>& units, const std::vector<Pending>& started) {
  for (auto index : units) {
    auto& unit = units_[index];
    if (!started.empty()) unit.gathering = started.front();
    if (unit.resident || unit.lifetime == Lifetime::Step) continue;
    unit.stale = false;
    for (auto i : unit.parameters) {
      gather_lane_.keep(parameters_[i].full);  // gloo's works hold theirs
      forget(parameters_[i]);
    }
  }
}

// Adds a unit's rows to the collectives of a gather. Once that is started its values count as those that the masters
// have now.
void Runtime::add_rows(Unit& unit, bool restores, RowsByDtype& calls, RowsByDtype& unmoved) {
  std::set<at::ScalarType> dtypes;
  unit.bytes = 0;
  for (auto i : unit.parameters) {
    auto& p = parameters_[i];
    const bool moves = !p.replicated && p.full.numel() > 0;
    const auto dtype = p.full.scalar_type();
    (moves ? calls : unmoved)[dtype].push_back(
        {on_the_wire(p.full), on_the_wire(p.rows_here), on_the_wire(p.own), on_the_wire(p.local)});
    const bool changes = !(restores || unit.stale) || p.gathered_version != p.version();
    if (changes) p.value.unsafeGetTensorImpl()->bump_version();  // an older forward's backward must see it
    p.value_version = static_cast<int64_t>(p.value._version());
    p.gathered_version = p.version();
    const auto bytes = static_cast<int64_t>(p.full.nbytes());
    unit.bytes += bytes;
    if (dtype == p.dtype) by_storage_[p.full.storage().unsafeGetStorageImpl()] = i;
    if (!moves) continue;
    dtypes.insert(dtype);
    stats_.gather_bytes += bytes;
    unit.gather_bytes += bytes;
  }
  unit.gathers += static_cast<int64_t>(dtypes.size());
  unit.stale = true;  // for good, if the gather is not started (out of memory)
}

// [Note: merged gathers] Where many units are gathered at once (a window that holds them opens, the optimizer has
// written them) small ones that follow each other share their collectives, in runs of up to `merge_bytes_`, as for
// reductions ([Note: merged reductions]). A run depends on `units`, which all ranks have alike, and on sizes. Copies
// between devices have to fit their buffer, with its padding.
void Runtime::gather_in_runs(const std::vector<int64_t>& units, bool full) {
  const bool padded = peers_ != nullptr;
  check_order(units, Way::Forth, full);
  for (const auto& run : runs_of(units, merge_bytes_, padded)) {
    launch_gather(run, Way::Forth, /*restores=*/false, full, /*checked=*/true);
  }
}

// Units that follow each other, together up to `limit` bytes of full values (`padded`: as they are sent); a larger one,
// and with a negative limit each, is a run of its own.
std::vector<std::vector<int64_t>> Runtime::runs_of(const std::vector<int64_t>& units, int64_t limit,
                                                   bool padded) const {
  std::vector<std::vector<int64_t>> runs;
  int64_t bytes = 0;
  for (auto index : units) {
    const auto size = padded ? units_[index].sent * world_ : full_bytes(units_[index]);
    if (runs.empty() || bytes + size > limit) {
      runs.emplace_back();
      bytes = 0;
    }
    runs.back().push_back(index);
    bytes += size;
  }
  return runs;
}

void Runtime::drop(Unit& unit) {
  if (!unit.resident || unit.lifetime == Lifetime::Step || unit.lent) return;
  await(unit);  // its memory goes back to the stream that allocated it
  for (auto i : unit.parameters) {
    auto& p = parameters_[i];
    if (!p.full.defined()) continue;
    write_back(p);
    forget(p);
  }
  unit.resident = false;
  unit.graph_uses = 0;
  stats_.resident_bytes -= unit.bytes;
}

// [Note: units after an exception] To drop a unit that is on its way is to wait for it, and another rank may have failed
// before it came to it. But to keep it would let this rank hold what ranks without the exception have dropped, and the
// next gathers would not match. So it counts as dropped, and its memory stays until the gather is done; a later gather
// of the unit waits for it.
void Runtime::drop_after_exception(Unit& unit) {
  if (!unit.resident || unit.lifetime == Lifetime::Step || unit.lent) return;
  if (!unit.gathering.any()) return drop(unit);
  for (auto i : unit.parameters) {
    gather_lane_.keep(parameters_[i].full);
    forget(parameters_[i]);
  }
  unit.resident = false;
  unit.graph_uses = 0;
  stats_.resident_bytes -= unit.bytes;
}

// Whether the unit's compute is too short to hide a gather behind: a norm between the last block and the head.
bool Runtime::hides_nothing(const Unit& unit) const {
  constexpr int64_t kShare = 16;
  return unit.sent * kShare < usual_bytes_;
}

// The units that should be gathered after the one in use: the order of the last step is the prediction.
std::vector<int64_t> Runtime::predicted() const {
  std::vector<int64_t> units;
  Token before = before_last_, token = last_;
  for (int64_t ahead = 0; ahead < prefetch_ && units.size() < units_.size();) {
    auto next = successor_.find({before, token});
    if (next == successor_.end()) break;
    const bool over_the_step = token.first == Way::Back && next->second.first == Way::Forth;
    if (over_the_step) break;  // the optimizer may run in between
    before = token;
    token = next->second;
    units.push_back(token.second);
    if (!hides_nothing(units_[token.second])) ++ahead;
  }
  return units;
}

// [Note: order of gathers] Which unit is gathered, dropped or started ahead depends on nothing but the sequence of
// units that the program asked for, never on timing or on what a graph happens to contain: so all ranks launch the
// same collectives in the same order, compiled or not.
void Runtime::demanded(Token token) {
  if (held_ || token == last_) return;  // held units say nothing of what is gathered next
  successor_[{before_last_, last_}] = token;
  before_last_ = last_;
  last_ = token;
  const auto next = predicted();
  for (auto& u : units_) {
    const int64_t index = &u - units_.data();
    const bool wanted = index == token.second || std::find(next.begin(), next.end(), index) != next.end();
    if (u.resident && !wanted && u.open_modules == 0 && u.graph_uses == 0) drop(u);
  }
  for (auto index : next) {
    auto& u = units_[index];
    if (u.resident || u.lifetime == Lifetime::Step) continue;
    launch_gather({index}, token.first);
    stats_.prefetched += 1;
  }
}

// `full`: it is needed in full precision, see [Note: low gathers].
void Runtime::acquire(int64_t index, Phase phase, int64_t needed, bool full) {
  check_entry("gather");
  abort_failed_backward();
  if (phase == Phase::Backward) arm();
  auto& unit = units_[index];
  if (phase == Phase::Forward && !seen_forward_[index]) {
    seen_forward_[index] = 1;
    forward_order_.push_back(index);
  }
  const auto way = phase == Phase::Backward ? Way::Back : Way::Forth;
  if (!current(unit, needed, full)) {
    drop(unit);
    launch_gather({index}, way, /*restores=*/false, full);
  }
  if (unit.lifetime == Lifetime::Use) demanded({way, index});
}

// All units, in the order of their first use in rank 0's forward; before any backward in the order of the model.
std::vector<int64_t> Runtime::unit_order() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<int64_t> order(reduce_order_.rbegin(), reduce_order_.rend());
  for (int64_t index = 0; order.size() < units_.size(); ++index) order.push_back(index);
  return order;
}

// The optimizer wrote: resident values are gathered anew, in the order of the forward.
void Runtime::masters_changed(const std::vector<int64_t>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check_running();
  std::vector<char> changed(units_.size(), 0);
  for (auto index : units) {
    (void)unit(index);  // there is one
    changed[index] = 1;
  }
  std::vector<int64_t> resident;
  for (auto index : unit_order()) {
    if (!changed[index]) continue;
    auto& unit = units_[index];
    if (unit.lifetime == Lifetime::Step) resident.push_back(index);
    else if (unit.open_modules == 0) drop(unit);
  }
  gather_in_runs(resident, /*full=*/false);
}

// How many units were gathered since set-up, and a digest of which: equal on ranks that went the same way.
std::string Runtime::gathered_so_far() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return text(launched_, " gathers (course ", static_cast<int64_t>(course_ >> 1), ")");
}

}  // namespace zerocompile
