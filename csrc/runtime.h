// Begin here. The runtime decides in every frame, compiled or not, what is gathered and what is reduced; the graphs
// only say "needed here" and "ready here". `Runtime` is what Python and the operators call. It owns the lock: each of
// its public methods takes it and calls the class that owns the state in question. These classes are `Registry`,
// `Gathers`, `Gradients`, `Reductions`, `BackwardPhase` and `Window`. Each of them uses those before it and never one
// after it. Where one of them has to call upwards, it is handed a function.
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
//   1. The first event of a backward arms the runtime (`BackwardPhase::arm`): autograd's engine calls when it ends.
//   2. A gradient is produced: `reduce_unit_` in a graph, `ReadFunction::backward` in eager code (ops.cpp).
//   3. `BackwardPhase::contribute` has it taken (`Gradients::take`): it is cast to the parameter's grad dtype, and kept
//      or added.
//   4. `Reductions::launch_complete`: while the next unit of the fixed order has all its gradients, it is reduced on
//      the reductions' lane (`launch`, `reduce_group`). `retire` gives the gradients' memory up.
//   5. The backward ends (`BackwardPhase::finish`): `Window::reduce_at_end` decides that the rest is reduced. The ranks
//      say what they have (`Reductions::reduce_everything`, `agree_on_used`), and the reduced rows become the gradients
//      (`Gradients::bind`).
//   6. The rows wait until an optimizer takes them (`Gradients::lend`) or `grad` is read (`Window::unbound_gradient`).
//      In a window or an accumulation 4 to 6 wait for its end (`Window::flush`).
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backward_phase.h"
#include "gathers.h"
#include "gradients.h"
#include "questions.h"
#include "reductions.h"
#include "registry.h"
#include "window.h"

namespace zerocompile {

struct Stats : GatherCounts, ReductionCounts, GradientCounts {};

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  // Names of process groups. `gather_group`: the shard group's. `reduce_group`: the shard group's, on the CPU that of
  // all ranks. `replica_group`: that of the ranks that hold the same rows, "" on the CPU and where no other rank does:
  // see [Note: replicas]. `inner_group`: that of gathers from secondary shards, a part of the shard group, "" if there
  // are none. `all`: this rank's place among all ranks.
  Runtime(const std::string& gather_group, const std::string& reduce_group, const std::string& replica_group,
          const std::string& inner_group, Place all, c10::Device device);

  // set-up
  int64_t add_parameter(ParameterSpec spec, Tensor master, Tensor local, Tensor handle);
  int64_t add_unit(std::string name, std::vector<int64_t> parameters, Lifetime lifetime);
  void set_callbacks(std::function<void(std::vector<ReducedGrad>)> bind,
                     std::function<std::vector<int64_t>(std::vector<int64_t>)> agree,
                     std::function<std::string(int64_t, std::string)> compare,
                     std::function<std::string(int64_t, std::string, bool)> unite,
                     std::function<void(std::string, std::string, int64_t)> waiting,
                     std::function<void(std::string)> failed);
  void set_update(std::function<void(std::vector<int64_t>)> update);
  void set_updates(bool updates);
  void set_outside(std::function<void(std::string)> outside);
  void set_turns(std::function<std::string(std::string)> take, std::function<std::string(std::string)> arrive,
                 std::function<std::string(std::string)> fail);
  void set_in_step(bool in_step);
  void set_evaluates(bool evaluates);
  int64_t peer_bytes() const;
  void set_peers(const Tensor& buffer, std::shared_ptr<DeviceBarriers> barriers, int64_t timeout_ms);
  int64_t kept_cast_bytes(bool low) const;
  void keep_casts(const Tensor& buffer, bool low);
  void set_kernels(const std::string& path, bool batches);
  int64_t summing_peer_bytes() const;
  void set_summing_peers(const Tensor& buffer, std::shared_ptr<DeviceBarriers> barriers, int64_t timeout_ms);
  void shutdown(bool wait);
  int64_t identity(int64_t parameter) const;
  Tensor resident_value(int64_t parameter);  // for Lifetime::Step: the tensor that graphs take as their input
  void fix_places(const std::vector<std::vector<int64_t>>& parameters, int64_t count);
  Tensor fixed_value(int64_t parameter) const;  // the same for Lifetime::Use, if it has a fixed place

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
  void masters_changed(const std::vector<int64_t>& units, const std::vector<int64_t>& placed);
  // See [Note: one pass]: parameter, and where its cast goes.
  std::vector<std::tuple<int64_t, std::optional<Tensor>, std::optional<Tensor>>> place(
      const std::vector<int64_t>& units);
  void meet_readers();
  void masters_written(const std::vector<int64_t>& units);
  void set_rows(int64_t parameter, Tensor local, std::optional<Tensor> host, bool shown);
  void follow_gathers(const std::vector<int64_t>& units) const;
  void write_back();
  void write_back_parameter(int64_t parameter);
  void disown_values(int64_t parameter);
  void keep(int64_t unit);
  void lend(const std::vector<int64_t>& units);
  Tensor lent_value(int64_t parameter);
  void take_back(const std::vector<int64_t>& units, bool keep, bool together);
  std::string lent_unit() const;
  void end_forward(bool raised);
  std::string gathered_so_far() const;
  // How many gathers and reductions were started. Without the lock, which a thread that waits holds.
  std::pair<int64_t, int64_t> started() const { return {gathers_.started(), reductions_.started()}; }

