// Gathered values: when a unit is gathered, who uses it until when, and what user code writes to it. The sources:
// gather.cpp (starting and dropping), secondary.cpp (a second copy of the shards, inside hosts), uses.cpp (regions,
// eager code, graphs), lend.cpp (units that stay gathered), low_gathers.cpp (in which dtype), float8.cpp (as float8),
// fixed_places.cpp (at addresses that graphs record), unequal.cpp (ranks that do unequal work).
//
// `Gathers` owns the process groups of gathers (or the memory that devices have mapped for them), their lane, the full
// value of each parameter that is gathered now, its secondary shard, who uses each unit, and the order in which units
// were asked for.
//
// Lock: whoever calls holds the runtime's mutex. Before a use it has also begun it (`Runtime::begin_use`). `started` is
// an atomic count and needs no lock.
//
// Streams: a value is allocated on the caller's stream (`launch`), written on the lane, and read on each stream that
// has been ordered after the gather (`await`). `drop` frees it, in the order of the stream that allocated it, after all
// streams that have read it ([Note: several streams]). A secondary shard is allocated as the value is, written on the
// stream that drops the value, and read on the lane, after an event ([Note: secondary shards]).
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "collectives.h"
#include "float8.h"
#include "gather_order.h"
#include "peers.h"
#include "questions.h"
#include "registry.h"
#include "stream.h"

namespace zerocompile {

enum class Phase : int64_t { Forward = 0, NoGrad = 1, Backward = 2 };
Phase phase();  // of the thread that asks

// Of a parameter that uses may ask for as float8, see [Note: float8 gathers]. A scale is [] of float32.
struct Float8 {
  bool power_of_two = false;  // scales are rounded down to one
  Tensor agreed;              // on all ranks; undefined: they have agreed on none yet
  int64_t version = -1;       // of the master, when they agreed; -1: they have to agree anew
  Tensor held;                // of the value in full that was cast last
};

// Where graphs read a parameter, see [Note: fixed places].
struct Fixed {
  Tensor full;   // [world*rows, ...]
  Tensor value;  // its first size[0] rows, with versions of its own, which nothing changes
};

struct FixedPlace {
  int64_t unit = -1;                 // that has had it last; -1: none
  std::vector<c10::Stream> readers;  // since it was written last
};

// A parameter's values in memory of their own; the tensors share it.
struct FullValue {
  Tensor full;          // [world*rows, ...]
  Tensor value;         // its first size[0] rows, shaped as the parameter
  Tensor rows_here;     // [rows, ...]: this rank's, padding included
  Tensor own;           // [<=rows, ...]: those of them that the master's local part has
  int64_t gathered_version = -1;  // of the master, when it had these values
  int64_t value_version = 0;  // of `value` then: later versions are writes of user code

