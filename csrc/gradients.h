// What a backward of this rank produces, until it is reduced; and the reduced rows, until an optimizer takes them.
//
// `Gradients` owns, for each parameter: the full gradient, which is added to (`grad`), its rows that a window or an
// accumulation has reduced early (`early`), the reduced rows that nobody has read yet (`unread`), and how many
// gradients are still to come. For each unit it owns the event after which all of its gradients are there. It knows
// whether gradients wait for the end of a window or an accumulation (`deferred_`, `pending_`), and in which dtype they
// are summed until then.
//
// Lock: whoever calls holds the runtime's mutex. Only a `Count` is shared with objects that do not lock.
//
// Streams: a gradient is allocated on the stream of the backward that produces it. The next one is added on the current
// stream, after everything that has produced a part of the sum ([Note: several streams] in gather.cpp). `give_away`
// hands the sum to a reduction, which frees it. The reduced rows are allocated in reductions.cpp. `release`, or the
// last reference to the master's `grad`, frees them; before that the optimizer's stream was ordered after their
// reduction (`Reductions::await_gradients`).
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "registry.h"
#include "stream.h"

namespace zerocompile {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Shared with what autograd holds, whose end may come on any thread, with the GIL held: it must not ask for our mutex.
using Count = std::shared_ptr<std::atomic<int64_t>>;

// Whose memory a gradient is in: who handed it over has it, too; a CUDA graph's, see [Note: gradients of CUDA graphs];
// or it was made here, and may be added to in place.
enum class GradMemory { Handed, Graph, Own };

// One parameter's.
struct Gradient {
  Tensor grad;                            // [size]: full, of this rank alone
  at::ScalarType raw_dtype = at::kFloat;  // of the gradients in `grad`, which may be summed in another
  GradMemory memory = GradMemory::Handed;
  bool contributed = false;               // since the last reduction
  bool contributed_now = false;           // in the backward that runs
  bool trained = false;                   // at the beginning of a backward since the last reduction
  Tensor early;  // [<=rows, ...]: reduced early, see [Note: bounded windows] and [Note: partial reductions]
  at::ScalarType early_dtype = at::kFloat;  // what it becomes when it is bound
  Count eager_outstanding = std::make_shared<std::atomic<int64_t>>(0);  // reads whose gradient is still to come
  int64_t graph_outstanding = 0;  // uses in forward graphs whose backward graph is still to come
  Tensor unread;                  // [<=rows, ...]: reduced, see [Note: unread gradients]
  // The master's `grad` as it was bound, and its local part.
  WeakTensor bound_outer{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  WeakTensor bound_local{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};

  bool waits() const { return grad.defined() || early.defined(); }  // for the end of a window or an accumulation
};

// Reduced rows that are to be bound to their master: (parameter, [<=rows, ...]). They are undefined if they were added
// to what is bound already.
using ReducedGrad = std::pair<int64_t, Tensor>;

struct GradientCounts {
  int64_t graph_reductions = 0;  // gradients that compiled graphs delivered
  int64_t graph_copies = 0;      // of these: copied out of a CUDA graph's memory
};

// Whether the user has hooks on the accumulated gradient.
bool has_hooks(const Tensor& master);

class Gradients {
 public:
  using Indices = std::vector<int64_t>;
  using Bind = std::function<void(std::vector<ReducedGrad>)>;

  explicit Gradients(const Registry& registry) : registry_(registry) {}

  // set-up and end
  void add_parameter() { gradients_.emplace_back(); }
  void add_unit() { units_.resize(registry_.units().size()); }
  void set_bind(Bind bind) { bind_ = std::move(bind); }
  void set_graphs(bool graphs) { graphs_ = graphs; }
  void set_replicas(bool replicas) { replicas_ = replicas; }
  void clear();

  // windows and accumulations
  void set_deferred(bool deferred);
  void set_sum_dtype(std::optional<at::ScalarType> dtype) { sum_dtype_ = dtype; }
  void set_pending(bool pending) { pending_ = pending; }
  void set_partial(bool partial);
  bool deferred() const { return deferred_; }
  bool partial() const { return partial_; }
  bool pending() const { return pending_; }
  const std::optional<at::ScalarType>& sum_dtype() const { return sum_dtype_; }

