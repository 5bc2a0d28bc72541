// Gathering: a unit is gathered as a whole, in place, from the masters. The value lives for one use or for one step.
// uses.cpp says who uses it, and until when.
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "collectives.h"
#include "gathers.h"
#include "text.h"
#include "views.h"

namespace zerocompile {

Gathers::Gathers(Registry& registry, Questions& questions, c10::intrusive_ptr<c10d::ProcessGroup> group,
                 c10::intrusive_ptr<c10d::ProcessGroup> inner)
    : registry_(registry),
      questions_(questions),
      group_(std::move(group)),
      inner_(std::move(inner)),
      lane_(registry.device()) {}

void Gathers::add_unit(int64_t index) {
  units_.resize(registry_.units().size());
  const auto& unit = registry_.unit(index);
  if (unit.lifetime != Lifetime::Step) return;
  for (auto i : unit.parameters) allocate(record(i), record(i).dtype, values_[i]);
}

// Bytes of a half: of one rank's rows of the usual unit, or of a run of small ones ([Note: merged gathers]). What does
// not fit (an embedding, a head) goes through the process group.
int64_t Gathers::peer_bytes() const {
  if (registry_.usual_bytes() == 0) return 0;
  int64_t all = 0;
  for (const auto& unit : registry_.units()) all += unit.sent;
  return std::max(registry_.usual_bytes(), std::min(all, merge_bytes_ / registry_.world()));
}

// The elements of the place of its kept cast, see [Note: kept casts]; 0: it has none. `low`: uses of a parameter of float32
// may ask for a lower dtype, which only values that live for a use can have ([Note: low gathers]).
int64_t Gathers::kept_elements(const Parameter& p, bool low) const {
  const bool lowered = low && p.dtype == at::kFloat && registry_.unit_of(p).lifetime == Lifetime::Use;
  if (p.replicated || !(lowered || p.dtype == at::kBFloat16 || p.dtype == at::kHalf)) return 0;
  return PeerMemory::kept_elements(c10::multiply_integers(registry_.padded_size(p)) / registry_.world());
}

// Of the places of all kept casts of this rank. Only other devices' copies read them.
int64_t Gathers::kept_bytes(bool low) const {
  int64_t elements = 0;
  if (peers_ == nullptr) return elements;
  for (const auto& p : registry_.parameters()) elements += kept_elements(p, low);
  return elements * static_cast<int64_t>(sizeof(at::BFloat16));
}

void Gathers::keep_casts(Tensor buffer, const std::string& group, bool low) {
  TORCH_CHECK(peers_ != nullptr, "zerocompile: casts are kept for copies between devices, and there are none");
  TORCH_CHECK(buffer.numel() >= kept_bytes(low),
              text("zerocompile: kept casts take ", kept_bytes(low), " bytes, not ", buffer.numel()));
  peers_->keep_casts(std::move(buffer), group);
  int64_t begin = 0;
  for (const auto& p : registry_.parameters()) {
    const auto elements = kept_elements(p, low);
    if (elements == 0) continue;
    of(p).kept = KeptCast{begin};
    begin += elements;
  }
}

// Waits for all that is on its way.
void Gathers::settle() {
  for (const auto& unit : registry_.units()) await(unit);
}

// See [Note: abandoned communication]. `devices_too`: what was awaited may still wait on the device.
void Gathers::abandon(bool devices_too) {
  bool running = false;
  for (const auto& unit : registry_.units()) {
    if (!of(unit).gathering.running()) continue;
    running = true;
    for (auto i : unit.parameters) {
      lane_.keep(values_[i].full);
      lane_.keep(values_[i].secondary);
      lane_.keep(record(i).local);
    }
    of(unit).gathering.drop();
  }
  if (scaling_.running()) {
    running = true;
    scaling_.drop();
  }
  if (running || devices_too) (void)peers_.release();
  if (running && registry_.device().is_cpu()) {
    (void)group_.release();
    (void)inner_.release();
  }
}

void Gathers::clear() {
  values_.clear();
  units_.clear();
  places_.clear();
  late_.clear();
  by_storage_.clear();
  meet_ = nullptr;
  peers_.reset();
  group_.reset();
  inner_.reset();
}

Phase phase() {
  if (torch::autograd::get_current_graph_task_id() != -1) return Phase::Backward;
  return at::GradMode::is_enabled() ? Phase::Forward : Phase::NoGrad;
}

// `fixed`: in the parameter's fixed place, if it has one and that has this dtype.
void Gathers::allocate(const Parameter& p, at::ScalarType dtype, GatheredValue& v, bool fixed) const {
  const auto world = registry_.world();
  if (fixed && v.fixed.has_value() && dtype == p.dtype) v.full = v.fixed->full;
  else v.full = registry_.empty_full(p, dtype);
  v.value = v.rows_here = v.own = v.full;
  if (p.replicated) {
    v.value = v.own = v.full.squeeze(0);
  } else {
    auto rows = v.full.sizes().vec();
    const auto begin = v.full.numel() / world * registry_.rank();
    rows[0] = p.rows;
    if (p.size[0] < v.full.size(0)) v.value = p.rows_in(v.full, p.size, 0);
    if (world > 1) v.rows_here = p.rows_in(v.full, rows, begin);
    v.own = p.local.size(0) < p.rows ? p.rows_in(v.full, p.local.sizes(), begin) : v.rows_here;
  }
  v.value = v.value.variable_data();  // with versions of its own: those of `full` change as the collective writes
}

void Gathers::forget(const Parameter& p) {
  auto& v = of(p);
  if (!v.full.defined()) return;
  by_storage_.erase(v.full.storage().unsafeGetStorageImpl());
  v.full.reset();
  v.value.reset();
  v.rows_here.reset();
  v.own.reset();
  v.read_eagerly = v.held = false;
}

// Waits for the unit's gather, which fails with a message that names it.
//
// [Note: modes of user code] A dispatch mode of torch or of user code (selective activation checkpointing) may be active
// where a value is read. It must not see how the value comes about: a gather, and what follows it, is in one forward
// and not in the other.
void Gathers::await(const Unit& unit) {
  auto& state = of(unit);
  if (state.gathering.awaited(registry_.device())) return;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
  const auto what = text("the gather of unit `", unit.name,
                         state.gathered_in == Way::Back ? "` in backward" : "` in forward");
  const auto look = questions_.look(what, "gather", state.gather_number);
  wait_for(state.gathering, registry_.device(), what, registry_.global_rank(), look);
}

// Whether the unit is gathered, what is gathered is what the masters hold (`full`: to the bit), and `needed` (-1: any)
// is still in it. In a backward that has updated the masters what is gathered is what they held when it began.
bool Gathers::current(const Unit& unit, int64_t needed, bool full) const {
  const bool older = of(unit).updated && phase() == Phase::Backward;
  if (!of(unit).resident || of(unit).stale || (needed >= 0 && !values_[needed].full.defined())) return false;
  return std::all_of(unit.parameters.begin(), unit.parameters.end(), [&](int64_t i) {
    const auto& v = values_[i];
    if (!v.full.defined()) return true;
    return (older || v.gathered_version == record(i).version()) && (!full || v.full.scalar_type() == record(i).dtype);
  });
}

// Raises where other ranks gather something else: see [Note: mismatched gathers]. `full`: see [Note: low gathers].
// `inner`: from secondary shards.
void Gathers::check_order(const Units& units, Way way, bool full, bool inner) {
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
  not_started_.meet(questions_, registry_.global_rank());
  const auto count = static_cast<int64_t>(units_.size());
  std::vector<int64_t> numbers;
  bool any_full = false, any_scales = false;
  for (auto index : units) {
    const auto& unit = registry_.units()[index];
    const bool wide = widens(unit, full);
    const bool scales = !inner && needs_scales(unit, full);
    numbers.push_back(index + (inner ? 2 * count : scales ? 3 * count : wide ? count : 0));
    any_full = any_full || wide;
    any_scales = any_scales || scales;
  }
  const auto step = sequence_.begin(numbers, way, count);
  if (registry_.world() == 1 || questions_.compare == nullptr || step.known) return;
  const auto what = text(registry_.names_of(units), any_full ? " (in full precision)" : "",
                         inner ? " (from secondary shards)" : "",
                         any_scales ? " (after new scales of float8 weights)" : "");
  const auto message = questions_.compare(step.number, what);
  TORCH_CHECK(message.empty(), message);
  sequence_.agreed();
}

// [Note: ranks apart] A rank that fails inside a window whose parameters are gathered at each use may have started
// fewer gathers than the others, which stand in one that it does not come to. If all of them catch what they raise,
// their next gathers would be paired with the old ones. So every rank that leaves such a window by an exception says
// what it has gathered, and compares that (`meet`) before its next gather. If it is the same everywhere all start from
// the same state: nothing is gathered, and nothing is known of what follows what. Otherwise `meet` raises, now and
// later.
void Gathers::come_apart(std::function<void()> meet) {
  meet_ = std::move(meet);
  not_started_.forget();  // what is compared now are the collectives that were started
  for (const auto& unit : registry_.units()) {
    auto& state = of(unit);
    state.open_modules = state.graph_uses = 0;
    state.stale = state.stale || (unit.lifetime == Lifetime::Use && state.resident);
  }
  forget_secondary();
  forget_scales();
  order_.forget();
  sequence_.forget();
}

// [Note: in-place gather] Each rank casts its master straight into its own rows of the result, and the collective
// runs in place on it: no second copy of the shard in the model's dtype, nothing to unpack afterwards.
// `full`: what is gathered anew must be exact. `checked`: the ranks know that they gather the same.
void Gathers::launch(const Units& units, Way way, bool full, bool checked) {
  const auto* const where = way == Way::Back ? " in backward" : " in forward";
  RECORD_USER_SCOPE(text("zerocompile: gather ", registry_.names_of(units), where));
  std::vector<Pending> started;
  bool expected = checked;  // the other ranks expect this gather
  try {
    take_late(units);
    for (auto index : units) write_back_all(registry_.units()[index]);  // what user code has written to resident values
    const bool inner = has_secondary(units, way, full);
    const bool scales = unequal_ ? take_turn(units, full) : !inner && needs_scales(units, full);
    if (!unequal_ && !checked) check_order(units, way, full, inner);
    expected = true;
    const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);  // see [Note: modes of user code]
    c10::InferenceMode normal_tensors(false);  // a validation step must not leave inference tensors behind
    at::NoGradGuard no_grad;
    if (scales) agree_on_scales();
    for (auto index : units) {
      const auto& unit = registry_.units()[index];
      of(unit).gathered_in = way;
      if (const auto written = std::exchange(of(unit).written, {})) written->block(current_stream(registry_.device()));
      await(unit);  // an earlier gather into the same memory must not finish after this one
      if (of(unit).resident) await_readers(unit);
      else if (!registry_.device().is_cpu()) of(unit).home = current_stream(registry_.device());
      const bool fixed = take_place(unit);
      for (auto i : unit.parameters) {
        if (!values_[i].full.defined()) allocate(record(i), gathered_dtype(record(i), full), values_[i], fixed);
        if (way == Way::Forth) allocate_secondary(record(i));
      }
      if (inner) follow_secondary(unit);
    }
    start(units, inner, started);
  } catch (...) {
    if (expected) give_up(units, started);
    throw;
  }
  started_ += 1;
  for (auto index : units) {
    auto& unit = units_[index];
    unit.gathering = started.front();
    unit.gather_number = started_;
    unit.stale = false;
    if (unit.resident) continue;
    unit.resident = true;
    counts_.resident_bytes += unit.bytes;
    counts_.peak_resident_bytes = std::max(counts_.peak_resident_bytes, counts_.resident_bytes);
  }
}

