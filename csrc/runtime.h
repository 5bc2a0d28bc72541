// Begin here. The runtime decides in every frame, compiled or not, what is gathered and what is reduced; the graphs
// only say "needed here" and "ready here". It has the lock, and holds the classes that own the state.
//
// The life of one gather (stage 3):
//   1. A region is entered (`Runtime::enter`), a graph comes to `gather_unit` (ops.cpp; `Runtime::use`), or eager code
//      reads a parameter (`read` in ops.cpp). A use begins: `Runtime::begin_use`.
//   2. `Gathers::acquire` (gather.cpp): is the unit there, as the masters are now? What comes next is noted
//      (gather_order.cpp).
//   3. If not, `check_order` compares with the other ranks what is not known yet (questions.h), and `launch` allocates,
//      casts this rank's rows into their place and starts the collective on the gathers' lane (collectives.cpp, or
//      peers.cpp; stream.h).
//   4. `demanded` drops what is neither used nor next, and starts what is next.
//   5. `await` orders the stream of whoever uses the value after the gather.
//   6. The use ends: `release`, `leave` (uses.cpp). A later demand drops the unit: what user code wrote goes to the
//      masters (`write_back`), the memory is freed (`forget`).
//   7. In the backward the same again. What eager code saved is gathered anew when it is asked for (saved.cpp).
//
// The life of one reduction:
//   1. The first event of a backward arms the runtime (`arm`, backward.cpp): autograd's engine calls when it ends.
//   2. A gradient is produced: `reduce_unit_` in a graph, `ReadFunction::backward` in eager code (ops.cpp).
//   3. `contribute`, `take` (backward.cpp): cast to the parameter's grad dtype, kept or added.
//   4. `launch_complete` (reduce.cpp): while the next unit of the fixed order has all its gradients, it is reduced, on
//      the reductions' lane: `launch_reduction`, `reduce_group`. `retire` gives its memory up.
//   5. The backward ends (`finish_backward`): the ranks say what they have (`agree_on_used`), and the rest is reduced.
//   6. The rows wait until an optimizer takes them (`lend_gradients`) or `grad` is read (`unbound_gradient`):
//      gradients.cpp. In a window or an accumulation 4 to 6 wait for its end (`flush`, window.cpp).
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

#include "gathers.h"
#include "peers.h"
#include "questions.h"
#include "registry.h"
#include "stream.h"

