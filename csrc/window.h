// Windows and accumulations: what waits for their end, and how much of it may.
//
// `Window` owns the bound on the bytes that wait. It decides what is reduced when a backward ends and when the window
// does, and what user code finds in the `grad` of a master until then. The gradients themselves are in `Gradients`.
//
// Lock: whoever calls holds the runtime's mutex.
//
// Streams: it has no tensors. What it hands out may be read on the current stream.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "backward_phase.h"
#include "gradients.h"
#include "reductions.h"
#include "registry.h"

namespace zerocompile {

// What the gradient of a master is that has none bound: the reduced one; or, in a window or an accumulation, this
// rank's own full sum, or its rows of what was reduced early.
enum class Unbound : int64_t { Reduced = 0, Sum = 1, Early = 2 };

class Window {
 public:
  Window(const Registry& registry, Gathers& gathers, Gradients& gradients, Reductions& reductions,
         BackwardPhase& backward);
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  void set_deferred(bool deferred);
  void set_partial(bool partial);
  void set_bound(int64_t bytes, std::function<void()> reached);
  void flush();

  std::pair<Tensor, Unbound> unbound_gradient(int64_t parameter, bool waiting);
  void drop_gradient(int64_t parameter);
  void drop_waiting(int64_t parameter);

 private:
  void reduce_at_end();
  bool reaches_bound() const;

  const Registry& registry_;
  Gathers& gathers_;
  Gradients& gradients_;
  Reductions& reductions_;
  BackwardPhase& backward_;
  int64_t max_bytes_ = -1;  // of gradients that wait for the end of a window; negative: any
  std::function<void()> reached_;  // called before what waits is reduced; raises if another rank does not come to it
};

}  // namespace zerocompile
