// Using parameters: regions, eager code and graphs say what they read and until when; what user code has written to a
// value goes back to the masters.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <set>
#include <utility>

#include "gathers.h"
#include "text.h"
#include "views.h"

namespace zerocompile {

namespace {

// Whether anything else refers to this memory.
bool is_held_elsewhere(const FullValue& v) {
  const std::set<const c10::TensorImpl*> ours = {v.full.unsafeGetTensorImpl(), v.value.unsafeGetTensorImpl(),
                                                 v.rows_here.unsafeGetTensorImpl(), v.own.unsafeGetTensorImpl()};
  return v.full.storage().use_count() > ours.size();
}

}  // namespace

Tensor Gathers::resident_value(int64_t index) const {
  const auto& p = registry_.parameter(index);
  TORCH_CHECK(p.unit >= 0 && registry_.units()[p.unit].lifetime == Lifetime::Step,
              text("zerocompile: `", p.name, "` has no resident value: its lifetime is one use"));
  return of(p).value;
}

// The value for eager code. With `cast` it is in that dtype, in memory of its own.
Tensor Gathers::read(int64_t index, std::optional<at::ScalarType> cast) {
  const auto& p = registry_.parameter(index);
  const auto& unit = registry_.unit_of(p);
  auto& v = of(p);
  const auto dtype = cast.value_or(p.dtype);
  ask(p, dtype);
  const auto before = counts_.gathers;
  acquire(unit, phase(), index, needs_full(p, dtype));
  await(unit);
  give_late(p);
  counts_.eager_reads += 1;
  of(unit).eager_reads += 1;
  counts_.eager_gathers += counts_.gathers - before;
  if (cast.has_value()) return v.value.scalar_type() == dtype ? v.value.clone() : cast_of(p, dtype);
  move_out(p);
  v.read_eagerly = v.read_eagerly || !trusted_;
  return v.value;
}

// Values that differ from the masters by now are gathered anew, by all ranks at once.
void Gathers::refresh(const Units& units) {
  Units missing;
  for (auto index : units) {
    if (!current(registry_.unit(index), -1, /*full=*/false)) missing.push_back(index);
  }
  gather_in_runs(missing, /*full=*/false);
}

// A region begins: its units stay gathered until it ends. `trusted`: see [Note: write back].
void Gathers::enter(const Units& units, bool trusted) {
  size_t entered = 0;
  try {
    for (; entered < units.size(); ++entered) {
      acquire(registry_.unit(units[entered]), phase(), -1);
      units_[units[entered]].open_modules += 1;
    }
  } catch (...) {  // nobody will leave
    while (entered > 0) units_[units[--entered]].open_modules -= 1;
    throw;
  }
  trusted_ = trusted;
}

void Gathers::leave(const Units& units) {
  trusted_ = false;
  if (registry_.is_shut_down()) return;
  for (auto index : units) {
    auto& state = of(registry_.unit(index));
    state.open_modules = std::max<int64_t>(0, state.open_modules - 1);  // `end_forward` closes all
  }
}

// [Note: stale backward] A graph saves handles, not weights: in its backward, which gathers again, nothing shows that
// the weights are not those of its forward. So saving a handle keeps the version that the forward saw (`pack`), and
// asking for it, which comes right before the backward graph runs, gives it back (`forward_version`); the graph's use
// of the value compares. A forward whose backward never comes, and a weight that the backward does not read, change
// nothing. Where no hooks are on, the version of the last forward has to do.
int64_t Gathers::seen_version(int64_t index) const {  // the same before and after the writes reach the master
  const auto& p = registry_.parameter(index);
  return p.version() + of(p).writes();
}

// A graph needs values from here on. Those that live for one use stay gathered until its `release`.
void Gathers::need(const Units& indices, const std::vector<at::ScalarType>& dtypes, Phase now) {
  std::set<int64_t> full;  // units that all of the graph's uses take in full precision
  for (size_t k = 0; k < indices.size(); ++k) {
    const auto& p = registry_.parameter(indices[k]);
    (void)registry_.unit_of(p);  // raises if there is none
    ask(p, dtypes[k]);
    if (needs_full(p, dtypes[k])) full.insert(p.unit);
  }
  check_places(indices, dtypes);
  size_t needed = 0;
  try {
    for (; needed < indices.size(); ++needed) {
      const auto& p = record(indices[needed]);
      const auto& unit = registry_.units()[p.unit];
      auto& v = of(p);
      acquire(unit, now, p.index, full.count(p.unit) > 0);
      await(unit);
      give_late(p);
      TORCH_CHECK(now != Phase::Backward || v.forward_version < 0 || v.forward_version == seen_version(p.index),
                  text("zerocompile: parameter `", p.name, "` was modified between its forward and its backward (by an "
                       "optimizer step or an in-place write), so the gradients would be wrong. Run the backward before "
                       "the modification"));
      if (v.fixed.has_value() && dtypes[needed] == p.dtype) put_in_place(p);
      if (unit.lifetime == Lifetime::Use) of(unit).graph_uses += 1;
      if (now == Phase::Forward) v.forward_version = seen_version(p.index);
      counts_.graph_uses += 1;
    }
  } catch (...) {  // the graph will not come to its `release`
    unneed(indices, needed);
    throw;
  }
}

// Takes the first `count` uses of a graph back.
void Gathers::unneed(const Units& indices, size_t count) {
  for (size_t k = 0; k < count; ++k) {
    auto& uses = units_[record(indices[k]).unit].graph_uses;
    uses = std::max<int64_t>(0, uses - 1);  // a unit that was dropped meanwhile has none
    counts_.graph_uses -= 1;
  }
}

// What a graph has just asked for.
std::vector<Tensor> Gathers::values(const Units& indices, const std::vector<at::ScalarType>& dtypes) {
  std::vector<Tensor> values;
  for (size_t k = 0; k < indices.size(); ++k) {
    const auto& value = values_[indices[k]].value;
    values.push_back(value.scalar_type() != dtypes[k] ? cast_of(record(indices[k]), dtypes[k]) : view_of(value));
  }
  return values;
}

// The graph does not use these values any more. `last`: the graph ends here. Values that are asked for next stay (after
// the last graph of the forward, by the backward).
void Gathers::release(const Units& indices, bool last) {
  const bool keeps_all = last || held_;
  const auto next = keeps_all ? Units() : predicted();
  for (auto i : indices) {
    const auto& p = registry_.parameter(i);
    const auto& unit = registry_.unit_of(p);
    auto& state = of(unit);
    if (unit.lifetime == Lifetime::Step || !state.resident) continue;
    state.graph_uses = std::max<int64_t>(0, state.graph_uses - 1);
    if (keeps_all || state.lent || !of(p).full.defined()) continue;
    if (std::find(next.begin(), next.end(), p.unit) != next.end()) continue;
    const bool written = may_be_written(p);
    write_back(p);
    write_secondary(unit, p, written);
    keep_for_readers(unit, of(p).full);
    keep_late(p);
    forget(p);
    const bool empty = std::none_of(unit.parameters.begin(), unit.parameters.end(),
                                    [&](int64_t k) { return values_[k].full.defined(); });
    if (empty) drop(unit);
  }
}

Tensor Gathers::value_in_backward(int64_t index) {
  const auto& p = registry_.parameter(index);
  const auto& unit = registry_.unit_of(p);
  acquire(unit, phase(), index, needs_full(p, p.dtype));
  await(unit);
  give_late(p);
  move_out(p);
  return of(p).full;
}

int64_t Gathers::parameter_of(const Tensor& value) const {
  auto found = by_storage_.find(value.storage().unsafeGetStorageImpl());
  return found == by_storage_.end() ? -1 : found->second;
}

// [Note: write back] User code may write to a value that it read from a module (`weight.data.mul_`, a codebook update).
// Every rank runs the same code, so each takes its own rows from what it wrote; elements that still are the cast of
// the master stay as they are, so a low-precision value never rounds the master. No host synchronisation. Values that
// only torch's own layers read (`trusted_`) are not compared. A write changes the master's version as it changed the
// value's, so a backward through the old value raises as in torch; one through `data` changes neither.
void Gathers::write_back(const Parameter& p) {
  auto& v = of(p);
  const auto writes = v.writes();
  const bool read = may_be_written(p);
  if ((!read && !v.held) || units_[p.unit].lent) return;
  v.read_eagerly = false;
  v.held = !is_in_place(p) && is_held_elsewhere(v);  // see [Note: late writes]
  if (read) forget_scale(v);                         // see [Note: float8 gathers]
  if (v.gathered_version == p.version() && v.own.scalar_type() == p.dtype) merge(p, v);
}

// Gives the master what was written to its rows since it had these values.
void Gathers::merge(const Parameter& p, FullValue& from) {
  auto& v = of(p);
  const bool on_host = p.host.defined();  // see [Note: masters in host memory]
  const bool shown = on_host && v.shown_version == p.version();
  const auto& master = on_host ? p.host : p.local;
  const auto writes = from.writes();
  if (writes == 0) {
    scale_again(p, from);
    write_secondary_again(p, from.full);
  }
  for (int64_t write = 0; write < writes; ++write) master.unsafeGetTensorImpl()->bump_version();
  from.value_version += writes;
  from.gathered_version = p.version();
  forget_kept(p);  // a write through `data` has no version
  if (p.local.numel() == 0) return;
  await_readers(registry_.units()[p.unit]);
  c10::InferenceMode normal_tensors(false);
  at::AutoDispatchBelowADInplaceOrView no_version_change;
  const auto rows = on_host ? p.host.to(registry_.device()) : p.local;
  const auto written = from.own.ne(rows.to(from.own.scalar_type()));
  v.shown_version = shown ? p.version() : -1;
  if (on_host) {  // the rows came from there, so the host has waited anyway
    if (!written.any().item<bool>()) return;
    counts_.host_writes += 1;  // for whoever has copied the rows from there: a write through `data` has no version
  }
  const auto merged = at::where(written, from.own.to(rows.scalar_type()), rows);
  master.copy_(merged);
  if (shown) p.local.copy_(merged);  // so later gathers need not read host memory
}

// [Note: late writes] User code may hold a value for longer than its unit is gathered, and write to it then. Of
// `target.weight.data.lerp_(online.weight.data, 0.1)` Python reads the target first, and to read the other one drops
// the target's unit. So a dropped value that others refer to is kept here, which takes no memory that is not taken
// anyway. What was written to it goes to the master before that is used or gathered, unless the master has changed
// meanwhile. Whoever is given the parameter's value next is given this memory (`give_late`): what user code still holds
// is what it reads, as in torch. An entry ends then, or with the last reference of others.
//
// A value that lives for a step is not dropped. While others refer to it (`held`), it is compared with its master at
// each `write_back`, and once after that.
//
// A write through `data` changes no version, so nothing tells whether there was one. Ranks may differ in what is held:
// Python frees what refers to itself at any time. So nothing here decides what is gathered. What was made of the values
// before (a scale, a secondary shard, a gather that was started before it was asked for) is made again of the whole
// value, which every rank has, and stays valid.
void Gathers::keep_late(const Parameter& p) {
  const auto& v = of(p);
  if (!v.held || v.own.scalar_type() != p.dtype) return;
  late_[p.index] = v;
}

void Gathers::take_late(const Parameter& p) {
  const auto found = late_.find(p.index);
  if (found == late_.end()) return;
  auto& late = found->second;
  const bool held = is_held_elsewhere(late);
  const bool current = of(p).full.defined() && of(p).gathered_version == p.version();  // it must stay so, as above
  if (!registry_.device().is_cpu()) keep_for(late.full, current_stream(registry_.device()));
  if (late.gathered_version == p.version()) merge(p, late);
  if (current) {
    await(registry_.units()[p.unit]);
    give_late(p);
  }
  if (!held) late_.erase(p.index);
}

// Those of these units, and those that nobody else refers to any more.
void Gathers::take_late(const Units& units) {
  Units due;
  for (const auto& [index, late] : late_) {
    const bool asked = std::find(units.begin(), units.end(), record(index).unit) != units.end();
    if (asked || !is_held_elsewhere(late)) due.push_back(index);
  }
  for (auto index : due) take_late(record(index));
}

void Gathers::take_late() {
  Units all;
  for (const auto& entry : late_) all.push_back(entry.first);
  for (auto index : all) take_late(record(index));
}

// The value, which has been gathered and awaited, is in the memory that user code has held meanwhile.
void Gathers::give_late(const Parameter& p) {
  const auto found = late_.find(p.index);
  if (found == late_.end()) return;
  auto& v = of(p);
  const auto& unit = registry_.units()[p.unit];
  const bool newer = found->second.gathered_version == p.version();  // it may have writes that the master does not have
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  keep_for_readers(unit, v.full);
  if (!registry_.device().is_cpu()) {
    keep_for(found->second.full, current_stream(registry_.device()));
    if (of(unit).home) keep_for(found->second.full, *of(unit).home);
  }
  if (found->second.full.scalar_type() != v.full.scalar_type()) {  // see [Note: low gathers]
    if (!newer) return;
    const bool scaled = v.float8.has_value() && v.float8->version == p.version();
    merge(p, found->second);
    if (scaled) {
      v.float8->version = p.version();
      scale_again(p, found->second);
    }
    await_readers(unit);
    cast_into(p, found->second.full, v.full);
    v.gathered_version = p.version();
    values_written(unit);
    return;
  }
  auto late = std::move(found->second);
  late_.erase(found);
  if (!newer) {
    await_readers(unit);
    late.full.copy_(v.full);
    late.value.unsafeGetTensorImpl()->bump_version();
    late.value_version = static_cast<int64_t>(late.value._version());
    late.gathered_version = v.gathered_version;
  }
  forget(p);
  static_cast<FullValue&>(v) = std::move(late);
  v.held = true;
  by_storage_[v.full.storage().unsafeGetStorageImpl()] = p.index;
  if (!newer) values_written(unit);
}

// The parameter has other memory from here on, as torch's `p.data = x` gives it. What user code holds of its values
// stays as it is, and is not the parameter any more.
void Gathers::disown_values(int64_t index) {
  if (registry_.is_shut_down()) return;
  const auto& p = registry_.parameter(index);
  if (p.unit < 0 || of(registry_.units()[p.unit]).lent) return;
  late_.erase(index);
  forget_writes(p);
}

void Gathers::write_back() {
  take_late();
  for (const auto& unit : registry_.units()) write_back_all(unit);
}

void Gathers::write_back(const Units& units) {
  take_late(units);
  for (auto index : units) write_back_all(registry_.unit(index));
}

// Before somebody reads or writes the master itself.
void Gathers::write_back_parameter(int64_t index) {
  if (registry_.is_shut_down()) return;
  const auto& p = registry_.parameter(index);
  if (p.unit < 0) return;
  take_late(p);
  if (!of(p).full.defined() || !(may_be_written(p) || of(p).held)) return;
  await(registry_.units()[p.unit]);
  write_back(p);
}

void Gathers::write_back_all(const Unit& unit) {
  if (!of(unit).resident) return;
  await(unit);
  for (auto i : unit.parameters) {
    if (values_[i].full.defined()) write_back(record(i));
  }
}

// Nothing stays gathered for a backward that will not come. `raised`: see [Note: units after an exception].
void Gathers::end_forward(bool raised) {
  for (const auto& unit : registry_.units()) {
    of(unit).open_modules = 0;
    if (held_) continue;
    if (raised) drop_after_exception(unit);
    else drop(unit);
  }
  if (raised) forget_secondary();
  order_.restart();
}

// Nothing of it is updated yet. (The one before may have raised.)
void Gathers::begin_backward() {
  for (auto& state : units_) state.updated = false;
}

// Nothing stays gathered for a graph that has ended.
void Gathers::end_backward() {
  write_back();
  for (const auto& unit : registry_.units()) {
    of(unit).updated = false;
    if (of(unit).written) of(unit).written->block(current_stream(registry_.device()));
    of(unit).graph_uses = 0;
    if (of(unit).open_modules == 0 && !held_) drop(unit);
  }
}

// [Note: held units] Within a window no parameter changes, so at stage 3 one gather of each unit can serve all of its
// forwards and backwards. All units are gathered when the window opens, in their fixed order: then nothing is gathered
// inside, and ranks may run different numbers of backwards.
void Gathers::hold() {
  held_ = true;
  Units missing;
  for (const auto& unit : registry_.units()) {
    const bool whole = std::all_of(unit.parameters.begin(), unit.parameters.end(),
                                   [&](int64_t i) { return values_[i].full.defined(); });
    if (unit.lifetime == Lifetime::Step || (whole && current(unit, -1, /*full=*/true))) continue;
    drop(unit);
    missing.push_back(unit.index);
  }
  try {
    gather_in_runs(missing, /*full=*/true);
  } catch (...) {  // out of memory, say: the window does not open
    let_go(/*raised=*/true);
    throw;
  }
}

// `raised`: see [Note: units after an exception].
void Gathers::let_go(bool raised) {
  held_ = false;
  for (const auto& unit : registry_.units()) {
    if (of(unit).open_modules > 0) continue;
    if (raised) drop_after_exception(unit);
    else drop(unit);
  }
  if (raised) forget_secondary();
  forget_scales();
  order_.restart();  // so it is the same on all ranks, whatever they ran in the window
}

}  // namespace zerocompile