// Into the units' memory. `started`: see [Note: unfinished launches].
void Gathers::start(const Units& units, bool inner, std::vector<Pending>& started) {
  Lane::Launch launch(lane_, started);
  RowsByDtype calls, unmoved;
  for (auto index : units) add_rows(registry_.units()[index], inner, calls, unmoved);
  for (const auto& [dtype, call] : unmoved) fill_rows(call);
  if (inner) move_inside(calls, launch);
  else move(calls, units.front(), launch);
  launch.finish();
  if (!unequal_) sequence_.started(units.size());
}

// One of the gathers' collectives has started. Those of unequal work are no part of the sequence.
void Gathers::started_one() {
  if (!unequal_) sequence_.started_one();
}

// Starts the collectives, or the copies that stand for them. `unit`: the first that moves.
void Gathers::move(RowsByDtype& calls, int64_t unit, Lane::Launch& launch) {
  for (auto& [dtype, call] : calls) {
    counts_.gathers += 1;
    if (peers_ != nullptr && (peers_->keeps(call) || peers_->holds(call))) {
      counts_.peer_gathers += 1;
      counts_.kept_casts += peers_->all_gather(call, unit);
      started_one();
      continue;
    }
    fill_rows(call);
    if (registry_.world() == 1) continue;
    std::vector<Tensor> outputs, inputs;
    for (auto& rows : call) {
      outputs.push_back(std::move(rows.full));
      inputs.push_back(std::move(rows.rows));
    }
    all_gather(*group_, launch, std::move(outputs), std::move(inputs), packing_);
    started_one();
  }
}