  // a backward
  void begin_backward(int64_t task);
  void end_backward() { begun_.reset(); }
  void leave_graphs();
  void expect_from_graph(const Indices& parameters);
  bool forget_outstanding(const Parameter& p);
  // Whether a graph has used the parameter in a forward whose backward is still to come.
  bool expects_from_graph(int64_t parameter) const { return gradients_[parameter].graph_outstanding > 0; }
  Count outstanding_reads(int64_t parameter) const { return gradients_[parameter].eager_outstanding; }
  void produced_here();
  void take(const Indices& parameters, at::TensorList grads, bool from_graph, bool shared, bool waits);
  Ready mark_ready(const Indices& parameters);

  // their reduction
  const Gradient& of(const Parameter& p) const { return gradients_[p.index]; }
  bool complete(const Unit& unit) const;
  // See [Note: frozen in an accumulation].
  bool trains(const Parameter& p) const { return p.master.requires_grad() || of(p).trained; }
  bool reducible(const Parameter& p) const { return of(p).grad.defined() && trains(p); }
  at::ScalarType dtype(const Parameter& p) const { return p.cast_grad ? p.grad_dtype : of(p).raw_dtype; }
  void agree_on_dtype(const Parameter& p, at::ScalarType dtype) { state(p).raw_dtype = dtype; }
  void follow_producers();
  bool several_producers() const { return several_producers_; }
  Ready ready_for(const Unit& unit, const Ready& latest) const;
  void launched(const Unit& unit) { units_[unit.index].ready.reset(); }
  Tensor give_away(const Parameter& p);
  void reduced(const Unit& unit);
  void reduced_all(bool partial);
  void keep_early(const Parameter& p, Tensor rows, at::ScalarType bound_dtype);
  bool has_part(const Parameter& p) const { return replicas_ && of(p).early.defined(); }
  Tensor take_part(const Parameter& p);
  Tensor lend_early(const Parameter& p);
  bool early_is_lent() const { return early_is_lent_; }

  // what is reduced, until an optimizer takes it
  Tensor existing(const Parameter& p, bool early = false) const;
  void bind(std::vector<ReducedGrad> reduced, const std::vector<char>& used);
  Tensor take_unread(const Parameter& p) { return std::exchange(state(p).unread, {}); }
  void bound(const Parameter& p, const Tensor& outer, const Tensor& local);
  Indices lend(const Indices& parameters, const std::vector<Tensor>& values) const;
  void release(const Indices& parameters, const std::vector<Tensor>& values);
  bool any_other_dtype() const;

  // what waits
  Tensor own_sum(const Parameter& p);
  void drop_unread(const Parameter& p) { state(p).unread.reset(); }
  void drop(const Parameter& p);
  void zero(const Parameter& p);
  void drop_all();
  bool any_waits() const;
  int64_t waiting_bytes() const;
  const GradientCounts& counts() const { return counts_; }

 private:
  // The gradients of one unit, in the backward that runs.
  struct UnitState {
    bool nested = false;  // a nested backward contributed to it: see [Note: nested contributions]
    Ready ready;          // after its gradients so far, see [Note: late reductions]
  };
  // Each of `parts` is to be added to its total; one kernel adds all of them.
  struct Sums {
    std::vector<Tensor> totals, parts;
  };

  Gradient& state(const Parameter& p) { return gradients_[p.index]; }
  const Parameter& record(int64_t parameter) const { return registry_.parameters()[parameter]; }
  void take_one(const Parameter& p, const Tensor& handed, bool from_graph, bool copies, Sums& into);

  const Registry& registry_;
  std::vector<Gradient> gradients_;  // by parameter
  std::vector<UnitState> units_;     // by unit
  Bind bind_;
  bool replicas_ = false;  // what is `early` is the mean of one replica alone, see [Note: partial reductions]
  bool graphs_ = false;    // gradients may lie in memory of CUDA graphs
  GradientCounts counts_;

  bool deferred_ = false;                    // what comes now waits for the end of a window or an accumulation
  bool partial_ = false;                     // what comes now is reduced inside the replica only
  bool early_is_lent_ = false;               // user code may have some `early`
  bool pending_ = false;                     // something may wait since the last reduction; the same on all ranks
  std::optional<at::ScalarType> sum_dtype_;  // of what waits; absent: its own

  int64_t outermost_ = -1;               // the graph task of the first event of the backward that runs
  Ready begun_;                          // where its stream was then, see [Note: late reductions]
  std::optional<c10::Stream> producer_;  // of the last gradient, see [Note: several streams]
  bool several_producers_ = false;       // what is not reduced came from several streams, or is reduced on another one
};

}  // namespace zerocompile