namespace zerocompile {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// What the gradient of a master is that has none bound: the reduced one; or, in a window or an accumulation, this
// rank's own full sum, or its rows of what was reduced early.
enum class Unbound : int64_t { Reduced = 0, Sum = 1, Early = 2 };

// Shared with what autograd holds, whose end may come on any thread, with the GIL held: it must not ask for our mutex.
using Count = std::shared_ptr<std::atomic<int64_t>>;

// One parameter's gradient of the backward that runs, or of the window.
struct Gradient {
  Tensor grad;               // full, not reduced
  at::ScalarType raw_dtype = at::kFloat;  // of the gradients in `grad`, which may be summed in another
  bool grad_owned = false;   // made here: may be added to in place
  bool contributed = false;  // since the last reduction
  bool contributed_now = false;  // in the backward that runs
  Tensor early;              // this rank's rows of what was reduced early, see [Note: bounded windows]
  at::ScalarType early_dtype = at::kFloat;  // what it becomes when it is bound
  Count eager_outstanding = std::make_shared<std::atomic<int64_t>>(0);  // reads whose gradient is still to come
  int64_t graph_outstanding = 0;  // uses in forward graphs whose backward graph is still to come
  Tensor unread;             // the reduced one, this rank's rows: see [Note: unread gradients]
  WeakTensor bound_outer{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  WeakTensor bound_local{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

// What becomes of one unit's gradients in the backward that runs.
struct UnitGradients {
  bool reduced = false;
  bool nested = false;  // a nested backward contributed to it: see [Note: nested contributions]
  Ready ready;          // behind its gradients so far, see [Note: late reductions]
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
  int64_t number = 0;  // among all
};

struct Stats : GatherCounts {
  int64_t peer_reductions = 0;                  // reductions that copies between devices did
  int64_t reductions = 0, reduce_bytes = 0;     // collectives, bytes of the full gradients
  int64_t graph_reductions = 0;                 // gradients that compiled graphs delivered
  int64_t padded_copies = 0;                    // gradients whose rows the world size does not divide
  int64_t backwards = 0;
};

// One shard of a reduced gradient, to be bound to its master: (parameter, local part of the gradient); undefined if it
// was added to what is bound already.
using ReducedGrad = std::pair<int64_t, Tensor>;

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  // `gather_group`: of the shard group. `reduce_group`: of the shard group, on the CPU of all ranks. `replica_group`: of
  // the ranks that hold the same rows, "" on the CPU and where no other does: see [Note: replicas]. `all`: of all ranks.
  Runtime(const std::string& gather_group, const std::string& reduce_group, const std::string& replica_group, Place all,
          c10::Device device);

  // set-up
  int64_t add_parameter(ParameterSpec spec, Tensor master, Tensor local, Tensor handle);
  int64_t add_unit(std::string name, std::vector<int64_t> parameters, Lifetime lifetime);
  void set_callbacks(std::function<void(std::vector<ReducedGrad>)> bind,
                     std::function<std::vector<int64_t>(std::vector<int64_t>)> agree,
                     std::function<std::string(int64_t, std::string)> compare,
                     std::function<std::string(int64_t, std::string, bool)> unite,
                     std::function<void(std::string, std::string, int64_t)> waiting);
  void set_outside(std::function<void(std::string)> outside);
  void set_in_step(bool in_step);
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
  void set_rows(int64_t parameter, Tensor local, std::optional<Tensor> host, bool shown);
  void follow_gathers(const std::vector<int64_t>& units) const;
  void write_back();
  void keep(int64_t unit);
  void lend(const std::vector<int64_t>& units);
  Tensor lent_value(int64_t parameter);
  void take_back(const std::vector<int64_t>& units, bool keep, bool together);
  std::string lent_unit() const;
  void end_forward(bool raised);
  std::string gathered_so_far() const;
  // How many gathers and reductions were started. Without the lock, which a thread that waits holds.
  std::pair<int64_t, int64_t> started() const { return {gathers_.started(), reductions_started_}; }
  void come_apart(std::function<void()> meet);
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
  void backward_raised();
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
  Gradient& of(const Parameter& p) { return gradients_[p.index]; }
  const Gradient& of(const Parameter& p) const { return gradients_[p.index]; }
  const Parameter& record(int64_t parameter) const { return registry_.parameters()[parameter]; }
  Phase begin_use();
  void await(Reduction& reduction);
  void drop_in_flight();

  // backward.cpp, reduce.cpp, gradients.cpp, window.cpp
  void enter_backward(const std::vector<int64_t>& units, const std::string& compiled);
  struct Sums {
    std::vector<Tensor> totals, parts;
  };
  void take(const Parameter& p, const Tensor& handed, bool from_graph, bool shared, Sums& into);
  void mark_ready(const std::vector<int64_t>& parameters);
  void follow_producers();
  bool complete(const Unit& unit) const;
  at::ScalarType communicated_dtype(const Parameter& p) const { return p.reduce_dtype.value_or(of(p).raw_dtype); }
  bool trainable(const Unit& unit) const;
  void launch_complete();
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
  Tensor existing_grad(const Parameter& p);
  void agree_on_order();
  static bool accumulating();
  bool failed() const { return armed_ && (raised_ || armed_task_.expired()); }
  void abort_failed_backward();

  mutable std::recursive_mutex mutex_;
  c10::Device device_;
  c10::intrusive_ptr<c10d::ProcessGroup> reduce_group_;
  c10::intrusive_ptr<c10d::ProcessGroup> replica_group_;  // null: what the first has reduced is the sum of all ranks
  std::string group_name_;  // of the shard group, for memory that they map
  Registry registry_;
  Questions questions_;
  Gathers gathers_;
  double divisor_ = 1;
  int64_t merge_bytes_ = 0;  // see [Note: merged reductions]
  std::vector<Gradient> gradients_;           // by parameter
  std::vector<UnitGradients> unit_gradients_;  // by unit
  std::function<void(std::vector<ReducedGrad>)> bind_;
  std::atomic<int64_t> reductions_started_ = 0;
  int64_t exchanges_ = 0;  // of used flags so far
  Lane reduce_lane_;
  std::unique_ptr<PeerMemory> summing_peers_;  // of the reductions' lane; null: their process group does all
  std::shared_ptr<Kernels> kernels_;           // null: torch's do all
  Stats stats_;

  bool copies_gradients_ = false;  // they may lie in memory that a graph's replay writes to
  bool deferred_ = false;
  bool pending_ = false;   // backwards were deferred since the last reduction; the same on all ranks
  bool early_ = false;     // what is reduced now is not bound yet, see [Note: bounded windows]
  std::optional<at::ScalarType> sum_dtype_;  // of gradients that wait for the end of a window; absent: their own
  int64_t max_deferred_bytes_ = -1;          // of gradients that wait for the end of a window; negative: any
  bool accumulates_ = false;  // the backward that runs writes to leaves, see [Note: autograd.grad]
  bool began_deferred_ = false;  // whether it began inside a window or an accumulation
  bool armed_ = false;    // the engine will call us when this backward ends
  std::weak_ptr<int64_t> armed_task_;  // dies with the graph task that we armed; its value is the task's number
  bool raised_ = false;  // that backward has raised, although a thread of autograd may still hold its graph task
  int64_t outermost_ = -1;             // the graph task of the first event of the backward that runs
  Ready latest_;          // behind the gradients that arrive now
  std::optional<c10::Stream> producer_;  // of the last gradient, see [Note: several streams]
  bool several_producers_ = false;       // gradients that are not reduced came from several, or are reduced on another
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
};

bool has_hooks(const Tensor& master);

}  // namespace zerocompile