// The same from secondary shards, which are the rows of these calls.
void Gathers::move_inside(RowsByDtype& calls, Lane::Launch& launch) {
  for (auto& [dtype, call] : calls) {
    counts_.gathers += 1;
    counts_.inner_gathers += 1;
    std::vector<Tensor> outputs, inputs;
    for (auto& rows : call) {
      outputs.push_back(std::move(rows.full));
      inputs.push_back(std::move(rows.rows));
    }
    all_gather(*inner_, launch, std::move(outputs), std::move(inputs), inner_packing_);
    started_one();
  }
}

// A gather has failed before all of it was started. A unit that was not resident is not half resident now: a later
// gather would find its memory, which could have another dtype than that gather asks for. A resident unit stays, and is
// stale.
void Gathers::give_up(const Units& units, const std::vector<Pending>& started) {
  not_started_.note(text("the gather of unit `", registry_.names_of(units), "`, after ", so_far()));
  for (auto index : units) {
    auto& unit = units_[index];
    if (!started.empty()) unit.gathering = started.front();
    if (unit.resident || registry_.units()[index].lifetime == Lifetime::Step) continue;
    unit.stale = false;
    for (auto i : registry_.units()[index].parameters) {
      lane_.keep(values_[i].full);  // gloo's works hold theirs
      keep_for_readers(registry_.units()[index], values_[i].full);
      forget(record(i));
    }
  }
}

