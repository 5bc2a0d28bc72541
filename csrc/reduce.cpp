// Reduction: a unit is reduced as a whole when its last gradient is there; what is left is flushed when the outermost
// backward ends (see backward.cpp).
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <utility>

#include "collectives.h"
#include "runtime.h"
#include "text.h"
#include "views.h"

namespace zerocompile {

namespace {

int64_t row_numel(const Parameter& p) {
  int64_t n = 1;
  for (size_t d = 1; d < p.size.size(); ++d) n *= p.size[d];
  return n;
}

// Whether it has a gradient to be reduced now; that of a frozen one waits until it is trained again.
bool waits(const Parameter& p, const Gradient& g) { return g.grad.defined() && p.master.requires_grad(); }

// [Note: agreed dtype] With `grad_dtype=None` the dtype of a gradient is a fact of one rank and of one backward, and a
// collective needs one that all ranks know. So such a unit is never reduced before the end of a backward, where the
// ranks agree each time: on the last of this list that one of them produced. Such units come last in the order of
// reductions: the others are reduced while the backward runs, as ever.
constexpr std::array<at::ScalarType, 7> kGradDtypes = {
    at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble};
constexpr char kUnused = '0', kUsed = '1', kFirstDtype = '2';

char letter_of(const Parameter& p, at::ScalarType dtype) {
  const auto found = std::find(kGradDtypes.begin(), kGradDtypes.end(), dtype);
  TORCH_CHECK(found != kGradDtypes.end(),
              text("zerocompile: the gradient of `", p.name, "`, whose grad_dtype is None, was produced in ",
                   c10::toString(dtype),
                   ", which cannot be reduced. Set its grad_dtype before the model is set up"));
  return static_cast<char>(kFirstDtype + (found - kGradDtypes.begin()));
}

}  // namespace

bool Runtime::trainable(const Unit& unit) const {
  return std::any_of(unit.parameters.begin(), unit.parameters.end(),
                     [&](int64_t i) { return record(i).master.requires_grad(); });
}

// [Note: nested contributions] What a nested backward (a reentrant checkpoint) hands over was read under no_grad in the
// forward, so nobody knows how much of it is still to come: such a unit waits for the end of the outermost backward.
// Started earlier, it would be reduced a second time, and how often would differ between ranks.
bool Runtime::complete(const Unit& unit) const {
  if (unit_gradients_[unit.index].nested) return false;
  return std::all_of(unit.parameters.begin(), unit.parameters.end(), [&](int64_t i) {
    const auto& p = record(i);
    const auto& g = of(p);
    return !p.master.requires_grad() ||
           (g.contributed_now && p.cast_grad && g.eager_outstanding->load() <= 0 && g.graph_outstanding == 0);
  });
}

void Runtime::launch_complete() {
  if (deferred_ || !backward_) return;
  for (; next_reduction_ < reduce_order_.size(); ++next_reduction_) {
    const auto index = reduce_order_[next_reduction_];
    const auto& unit = registry_.units()[index];
    if (unit_gradients_[index].reduced || !trainable(unit)) continue;
    if (!complete(unit)) return;
    launch_reduction({index});
  }
}

// After a failure: waits for nobody, see [Note: abandoned communication].
void Runtime::drop_reductions() {
  for (auto& reduction : in_flight_) {
    for (const auto& done : reduction.done) reductions_dropped_ = reductions_dropped_ || done.running();
    reserve(reduction);
  }
  in_flight_.clear();
}

// What it reads and writes is not used again before it is done, without anybody waiting.
void Runtime::reserve(const Reduction& reduction) {
  for (const auto& tensor : reduction.inputs) reduce_lane_.keep(tensor);
  for (auto unit : reduction.units) {
    for (auto i : registry_.units()[unit].parameters) reduce_lane_.keep(existing_grad(record(i)));
  }
}

// Of the reduced gradient: what is bound; what is reduced early is summed as the window's gradients are.
at::ScalarType Runtime::kept_dtype(const Parameter& p) const {
  const auto bound = p.bound_dtype.value_or(of(p).raw_dtype);
  return early_ && sum_dtype_.has_value() && at::isFloatingType(bound) ? *sum_dtype_ : bound;
}

// Reduces the units: every trainable parameter of them, in the units' order, zeros for one without a gradient here. It
// is in flight from its beginning: see [Note: unfinished launches].
void Runtime::launch_reduction(const std::vector<int64_t>& units) {
  at::NoGradGuard no_grad;
  RECORD_USER_SCOPE(text("zerocompile: reduce ", registry_.names_of(units)));
  std::map<std::pair<at::ScalarType, at::ScalarType>, std::vector<int64_t>> groups;  // (communicated, kept) dtypes
  std::vector<int64_t> replicated;
  auto& reduction = in_flight_.emplace_back();
  reduction.units = units;
  reduction.number = ++reductions_started_;
  if (units.size() == 1) {
    const auto& unit = registry_.units()[units.front()];
    const auto& ready = unit_gradients_[unit.index].ready;
    const bool just_now = complete(unit) && latest_ != nullptr && ready == latest_;
    if (!just_now || several_producers_) reduction.ready = ready ? ready : begun_;
  }
  for (auto index : units) {
    for (auto i : registry_.units()[index].parameters) {
      const auto& p = record(i);
      if (!p.master.requires_grad()) continue;
      if (!of(p).grad.defined() && p.cast_grad) of(p).raw_dtype = p.grad_dtype;  // the other: as agreed
      if (p.replicated) replicated.push_back(i);
      else groups[{communicated_dtype(p), kept_dtype(p)}].push_back(i);
    }
    auto& unit = unit_gradients_[index];
    again_ = again_ || unit.reduced;
    unit.reduced = true;
    unit.ready.reset();
  }
  if (!replicated.empty()) replicate_group(replicated, reduction);
  for (auto& [dtypes, group] : groups) reduce_group(group, reduction);
  retire(2);
}

// One collective, or its copies: the parameters of a unit that share their dtypes. The result is one flat partition,
// [sum of rows].
void Runtime::reduce_group(const std::vector<int64_t>& group, Reduction& reduction) {
  const auto& first = record(group.front());
  const auto communicated = communicated_dtype(first);
  const auto kept = kept_dtype(first);
  const auto options = first.local.options().requires_grad(false);
  int64_t total = 0;
  bool binds = false;
  std::vector<Shard> shards;
  for (auto i : group) {
    shards.push_back({existing_grad(record(i)), {}, total});
    total += record(i).rows * row_numel(record(i));
    binds = binds || !shards.back().existing.defined();
  }
  const auto make_partition = [&] { return at::empty({binds ? total : 0}, options.dtype(kept)); };
  Tensor partition;  // of the caller's stream, where the optimizer reads it, if the lane is ordered behind all of that
  if (!reduction.ready) partition = make_partition();
  Lane::Launch launch(reduce_lane_, reduction.done, reduction.ready);
  if (reduction.ready) partition = make_partition();
  reduction.inputs.push_back(partition);  // the lane writes to it even if nobody binds it
  std::vector<PeerMemory::Gradient> gradients;
  for (size_t k = 0; k < group.size(); ++k) {
    const auto& p = record(group[k]);
    auto& shard = shards[k];
    if (!shard.existing.defined()) shard.own = view_of(partition, p.local.sizes(), shard.offset);
    reduced_.emplace_back(group[k], shard.own);
    if (!of(p).grad.defined()) of(p).grad = at::zeros(p.size, options.dtype(communicated));
    reduction.inputs.push_back(of(p).grad);
    auto grad = of(p).grad.to(communicated).contiguous();
    if (p.rows * registry_.world() != p.size[0]) {
      auto padded = at::zeros(registry_.padded_size(p), grad.options());
      padded.narrow(0, 0, p.size[0]).copy_(grad);
      grad = std::move(padded);
      stats_.padded_copies += 1;
    }
    of(p).grad.reset();
    of(p).grad_owned = false;
    if (grad.numel() == 0) continue;
    stats_.reduce_bytes += static_cast<int64_t>(grad.nbytes());
    reduction.inputs.push_back(grad);
    const bool adds = shard.existing.defined();
    gradients.push_back({std::move(grad), adds ? shard.existing : shard.own, adds});
    shard.gradient = static_cast<int64_t>(gradients.size()) - 1;
  }
  if (!gradients.empty()) stats_.reductions += 1;
  const bool fits = std::all_of(gradients.begin(), gradients.end(), [&](const auto& gradient) {
    return gradient.mean.scalar_type() == kept;  // what it is added to may be of an earlier backward
  });
  const bool by_kernel = communicated == at::kBFloat16 && kept == at::kFloat && !gradients.empty() && fits;
  if (by_kernel && summing_peers_ != nullptr && summing_peers_->holds(gradients)) {
    stats_.peer_reductions += 1;
    summing_peers_->reduce_scatter(gradients, divisor_);
  } else {
    reduce_by_collective(launch, group, shards, gradients, partition, total, communicated);
  }
  launch.finish();
}

// The same through the process group: the result is in the dtype that is communicated, and copied or added from there.
void Runtime::reduce_by_collective(Lane::Launch& launch, const std::vector<int64_t>& group,
                                   const std::vector<Shard>& shards,
                                   const std::vector<PeerMemory::Gradient>& gradients, const Tensor& partition,
                                   int64_t total, at::ScalarType communicated) {
  const bool adds = std::any_of(shards.begin(), shards.end(), [](const Shard& s) { return s.existing.defined(); });
  const bool direct = !adds && partition.scalar_type() == communicated;
  const auto result = direct ? partition : at::empty({total}, partition.options().dtype(communicated));
  std::vector<Tensor> inputs, outputs, reduced;  // the last: [<=rows, ...], by parameter
  for (size_t k = 0; k < group.size(); ++k) {
    const auto& p = record(group[k]);
    if (adds) reduced.push_back(view_of(result, p.local.sizes(), shards[k].offset));
    if (shards[k].gradient < 0) continue;
    auto size = p.size;
    size[0] = p.rows;
    inputs.push_back(on_the_wire(gradients[shards[k].gradient].full));
    outputs.push_back(on_the_wire(view_of(result, size, shards[k].offset)));
  }
  const bool average = divisor_ == static_cast<double>(registry_.all_ranks());
  const c10d::ReduceOp op = average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
  if (!inputs.empty() && reduce_group_->getSize() == 1) {
    at::_foreach_copy_(outputs, inputs);
  } else if (!inputs.empty()) {
    reduce_scatter(*reduce_group_, registry_.rank(), registry_.world(), launch, outputs, inputs, op);
  }
  if (!inputs.empty() && replica_group_ != nullptr) {  // after the first, in the lane's order
    std::vector<Tensor> rows{on_the_wire(result)};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    options.asyncOp = false;
    launch.add(replica_group_->allreduce(rows, options));
  }
  launch.then([=, divisor = average ? 1.0 : divisor_] {
    at::NoGradGuard no_grad;
    if (divisor != 1.0) result.div_(divisor);
    if (!direct && !adds) at::_foreach_copy_({partition}, {result});  // its kernel casts faster than that of copy_
    for (size_t k = 0; k < reduced.size(); ++k) {
      if (shards[k].existing.defined()) shards[k].existing.add_(reduced[k]);
      else shards[k].own.copy_(reduced[k]);
    }
  });
}

// 0-dim parameters are replicated: their gradients are averaged whole.
void Runtime::replicate_group(const std::vector<int64_t>& group, Reduction& reduction) {
  const auto make_result = [&](const Parameter& p) {
    return at::empty({}, p.local.options().dtype(kept_dtype(p)).requires_grad(false));
  };
  std::vector<Tensor> results;
  if (!reduction.ready) {
    for (auto i : group) results.push_back(make_result(record(i)));
  }
  Lane::Launch launch(reduce_lane_, reduction.done, reduction.ready);
  for (size_t k = 0; k < group.size(); ++k) {
    const auto& p = record(group[k]);
    if (reduction.ready) results.push_back(make_result(p));
    const auto communicated = communicated_dtype(p);
    if (!of(p).grad.defined()) of(p).grad = at::zeros({}, results[k].options().dtype(communicated));
    auto sum = of(p).grad.to(communicated, /*non_blocking=*/false, /*copy=*/true).reshape({1});
    sum.div_(divisor_);  // before it is summed: a half overflows early
    reduction.inputs.push_back(of(p).grad);
    reduction.inputs.push_back(results[k]);  // the lane uses it even if nobody binds it
    of(p).grad.reset();
    of(p).grad_owned = false;
    stats_.reductions += 1;
    stats_.reduce_bytes += static_cast<int64_t>(sum.nbytes());
    std::vector<Tensor> tensors{on_the_wire(sum)};
    for (const auto& ranks : {reduce_group_, replica_group_}) {
      if (ranks == nullptr || ranks->getSize() == 1) continue;
      c10d::AllreduceOptions options;
      options.asyncOp = device_.is_cpu();
      launch.add(ranks->allreduce(tensors, options));
    }
    auto existing = existing_grad(p);
    reduced_.emplace_back(group[k], existing.defined() ? Tensor() : results[k]);
    launch.then([sum, existing, result = results[k]] {
      at::NoGradGuard no_grad;
      result.copy_(sum.squeeze(0));
      if (existing.defined()) existing.add_(result);
    });
  }
  launch.finish();
}

// [Note: gloo reductions] Gloo's waits block the host. A rank that waited inside its backward for the reduction of a
// unit could wait for one that misses gradients of it and waits for the used flags: so on the CPU only the end of a
// backward waits.
void Runtime::retire(size_t keep) {
  if (device_.is_cpu() && keep > 0) return;
  while (in_flight_.size() > keep) {
    if (!device_.is_cpu() && !in_flight_.front().done.empty()) last_retired_ = in_flight_.front().done.back();
    if (several_producers_) reserve(in_flight_.front());  // what it reads may be another stream's memory
    try {
      await(in_flight_.front());
    } catch (...) {  // nobody waits for it, or for those after it, again
      drop_reductions();
      throw;
    }
    in_flight_.erase(in_flight_.begin());
  }
}

// [Note: used flags] AdamW moves a parameter whose gradient is zero, not one whose gradient is None; and a rank must
// not skip a unit that others reduce. So every rank says which parameters have a gradient; only a rank that misses
// gradients asks what the others have. They say it through the store: a collective would wait on the device behind
// what the other ranks have queued, and that may wait for a reduction that this rank has still to start.
// `meanwhile`: what this rank can do before it asks; the others may wait for its word.
std::vector<char> Runtime::agree_on_used(const std::function<void()>& meanwhile) {
  std::string used(registry_.parameters().size(), kUnused);
  bool asks = deferred_;  // in a window a rank may have failed: the others hear of it before they start reductions
  for (size_t i = 0; i < registry_.parameters().size(); ++i) {
    const auto& p = record(i);
    if (of(p).contributed) used[i] = p.cast_grad ? kUsed : letter_of(p, of(p).raw_dtype);
    asks = asks || (p.master.requires_grad() && !(of(p).contributed && p.cast_grad));
  }
  const bool alone = registry_.all_ranks() == 1 || questions_.unite == nullptr;
  if (!alone) questions_.unite(exchanges_, used, /*asks=*/false);
  if (!deferred_) meanwhile();
  if (!alone && asks) used = questions_.unite(exchanges_, used, /*asks=*/true);
  if (deferred_) meanwhile();
  exchanges_ += 1;
  TORCH_CHECK(used.size() == registry_.parameters().size(),
              "zerocompile: the ranks have different numbers of parameters");
  for (size_t i = 0; i < registry_.parameters().size(); ++i) {
    const auto& p = record(i);
    if (p.cast_grad) continue;
    if (used[i] >= kFirstDtype) of(p).raw_dtype = kGradDtypes.at(used[i] - kFirstDtype);
    else of(p).raw_dtype = p.dtype;  // of no rank: that of zeros, which must not be what this rank alone has had
  }
  std::vector<char> flags(used.size());
  std::transform(used.begin(), used.end(), flags.begin(), [](char c) { return c != kUnused; });
  return flags;
}

// [Note: merged reductions] Where a window closes nothing is left to hide a reduction behind, and a small one costs the
// host more than the devices. So small units that follow each other are reduced together there, in runs of up to
// `merge_bytes_`. A run depends on sizes alone and is launched as a whole, or, when all ranks know what each of them
// has, without what nobody has: either way the collectives are the same on all ranks. Copies between devices take one
// unit at a time: their buffers are no larger.
std::vector<std::vector<int64_t>> Runtime::runs(bool merged) const {
  std::vector<int64_t> units;
  for (auto index : reduce_order_) {
    if (trainable(registry_.units()[index])) units.push_back(index);
  }
  return registry_.runs_of(units, merged && summing_peers_ == nullptr ? merge_bytes_ : -1, /*padded=*/false);
}

// Units of which this rank has a gradient are reduced whatever the others have, up to the first run with one that it
// has none of or whose dtypes are not agreed.
void Runtime::launch_contributed(const std::vector<std::vector<int64_t>>& runs) {
  for (const auto& run : runs) {
    std::vector<int64_t> units;
    for (auto index : run) {
      const auto& unit = registry_.units()[index];
      if (unit_gradients_[index].reduced) continue;
      const bool any = std::any_of(unit.parameters.begin(), unit.parameters.end(),
                                   [&](int64_t i) { return waits(record(i), gradients_[i]); });
      const bool agreed = std::all_of(unit.parameters.begin(), unit.parameters.end(), [&](int64_t i) {
        return record(i).cast_grad || !record(i).master.requires_grad();
      });
      if (!any || !agreed) return;
      units.push_back(index);
    }
    if (!units.empty()) launch_reduction(units);
  }
}

// `merged`: see [Note: merged reductions].
void Runtime::reduce_everything(bool merged) {
  at::NoGradGuard no_grad;
  follow_producers();
  agree_on_order();
  const auto order = runs(merged);
  const auto used = agree_on_used([&] { launch_contributed(order); });
  for (const auto& run : order) {
    std::vector<int64_t> units;
    for (auto index : run) {
      const auto& unit = registry_.units()[index];
      bool wanted = false, late = false;
      for (auto i : unit.parameters) {
        const auto& p = record(i);
        wanted = wanted || (p.master.requires_grad() && used[i]);
        late = late || waits(p, of(p));
      }
      if (wanted && (!unit_gradients_[index].reduced || late)) units.push_back(index);
    }
    if (!units.empty()) launch_reduction(units);
  }
  if (may_be_late()) leave_in_flight();
  else retire(0);
  several_producers_ = false;
  producer_.reset();
  again_ = false;
  next_reduction_ = 0;
  pending_ = false;
  for (auto& g : gradients_) g.contributed = g.grad.defined();  // one that is frozen now waits until it is not
  for (auto& unit : unit_gradients_) unit.reduced = false;
  bind_reduced(used);
}

}  // namespace zerocompile