  int64_t writes() const { return value.defined() ? static_cast<int64_t>(value._version()) - value_version : 0; }
};

// The value of one parameter. Its tensors are defined while the parameter is resident.
struct GatheredValue : FullValue {
  bool read_eagerly = false;  // user code may have written to it: see [Note: write back]
  bool held = false;          // others on this rank may refer to its memory: see [Note: late writes]
  std::optional<at::ScalarType> low;  // what a gather moves, if not `dtype`: see [Note: low gathers]
  bool asked_cast = false, asked_full = false;  // what this rank's uses have asked for
  std::optional<Float8> float8;   // absent: no use asks for float8
  std::optional<Fixed> fixed;     // absent: it has other memory in each gather
  std::optional<KeptCast> kept;   // absent: its cast is not kept, see [Note: kept casts]
  int64_t forward_version = -1;   // see [Note: stale backward]
  int64_t shown_version = -1;     // of the rows in host memory that `Parameter::local` shows
  Tensor secondary;               // [world * rows / inner, ...], see [Note: secondary shards]; undefined: there is none
  int64_t secondary_version = -1;  // of the master, whose values it has; -1: it has none yet
};

// The values of one unit.
struct GatheredUnit {
  bool resident = false;
  int64_t open_modules = 0;
  int64_t graph_uses = 0;   // values that running graphs hold
  bool lent = false;        // to `full_parameters`, see [Note: lent units]
  int64_t place = -1;       // its number, see [Note: fixed places]; -1: it has none
  bool stale = false;       // its values are not what the masters hold: they have to be gathered again
  int64_t eager_reads = 0, gathers = 0, gather_bytes = 0;  // since set-up
  int64_t bytes = 0;        // of its gathered values
  Pending gathering;
  Ready written;            // after the update of its masters, if that has another stream
  bool updated = false;     // in the backward that runs, see [Note: updates in backward] in reductions.cpp
  std::optional<c10::Stream> copied_on;  // on which its secondary shards were written last
  std::optional<c10::Stream> home;  // on which its values were allocated, see [Note: several streams]
  Way gathered_in = Way::Forth;
  int64_t gather_number = 0;  // of the last one, among all
};

struct GatherCounts {
  int64_t gathers = 0, gather_bytes = 0;        // collectives, bytes of the gathered result
  int64_t peer_gathers = 0;                     // gathers that copies between devices did
  int64_t kept_casts = 0;                       // parameters whose cast they found, see [Note: kept casts]
  int64_t prefetched = 0;                       // gathers that were started before they were asked for
  int64_t place_copies = 0;                     // values that were copied to or from a fixed place
  int64_t served = 0;                           // gathers in which this rank took part for others only
  int64_t inner_gathers = 0;                    // gathers from secondary shards, inside the inner group
  int64_t secondary_bytes = 0;                  // of secondary shards that are held now
  int64_t eager_reads = 0, eager_gathers = 0;   // reads outside graphs, and those that had to gather
  int64_t graph_uses = 0;                       // parameters that compiled graphs asked for
  int64_t host_writes = 0;                      // values that user code has written to and that went to host memory
  int64_t resident_bytes = 0, peak_resident_bytes = 0;
};

// Where a gather takes the rows of a parameter from: see [Note: one pass].
struct CastPlace {
  std::optional<Tensor> own;     // [<=rows, ...]: of the gathered value, if it stays gathered
  std::optional<Tensor> staged;  // the same rows in the mapped memory
};

class Gathers {
 public:
  using Units = std::vector<int64_t>;
  using CastPlaces = std::map<int64_t, CastPlace>;  // by parameter

  // `inner`: the group of gathers from secondary shards; null: there are none.
  Gathers(Registry& registry, Questions& questions, c10::intrusive_ptr<c10d::ProcessGroup> group,
          c10::intrusive_ptr<c10d::ProcessGroup> inner);

  // set-up and end
  void add_parameter() { values_.emplace_back(); }
  void add_unit(int64_t unit);
  void set_prefetch(int64_t distance) { prefetch_ = distance; }
  void set_packing(Packing shards, Packing inner) {
    packing_ = shards;
    inner_packing_ = inner;
  }
  void set_merge_bytes(int64_t bytes) { merge_bytes_ = bytes; }
  int64_t peer_bytes() const;
  void set_peers(std::unique_ptr<PeerMemory> peers) { peers_ = std::move(peers); }
  int64_t kept_bytes(bool low) const;
  void keep_casts(Tensor buffer, const std::string& group, bool low);
  void settle();
  void abandon(bool devices_too);
  void clear();

  // uses
  Tensor resident_value(int64_t parameter) const;
  Tensor read(int64_t parameter, std::optional<at::ScalarType> cast);
  Tensor value_in_backward(int64_t parameter);
  void enter(const Units& units, bool trusted);
  void leave(const Units& units);
  void need(const Units& parameters, const std::vector<at::ScalarType>& dtypes, Phase now);
  std::vector<Tensor> values(const Units& parameters, const std::vector<at::ScalarType>& dtypes);
  void release(const Units& parameters, bool last);
  void end_forward(bool raised);
  void begin_backward();
  void end_backward();
  void forward_saw(int64_t parameter, int64_t version) { values_[parameter].forward_version = version; }
  void forget_forward(int64_t parameter) { values_[parameter].forward_version = -1; }
  int64_t seen_version(int64_t parameter) const;
  int64_t parameter_of(const Tensor& value) const;  // -1: it is none's
  void write_back();
  void write_back(const Units& units);
  void write_back_parameter(int64_t parameter);
  void disown_values(int64_t parameter);