// What a gather reads, on the device: see [Note: masters in host memory].
Tensor Gathers::rows_of(const Parameter& p) const {
  return !p.host.defined() || of(p).shown_version == p.version() ? p.local : p.host.to(registry_.device());
}

// `shown`: `local` has the values of `host` now.
void Gathers::set_rows(int64_t index, Tensor local, Tensor host, bool shown) {
  registry_.set_rows(index, std::move(local), std::move(host));
  const auto& p = record(index);
  forget_kept(p);
  of(p).shown_version = shown ? p.version() : -1;
}

// Orders the current stream after what gathers of these units read; for who waits for them nothing changes.
void Gathers::follow(const Units& units) const {
  if (registry_.device().is_cpu()) return;
  const auto here = current_stream(registry_.device());
  for (auto index : units) of(registry_.unit(index)).gathering.order(here);
}

// The current stream updates the masters of these units in a backward: what gathers them is ordered after that, and so
// is the stream of the backward when it ends. See [Note: updates in backward] in reductions.cpp.
void Gathers::masters_written(const Units& units) {
  for (auto index : units) of(registry_.unit(index)).updated = true;
  if (registry_.device().is_cpu()) return;
  const auto here = mark(registry_.device());
  for (auto index : units) of(registry_.unit(index)).written = here;
}

