#include "gradients.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "text.h"
#include "views.h"

namespace zerocompile {

namespace {

// Whether the gradient that is there may be added to in place: it was made here, or nobody else holds its memory, as of
// one that a graph has handed over.
bool is_ours(const Gradient& g) {
  if (g.memory != GradMemory::Handed) return g.memory == GradMemory::Own;
  return g.grad.storage().use_count() == 1 && g.grad.is_non_overlapping_and_dense();
}

void copy_to_own(Gradient& g) {
  g.grad = g.grad.clone();
  g.memory = GradMemory::Own;
}

}  // namespace

// It is also true where the user has removed all of them again.
bool has_hooks(const Tensor& master) {
  return torch::autograd::impl::get_autograd_meta(master) != nullptr &&
         torch::autograd::impl::post_acc_grad_hooks(master) != nullptr;
}

void Gradients::clear() {
  gradients_.clear();
  units_.clear();
  bind_ = nullptr;
}

void Gradients::set_deferred(bool deferred) {
  deferred_ = deferred;
  pending_ = pending_ || deferred;
}

void Gradients::set_partial(bool partial) {
  partial_ = partial && replicas_;
  pending_ = pending_ || partial_;
}

// ---- taking gradients ----

// `task`: the number of its graph task.
void Gradients::begin_backward(int64_t task) {
  outermost_ = task;
  pending_ = pending_ || deferred_ || partial_;
  begun_.reset();  // what waits for the end of a window is older than its last backward
  if (!deferred_ && !registry_.device().is_cpu()) begun_ = mark(registry_.device());
  for (auto& unit : units_) unit = {};
  for (const auto& p : registry_.parameters()) {
    auto& g = state(p);
    g.contributed_now = false;
    g.trained = trains(p);
  }
}

// A forward graph uses these parameters, so its backward graph will hand their gradients over.
void Gradients::expect_from_graph(const Indices& indices) {
  for (auto i : indices) {
    if (record(i).master.requires_grad()) gradients_[i].graph_outstanding += 1;
  }
}

// A forward whose backward never came must not delay the reductions of the next step. Returns whether one was expected.
bool Gradients::forget_outstanding(const Parameter& p) { return std::exchange(state(p).graph_outstanding, 0) > 0; }

// The current stream produces the gradients that come now.
void Gradients::produced_here() {
  follow_producers();
  if (!registry_.device().is_cpu()) producer_ = current_stream(registry_.device());
}

// What follows on the current stream is ordered after all gradients so far: see [Note: several streams].
void Gradients::follow_producers() {
  if (registry_.device().is_cpu() || !producer_) return;
  const auto here = current_stream(registry_.device());
  if (*producer_ == here) return;
  mark(*producer_)->block(here);
  several_producers_ = true;
}

// [Note: gradients of CUDA graphs] A CUDA graph leaves a gradient in memory that it shares with other graphs. torch
// gives that memory to a graph that it records when nobody holds the gradient. If somebody holds it where that graph is
// to be replayed, torch records anew. So a gradient that is reduced in the backward that makes it is not copied:
// `Reduction::inputs` hold it for the next two reductions, alike in each step. Then the stream of the backward is
// ordered after the reduction (`retire`, `leave_in_flight`), and with it the replays that follow. What is held for
// longer is copied (until the end of a window, an accumulation or a backward), and so is what several streams produce,
// of which only one is ordered. A gradient of eager code is copied, too: it may have come through another graph, and
// its unit, an embedding, is mostly the last one, whose reduction is to go beside the optimizer.

// What is still in memory of CUDA graphs at the end of a backward is copied.
void Gradients::leave_graphs() {
  at::NoGradGuard no_grad;
  for (auto& g : gradients_) {
    if (g.memory == GradMemory::Graph) copy_to_own(g);
  }
}

// [Note: grad dtype] The raw gradient becomes the leaf's before anything else looks at it: a bf16 parameter whose
// backward computed in fp32 never opens an fp32 bucket. With `grad_dtype=None` each backward decides, see
// [Note: agreed dtype]. `shared`: somebody else holds it and may write to it again. `waits`: for more than the other
// gradients of its unit.
void Gradients::take(const Indices& indices, at::TensorList grads, bool from_graph, bool shared, bool waits) {
  at::NoGradGuard no_grad;
  auto sorted = indices;  // one kernel adds all of them, so none may be there twice
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  TORCH_CHECK(twice == sorted.end(), text("zerocompile: two gradients of `", registry_.parameter(*twice).name,
                                          "` are handed over in one call. Add them before"));
  const bool nested = torch::autograd::get_current_graph_task_id() != outermost_;
  const bool copies = shared || (graphs_ && (!from_graph || waits || nested || several_producers_));
  Sums sums;
  for (size_t k = 0; k < indices.size(); ++k) {
    take_one(registry_.parameter(indices[k]), grads[k], from_graph, copies, sums);
  }
  if (sums.totals.size() == 1) sums.totals.front().add_(sums.parts.front());
  else if (!sums.totals.empty()) at::_foreach_add_(sums.totals, sums.parts);
}

// [Note: gradients of several dtypes] With `grad_dtype=None` gradients of one leaf may have several. torch adds to what
// an earlier backward has left in place, so the dtype of that stays. Within one backward it adds in place to a sum that
// nobody else holds, and otherwise makes a new one, of the wider dtype. So it is here.

// Takes one gradient: it is kept, or noted in `into`, since one kernel adds all of them.
void Gradients::take_one(const Parameter& p, const Tensor& handed, bool from_graph, bool copies, Sums& into) {
  auto& g = state(p);
  if (from_graph) g.graph_outstanding = std::max<int64_t>(0, g.graph_outstanding - 1);
  if (!p.master.requires_grad()) return;  // frozen after the forward: torch drops the gradient too
  TORCH_CHECK(handed.layout() == at::kStrided,
              text("zerocompile: the gradient of `", p.name,
                   "` is sparse, which cannot be sharded. Use sparse=False for this embedding"));
  TORCH_CHECK(!handed.key_set().has(c10::DispatchKey::Python),
              text("zerocompile: the gradient of `", p.name, "` is no ordinary tensor (a DTensor, perhaps): a loss was "
                   "computed from a sharded tensor. Take its full value first (`full_tensor()`), on all ranks"));
  TORCH_CHECK(handed.sizes() == at::IntArrayRef(p.size),
              text("zerocompile: the gradient of `", p.name, "` has sizes ",
                   handed.sizes(), ", the parameter ", p.size));
  auto grad = view_of(handed);
  if (p.cast_grad && grad.scalar_type() != p.grad_dtype) grad = grad.to(p.grad_dtype);
  const auto raw = grad.scalar_type();
  const bool sums = deferred_ && sum_dtype_.has_value();
  const bool there = g.grad.defined();
  const bool stays = there && (!g.contributed_now || is_ours(g));  // see [Note: gradients of several dtypes]
  g.raw_dtype = stays ? g.raw_dtype : there ? at::promote_types(g.raw_dtype, raw) : raw;
  if (there && several_producers_) keep_for(g.grad, *producer_);  // it may be another stream's memory
  const bool sums_in_another = sums && grad.is_floating_point() && raw != *sum_dtype_;
  if (sums_in_another) grad = grad.to(*sum_dtype_);
  if (!there) {
    const bool same_memory = grad.is_alias_of(handed);
    g.grad = copies && same_memory ? grad.clone() : grad;
    const bool own = sums_in_another || copies;
    g.memory = own ? GradMemory::Own : graphs_ && same_memory ? GradMemory::Graph : GradMemory::Handed;
    if (graphs_ && from_graph && same_memory && copies) counts_.graph_copies += 1;
  } else if (is_ours(g) && (!sums || g.grad.scalar_type() == grad.scalar_type())) {
    g.memory = GradMemory::Own;
    into.totals.push_back(g.grad);
    into.parts.push_back(std::move(grad));
  } else {
    const auto dtype = g.grad.scalar_type();
    g.grad = g.grad.add(grad);
    if (stays && !sums) g.grad = g.grad.to(dtype);
    g.memory = GradMemory::Own;
  }
  g.contributed = g.contributed_now = true;
  auto& unit = units_[registry_.unit_of(p).index];
  unit.nested = unit.nested || torch::autograd::get_current_graph_task_id() != outermost_;
  if (from_graph) counts_.graph_reductions += 1;
}

// [Note: late reductions] A unit of which this rank misses a gradient is reduced at the end of the backward, and so are
// those whose turn comes after it. The other ranks may have started them long ago. Their streams may wait for them
// before they run what this rank's stream waits for (a gather, a collective of the user's in the backward). So what is
// not reduced right when its last gradient arrives is ordered after its own gradients alone, not after all that this
// rank's stream holds. Without any gradient it is ordered after the point where the backward began.

// Returns the point after the gradients that have just come; null: nobody needs it.
Ready Gradients::mark_ready(const Indices& indices) {
  Ready latest;
  if (registry_.device().is_cpu() || deferred_) return latest;
  for (auto i : indices) {
    const auto& p = record(i);
    if (!of(p).grad.defined()) continue;
    if (!latest) latest = mark(registry_.device());
    units_[registry_.unit_of(p).index].ready = latest;
  }
  return latest;
}

// ---- their reduction ----

// [Note: frozen in an accumulation] What a parameter's gradient has when the parameter is frozen stays its gradient in
// torch, and a step uses it. So it is reduced with the others: a parameter counts as trained from the beginning of a
// backward that trains it to the next reduction. All ranks freeze the same parameters, so they reduce the same ones.
// Which ranks have a gradient of it may differ, and maybe none has (a `zero_grad` has dropped it). A rank that has none
// waits with its unit for the end of the backward, when it knows whether another rank has one.

// [Note: nested contributions] What a nested backward (a reentrant checkpoint) hands over was read under no_grad in the
// forward, so nobody knows how much of it is still to come: such a unit waits for the end of the outermost backward.
// Started earlier, it would be reduced a second time, and how often would differ between ranks.

// Whether all gradients of the unit are there that this backward produces.
bool Gradients::complete(const Unit& unit) const {
  if (units_[unit.index].nested) return false;
  return std::all_of(unit.parameters.begin(), unit.parameters.end(), [&](int64_t i) {
    const auto& p = record(i);
    const auto& g = of(p);
    if (!p.master.requires_grad()) return !g.trained || (p.cast_grad && (g.contributed || has_part(p)));
    return g.contributed_now && p.cast_grad && g.eager_outstanding->load() <= 0 && g.graph_outstanding == 0;
  });
}

// What the unit's reduction is to be ordered after; null: all that the current stream holds. `latest`: what
// `mark_ready` has just returned.
Ready Gradients::ready_for(const Unit& unit, const Ready& latest) const {
  const auto& ready = units_[unit.index].ready;
  const bool just_now = complete(unit) && latest != nullptr && ready == latest;
  if (just_now && !several_producers_) return nullptr;
  return ready ? ready : begun_;
}

// The gradient, which is not here any more; undefined: there is none.
Tensor Gradients::give_away(const Parameter& p) {
  state(p).memory = GradMemory::Handed;
  return std::exchange(state(p).grad, {});
}

// The unit's gradients were given away.
void Gradients::reduced(const Unit& unit) {
  for (auto i : unit.parameters) gradients_[i].contributed = gradients_[i].grad.defined();
}

// The gradients of all units were given away: nothing waits any more, unless what was reduced is `partial`.
void Gradients::reduced_all(bool partial) {
  several_producers_ = false;
  producer_.reset();
  pending_ = partial;
  for (const auto& unit : registry_.units()) reduced(unit);
  if (partial) return;
  early_is_lent_ = false;
  for (auto& g : gradients_) g.trained = false;
}

void Gradients::keep_early(const Parameter& p, Tensor rows, at::ScalarType bound_dtype) {
  state(p).early = std::move(rows);
  state(p).early_dtype = bound_dtype;
}

// What was reduced early, to be added to what is reduced now. It counts as a gradient of this backward: nothing else may
// tell that the parameter is used.
Tensor Gradients::take_part(const Parameter& p) {
  if (!has_part(p)) return {};
  state(p).contributed = true;
  return std::exchange(state(p).early, {});
}

// What was reduced early, for user code, which may write to it and keep it.
Tensor Gradients::lend_early(const Parameter& p) {
  early_is_lent_ = early_is_lent_ || of(p).early.defined();
  return of(p).early;
}

// ---- reduced gradients ----

// [Note: unread gradients] A DTensor costs the host 10 us, an optimizer of ours needs none, and a model may have
// thousands of parameters. So a reduced gradient is a plain tensor here until somebody reads the master's `grad`: then
// it becomes the DTensor that is bound there, and what is reduced later is added to it through its local part.

// What a reduced gradient is added to: the one of earlier in the window (`early`: nothing else), the unread one, or
// master.grad as we bound it, if the optimizer has not dropped it since.
Tensor Gradients::existing(const Parameter& p, bool early) const {
  const auto& g = of(p);
  if (early || (g.early.defined() && !replicas_)) return g.early;
  if (g.unread.defined()) return g.unread;
  const auto& outer = p.master.grad();
  if (!outer.defined()) return {};
  auto bound_outer = g.bound_outer.lock();
  auto bound_local = g.bound_local.lock();
  if (!bound_outer || !bound_local || bound_outer.get() != outer.unsafeGetTensorImpl()) return {};
  return Tensor(std::move(bound_local));
}

// What was reduced is the gradient now. What was reduced early is, too; with replicas it is in `reduced`. A parameter
// that has a gradient on no rank (`used`, by parameter) keeps None. The callback hears of the parameters whose `grad`
// is somebody else's, with what is to be added to it, and of those with hooks.
void Gradients::bind(std::vector<ReducedGrad> reduced, const std::vector<char>& used) {
  at::NoGradGuard no_grad;
  std::vector<ReducedGrad> heard;
  const auto bind_one = [&](int64_t index, Tensor rows) {
    const auto& p = record(index);
    auto& unread = gradients_[index].unread;
    if (rows.defined() && !p.master.grad().defined()) {
      unread = unread.defined() ? unread.add_(rows) : rows;
      rows.reset();
    }
    if (rows.defined() || has_hooks(p.master)) heard.emplace_back(index, std::move(rows));
  };
  for (auto& [index, rows] : reduced) {
    if (used[index] && (replicas_ || !gradients_[index].early.defined())) bind_one(index, std::move(rows));
  }
  reduced.clear();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    auto& g = gradients_[i];
    if (g.early.defined() && !replicas_) bind_one(static_cast<int64_t>(i), std::exchange(g.early, {}).to(g.early_dtype));
  }
  if (bind_ != nullptr && !heard.empty()) bind_(std::move(heard));
}