  // all at once
  void refresh(const Units& units);
  void masters_changed(const Units& units, const Units& order, const std::vector<int64_t>& placed);
  CastPlaces place(const Units& units, const Units& order);
  void meet_readers();
  void set_rows(int64_t parameter, Tensor local, Tensor host, bool shown);
  void follow(const Units& units) const;
  void masters_written(const Units& units);
  void hold();
  void let_go(bool raised);
  void keep(int64_t unit);
  void lend(const Units& units);
  Tensor lent_value(int64_t parameter);
  void take_back(const Units& units, bool keep, bool together);
  std::string lent_unit() const;
  void come_apart(std::function<void()> meet);
  void forget_secondary();

  // fixed places
  void fix_places(const std::vector<Units>& parameters, int64_t count);
  Tensor fixed_value(int64_t parameter) const;

  // unequal work
  void begin_unequal();
  void end_unequal(bool raised);
  bool unequal() const { return unequal_; }
  void meet_others(const std::string& what);
  void tell_failure(const std::string& why);

  // dtypes
  std::string asked() const;
  void gather_low(const Units& parameters, at::ScalarType dtype);
  void read_as_float8(int64_t parameter, bool power_of_two);
  Tensor float8_scale(int64_t parameter);

  // what is
  const GatherOrder& order() const { return order_; }
  const GatherCounts& counts() const { return counts_; }
  const GatheredUnit& unit(int64_t index) const { return units_[index]; }
  std::vector<std::string> resident_units() const;
  std::string so_far() const;
  int64_t started() const { return started_; }  // gathers; without the lock

 private:
  using RowsByDtype = std::map<at::ScalarType, std::vector<PeerMemory::Rows>>;  // of what is gathered

  GatheredValue& of(const Parameter& p) { return values_[p.index]; }
  const GatheredValue& of(const Parameter& p) const { return values_[p.index]; }
  GatheredUnit& of(const Unit& unit) { return units_[unit.index]; }
  const GatheredUnit& of(const Unit& unit) const { return units_[unit.index]; }
  const Parameter& record(int64_t parameter) const { return registry_.parameters()[parameter]; }

  // gather.cpp
  void allocate(const Parameter& p, at::ScalarType dtype, GatheredValue& v, bool fixed = false) const;
  void forget(const Parameter& p);
  void await(const Unit& unit);
  void acquire(const Unit& unit, Phase phase, int64_t needed, bool full = false);
  bool current(const Unit& unit, int64_t needed, bool full) const;
  void launch(const Units& units, Way way, bool full = false, bool checked = false);
  void start(const Units& units, bool inner, std::vector<Pending>& started);
  void started_one();
  void move(RowsByDtype& calls, int64_t unit, Lane::Launch& launch);
  void move_inside(RowsByDtype& calls, Lane::Launch& launch);
  Tensor rows_of(const Parameter& p) const;
  void give_up(const Units& units, const std::vector<Pending>& started);
  PeerMemory::Rows rows_to_move(const Parameter& p, const FullValue& v);
  void add_rows(const Unit& unit, bool inner, RowsByDtype& calls, RowsByDtype& unmoved);
  void gather_in_runs(const Units& units, bool full);
  Units in_order(const Units& units, const Units& order) const;
  int64_t kept_elements(const Parameter& p, bool low) const;
  void offer_gathered(const Units& resident, CastPlaces& places);
  void offer_kept(const Units& units, CastPlaces& places);
  void offer_staged(const Units& resident, CastPlaces& places);
  void forget_kept(const Parameter& p);
  void check_order(const Units& units, Way way, bool full, bool inner);
  void drop(const Unit& unit);
  void drop_unused(int64_t but, bool raised = false);
  void drop_after_exception(const Unit& unit);
  void keep_for_readers(const Unit& unit, const Tensor& full) const;
  void await_readers(const Unit& unit) const;
  void values_written(const Unit& unit);
  void await_streams(const std::vector<c10::Stream>& streams) const;
  void demanded(Way way, int64_t unit);
  Units predicted() const;