// A parameter's part of a collective, which casts its rows to the dtype of `v`.
PeerMemory::Rows Gathers::rows_to_move(const Parameter& p, const FullValue& v) {
  const auto moved = [&p](const Tensor& rows) { return on_the_wire(p.in_order(rows)); };
  PeerMemory::Rows rows{moved(v.full), moved(v.rows_here), moved(v.own), moved(rows_of(p))};
  rows.version = p.version();
  if (auto& kept = of(p).kept) rows.kept = &*kept;
  const auto& float8 = of(p).float8;
  if (float8.has_value() && v.full.scalar_type() == kFloat8) {
    rows.scale = float8->agreed;
    rows.through = p.dtype;
  }
  return rows;
}

// Adds a unit's rows to the collectives of a gather. Once that is started its values count as those that the masters
// have now. `inner`: its rows are the secondary shards.
void Gathers::add_rows(const Unit& unit, bool inner, RowsByDtype& calls, RowsByDtype& unmoved) {
  auto& state = of(unit);
  state.updated = false;
  std::set<at::ScalarType> dtypes;
  state.bytes = 0;
  for (auto i : unit.parameters) {
    const auto& p = record(i);
    auto& v = values_[i];
    const bool moves = !p.replicated && v.full.numel() > 0;
    const auto dtype = v.full.scalar_type();
    const auto placed = placed_.find(i);
    if (moves && inner) {
      calls[dtype].push_back({on_the_wire(p.in_order(v.full)), on_the_wire(v.secondary), {}, {}});
    } else {
      auto rows = rows_to_move(p, v);
      if (placed != placed_.end()) rows.placed = placed->second;
      (moves ? calls : unmoved)[dtype].push_back(std::move(rows));
    }
    if (v.gathered_version != p.version()) {  // an older forward's backward must see it
      v.value.unsafeGetTensorImpl()->bump_version();
    }
    v.value_version = static_cast<int64_t>(v.value._version());
    v.gathered_version = p.version();
    const auto bytes = static_cast<int64_t>(v.full.nbytes());
    state.bytes += bytes;
    if (dtype == p.dtype && !is_in_place(p)) by_storage_[v.full.storage().unsafeGetStorageImpl()] = i;
    if (!moves) continue;
    dtypes.insert(dtype);
    counts_.gather_bytes += bytes;
    state.gather_bytes += bytes;
  }
  state.gathers += static_cast<int64_t>(dtypes.size());
  state.stale = true;  // it stays so if the gather is not started (out of memory)
}

// [Note: merged gathers] Where many units are gathered at once (a window that holds them opens, the optimizer has
// written them) small ones that follow each other share their collectives, in runs of up to `merge_bytes_`, as for
// reductions ([Note: merged reductions]). A run depends on `units`, which all ranks have alike, and on sizes. Copies
// between devices have to fit their buffer, with its padding.
void Gathers::gather_in_runs(const Units& units, bool full) {
  const bool padded = peers_ != nullptr;
  if (!unequal_) check_order(units, Way::Forth, full, /*inner=*/false);
  for (const auto& run : registry_.runs_of(units, merge_bytes_, padded)) {
    launch(run, Way::Forth, full, /*checked=*/true);
  }
}

// [Note: several streams] User code may run parts of its model on streams of its own, and autograd runs their backward
// on the same ones. What we do unseen has to be ordered for all of them, as torch orders what it does unseen. A gather
// is ordered before each stream that reads the unit (`Pending::wait`); the memory of its values is not used again
// before all of these are done. A gradient that arrives on another stream than the one before is ordered after that
// (`follow_producers`), so the last one is ordered after all, and so is what follows it: a reduction, or the end of the
// backward. With one stream none of this costs anything.
void Gathers::keep_for_readers(const Unit& unit, const Tensor& full) const {
  for (const auto& stream : of(unit).gathering.waited()) {
    if (stream != of(unit).home || of(unit).place >= 0) keep_for(full, stream);  // `move_out` allocates elsewhere
  }
}

