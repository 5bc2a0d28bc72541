#include "reductions.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "collectives.h"
#include "kernel_arguments.h"
#include "text.h"
#include "views.h"

namespace zerocompile {

namespace {

int64_t row_numel(const Parameter& p) {
  int64_t n = 1;
  for (size_t d = 1; d < p.size.size(); ++d) n *= p.size[d];
  return n;
}

// [Note: agreed dtype] With `grad_dtype=None` the dtype of a gradient is a fact of one rank and of one backward, and a
// collective needs one that all ranks know. So such a unit is never reduced before the end of a backward, where the
// ranks agree each time: on the last of this list that one of them produced. Such units come last in the order of
// reductions: the others are reduced while the backward runs, as ever.
constexpr std::array<at::ScalarType, 7> kGradDtypes = {
    at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble};
constexpr char kUnused = '0', kUsed = '1', kFirstDtype = '2';
constexpr char kBegun = '+';  // begins an answer that is no letters, see [Note: begun reductions]

char letter_of(const Parameter& p, at::ScalarType dtype) {
  const auto found = std::find(kGradDtypes.begin(), kGradDtypes.end(), dtype);
  TORCH_CHECK(found != kGradDtypes.end(),
              text("zerocompile: the gradient of `", p.name, "`, whose grad_dtype is None, was produced in ",
                   c10::toString(dtype),
                   ", which cannot be reduced. Set its grad_dtype before the model is set up"));
  return static_cast<char>(kFirstDtype + (found - kGradDtypes.begin()));
}

bool is_letter(char c) { return c >= kUnused && c < kFirstDtype + static_cast<char>(kGradDtypes.size()); }

// The number of units in an answer of [Note: begun reductions].
int64_t begun_in(const std::string& answer) {
  const auto digits = answer.substr(1);
  const bool number = std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  TORCH_CHECK(number && !digits.empty() && digits.size() < 10,
              text("zerocompile: another rank has begun to reduce `", digits, "` units, which is no number"));
  return std::stoll(digits);
}

}  // namespace

Reductions::Reductions(const Registry& registry, Questions& questions, const GatherOrder& gather_order,
                       Gradients& gradients, Group group, Group replicas)
    : registry_(registry),
      questions_(questions),
      gather_order_(gather_order),
      gradients_(gradients),
      group_(std::move(group)),
      replicas_(std::move(replicas)),
      lane_(registry.device()),
      replica_lane_(registry.device()) {
  const int64_t reduced = group_->getSize() * (replicas_ ? replicas_->getSize() : 1);
  TORCH_CHECK(reduced == registry_.all_ranks(),
              text("zerocompile: the process groups of reductions have ", reduced, " ranks, not all ",
                   registry_.all_ranks()));
  gradients_.set_replicas(replicas_ != nullptr);
}

// ---- set-up and end ----

// Bytes of a half: what the other ranks send of the usual unit's gradients, as far as a kernel can sum them.
int64_t Reductions::peer_bytes() const {
  const auto& units = registry_.units();
  const auto usual = std::find_if(units.begin(), units.end(),
                                  [&](const Unit& u) { return u.sent == registry_.usual_bytes(); });
  if (usual == units.end() || registry_.world() - 1 > kMostPeers) return 0;
  int64_t bytes = 0;
  for (auto i : usual->parameters) {
    const auto& p = record(i);
    const bool summed = p.cast_grad && p.reduce_dtype.value_or(p.grad_dtype) == at::kBFloat16 &&
                        p.bound_dtype == at::kFloat && !p.replicated;
    if (summed) bytes += registry_.sent_bytes(p, at::kBFloat16);
  }
  return bytes * (registry_.world() - 1);
}

void Reductions::check_peers() const {
  TORCH_CHECK(replicas_ == nullptr, "zerocompile: copies between devices reduce inside one replica only");
}

// See [Note: abandoned communication]. `devices_too`: what was awaited may still wait on the device.
void Reductions::abandon(bool devices_too) {
  drop_in_flight();
  if (dropped_ || devices_too) (void)peers_.release();
  if (dropped_ && registry_.device().is_cpu()) (void)group_.release();
}

void Reductions::clear() {
  reduced_.clear();
  updating_.clear();
  launched_.clear();
  peers_.reset();
  group_.reset();
  replicas_.reset();
}

// ---- their order ----

// [Note: order of reductions] One fixed order on all ranks: the reverse of the order in which rank 0 first used the
// units in a forward, told to the others through the store, so that no collective hides in a backward. A unit that is
// ready early waits for its turn; one that is not ready when the backward ends is reduced then. Gathers have a process
// group of their own, so only this order has to agree.
void Reductions::agree_on_order() {
  if (!order_.empty() || registry_.units().empty()) return;
  auto order = gather_order_.first_uses(static_cast<int64_t>(registry_.units().size()));
  std::reverse(order.begin(), order.end());
  std::stable_partition(order.begin(), order.end(), [&](int64_t index) {  // see [Note: agreed dtype]
    const auto& members = registry_.units()[index].parameters;
    return std::all_of(members.begin(), members.end(), [&](int64_t i) { return record(i).cast_grad; });
  });
  if (questions_.agree != nullptr && registry_.all_ranks() > 1) {
    auto told = questions_.agree(order);
    TORCH_CHECK(std::is_permutation(told.begin(), told.end(), order.begin(), order.end()),
                text("zerocompile: rank 0 has told the order of reductions ", at::IntArrayRef(told), ", in which rank ",
                     registry_.global_rank(), " does not find each of its ", order.size(),
                     " units once. Run the same model and code on all ranks"));
    order = std::move(told);
  }
  order_ = std::move(order);
}

// All units, in the order of their first use in rank 0's forward; before any backward in the order of the model.
Reductions::Units Reductions::unit_order() const {
  Units order(order_.rbegin(), order_.rend());
  for (int64_t index = 0; order.size() < registry_.units().size(); ++index) order.push_back(index);
  return order;
}

// ---- in a backward ----

bool Reductions::trainable(const Unit& unit) const {
  return std::any_of(unit.parameters.begin(), unit.parameters.end(),
                     [&](int64_t i) { return gradients_.trains(record(i)); });
}

void Reductions::begin_backward() {
  await_all();
  home_.reset();  // nothing of an earlier backward is on its way
  again_ = false;
  next_ = 0;
  begun_ = 0;
  launched_.assign(launched_.size(), false);
  taken_.assign(taken_.size(), false);
  untaken_.clear();
}

// [Note: begun reductions] A rank that misses gradients waits at the end of its backward for the used flags of the
// others. Another one may still be in its backward, where its device waits for the first rank in a reduction that is
// begun. Its host may stand then, too: CUDA loads a kernel at its first launch only when the device is idle, a queue of
// launches may be full, or user code may read a number. So a rank that stands in its backward for more than a second
// says how many units of the order it has begun to reduce, by the thread that watches for it (ranks/messages.py). Ranks
// that wait for its flags hear that, and reduce the same units, as they would after its flags. The number is zero from
// the end of the backward on, before the flags are sent: so it always belongs to the flags that come next.

// What another rank has begun to reduce in its backward: so many units of the order.
void Reductions::launch_begun(int64_t units) {
  TORCH_CHECK(units >= 0 && units <= static_cast<int64_t>(order_.size()),
              text("zerocompile: another rank has begun to reduce ", units, " units, and there are ", order_.size()));
  for (int64_t k = 0; k < units; ++k) {
    if (!launched_[order_[k]] && trainable(registry_.units()[order_[k]])) {
      launch({order_[k]}, /*latest=*/{}, gradients_.partial());
    }
  }
}

// Called while a backward runs that is to be reduced. `latest`: what `Gradients::mark_ready` has just returned.
void Reductions::launch_complete(const Ready& latest) {
  for (; next_ < order_.size(); ++next_) {
    const auto index = order_[next_];
    const auto& unit = registry_.units()[index];
    if (launched_[index] || !trainable(unit)) continue;
    if (!gradients_.complete(unit)) return;
    begun_ = static_cast<int64_t>(next_) + 1;
    launch({index}, latest, gradients_.partial());
  }
}

// [Note: updates in backward] With `optimizer_in_backward` a unit is updated as soon as it is reduced. Only a unit that
// was complete is: all of its gradients came on this rank, so all ranks know that they are used. On a device a unit is
// handed over when its reduction was launched: the optimizer's stream is ordered after that, and the host waits for
// nothing. At most two units' gradients are there while they are updated (`retire_updates`). On the CPU a unit is
// handed over once its reduction is done. This rank looks for that whenever a gradient comes; to wait for it could be
// to wait for ever ([Note: gloo reductions]). What is not handed over until the backward ends is updated then. Which
// units that are differs between ranks. So nothing is gathered or dropped for that before the backward has ended on this
// rank: gathered values stay those that this backward began with, also for a read in it (`Gathers::current`). If such a
// value is not there any more the read raises, since a gather would mix rows that are updated with others. A unit that
// gets a gradient after it was handed over raises, too, since its gradient would be used in two parts.

// Units that were reduced in this backward and that nobody has taken; their rows are bound.
Reductions::Units Reductions::take_reduced() {
  if (registry_.device().is_cpu()) {
    const auto done = [](const Reduction& reduction) {
      return std::all_of(reduction.done.begin(), reduction.done.end(), [](const Pending& p) { return p.completed(); });
    };
    while (!in_flight_.empty() && done(in_flight_.front())) retire(in_flight_.size() - 1, /*completed=*/true);
  }
  // While a backward runs, each reduction is of one unit, so those that are on their way are of the last ones here.
  const auto end = untaken_.end() - (registry_.device().is_cpu() ? static_cast<std::ptrdiff_t>(in_flight_.size()) : 0);
  const Units units(untaken_.begin(), end);
  untaken_.erase(untaken_.begin(), end);
  if (units.empty()) return units;
  for (auto unit : units) taken_[unit] = true;
  const auto mine = std::stable_partition(reduced_.begin(), reduced_.end(), [&](const ReducedGrad& one) {
    return !taken_[record(one.first).unit];
  });
  std::vector<ReducedGrad> rows(std::make_move_iterator(mine), std::make_move_iterator(reduced_.end()));
  reduced_.erase(mine, reduced_.end());
  gradients_.bind(std::move(rows), std::vector<char>(registry_.parameters().size(), 1));
  if (registry_.device().is_cpu()) return units;
  auto& updating = updating_.emplace_back();
  for (auto unit : units) {
    for (auto i : registry_.units()[unit].parameters) updating.rows.push_back(gradients_.existing(record(i)));
  }
  return units;
}

// The current stream has updated what was taken.
void Reductions::updated() {
  if (registry_.device().is_cpu()) return;
  for (auto& updating : updating_) {
    if (updating.done) continue;
    updating.done = mark(registry_.device());
    if (!gradients_.several_producers()) continue;  // else the rows may be the memory of another stream than ours
    for (const auto& rows : updating.rows) keep_for(rows, current_stream(registry_.device()));
  }
}

// The memory of gradients that were used goes back. A stream of its own may still read them, so the current stream and
// the lane, which own that memory, are ordered after it. To wait for a block's event instead, as the allocator does,
// would let a host that runs ahead of its device hold the gradients of many units.
void Reductions::retire_updates(size_t keep) {
  while (updating_.size() > keep) {
    if (const auto& done = updating_.front().done) {
      done->block(current_stream(registry_.device()));
      lane_.follow(done);
      replica_lane_.follow(done);
    }
    updating_.erase(updating_.begin());
  }
}

// The dtype of a reduced gradient is that in which it is bound. What is reduced early is summed in the window's dtype.
at::ScalarType Reductions::kept_dtype(const Parameter& p, bool early) const {
  const auto bound = p.bound_dtype.value_or(gradients_.dtype(p));
  const auto& sum = gradients_.sum_dtype();
  return early && sum.has_value() && at::isFloatingType(bound) ? *sum : bound;
}

// Reduces the units: every trainable parameter of them, in the units' order, zeros for one without a gradient here. The
// reduction is in flight from its beginning: see [Note: unfinished launches]. `latest`: see `Gradients::ready_for`.
// `early`: see [Note: bounded windows] and [Note: partial reductions].
void Reductions::launch(const Units& units, const Ready& latest, bool early) {
  at::NoGradGuard no_grad;
  RECORD_USER_SCOPE(text("zerocompile: reduce ", registry_.names_of(units)));
  std::map<std::pair<at::ScalarType, at::ScalarType>, std::vector<int64_t>> groups;  // (communicated, kept) dtypes
  std::vector<int64_t> replicated;
  for (auto index : units) {
    TORCH_CHECK(!taken_[index],
                text("zerocompile: unit `", registry_.units()[index].name, "` got a gradient on rank ",
                     registry_.global_rank(), " after the optimizer had updated it in this backward. Its gradient ",
                     "came in two parts, so use optimizer_in_backward=False"));
  }
  not_started_.meet(questions_, registry_.global_rank());
  auto& reduction = in_flight_.emplace_back();
  reduction.units = units;
  reduction.early = early;
  reduction.number = started_ + 1;
  if (units.size() == 1) reduction.ready = gradients_.ready_for(registry_.units()[units.front()], latest);
  for (auto index : units) {
    const auto& unit = registry_.units()[index];
    for (auto i : unit.parameters) {
      const auto& p = record(i);
      if (!gradients_.trains(p)) continue;
      if (p.replicated) replicated.push_back(i);
      else groups[{communicated_dtype(p), kept_dtype(p, early)}].push_back(i);
    }
    again_ = again_ || launched_[index];
    launched_[index] = true;
    gradients_.launched(unit);
    untaken_.push_back(index);
  }
  try {
    if (!replicated.empty()) replicate_group(replicated, reduction);
    for (auto& [dtypes, group] : groups) reduce_group(group, reduction);
  } catch (...) {
    not_started_.note(text("the reduction of unit `", registry_.names_of(units), "`, after ", started_.load(),
                           " reductions"));
    throw;
  }
  started_ += 1;
  retire(2);
}

// One collective, or the copies that stand for it, for the parameters of the units that share their dtypes. The result
// is one flat partition, [sum of rows].
void Reductions::reduce_group(const std::vector<int64_t>& group, Reduction& reduction) {
  const auto& first = record(group.front());
  const auto communicated = communicated_dtype(first);
  const auto kept = kept_dtype(first, reduction.early);
  const auto options = first.local.options().requires_grad(false);
  int64_t total = 0;
  bool binds = false;
  std::vector<Shard> shards;
  for (auto i : group) {
    auto part = reduction.early ? Tensor() : gradients_.take_part(record(i));
    if (part.defined()) reduction.inputs.push_back(part);
    shards.push_back({gradients_.existing(record(i), reduction.early), {}, std::move(part), total});
    total += record(i).rows * row_numel(record(i));
    binds = binds || !shards.back().existing.defined();
  }
  const auto make_partition = [&] { return at::empty({binds ? total : 0}, options.dtype(kept)); };
  Tensor partition;  // of the caller's stream, where the optimizer reads it, if the lane is ordered after all of that
  if (!reduction.ready) partition = make_partition();
  Lane::Launch launch(lane_, reduction.done, reduction.ready);
  if (reduction.ready) partition = make_partition();
  reduction.inputs.push_back(partition);  // the lane writes to it even if nobody binds it
  std::vector<PeerMemory::Gradient> gradients;
  for (size_t k = 0; k < group.size(); ++k) {
    const auto& p = record(group[k]);
    auto& shard = shards[k];
    if (!shard.existing.defined()) shard.own = p.rows_in(partition, p.local.sizes(), shard.offset);
    reduced_.emplace_back(group[k], shard.own);
    reduction.in_graph = reduction.in_graph || gradients_.of(p).memory == GradMemory::Graph;
    auto raw = gradients_.give_away(p);
    if (!raw.defined()) raw = at::zeros(p.size, options.dtype(communicated));
    reduction.inputs.push_back(raw);
    // what moves is memory, of which torch's bits of a lazy conjugation and negation are no part
    auto grad = p.in_order(raw.to(communicated)).contiguous().resolve_conj().resolve_neg();
    if (p.rows * registry_.world() != p.size[0]) {
      auto size = grad.sizes().vec();
      size[0] = p.rows * registry_.world();
      auto padded = at::zeros(size, grad.options());
      padded.narrow(0, 0, p.size[0]).copy_(grad);
      grad = std::move(padded);
      counts_.padded_copies += 1;
    }
    if (grad.numel() == 0) continue;
    counts_.reduce_bytes += static_cast<int64_t>(grad.nbytes());
    reduction.inputs.push_back(grad);
    const bool adds = shard.existing.defined();
    gradients.push_back({std::move(grad), p.in_order(adds ? shard.existing : shard.own), adds});
    shard.gradient = static_cast<int64_t>(gradients.size()) - 1;
  }
  if (!gradients.empty()) counts_.reductions += 1;
  const bool fits = std::all_of(gradients.begin(), gradients.end(), [&](const auto& gradient) {
    return gradient.mean.scalar_type() == kept;  // what it is added to may be of an earlier backward
  });
  const bool by_kernel = communicated == at::kBFloat16 && kept == at::kFloat && !gradients.empty() && fits;
  if (by_kernel && peers_ != nullptr && peers_->holds(gradients)) {
    counts_.peer_reductions += 1;
    peers_->reduce_scatter(gradients, record(group.front()).unit);
    launch.finish();
  } else {
    reduce_by_collective(launch, reduction, group, shards, gradients, partition, total, communicated);
  }
}

// The same through the process group: the result is in the dtype that is communicated, and copied or added from there.
void Reductions::reduce_by_collective(Lane::Launch& launch, Reduction& reduction, const std::vector<int64_t>& group,
                                      const std::vector<Shard>& shards,
                                      const std::vector<PeerMemory::Gradient>& gradients, const Tensor& partition,
                                      int64_t total, at::ScalarType communicated) {
  const bool adds = std::any_of(shards.begin(), shards.end(), [](const Shard& s) { return s.existing.defined(); });
  const bool direct = !adds && partition.scalar_type() == communicated;
  const auto result = direct ? partition : at::empty({total}, partition.options().dtype(communicated));
  std::vector<Tensor> inputs, outputs, reduced;  // the last: [<=rows, ...], by parameter
  for (size_t k = 0; k < group.size(); ++k) {
    const auto& p = record(group[k]);
    if (adds) reduced.push_back(p.rows_in(result, p.local.sizes(), shards[k].offset));
    if (shards[k].gradient < 0) continue;
    const auto& full = gradients[shards[k].gradient].full;
    auto size = full.sizes().vec();
    size[0] = p.rows;
    inputs.push_back(on_the_wire(full));
    outputs.push_back(on_the_wire(view_of(result, size, shards[k].offset)));
  }
  if (!inputs.empty() && group_->getSize() == 1) {
    at::_foreach_copy_(outputs, inputs);
  } else if (!inputs.empty()) {
    reduce_scatter(*group_, registry_.rank(), registry_.world(), launch, outputs, inputs, packing_);
  }
  const auto place = [=] {
    at::NoGradGuard no_grad;
    if (!direct && !adds) at::_foreach_copy_({partition}, {result});  // its kernel casts faster than that of copy_
    for (size_t k = 0; k < reduced.size(); ++k) {
      if (shards[k].existing.defined()) shards[k].existing.add_(reduced[k]);
      else shards[k].own.copy_(reduced[k]);
    }
  };
  if (inputs.empty() || replicas_ == nullptr || reduction.early) {
    launch.then(place);
    launch.finish();
    return;
  }
  for (size_t k = 0; k < group.size(); ++k) {
    if (!shards[k].part.defined()) continue;
    const auto& p = record(group[k]);
    p.rows_in(result, p.local.sizes(), shards[k].offset).add_(shards[k].part);
  }
  const auto scattered = mark(registry_.device());  // on the lane; only devices have replicas: [Note: replicas]
  launch.finish();
  Lane::Launch second(replica_lane_, reduction.done, scattered);
  replica_lane_.keep(result);  // it is the first lane's memory
  all_reduce(*replicas_, second, on_the_wire(result), c10d::ReduceOp::AVG);
  second.then(place);
  second.finish();
}

// 0-dim parameters are replicated: their gradients are averaged whole.
void Reductions::replicate_group(const std::vector<int64_t>& group, Reduction& reduction) {
  const auto make_result = [&](const Parameter& p) {
    return at::empty({}, p.local.options().dtype(kept_dtype(p, reduction.early)).requires_grad(false));
  };
  std::vector<Tensor> results;
  if (!reduction.ready) {
    for (auto i : group) results.push_back(make_result(record(i)));
  }
  Lane::Launch launch(lane_, reduction.done, reduction.ready);
  for (size_t k = 0; k < group.size(); ++k) {
    const auto& p = record(group[k]);
    if (reduction.ready) results.push_back(make_result(p));
    const auto communicated = communicated_dtype(p);
    reduction.in_graph = reduction.in_graph || gradients_.of(p).memory == GradMemory::Graph;
    auto raw = gradients_.give_away(p);
    if (!raw.defined()) raw = at::zeros({}, results[k].options().dtype(communicated));
    reduction.inputs.push_back(raw);
    reduction.inputs.push_back(results[k]);  // the lane uses it even if nobody binds it
    const auto part = reduction.early ? Tensor() : gradients_.take_part(p);
    if (part.defined()) reduction.inputs.push_back(part);
    auto sum = raw.to(communicated, /*non_blocking=*/false, /*copy=*/true).reshape({1});
    sum.div_(registry_.all_ranks());  // before it is summed: a half overflows early
    counts_.reductions += 1;
    counts_.reduce_bytes += static_cast<int64_t>(sum.nbytes());
    const auto add_up = [&](const Group& ranks) {
      if (ranks == nullptr || ranks->getSize() == 1) return;
      all_reduce(*ranks, launch, on_the_wire(sum), c10d::ReduceOp::SUM);
    };
    add_up(group_);
    if (part.defined()) sum.add_(part.reshape({1}));  // on a device: the lane's work is in order
    if (!reduction.early) add_up(replicas_);
    auto existing = gradients_.existing(p, reduction.early);
    reduced_.emplace_back(group[k], existing.defined() ? Tensor() : results[k]);
    launch.then([sum, existing, result = results[k]] {
      at::NoGradGuard no_grad;
      result.copy_(sum.squeeze(0));
      if (existing.defined()) existing.add_(result);
    });
  }
  launch.finish();
}

// ---- at the end of a backward, or of a window ----

// [Note: used flags] AdamW moves a parameter whose gradient is zero, not one whose gradient is None; and a rank must
// not skip a unit that others reduce. So every rank says which parameters have a gradient; only a rank that misses
// gradients asks what the others have. They say it through the store: a collective would run on the device after
// what the other ranks have queued, and that may wait for a reduction that this rank has still to start.

// Returns by parameter whether any rank has a gradient. `meanwhile`: what this rank can do before it asks; the others
// may wait for its word.
std::vector<char> Reductions::agree_on_used(const std::function<void()>& meanwhile) {
  begun_ = 0;
  std::string used(registry_.parameters().size(), kUnused);
  bool asks = false;
  for (size_t i = 0; i < registry_.parameters().size(); ++i) {
    const auto& p = record(i);
    const bool contributed = gradients_.of(p).contributed || gradients_.has_part(p);
    if (contributed) used[i] = p.cast_grad ? kUsed : letter_of(p, gradients_.dtype(p));
    asks = asks || (gradients_.trains(p) && !(contributed && p.cast_grad));
  }
  const bool alone = registry_.all_ranks() == 1 || questions_.unite == nullptr;
  if (!alone) questions_.unite(exchanges_, used, /*asks=*/false);
  meanwhile();
  while (!alone && asks) {
    auto answer = questions_.unite(exchanges_, used, /*asks=*/true);
    if (answer.empty() || answer.front() != kBegun) {
      used = std::move(answer);
      break;
    }
    launch_begun(begun_in(answer));
    meanwhile();
  }
  exchanges_ += 1;
  TORCH_CHECK(used.size() == registry_.parameters().size(),
              "zerocompile: the ranks have different numbers of parameters");
  TORCH_CHECK(std::all_of(used.begin(), used.end(), is_letter),
              text("zerocompile: the ranks say that they have the gradients `", used, "`, of which not all letters are ",
                   "known. Run the same version on all ranks"));
  for (size_t i = 0; i < registry_.parameters().size(); ++i) {
    const auto& p = record(i);
    if (p.cast_grad) continue;
    // Where no rank has a gradient, all reduce zeros in the parameter's dtype, whatever this rank has had before.
    gradients_.agree_on_dtype(p, used[i] >= kFirstDtype ? kGradDtypes.at(used[i] - kFirstDtype) : p.dtype);
  }
  std::vector<char> flags(used.size());
  std::transform(used.begin(), used.end(), flags.begin(), [](char c) { return c != kUnused; });
  return flags;
}

// [Note: merged reductions] Where a window closes no compute is left that could hide a reduction, and a small one costs
// the host more than the devices. So small units that follow each other are reduced together there, in runs of up to
// `merge_bytes_`. A run depends on sizes alone and is launched as a whole, or, when all ranks know what each of them
// has, without what nobody has: either way the collectives are the same on all ranks. Copies between devices take one
// unit at a time: their buffers are no larger.
std::vector<Reductions::Units> Reductions::runs(bool merged) const {
  std::vector<int64_t> units;
  for (auto index : order_) {
    if (trainable(registry_.units()[index])) units.push_back(index);
  }
  return registry_.runs_of(units, merged && peers_ == nullptr ? merge_bytes_ : -1, /*padded=*/false);
}

// Units of which this rank has a gradient are reduced whatever the others have. This ends at the first run with a unit
// of which this rank has no gradient, or whose dtypes the ranks have still to agree on.
void Reductions::launch_contributed(const std::vector<Units>& runs, bool partial) {
  for (const auto& run : runs) {
    std::vector<int64_t> units;
    for (auto index : run) {
      const auto& unit = registry_.units()[index];
      if (launched_[index]) continue;
      const bool any = std::any_of(unit.parameters.begin(), unit.parameters.end(),
                                   [&](int64_t i) { return gradients_.reducible(record(i)); });
      const bool agreed = std::all_of(unit.parameters.begin(), unit.parameters.end(), [&](int64_t i) {
        return record(i).cast_grad || !gradients_.trains(record(i));
      });
      if (!any || !agreed) return;
      units.push_back(index);
    }
    if (!units.empty()) launch(units, /*latest=*/{}, partial);
  }
}

// [Note: partial reductions] With replicas, what an accumulation reduces before its last backward stays the mean of one
// replica: each rank keeps its rows (`early`), in the memory that the reduced gradient would have. The last backward
// adds them to its own, and these are then summed over the replicas. So what crosses between replicas, mostly between
// hosts, is sent once in a step. Rows that a bounded window reduces wait in the same way for its end. Source:
// FSDP2's `set_requires_all_reduce`. On the CPU a reduction is of all ranks anyway ([Note: replicas]), and nothing is
// partial. A parameter that only an earlier backward has used counts as used ([Note: used flags]), so the sum over
// replicas is never left out. One that is frozen meanwhile is summed, too: see
// [Note: frozen in an accumulation].

// Reduces what any rank has, and binds the result, unless it is `partial`. `merged`: see [Note: merged reductions].
void Reductions::reduce_everything(bool partial, bool merged) {
  at::NoGradGuard no_grad;
  gradients_.follow_producers();
  agree_on_order();
  const auto order = runs(merged);
  const auto used = agree_on_used([&] { launch_contributed(order, partial); });
  for (const auto& run : order) {
    std::vector<int64_t> units;
    for (auto index : run) {
      const auto& unit = registry_.units()[index];
      bool wanted = false, late = false;
      for (auto i : unit.parameters) {
        const auto& p = record(i);
        wanted = wanted || (gradients_.trains(p) && used[i]);
        late = late || gradients_.reducible(p);
      }
      if (wanted && (!launched_[index] || late)) units.push_back(index);
    }
    if (!units.empty()) launch(units, /*latest=*/{}, partial);
  }
  if (may_be_late()) leave_in_flight();
  else retire(0);
  again_ = false;
  next_ = 0;
  launched_.assign(launched_.size(), false);
  untaken_.clear();
  taken_.assign(taken_.size(), false);
  retire_updates(0);
  gradients_.reduced_all(partial);
  if (partial) keep_reduced(used);
  else gradients_.bind(std::exchange(reduced_, {}), used);
}

// What was reduced early waits. A parameter that has a gradient on no rank (`used`) keeps None.
void Reductions::keep_reduced(const std::vector<char>& used) {
  for (auto& [index, rows] : std::exchange(reduced_, {})) {
    if (!used[index] || !rows.defined()) continue;
    gradients_.keep_early(record(index), rows, kept_dtype(record(index), /*early=*/false));
  }
}

// ---- what is on its way ----

// On the CPU it blocks until the reduction is done, on a device it orders the current stream after it.
void Reductions::await(Reduction& reduction) {
  const auto what = text("the reduction of unit `", registry_.names_of(reduction.units), "` in backward number ",
                         counts_.backwards);
  const auto look = questions_.look(what, "reduction", reduction.number);
  for (auto& done : reduction.done) wait_for(done, registry_.device(), what, registry_.global_rank(), look);
}

// [Note: gloo reductions] Gloo's waits block the host. A rank that waited inside its backward for the reduction of a
// unit could wait for one that misses gradients of it and waits for the used flags: so on the CPU only the end of a
// backward waits.
// `completed`: what is retired is done.
void Reductions::retire(size_t keep, bool completed) {
  if (registry_.device().is_cpu() && keep > 0 && !completed) return;
  while (in_flight_.size() > keep) {
    auto& oldest = in_flight_.front();
    if (!registry_.device().is_cpu() && !oldest.done.empty()) last_retired_ = oldest.done;
    if (gradients_.several_producers()) reserve(oldest);  // what it reads may be another stream's memory
    try {
      await(oldest);
    } catch (...) {  // nobody waits for it, or for those after it, again
      drop_in_flight();
      throw;
    }
    in_flight_.erase(in_flight_.begin());
  }
}

// After a failure. This rank waits for nobody, see [Note: abandoned communication].
void Reductions::drop_in_flight() {
  for (auto& reduction : in_flight_) {
    for (const auto& done : reduction.done) dropped_ = dropped_ || done.running();
    reserve(reduction);
  }
  in_flight_.clear();
}

// The memory that a reduction reads and writes is not used again before it is done, without anybody waiting.
void Reductions::reserve(const Reduction& reduction) {
  const auto keep = [&](const Tensor& tensor) {
    lane_.keep(tensor);
    replica_lane_.keep(tensor);
  };
  for (const auto& tensor : reduction.inputs) keep(tensor);
  for (auto unit : reduction.units) {
    for (auto i : registry_.units()[unit].parameters) keep(gradients_.existing(record(i), reduction.early));
  }
}

// The gradients are dropped: nothing that was launched counts any more.
void Reductions::forget() {
  launched_.assign(launched_.size(), false);
  taken_.assign(taken_.size(), false);
  untaken_.clear();
  retire_updates(0);
  reduced_.clear();
}

// [Note: reductions after a backward] On a device the last units' reductions end long after the last kernel of the
// backward, and the other units' update needs nothing of them. So they are left on their way. Whoever takes a unit's
// gradients orders its stream after them (`await_gradients`), and the optimizer does not begin with the units that the
// forward uses first, which are reduced last. Other code relies on the stream of the backward. So that stream is
// ordered, too: after what is retired when the backward ends, after what an optimizer takes then, and after all of them
// as soon as user code reads any gradient. A reduction is waited for at once if it adds to a gradient that is bound
// already, if hooks see its result, or if its unit is reduced in two parts.
bool Reductions::may_be_late() const {
  if (registry_.device().is_cpu() || again_) return false;
  if (gradients_.early_is_lent()) return false;
  return std::none_of(registry_.parameters().begin(), registry_.parameters().end(), [this](const Parameter& p) {
    const bool early = gradients_.of(p).early.defined() && !gradients_.has_part(p);
    return early || p.master.grad().defined() || has_hooks(p.master);
  });
}

void Reductions::leave_in_flight() {
  home_ = current_stream(registry_.device());
  // What was retired in the backward may have been so on another stream.
  for (const auto& done : last_retired_) done.order(*home_);
  for (auto& reduction : in_flight_) {
    reserve(reduction);  // what an earlier backward has left is added to, and may be dropped meanwhile
    if (reduction.in_graph) {  // `reserve` is nothing to the memory of a graph
      for (const auto& done : reduction.done) done.order(*home_);
    }
    reduction.inputs.clear();
  }
}

// Orders the current stream after what is on its way of this unit's reductions, or (-1) of all.
void Reductions::await_gradients(int64_t unit) {
  if (in_flight_.empty() || registry_.device().is_cpu()) return;
  const auto here = current_stream(registry_.device());
  for (auto& reduction : in_flight_) {
    const auto& units = reduction.units;
    if (unit >= 0 && std::find(units.begin(), units.end(), unit) == units.end()) continue;
    for (auto& done : reduction.done) {
      done.order(here);
      if (home_ && here != *home_) done.order(*home_);
    }
  }
}

// Somebody takes the gradients of these parameters.
void Reductions::await_gradients_of(const std::vector<int64_t>& parameters) {
  int64_t awaited = -1;
  for (auto index : parameters) {
    const auto unit = registry_.parameter(index).unit;
    if (unit != awaited) await_gradients(unit);
    awaited = unit;
  }
}

// A new backward, or a window's end, begins after what is still on its way.
void Reductions::await_all() {
  await_gradients(-1);
  retire(0);
}

}  // namespace zerocompile