  // How many units of their order the backward that runs has begun to reduce. Without the lock, too. See
  // [Note: begun reductions].
  int64_t begun() const { return reductions_.begun(); }
  void come_apart(std::function<void()> meet);
  int64_t parameter_of(const Tensor& value) const;
  int64_t parameter_of_handle(const Tensor& tensor) const;
  int64_t seen_version(int64_t parameter) const;
  void forward_saw(int64_t parameter, int64_t version);
  std::string parameter_name(int64_t parameter) const;
  Tensor value_in_backward(int64_t parameter);
  void begin_unequal();
  void end_unequal(bool raised);
  bool unequal() const;
  void meet_others(const std::string& what);
  void tell_failure(const std::string& why);
  std::string asked() const;
  void gather_low(const std::vector<int64_t>& parameters, at::ScalarType dtype);
  void read_as_float8(int64_t parameter, bool power_of_two);
  Tensor float8_scale(int64_t parameter);

  // reduction
  void contribute(const std::vector<int64_t>& parameters, at::TensorList grads, bool from_graph, bool shared = false);
  void watch_backward(const Tensor& result, std::vector<int64_t> units, std::string compiled);
  void arm();
  void finish_ended_backward();
  void set_deferred(bool deferred);
  void set_partial(bool partial);
  void set_window(std::optional<at::ScalarType> sum_dtype, int64_t max_bytes, std::function<void()> reached);
  bool deferred() const;
  bool pending() const;
  bool in_backward() const { return phase() == Phase::Backward; }
  void publish_order();
  void check_backward_ended() const;
  void flush();
  void drop_gradients();
  void backward_raised();
  void drop_failed_backward();
  void drop_gradient(int64_t parameter);
  void drop_waiting(int64_t parameter);
  int64_t deferred_bytes() const;
  std::pair<Tensor, Unbound> unbound_gradient(int64_t parameter, bool waiting);
  bool may_have_gradient(int64_t parameter) const;
  std::vector<bool> trainable(const std::vector<int64_t>& parameters) const;
  void bound(int64_t parameter, const Tensor& outer, const Tensor& local);
  std::vector<int64_t> lend_gradients(const std::vector<int64_t>& parameters, const std::vector<Tensor>& values);
  void release_gradients(const std::vector<int64_t>& parameters, const std::vector<Tensor>& values);
  bool any_other_dtype() const;
  Count outstanding_reads(int64_t parameter) const;
  std::optional<at::ScalarType> grad_dtype(int64_t parameter) const;
  void forget_outstanding();

  Stats stats() const;
  std::vector<std::string> resident_units() const;
  int64_t eager_reads_of(int64_t unit) const;
  std::pair<int64_t, int64_t> gathers_of(int64_t unit) const;
  void set_prefetch(int64_t distance);
  void set_spans_hosts(bool shards, bool inner);
  void set_merge_bytes(int64_t bytes);
  void set_cuda_graphs(bool graphs);
  void check_entry(const char* what) const;
  // For who holds the GIL, and must not wait for the mutex: see [Note: cheap hooks].
  std::unique_lock<std::recursive_mutex> lock_if_free() const { return std::unique_lock(mutex_, std::try_to_lock); }

 private:
  Phase begin_use();
  void enter_backward(const std::vector<int64_t>& units, const std::string& compiled);
  void end_of_task();

  mutable std::recursive_mutex mutex_;
  std::string group_name_;                  // of the shard group, for memory that its ranks map
  std::shared_ptr<const Kernels> kernels_;  // null: no peers
  // Each uses only those before it.
  Registry registry_;
  Questions questions_;
  Gathers gathers_;
  Gradients gradients_;
  Reductions reductions_;
  BackwardPhase backward_;
  Window window_;
};

}  // namespace zerocompile