// The current stream goes on once all others have read, or written, the unit's values.
void Gathers::await_readers(const Unit& unit) const { await_streams(of(unit).gathering.waited()); }

// The current stream goes on once the others of these have done what they hold now.
void Gathers::await_streams(const std::vector<c10::Stream>& streams) const {
  for (const auto& stream : streams) {
    const auto here = current_stream(registry_.device());
    if (stream != here) mark(stream)->block(here);
  }
}

// The current stream, which goes after all that have read the unit, has written to its values: who reads them next does
// so after that.
void Gathers::values_written(const Unit& unit) {
  if (registry_.device().is_cpu()) return;
  Pending written(mark(registry_.device()));
  (void)written.wait(registry_.device(), nullptr);
  of(unit).gathering = std::move(written);
}

void Gathers::drop(const Unit& unit) {
  auto& state = of(unit);
  if (!state.resident || unit.lifetime == Lifetime::Step || state.lent) return;
  await(unit);  // its memory goes back to the stream that allocated it
  for (auto i : unit.parameters) {
    if (!values_[i].full.defined()) continue;
    const bool written = may_be_written(record(i));
    write_back(record(i));
    write_secondary(unit, record(i), written);
    keep_for_readers(unit, values_[i].full);
    keep_late(record(i));
    forget(record(i));
  }
  state.resident = false;
  state.graph_uses = 0;
  counts_.resident_bytes -= state.bytes;
}

// [Note: units after an exception] To drop a unit that is on its way is to wait for it, and another rank may have
// failed before it came to it. But to keep it would let this rank hold what ranks without the exception have dropped,
// and the next gathers would not match. So it counts as dropped, and its memory stays until the gather is done; a later
// gather of the unit waits for it.
void Gathers::drop_after_exception(const Unit& unit) {
  auto& state = of(unit);
  if (!state.resident || unit.lifetime == Lifetime::Step || state.lent) return;
  if (!state.gathering.unawaited()) return drop(unit);
  for (auto i : unit.parameters) {
    lane_.keep(values_[i].full);
    forget(record(i));
  }
  state.resident = false;
  state.graph_uses = 0;
  counts_.resident_bytes -= state.bytes;
}

// Those that nobody uses now, but for one. `raised`: see [Note: units after an exception].
void Gathers::drop_unused(int64_t but, bool raised) {
  for (const auto& unit : registry_.units()) {
    const auto& state = of(unit);
    if (held_ || unit.index == but || state.open_modules > 0 || state.graph_uses > 0) continue;
    if (raised) drop_after_exception(unit);
    else drop(unit);
  }
}

// The units that come next. One whose compute is too short to hide a gather (a norm between the last block and the
// head) does not count.
Gathers::Units Gathers::predicted() const {
  if (unequal_) return {};
  constexpr int64_t kShare = 16;
  return order_.next(prefetch_, units_.size(), [this](int64_t unit) {
    return registry_.units()[unit].sent * kShare < registry_.usual_bytes();
  });
}

// A unit has been asked for. Units that are neither used nor next are dropped, and the next ones are started: see
// [Note: order of gathers].
void Gathers::demanded(Way way, int64_t index) {
  if (unequal_) return drop_unused(index);
  const bool tells_nothing = held_ || !order_.demand(way, index);  // of what is gathered next
  if (tells_nothing) return;
  const auto next = predicted();
  for (const auto& unit : registry_.units()) {
    const auto& state = of(unit);
    const bool wanted = unit.index == index || std::find(next.begin(), next.end(), unit.index) != next.end();
    if (state.resident && !wanted && state.open_modules == 0 && state.graph_uses == 0) drop(unit);
  }
  for (auto other : next) {
    if (units_[other].resident || registry_.units()[other].lifetime == Lifetime::Step) continue;
    launch({other}, way);
    counts_.prefetched += 1;
  }
}

