// When a backward begins, when it ends, and what becomes of one that raised.
//
// `BackwardPhase` owns what is known of the backward that runs: whether autograd's engine is to call at its end, by
// which graph task, whether it accumulates into leaves, and whether it began in a window or an accumulation.
//
// Lock: whoever calls holds the runtime's mutex. The engine calls from a thread of its own and without it: so what it
// calls is made by the runtime (`EndOfTask`), and takes the mutex before it comes to `task_ended`.
//
// Streams: it has no tensors. `contribute` and `finish` work on the current stream, which autograd sets.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "gathers.h"
#include "gradients.h"
#include "reductions.h"
#include "registry.h"

namespace zerocompile {

class BackwardPhase {
 public:
  using EndOfTask = std::function<std::function<void()>()>;

  // `end_of_task` makes what the engine calls when a graph task ends: `task_ended`, with the mutex.
  BackwardPhase(const Registry& registry, Gathers& gathers, Gradients& gradients, Reductions& reductions,
                EndOfTask end_of_task);

  // What is to be reduced when a backward ends that accumulates into leaves. The window decides it.
  void set_reduce(std::function<void()> reduce) { reduce_ = std::move(reduce); }

  // What updates units in a backward, see [Note: updates in backward]; null: nothing does. It may raise.
  using Update = std::function<void(std::vector<int64_t>)>;
  void set_update(Update update) { update_ = std::move(update); }
  void set_updates(bool updates) { updates_ = updates; }

  void arm();
  void contribute(const std::vector<int64_t>& parameters, at::TensorList grads, bool from_graph, bool shared);
  void task_ended();
  void finish_ended();

  bool running() const { return running_; }
  bool failed() const { return armed_ && (raised_ || armed_task_.expired()); }
  bool began_deferred() const { return began_deferred_; }
  void forget_failed();
  void check_ended() const;

  void raised();
  void abort_failed();
  void drop_failed();
  void drop_gradients();
  void forget_forwards();

 private:
  void finish();
  void update_reduced();

  const Registry& registry_;
  Gathers& gathers_;
  Gradients& gradients_;
  Reductions& reductions_;
  EndOfTask end_of_task_;
  std::function<void()> reduce_;
  Update update_;
  bool updates_ = false;               // it is to be called
  bool running_ = false;               // something happened in a backward that has not been finished
  bool armed_ = false;                 // the engine will call us when this backward ends
  std::weak_ptr<int64_t> armed_task_;  // dies with the graph task that we armed; its value is the task's number
  bool raised_ = false;                // that backward has raised, though a thread of autograd may still hold its task
  bool accumulates_ = false;           // the backward that runs writes to leaves, see [Note: autograd.grad]
  bool began_deferred_ = false;        // whether it began inside a window or an accumulation
  bool began_waiting_ = false;         // whether gradients of an accumulation waited for it
};

// Calls `call` when a backward comes to the operation that has made `result`.
void at_backward_of(const Tensor& result, std::function<void()> call);

}  // namespace zerocompile