void Gradients::bound(const Parameter& p, const Tensor& outer, const Tensor& local) {
  state(p).bound_outer = WeakTensor(outer.getIntrusivePtr());
  state(p).bound_local = WeakTensor(local.getIntrusivePtr());
}

// `values`: local parts that an optimizer is to update; each gets the gradient of its parameter. Returns the positions
// of those whose `grad` is not ours.
Gradients::Indices Gradients::lend(const Indices& indices, const std::vector<Tensor>& values) const {
  TORCH_CHECK(indices.size() == values.size(), "zerocompile: lend_gradients takes one value for each parameter");
  Indices others;
  for (size_t k = 0; k < indices.size(); ++k) {
    const auto& p = registry_.parameter(indices[k]);
    auto grad = existing(p);
    if (grad.defined()) values[k].mutable_grad() = std::move(grad);
    else if (p.master.grad().defined()) others.push_back(static_cast<int64_t>(k));
  }
  return others;
}

// Nobody holds a gradient of these parameters any more, as far as we can tell.
void Gradients::release(const Indices& indices, const std::vector<Tensor>& values) {
  for (const auto& value : values) value.mutable_grad().reset();
  for (auto index : indices) {
    const auto& p = registry_.parameter(index);
    state(p).unread.reset();
    p.master.mutable_grad().reset();
  }
}