// `full`: it is needed in full precision, see [Note: low gathers].
void Gathers::acquire(const Unit& unit, Phase phase, int64_t needed, bool full) {
  if (phase == Phase::Forward) order_.use_in_forward(unit.index);
  const auto way = phase == Phase::Backward ? Way::Back : Way::Forth;
  if (!current(unit, needed, full)) {
    TORCH_CHECK(phase != Phase::Backward || !of(unit).updated,
                text("zerocompile: ", needed < 0 ? text("unit `", unit.name) : text("parameter `", record(needed).name),
                     "` is read in a backward that has updated it (`optimizer_in_backward`) and dropped its value, on "
                     "rank ", registry_.global_rank(), ". Read it in the forward, or after the backward"));
    if (phase != Phase::Backward && unit.lifetime == Lifetime::Use && !unequal_) questions_.ask_outside(unit.name);
    drop(unit);
    launch({unit.index}, way, full);
  }
  if (unit.lifetime == Lifetime::Use) demanded(way, unit.index);
}

Gathers::Units Gathers::in_order(const Units& units, const Units& order) const {
  std::vector<char> chosen(units_.size(), 0);
  for (auto index : units) {
    (void)registry_.unit(index);  // raises if there is none
    chosen[index] = 1;
  }
  Units ordered;
  for (auto index : order) {
    if (chosen[index]) ordered.push_back(index);
  }
  return ordered;
}

// [Note: one pass] To update a master, to cast it and to put the cast where the gather reads it are three passes over
// memory, which one kernel can make at once. So who is about to update masters may ask where their casts go (`place`),
// write them there on the current stream, and say for which parameters it has done so (`masters_changed`). What is
// offered is valid until the next gather: the rows of the gathered value of each unit that lives for a step, and the
// places in the mapped memory for the units that are gathered first (see `gather_in_runs`), as the half of the buffer
// that comes next is the only one that is free. Where casts are kept ([Note: kept casts]) their places are offered for
// all units, also for those that are gathered later, at their use. All are free only after what was read from them: the
// current stream is ordered after the readers of the value, and after the barrier of the last gather
// ([Note: two halves]). All that is not written is cast and copied as ever, so ranks may differ in what they write.
Gathers::CastPlaces Gathers::place(const Units& units, const Units& order) {
  offered_.clear();
  if (unequal_ || registry_.device().is_cpu()) return {};
  Units resident;
  for (auto index : in_order(units, order)) {
    const auto& unit = registry_.units()[index];
    if (unit.lifetime != Lifetime::Step) continue;
    if (!of(unit).resident) return {};
    resident.push_back(index);
  }
  CastPlaces places;
  offer_gathered(resident, places);
  if (peers_ != nullptr) {
    offer_kept(units, places);
    if (!resident.empty()) offer_staged(resident, places);
  }
  return places;
}

// The rows of the gathered values.
void Gathers::offer_gathered(const Units& resident, CastPlaces& places) {
  for (auto index : resident) {
    const auto& unit = registry_.units()[index];
    if (const auto& written = of(unit).written) written->block(current_stream(registry_.device()));
    await(unit);
    await_readers(unit);
    for (auto i : unit.parameters) {
      const auto& p = record(i);
      const auto& v = values_[i];
      const auto dtype = v.full.scalar_type();
      const bool narrow = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
      if (p.replicated || p.host.defined() || p.local.numel() == 0 || !narrow) continue;
      places[i].own = v.own;
      offered_[i].placed.own = true;
    }
  }
}

// The places of kept casts.
void Gathers::offer_kept(const Units& units, CastPlaces& places) {
  for (auto index : units) {
    for (auto i : registry_.unit(index).parameters) {
      const auto& p = record(i);
      auto& kept = values_[i].kept;
      const auto dtype = gathered_dtype(p, /*full=*/false);
      const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
      if (!kept.has_value() || !narrow || p.host.defined() || p.local.numel() == 0) continue;
      if (!peers_->may_write(*kept)) continue;
      kept->version = -1;  // it may be written in part
      kept->dtype = dtype;
      places[i].staged = p.rows_in(peers_->kept_rows(*kept, dtype, {p.local.numel()}), p.local.sizes(), 0);
      offered_[i].kept = true;
    }
  }
}

