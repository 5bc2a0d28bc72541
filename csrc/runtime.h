// The runtime: which parameters exist, which unit each belongs to, what is gathered now, which gradients wait for
// their reduction. It decides in every frame, compiled or not; the graphs only say "needed here" and "ready here".
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "peers.h"
#include "stream.h"

namespace zerocompile {

using at::Tensor;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// What a collective moves for a tensor: the backends know no complex numbers.
inline Tensor on_the_wire(const Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

// What the gradient of a master is that has none bound: the reduced one; or, in a window or an accumulation, this rank's
// own full sum, or its rows of what was reduced early.
enum class Unbound : int64_t { Reduced = 0, Sum = 1, Early = 2 };

// How long a gathered value lives (ZeRO-3: one use; ZeRO-1 and 2: until the optimizer's next step).
enum class Lifetime : int64_t { Use = 0, Step = 1 };

struct ParameterSpec {
  std::string name;            // fully qualified
  std::vector<int64_t> size;   // of the full parameter; empty for a 0-dim one, which is replicated
  at::ScalarType dtype;        // of the gathered value: what the model computes with
  bool cast_grad;              // false: grad_dtype=None, see [Note: agreed dtype]
  at::ScalarType grad_dtype;   // the leaf's contract; the raw gradient is cast to it before anything else
  std::optional<at::ScalarType> reduce_dtype;  // of the communication; absent: the gradient's own
  std::optional<at::ScalarType> bound_dtype;   // of master.grad; absent: as agreed, see [Note: agreed dtype]
};

// Shared with what autograd holds, whose end may come on any thread, with the GIL held: it must not ask for our mutex.
using Count = std::shared_ptr<std::atomic<int64_t>>;

struct Parameter : ParameterSpec {
  int64_t identity = 0;
  int64_t unit = -1;
  int64_t rows = 1;     // padded rows of one rank: ceil(size[0] / world)
  bool replicated = false;
  Tensor master;        // the optimizer's leaf (a DTensor)
  Tensor local;         // its local part, [<=rows, ...]
  Tensor handle;        // [1] float64: its value is the identity

  // gathered value: defined while resident
  Tensor full;          // [world*rows, ...]
  Tensor value;         // its first size[0] rows, shaped as the parameter
  Tensor rows_here;     // [rows, ...]: this rank's, padding included
  Tensor own;           // those of them that the master's local part corresponds to
  int64_t gathered_version = -1;
  int64_t value_version = 0;  // of `value` when it was gathered: what came since are user code's writes
  bool read_eagerly = false;  // user code may have written to it: see [Note: write back]
  std::optional<at::ScalarType> low;  // what a gather moves, if not `dtype`: see [Note: low gathers]
  bool asked_cast = false, asked_full = false;  // what this rank's uses have asked for

  // gradient of the backward that runs, or of the window
  Tensor grad;               // full, not reduced
  at::ScalarType raw_dtype = at::kFloat;  // of the gradients in `grad`, which may be summed in another
  bool grad_owned = false;   // made here: may be added to in place
  bool contributed = false;  // since the last reduction
  bool contributed_now = false;  // in the backward that runs
  Tensor early;              // this rank's rows of what was reduced early, see [Note: bounded windows]
  at::ScalarType early_dtype = at::kFloat;  // what it becomes when it is bound
  Count eager_outstanding = std::make_shared<std::atomic<int64_t>>(0);  // reads whose gradient is still to come
  int64_t graph_outstanding = 0;  // uses in forward graphs whose backward graph is still to come
  int64_t forward_version = -1;   // see [Note: stale backward]
  Tensor unread;             // the reduced one, this rank's rows: see [Note: unread gradients]
  WeakTensor bound_outer{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  WeakTensor bound_local{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};

  int64_t version() const { return master._version() + local._version(); }
  int64_t writes() const { return value.defined() ? static_cast<int64_t>(value._version()) - value_version : 0; }
  // the same before and after the writes reach the master
  int64_t seen_version() const { return version() + writes(); }
};

struct Unit {
  std::string name;
  Lifetime lifetime;
  std::vector<int64_t> parameters;
  bool resident = false;
  int64_t open_modules = 0;
  int64_t graph_uses = 0;   // values that running graphs hold
  bool lent = false;        // to `full_parameters`, see [Note: lent units]
  bool stale = false;       // what is there is not what the masters hold: gather again
  int64_t eager_reads = 0, gathers = 0, gather_bytes = 0;  // since set-up
  int64_t bytes = 0;        // of its gathered values
  int64_t sent = 0;         // bytes of one rank's rows of it
  Pending gathering;
  int64_t gathered_in = 0;  // a Way
  bool reduced = false;     // in the backward that runs
  bool nested = false;      // a nested backward contributed to it: see [Note: nested contributions]
  Ready ready;              // behind its gradients so far, see [Note: late reductions]
};

// One parameter's part of a reduction's result: added to what is bound already, or in the partition, which is bound.
struct Shard {
  Tensor existing, own;   // [<=rows, ...]; one of the two
  int64_t offset;         // in the partition
  int64_t gradient = -1;  // which of the collective's; -1: it has no elements
};

// A reduction that is started or on its way: it holds what the collective reads until the compute stream is behind it,
// or until the backward ends (see [Note: reductions behind a backward], [Note: unfinished launches]).
struct Reduction {
  std::vector<int64_t> units;
  Ready ready;  // what it is ordered behind; null: all that the caller's stream holds
  std::vector<Tensor> inputs;
  std::vector<Pending> done;
};

struct Stats {
  int64_t gathers = 0, gather_bytes = 0;        // collectives, bytes of the gathered result
  int64_t peer_gathers = 0;                     // gathers that copies between devices did
  int64_t peer_reductions = 0;                  // and reductions
  int64_t reductions = 0, reduce_bytes = 0;     // collectives, bytes of the full gradients
  int64_t prefetched = 0;                       // gathers that were started before they were asked for
  int64_t eager_reads = 0, eager_gathers = 0;   // reads outside graphs, and those that had to gather
  int64_t graph_uses = 0, graph_reductions = 0; // parameters that compiled graphs asked for, gradients they delivered
  int64_t padded_copies = 0;                    // gradients whose rows the world size does not divide
  int64_t resident_bytes = 0, peak_resident_bytes = 0;
  int64_t backwards = 0;
};

// One shard of a reduced gradient, to be bound to its master: (parameter, local part of the gradient); undefined if it
// was added to what is bound already.
using ReducedGrad = std::pair<int64_t, Tensor>;

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  Runtime(const std::string& gather_group, const std::string& reduce_group, c10::Device device);
  ~Runtime();

  // set-up
  int64_t add_parameter(ParameterSpec spec, Tensor master, Tensor local, Tensor handle);
  int64_t add_unit(std::string name, std::vector<int64_t> parameters, Lifetime lifetime);
  void set_callbacks(std::function<void(std::vector<ReducedGrad>)> bind,
                     std::function<std::vector<int64_t>(std::vector<int64_t>)> agree,
                     std::function<std::string(int64_t, std::string)> compare,
                     std::function<std::string(int64_t, std::string, bool)> unite,
                     std::function<void()> waiting);
  int64_t peer_bytes() const;
  void set_peers(const Tensor& buffer, int64_t timeout_ms);
  void set_kernels(const std::string& code);
  int64_t summing_peer_bytes() const;
  void set_summing_peers(const Tensor& buffer, int64_t timeout_ms);
  void settle();
  void shutdown(bool wait);
  int64_t identity(int64_t parameter) const;
  Tensor resident_value(int64_t parameter);  // for Lifetime::Step: the tensor that graphs take as their input

  // gathering
  Tensor read(int64_t parameter, std::optional<at::ScalarType> cast = std::nullopt);
  void refresh(const std::vector<int64_t>& units);
  int64_t enter(const std::vector<int64_t>& units, bool trusted);
  int64_t leave(const std::vector<int64_t>& units);
  void need(const std::vector<int64_t>& parameters, const std::vector<at::ScalarType>& dtypes, bool expects_grad);
  std::vector<Tensor> use(const std::vector<int64_t>& parameters, const std::vector<at::ScalarType>& dtypes,
                          bool expects_grad);
  void release(const std::vector<int64_t>& parameters, bool last);
  void hold();
  void let_go(bool raised);
  std::vector<int64_t> unit_order() const;
  void masters_changed(const std::vector<int64_t>& units);
  void write_back();
  void keep(int64_t unit);
  void lend(const std::vector<int64_t>& units);
  Tensor lent_value(int64_t parameter);
  void take_back(const std::vector<int64_t>& units, bool keep, bool together);
  std::string lent_unit() const;
  void end_forward(bool raised);
  std::string gathered_so_far() const;
  using Run = std::pair<std::vector<int64_t>, bool>;  // the units of a gather, and whether in full precision
  void log_runs(bool logs);
  std::vector<Run> logged_runs() const;
  void come_apart(std::function<void()> meet);
  void catch_up(const std::vector<Run>& runs);
  int64_t parameter_of(const Tensor& value) const;
  int64_t parameter_of_handle(const Tensor& tensor) const;
  int64_t seen_version(int64_t parameter) const;
  void forward_saw(int64_t parameter, int64_t version);
  std::string parameter_name(int64_t parameter) const;
  Tensor value_in_backward(int64_t parameter);
  std::string asked() const;
  void gather_low(const std::vector<int64_t>& parameters, at::ScalarType dtype);

  // reduction
  void contribute(const std::vector<int64_t>& parameters, at::TensorList grads, bool from_graph, bool shared = false);
  void watch_backward(const Tensor& result, std::vector<int64_t> units, std::string compiled);
  void arm();
  void backward_ended();
  void finish_backward();
  void finish_ended_backward();
  void set_deferred(bool deferred);
  void set_window(std::optional<at::ScalarType> sum_dtype, int64_t max_bytes);
  bool deferred() const;
  bool pending() const;
  bool in_backward() const { return phase() == Phase::Backward; }
  void publish_order();
  void check_backward_ended() const;
  void flush();
  void drop_gradients();
  void drop_failed_backward();
  Tensor deferred_gradient(int64_t parameter);
  void drop_gradient(int64_t parameter);
  void drop_waiting(int64_t parameter);
  std::vector<std::string> frozen_gradients() const;
  int64_t deferred_bytes() const;
  std::pair<Tensor, Unbound> unbound_gradient(int64_t parameter, bool waiting);
  void bound(int64_t parameter, const Tensor& outer, const Tensor& local);
  std::vector<int64_t> lend_gradients(const std::vector<int64_t>& parameters, const std::vector<Tensor>& values);
  void release_gradients(const std::vector<int64_t>& parameters, const std::vector<Tensor>& values);
  bool any_other_dtype() const;
  Count outstanding_reads(int64_t parameter);
  std::optional<at::ScalarType> grad_dtype(int64_t parameter);
  void forget_outstanding();

  Stats stats() const;
  std::vector<std::string> resident_units() const;
  int64_t eager_reads_of(int64_t unit) const;
  std::pair<int64_t, int64_t> gathers_of(int64_t unit) const;
  void set_gradient_divisor(double divisor);
  void set_prefetch(int64_t distance);
  void set_merge_bytes(int64_t bytes);
  void set_copies_gradients(bool copies);
  void check_entry(const char* what) const;

 private:
  enum class Phase : int64_t { Forward = 0, NoGrad = 1, Backward = 2 };
  // All that prediction and order may depend on: whether grad mode is on differs between a graph and eager code.
  enum class Way : int64_t { Forth = 0, Back = 1 };
  using Token = std::pair<Way, int64_t>;  // (way, unit)
  static constexpr Token NOWHERE{Way::Forth, -1};

  // [Note: checked indices] An index that comes from outside (Python, an operator, what autograd has saved) goes through
  // these: the runtime may be shut down, and a parameter's unit may not be planned yet. They raise, with the name.
  void check_running() const;
  const Parameter& parameter(int64_t index) const;
  Parameter& parameter(int64_t index) { return const_cast<Parameter&>(std::as_const(*this).parameter(index)); }
  const Unit& unit(int64_t index) const;
  Unit& unit(int64_t index) { return const_cast<Unit&>(std::as_const(*this).unit(index)); }
  const Unit& unit_of(const Parameter& p) const;
  Unit& unit_of(const Parameter& p) { return const_cast<Unit&>(std::as_const(*this).unit_of(p)); }
  std::vector<int64_t> padded_size(const Parameter& p) const;
  int64_t full_bytes(const Unit& unit) const;
  int64_t sent_bytes(const Unit& unit) const;
  int64_t sent_bytes(const Parameter& p, at::ScalarType dtype) const;
  void allocate(Parameter& p, at::ScalarType dtype);
  void forget(Parameter& p);
  Phase phase() const;
  void await(Unit& unit);
  void await(Reduction& reduction);
  void drop_in_flight();

  // gather.cpp, uses.cpp
  void acquire(int64_t unit, Phase phase, int64_t needed, bool full = false);
  using RowsByDtype = std::map<at::ScalarType, std::vector<PeerMemory::Rows>>;  // of what is gathered
  void launch_gather(const std::vector<int64_t>& units, Way way, bool restores = false, bool full = false,
                     bool checked = false);
  void start_gather(const std::vector<int64_t>& units, bool restores, std::vector<Pending>& started);
  void abandon_gather(const std::vector<int64_t>& units, const std::vector<Pending>& started);
  void unneed(const std::vector<int64_t>& parameters, size_t count, Phase phase, bool expects_grad);
  void add_rows(Unit& unit, bool restores, RowsByDtype& calls, RowsByDtype& unmoved);
  void gather_in_runs(const std::vector<int64_t>& units, bool full);
  std::vector<std::vector<int64_t>> runs_of(const std::vector<int64_t>& units, int64_t limit, bool padded) const;
  void check_order(const std::vector<int64_t>& units, Way way, bool full);
  void add_to_course(uint64_t number) { course_ = course_ * 1099511628211ULL + number; }
  void drop(Unit& unit);
  void drop_after_exception(Unit& unit);
  void demanded(Token token);
  std::vector<int64_t> predicted() const;
  bool hides_nothing(const Unit& unit) const;
  bool current(const Unit& unit, int64_t needed, bool full = false) const;
  void write_back(Parameter& p);
  static void forget_writes(Parameter& p);

  // layout.cpp
  void ask(Parameter& p, at::ScalarType dtype);
  static bool needs_full(const Parameter& p, at::ScalarType asked) { return p.low.has_value() && asked != *p.low; }
  static at::ScalarType gathered_dtype(const Parameter& p, bool full);
  bool widens(const Unit& unit, bool full) const;

  // backward.cpp, reduce.cpp, gradients.cpp, window.cpp
  void enter_backward(const std::vector<int64_t>& units, const std::string& compiled);
  struct Sums {
    std::vector<Tensor> totals, parts;
  };
  void take(Parameter& p, const Tensor& handed, bool from_graph, bool shared, Sums& into);
  void mark_ready(const std::vector<int64_t>& parameters);
  bool complete(const Unit& unit) const;
  at::ScalarType communicated_dtype(const Parameter& p) const { return p.reduce_dtype.value_or(p.raw_dtype); }
  bool trainable(const Unit& unit) const;
  void launch_complete();
  std::string names_of(const std::vector<int64_t>& units) const;
  void launch_reduction(const std::vector<int64_t>& units);
  std::vector<std::vector<int64_t>> runs(bool merged) const;
  void launch_contributed(const std::vector<std::vector<int64_t>>& runs);
  void reduce_group(const std::vector<int64_t>& group, Reduction& reduction);
  void reduce_by_collective(Lane::Launch& launch, const std::vector<int64_t>& group, const std::vector<Shard>& shards,
                            const std::vector<PeerMemory::Gradient>& gradients, const Tensor& partition, int64_t total,
                            at::ScalarType communicated);
  void replicate_group(const std::vector<int64_t>& group, Reduction& reduction);
  std::vector<char> agree_on_used(const std::function<void()>& meanwhile);
  void drop_reductions();
  void reduce_everything(bool merged = false);
  void reduce_largest();
  void bind_reduced(const std::vector<char>& used);
  at::ScalarType kept_dtype(const Parameter& p) const;
  void retire(size_t keep);
  bool may_be_late() const;
  void leave_in_flight();
  void await_gradients(int64_t unit);
  void await_reductions();
  void reserve(const Reduction& reduction);
  Tensor existing_grad(Parameter& p);
  void agree_on_order();
  static bool accumulating();
  bool failed() const { return armed_ && armed_task_.expired(); }
  void abort_failed_backward();

  mutable std::recursive_mutex mutex_;
  c10::Device device_;
  c10::intrusive_ptr<c10d::ProcessGroup> gather_group_, reduce_group_;
  int64_t world_ = 1, rank_ = 0;
  double divisor_ = 1;
  int64_t prefetch_ = 1;
  int64_t merge_bytes_ = 0;  // see [Note: merged gathers], [Note: merged reductions]
  std::vector<Parameter> parameters_;
  std::vector<Unit> units_;
  std::function<void(std::vector<ReducedGrad>)> bind_;
  std::function<std::vector<int64_t>(std::vector<int64_t>)> agree_;
  std::function<std::string(int64_t, std::string)> compare_;
  std::function<std::string(int64_t, std::string, bool)> unite_;
  std::function<void()> waiting_;  // asked once a second while this rank waits for a gather; may raise
  std::function<void()> meet_;  // before the next gather: see [Note: ranks apart]
  bool asking_ = false;    // one of the last runs, except `meet_`, see [Note: re-entry]
  int64_t exchanges_ = 0;  // of used flags so far
  Lane gather_lane_, reduce_lane_;
  std::unique_ptr<PeerMemory> peers_;          // of the gathers' lane; null: their process group does all
  std::unique_ptr<PeerMemory> summing_peers_;  // of the reductions' lane
  std::shared_ptr<Kernels> kernels_;           // null: torch's do all
  int64_t usual_bytes_ = 0;                    // `sent` of the most frequent unit, the repeated block
  std::map<int64_t, int64_t> units_by_bytes_;  // how many have this `sent`
  Stats stats_;

  std::unordered_map<const void*, int64_t> by_storage_;  // storage of a gathered value -> parameter
  std::unordered_map<const void*, int64_t> by_handle_;   // storage of a handle -> parameter
  Token before_last_ = NOWHERE, last_ = NOWHERE;
  std::map<std::pair<Token, Token>, Token> successor_;   // (token before, token) -> the token that came next
  std::vector<int64_t> forward_order_;                   // units by their first use
  std::vector<char> seen_forward_;

  int64_t launched_ = 0;                                 // units gathered so far
  bool logs_runs_ = false;
  std::vector<Run> runs_logged_;                         // since the window opened, see [Note: ranks apart]
  uint64_t course_ = 0;                                  // digest of their units and runs
  Token last_launched_ = NOWHERE;
  std::map<std::pair<Token, Way>, std::set<int64_t>> followers_;  // the units that followed a gather on all ranks

  bool copies_gradients_ = false;  // they may lie in memory that a graph's replay writes to
  bool trusted_ = false;   // the code that reads now is known not to write, see [Note: write back]
  bool deferred_ = false;
  bool pending_ = false;   // backwards were deferred since the last reduction; the same on all ranks
  bool early_ = false;     // what is reduced now is not bound yet, see [Note: bounded windows]
  bool held_ = false;      // units stay gathered, see [Note: held units]
  std::optional<at::ScalarType> sum_dtype_;  // of gradients that wait for the end of a window; absent: their own
  int64_t max_deferred_bytes_ = -1;          // of gradients that wait for the end of a window; negative: any
  bool accumulates_ = false;  // the backward that runs writes to leaves, see [Note: autograd.grad]
  bool began_deferred_ = false;  // whether it began inside a window or an accumulation
  bool armed_ = false;    // the engine will call us when this backward ends
  std::weak_ptr<int64_t> armed_task_;  // dies with the graph task that we armed; its value is the task's number
  int64_t outermost_ = -1;             // the graph task of the first event of the backward that runs
  Ready latest_;          // behind the gradients that arrive now
  Ready begun_;           // where the compute stream was when the backward began, see [Note: late reductions]
  bool backward_ = false; // something happened in a backward that has not been finished
  std::vector<int64_t> reduce_order_;  // agreed by all ranks before the first reduction
  size_t next_reduction_ = 0;
  std::vector<Reduction> in_flight_;
  std::optional<c10::Stream> home_;  // of the backward that left reductions, see [Note: reductions behind a backward]
  Pending last_retired_;             // the last reduction that is not in flight any more
  bool again_ = false;               // a unit was reduced a second time in the backward that runs
  bool reductions_dropped_ = false;  // some are on their way for which nobody waits
  std::vector<ReducedGrad> reduced_;
  bool shut_down_ = false;
};

bool has_hooks(const Tensor& master);

// The one table that is global: a parameter's identity -> its runtime and index. Entries die with their runtime.
struct Record {
  std::shared_ptr<Runtime> runtime;
  int64_t parameter;
};
Record find(const Tensor& handle);
int64_t new_identity(const std::weak_ptr<Runtime>& runtime, int64_t parameter);
void forget_identity(int64_t identity);

}  // namespace zerocompile