// Whether a reduced gradient has another dtype than its master.
bool Gradients::any_other_dtype() const {
  return std::any_of(registry_.parameters().begin(), registry_.parameters().end(), [this](const Parameter& p) {
    const auto& grad = of(p).unread.defined() ? of(p).unread : p.master.grad();
    return grad.defined() && grad.scalar_type() != p.master.scalar_type();
  });
}

// ---- what waits ----

// The full sum of this rank; undefined: there is none. The caller may write to it.
Tensor Gradients::own_sum(const Parameter& p) {
  auto& g = state(p);
  if (!g.grad.defined()) return {};
  if (g.memory != GradMemory::Own) copy_to_own(g);
  return g.grad;
}

void Gradients::drop(const Parameter& p) {
  auto& g = state(p);
  g.grad.reset();
  g.early.reset();
  g.memory = GradMemory::Handed;
  g.contributed = false;
}

// As `drop`, but what was reduced early stays a gradient, of zeros: it may itself be what user code has made zero.
void Gradients::zero(const Parameter& p) {
  at::NoGradGuard no_grad;
  auto& g = state(p);
  g.grad.reset();
  if (g.early.defined()) g.early.zero_();
  g.memory = GradMemory::Handed;
  g.contributed = false;
}

void Gradients::drop_all() {
  pending_ = false;
  for (const auto& p : registry_.parameters()) {
    drop(p);
    state(p).graph_outstanding = 0;
    state(p).trained = false;
  }
}

bool Gradients::any_waits() const {
  return std::any_of(gradients_.begin(), gradients_.end(), [](const Gradient& g) { return g.waits(); });
}

int64_t Gradients::waiting_bytes() const {
  int64_t bytes = 0;
  for (const auto& g : gradients_) {
    if (g.grad.defined()) bytes += static_cast<int64_t>(g.grad.nbytes());
  }
  return bytes;
}

}  // namespace zerocompile