// The half of the mapped memory that comes next, for the units that are gathered first.
void Gathers::offer_staged(const Units& resident, CastPlaces& places) {
  RowsByDtype calls;
  std::vector<int64_t> moved;
  const auto runs = registry_.runs_of(resident, merge_bytes_, /*padded=*/true);
  for (auto index : runs.front()) {
    for (auto i : registry_.units()[index].parameters) {
      const auto& p = record(i);
      auto& v = values_[i];
      if (p.replicated || v.full.numel() == 0) continue;
      PeerMemory::Rows rows{on_the_wire(p.in_order(v.full)), on_the_wire(p.in_order(v.rows_here)), {}, {}};
      if (v.kept.has_value()) rows.kept = &*v.kept;
      calls[v.full.scalar_type()].push_back(std::move(rows));
      moved.push_back(i);
    }
  }
  if (calls.size() != 1 || peers_->keeps(calls.begin()->second) || !peers_->holds(calls.begin()->second)) return;
  const auto staged = peers_->places(calls.begin()->second);
  for (size_t k = 0; k < moved.size(); ++k) {
    const auto found = places.find(moved[k]);
    if (found == places.end()) continue;
    const auto& p = record(moved[k]);
    found->second.staged = p.rows_in(staged[k], p.local.sizes(), 0);
    offered_[moved[k]].placed.staged = true;
  }
  offered_turn_ = peers_->turn();
}

// Its master may have been written without a version.
void Gathers::forget_kept(const Parameter& p) {
  if (auto& kept = of(p).kept) kept->version = -1;
}

// Somebody is about to update masters, on all ranks: see [Note: kept casts]. The ranks meet once they have read what is
// gathered now, beside what the caller's stream holds.
void Gathers::meet_readers() {
  if (peers_ == nullptr || unequal_) return;
  for (const auto& unit : registry_.units()) {
    const bool read = std::any_of(unit.parameters.begin(), unit.parameters.end(), [this](int64_t i) {
      return values_[i].kept.has_value() && !peers_->may_write(*values_[i].kept);
    });
    if (!read) continue;
    const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
    std::vector<Pending> started;
    Lane::Launch launch(lane_, started, peers_->passed());
    peers_->meet_readers(unit.index);
    launch.finish();
    return;
  }
}

// The optimizer has written the masters of these units: resident values are gathered anew. `order`: all units, in the
// order of the forward. `placed`: the parameters whose casts are where `place` has said.
void Gathers::masters_changed(const Units& units, const Units& order, const std::vector<int64_t>& placed) {
  Units resident;
  for (auto index : in_order(units, order)) {
    const auto& unit = registry_.units()[index];
    if (unit.lifetime == Lifetime::Step) resident.push_back(index);
    else if (of(unit).open_modules == 0) drop(unit);
    forget_secondary(unit);
    for (auto i : unit.parameters) {
      forget_scale(values_[i]);
      forget_kept(record(i));
    }
  }
  const auto offered = std::exchange(offered_, {});
  const bool moved_on = peers_ != nullptr && peers_->turn() != offered_turn_;
  try {
    for (auto i : placed) {
      const auto found = offered.find(i);
      TORCH_CHECK(found != offered.end(),
                  text("zerocompile: nothing was offered to write the cast of parameter ", i, " to"));
      placed_[i] = found->second.placed;
      if (moved_on) placed_[i].staged = false;
      if (found->second.kept) values_[i].kept->version = record(i).version();
    }
    gather_in_runs(resident, /*full=*/false);
  } catch (...) {
    placed_.clear();
    throw;
  }
  placed_.clear();
}

std::vector<std::string> Gathers::resident_units() const {
  std::vector<std::string> names;
  for (const auto& unit : registry_.units()) {
    if (of(unit).resident && unit.lifetime == Lifetime::Use) names.push_back(unit.name);
  }
  return names;
}

// How many units were gathered since set-up, and a digest of which: equal on ranks that went the same way.
std::string Gathers::so_far() const {
  return text(sequence_.gathered(), " gathers (course ", sequence_.course(), ")");
}

}  // namespace zerocompile