  // float8.cpp
  static Tensor largest_of(const Tensor& value);
  static Tensor scale_of(const Tensor& largest, at::ScalarType dtype, bool power_of_two);
  Tensor cast_of(const Parameter& p, at::ScalarType dtype);
  bool needs_scales(const Unit& unit, bool full) const;
  bool needs_scales(const Units& units, bool full) const;
  static void forget_scale(GatheredValue& v);
  void scale_again(const Parameter& p, const FullValue& from);
  void cast_into(const Parameter& p, const Tensor& full, Tensor& low);
  void forget_scales();
  void agree_on_scales();
  void take_scales(const Units& indices, const Tensor& largest);

  // fixed_places.cpp
  bool is_in_place(const Parameter& p) const;
  bool is_in_place(const Unit& unit) const;
  bool take_place(const Unit& unit);
  void reads_place(const Unit& unit);
  void await_readers(FixedPlace& place) const;
  void check_places(const Units& parameters, const std::vector<at::ScalarType>& dtypes) const;
  void put_in_place(const Parameter& p);
  void move_out(const Parameter& p);

  // secondary.cpp
  bool has_secondary(const Units& units, Way way, bool full) const;
  void allocate_secondary(const Parameter& p);
  bool may_be_written(const Parameter& p) const { return of(p).read_eagerly || of(p).writes() != 0; }
  void write_secondary(const Unit& unit, const Parameter& p, bool written);
  void write_secondary_again(const Parameter& p, const Tensor& full);
  void copy_to_secondary(const Parameter& p, const Tensor& full);
  void follow_secondary(const Unit& unit) const;
  void forget_secondary(const Unit& unit);

  // unequal.cpp
  bool take_turn(const Units& units, bool full);
  void serve(const std::string& turn);

  // uses.cpp
  void unneed(const Units& parameters, size_t count);
  void write_back(const Parameter& p);
  void write_back_all(const Unit& unit);
  void merge(const Parameter& p, FullValue& from);
  void keep_late(const Parameter& p);
  void take_late(const Parameter& p);
  void take_late(const Units& units);
  void take_late();
  void give_late(const Parameter& p);

  // lend.cpp
  void forget_writes(const Parameter& p, bool held = false);

  // low_gathers.cpp
  void ask(const Parameter& p, at::ScalarType dtype);
  bool needs_full(const Parameter& p, at::ScalarType asked) const;
  at::ScalarType gathered_dtype(const Parameter& p, bool full) const;
  bool widens(const Unit& unit, bool full) const;

  Registry& registry_;
  Questions& questions_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_, inner_;
  Packing packing_ = Packing::Each, inner_packing_ = Packing::Each;
  std::unique_ptr<PeerMemory> peers_;  // null: the process group does all
  Lane lane_;
  Pending scaling_;  // the last agreement on scales
  int64_t prefetch_ = 1;
  int64_t merge_bytes_ = 0;  // see [Note: merged gathers]
  std::vector<GatheredValue> values_;                    // by parameter
  std::vector<GatheredUnit> units_;                      // by unit
  std::vector<FixedPlace> places_;
  std::map<int64_t, FullValue> late_;                    // by parameter, see [Note: late writes]
  std::unordered_map<const void*, int64_t> by_storage_;  // storage of a gathered value -> parameter
  GatherOrder order_;
  GatherSequence sequence_;
  GatherCounts counts_;
  // See [Note: one pass]: by parameter, what is offered to who updates the masters, and what of it is written.
  struct Offer {
    PeerMemory::Placed placed;
    bool kept = false;
  };
  std::map<int64_t, Offer> offered_;
  std::map<int64_t, PeerMemory::Placed> placed_;
  int64_t offered_turn_ = 0;
  std::function<void()> meet_;  // before the next gather: see [Note: ranks apart]
  std::atomic<int64_t> started_ = 0;  // gathers
  bool trusted_ = false;  // the code that reads now is known not to write, see [Note: write back]
  bool held_ = false;     // all units stay gathered, see [Note: held units]
  bool unequal_ = false;  // see [Note: unequal work]
  NotStarted not_started_;
};

}  // namespace zerocompile
