#include "runtime.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "text.h"

namespace zerocompile {

namespace {

Place place_in(const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  return {group->getSize(), group->getRank()};
}

}  // namespace

Runtime::Runtime(const std::string& gather_group, const std::string& reduce_group, const std::string& replica_group,
                 const std::string& inner_group, Place all, c10::Device device)
    : group_name_(gather_group),
      registry_(device, place_in(gather_group), all),
      gathers_(registry_, questions_, c10d::resolve_process_group(gather_group),
               inner_group.empty() ? nullptr : c10d::resolve_process_group(inner_group)),
      gradients_(registry_),
      reductions_(registry_, questions_, gathers_.order(), gradients_, c10d::resolve_process_group(reduce_group),
                  replica_group.empty() ? nullptr : c10d::resolve_process_group(replica_group)),
      backward_(registry_, gathers_, gradients_, reductions_,
                [this] {
                  return [weak = weak_from_this()] {
                    if (auto self = weak.lock()) self->end_of_task();
                  };
                }),
      window_(registry_, gathers_, gradients_, reductions_, backward_) {}

// ---- set-up and end ----

int64_t Runtime::add_parameter(ParameterSpec spec, Tensor master, Tensor local, Tensor handle) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto index = registry_.add_parameter(weak_from_this(), std::move(spec), std::move(master), std::move(local),
                                             std::move(handle));
  gathers_.add_parameter();
  gradients_.add_parameter();
  return index;
}

int64_t Runtime::add_unit(std::string name, std::vector<int64_t> members, Lifetime lifetime) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto index = registry_.add_unit(std::move(name), std::move(members), lifetime);
  gathers_.add_unit(index);
  gradients_.add_unit();
  reductions_.add_unit();
  return index;
}

// `bind` runs users' hooks, and these may call the runtime again: nothing is half done then. From inside the other
// functions nothing that changes the runtime may be called: see [Note: re-entry].
void Runtime::set_callbacks(std::function<void(std::vector<ReducedGrad>)> bind,
                            std::function<std::vector<int64_t>(std::vector<int64_t>)> agree,
                            std::function<std::string(int64_t, std::string)> compare,
                            std::function<std::string(int64_t, std::string, bool)> unite,
                            std::function<void(std::string, std::string, int64_t)> waiting,
                            std::function<void(std::string)> failed) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gradients_.set_bind(std::move(bind));
  questions_.set(std::move(agree), std::move(compare), std::move(unite), std::move(waiting), std::move(failed));
}

void Runtime::set_update(std::function<void(std::vector<int64_t>)> update) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  backward_.set_update(std::move(update));
}

void Runtime::set_updates(bool updates) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  backward_.set_updates(updates);
}

void Runtime::set_outside(std::function<void(std::string)> outside) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  questions_.set_outside(std::move(outside));
}

void Runtime::set_turns(std::function<std::string(std::string)> take, std::function<std::string(std::string)> arrive,
                        std::function<std::string(std::string)> fail) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  questions_.set_turns(std::move(take), std::move(arrive), std::move(fail));
}

void Runtime::set_in_step(bool in_step) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  questions_.in_step = in_step;
}

void Runtime::set_evaluates(bool evaluates) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  questions_.evaluates = evaluates;
}

void Runtime::check_entry(const char* what) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  questions_.check_entry(what, registry_.global_rank());
}

int64_t Runtime::peer_bytes() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.peer_bytes();
}

void Runtime::set_peers(const Tensor& buffer, std::shared_ptr<DeviceBarriers> barriers, int64_t timeout_ms) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  gathers_.set_peers(std::make_unique<PeerMemory>(buffer, std::move(barriers), group_name_, kernels_, timeout_ms));
}

// How much memory `keep_casts` needs, see [Note: kept casts]. `low`: parameters of float32 may be gathered in a lower
// dtype.
int64_t Runtime::kept_cast_bytes(bool low) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.kept_bytes(low);
}

void Runtime::keep_casts(const Tensor& buffer, bool low) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  gathers_.keep_casts(buffer, group_name_, low);
}

// `batches`: see [Note: batched copies].
void Runtime::set_kernels(const std::string& path, bool batches) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  kernels_ = std::make_shared<const Kernels>(path, registry_.device(), batches);
}

// How much memory `set_summing_peers` needs for a half; 0: no gradient can be summed there.
int64_t Runtime::summing_peer_bytes() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return reductions_.peer_bytes();
}

void Runtime::set_summing_peers(const Tensor& buffer, std::shared_ptr<DeviceBarriers> barriers, int64_t timeout_ms) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  reductions_.check_peers();
  reductions_.set_peers(std::make_unique<PeerMemory>(buffer, std::move(barriers), group_name_, kernels_, timeout_ms));
}

// Whether the shard group, and the inner group, have ranks on several hosts: see [Note: flat collectives].
void Runtime::set_spans_hosts(bool shards, bool inner) {
  const std::lock_guard lock(mutex_);
  const auto packing = [](bool spans) { return spans ? Packing::Flat : Packing::Each; };
  gathers_.set_packing(packing(shards), packing(inner));
  reductions_.set_packing(packing(shards));
}

void Runtime::set_prefetch(int64_t distance) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.set_prefetch(distance);
}

void Runtime::set_merge_bytes(int64_t bytes) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.set_merge_bytes(bytes);
  reductions_.set_merge_bytes(bytes);
}

void Runtime::set_cuda_graphs(bool graphs) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gradients_.set_graphs(graphs);
}

// [Note: abandoned communication] After a failure this rank waits for nobody: another may have failed before it came to
// what is on its way here. Gloo's works hold their tensors until they end, and on a device the memory stays reserved
// until the lane is done. What would block when it is destroyed (gloo's group waits for its works; peers' memory for
// the device) is left to the end of the process.

// [Note: shutdown] This object must not keep a process group alive: a group that is destroyed while somebody holds it
// aborts the process at exit. After shutdown every use of a parameter raises.
void Runtime::shutdown(bool wait) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (registry_.is_shut_down()) return;
  if (wait) {
    gathers_.settle();
    reductions_.settle();
  }
  gathers_.abandon(/*devices_too=*/!wait);
  reductions_.abandon(/*devices_too=*/!wait);
  registry_.shut_down();
  gathers_.clear();
  gradients_.clear();
  questions_.clear();
  backward_.set_update(nullptr);
  reductions_.clear();
  kernels_.reset();
}

// ---- gathered values ----

// A use begins, in a forward or in a backward: what was left by a backward that failed is dropped first.
Phase Runtime::begin_use() {
  registry_.check_running();
  questions_.check_entry("gather", registry_.global_rank());
  backward_.abort_failed();
  const auto now = phase();
  if (now == Phase::Backward) backward_.arm();
  return now;
}

Tensor Runtime::resident_value(int64_t parameter) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.resident_value(parameter);
}

void Runtime::fix_places(const std::vector<std::vector<int64_t>>& parameters, int64_t count) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  gathers_.fix_places(parameters, count);
}

Tensor Runtime::fixed_value(int64_t parameter) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.fixed_value(parameter);
}

Tensor Runtime::read(int64_t parameter, std::optional<at::ScalarType> cast) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  begin_use();
  return gathers_.read(parameter, cast);
}

Tensor Runtime::value_in_backward(int64_t parameter) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  begin_use();
  return gathers_.value_in_backward(parameter);
}

// Values that differ from the masters by now are gathered anew, by all ranks at once.
void Runtime::refresh(const std::vector<int64_t>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  backward_.abort_failed();
  gathers_.refresh(units);
}

// A region begins and ends. Both return how often a parameter was read outside of graphs.
int64_t Runtime::enter(const std::vector<int64_t>& units, bool trusted) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  for (auto index : units) (void)registry_.unit(index);  // raises if there is none
  if (!units.empty()) begin_use();
  gathers_.enter(units, trusted);
  return gathers_.counts().eager_reads;
}

int64_t Runtime::leave(const std::vector<int64_t>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.leave(units);
  return gathers_.counts().eager_reads;
}

// A graph needs values from here on. Those that live for one use stay gathered until its `release`.
void Runtime::need(const std::vector<int64_t>& parameters, const std::vector<at::ScalarType>& dtypes,
                   bool expects_grad) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto now = begin_use();
  // Autograd disables grad mode inside its functions, so that mode does not tell here.
  if (expects_grad && now != Phase::Backward) now = Phase::Forward;
  gathers_.need(parameters, dtypes, now);
  if (expects_grad && now == Phase::Forward) gradients_.expect_from_graph(parameters);
}

std::vector<Tensor> Runtime::use(const std::vector<int64_t>& parameters, const std::vector<at::ScalarType>& dtypes,
                                 bool expects_grad) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  need(parameters, dtypes, expects_grad);
  return gathers_.values(parameters, dtypes);
}

void Runtime::release(const std::vector<int64_t>& parameters, bool last) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.release(parameters, last);
}

void Runtime::end_forward(bool raised) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.end_forward(raised);
}

void Runtime::write_back() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.write_back();
}

void Runtime::write_back_parameter(int64_t parameter) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.write_back_parameter(parameter);
}

void Runtime::disown_values(int64_t parameter) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.disown_values(parameter);
}

std::vector<int64_t> Runtime::unit_order() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return reductions_.unit_order();
}

void Runtime::masters_changed(const std::vector<int64_t>& units, const std::vector<int64_t>& placed) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  gathers_.masters_changed(units, reductions_.unit_order(), placed);
}

std::vector<std::tuple<int64_t, std::optional<Tensor>, std::optional<Tensor>>> Runtime::place(
    const std::vector<int64_t>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  std::vector<std::tuple<int64_t, std::optional<Tensor>, std::optional<Tensor>>> places;
  for (auto& [parameter, place] : gathers_.place(units, reductions_.unit_order())) {
    places.emplace_back(parameter, std::move(place.own), std::move(place.staged));
  }
  return places;
}

void Runtime::meet_readers() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  gathers_.meet_readers();
}

void Runtime::masters_written(const std::vector<int64_t>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  gathers_.masters_written(units);
  reductions_.updated();
}

void Runtime::set_rows(int64_t parameter, Tensor local, std::optional<Tensor> host, bool shown) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.set_rows(parameter, std::move(local), std::move(host).value_or(Tensor()), shown);
}

void Runtime::follow_gathers(const std::vector<int64_t>& units) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.follow(units);
}

void Runtime::hold() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  gathers_.hold();
}

void Runtime::let_go(bool raised) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.let_go(raised);
}

void Runtime::keep(int64_t unit) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.keep(unit);
}

void Runtime::lend(const std::vector<int64_t>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto index : units) (void)registry_.unit(index);  // raises if there is none
  backward_.abort_failed();
  gathers_.lend(units);
}

Tensor Runtime::lent_value(int64_t parameter) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.lent_value(parameter);
}

void Runtime::take_back(const std::vector<int64_t>& units, bool keep, bool together) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.take_back(units, keep, together);
}

std::string Runtime::lent_unit() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.lent_unit();
}

void Runtime::come_apart(std::function<void()> meet) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!registry_.is_shut_down()) gathers_.come_apart(std::move(meet));
}

void Runtime::begin_unequal() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  backward_.abort_failed();
  gathers_.begin_unequal();
}

void Runtime::end_unequal(bool raised) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.end_unequal(raised);
}

bool Runtime::unequal() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.unequal();
}

void Runtime::meet_others(const std::string& what) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  gathers_.meet_others(what);
}

void Runtime::tell_failure(const std::string& why) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!registry_.is_shut_down()) gathers_.tell_failure(why);
}

std::string Runtime::asked() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.asked();
}

void Runtime::gather_low(const std::vector<int64_t>& parameters, at::ScalarType dtype) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.gather_low(parameters, dtype);
}

void Runtime::read_as_float8(int64_t parameter, bool power_of_two) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.read_as_float8(parameter, power_of_two);
}

Tensor Runtime::float8_scale(int64_t parameter) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.float8_scale(parameter);
}

std::string Runtime::gathered_so_far() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.so_far();
}

// ---- a backward, and its gradients ----

void Runtime::contribute(const std::vector<int64_t>& parameters, at::TensorList grads, bool from_graph, bool shared) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  backward_.contribute(parameters, grads, from_graph, shared);
}

// [Note: entry of backward] Whether a backward reads weights differs between a graph, which may recompute, and eager
// code. So reads do not decide when the units of a region are gathered for its backward. The first gradient of one of
// the region's results does, on every rank. `compiled`: the region's name, if it is a graph.
void Runtime::watch_backward(const Tensor& result, std::vector<int64_t> units, std::string compiled) {
  at_backward_of(result, [weak = weak_from_this(), units = std::move(units), compiled = std::move(compiled)] {
    if (auto self = weak.lock()) self->enter_backward(units, compiled);
  });
}

void Runtime::enter_backward(const std::vector<int64_t>& units, const std::string& compiled) {
  TORCH_CHECK(compiled.empty() || !at::GradMode::is_enabled(),
              text("backward with `create_graph=True` through the compiled module `", compiled,
                   "`: compiled graphs have no second derivative. Use ZeroCompileStrategy(compile=False)."));
  enter(units, /*trusted=*/false);
  leave(units);
}

void Runtime::arm() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  backward_.arm();
}

// Autograd's engine calls it.
void Runtime::end_of_task() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  backward_.task_ended();
}

void Runtime::finish_ended_backward() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  backward_.finish_ended();
}

void Runtime::check_backward_ended() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  backward_.check_ended();
}

void Runtime::backward_raised() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  backward_.raised();
}

void Runtime::drop_failed_backward() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  backward_.drop_failed();
}

void Runtime::drop_gradients() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  backward_.drop_gradients();
}

// Rank 0's order, for ranks that are in a backward while rank 0 is at a window's end without one.
void Runtime::publish_order() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (registry_.global_rank() == 0) reductions_.agree_on_order();
}

// A new step begins. Only a forward whose backward never came can still find its parameters modified.
void Runtime::forget_outstanding() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (const auto& p : registry_.parameters()) {
    if (!gradients_.forget_outstanding(p)) gathers_.forget_forward(p.index);
  }
}

Count Runtime::outstanding_reads(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gradients_.outstanding_reads(registry_.parameter(index).index);
}

// What each use's gradient is cast to; none: nothing.
std::optional<at::ScalarType> Runtime::grad_dtype(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto& p = registry_.parameter(index);
  return p.cast_grad ? std::optional(p.grad_dtype) : std::nullopt;
}

void Runtime::bound(int64_t index, const Tensor& outer, const Tensor& local) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gradients_.bound(registry_.parameter(index), outer, local);
}

std::vector<int64_t> Runtime::lend_gradients(const std::vector<int64_t>& parameters,
                                             const std::vector<Tensor>& values) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  reductions_.await_gradients_of(parameters);
  return gradients_.lend(parameters, values);
}

void Runtime::release_gradients(const std::vector<int64_t>& parameters, const std::vector<Tensor>& values) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gradients_.release(parameters, values);
}

bool Runtime::any_other_dtype() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gradients_.any_other_dtype();
}

// ---- windows and accumulations ----

void Runtime::set_deferred(bool deferred) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  window_.set_deferred(deferred);
}

void Runtime::set_partial(bool partial) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  window_.set_partial(partial);
}

void Runtime::set_window(std::optional<at::ScalarType> sum_dtype, int64_t max_bytes, std::function<void()> reached) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gradients_.set_sum_dtype(sum_dtype);
  window_.set_bound(max_bytes, std::move(reached));
}

bool Runtime::deferred() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gradients_.deferred();
}

bool Runtime::pending() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gradients_.pending();
}

void Runtime::flush() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  window_.flush();
}

std::pair<Tensor, Unbound> Runtime::unbound_gradient(int64_t index, bool waiting) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return window_.unbound_gradient(index, waiting);
}

// False: `grad` of this master is None. Optimizers and `zero_grad` ask each parameter, mostly when there is none.
bool Runtime::may_have_gradient(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (registry_.is_shut_down() || questions_.asking() || backward_.running() || gradients_.pending()) return true;
  const auto& p = registry_.parameter(index);
  return gradients_.of(p).unread.defined() || gradients_.of(p).waits() || p.master.grad().defined();
}

void Runtime::drop_gradient(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  window_.drop_gradient(index);
}

void Runtime::drop_waiting(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  window_.drop_waiting(index);
}

int64_t Runtime::deferred_bytes() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gradients_.waiting_bytes();
}

// ---- identity, and counts ----

// Which of these parameters' masters require grad now.
std::vector<bool> Runtime::trainable(const std::vector<int64_t>& parameters) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<bool> found;
  found.reserve(parameters.size());
  for (auto index : parameters) found.push_back(registry_.parameter(index).master.requires_grad());
  return found;
}

int64_t Runtime::identity(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return registry_.parameter(index).identity;
}

std::string Runtime::parameter_name(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return registry_.parameter(index).name;
}

int64_t Runtime::seen_version(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.seen_version(index);
}

void Runtime::forward_saw(int64_t index, int64_t version) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.forward_saw(registry_.parameter(index).index, version);
}

int64_t Runtime::parameter_of(const Tensor& value) const {
  if (!value.has_storage()) return -1;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.parameter_of(value);
}

int64_t Runtime::parameter_of_handle(const Tensor& tensor) const {
  if (!tensor.device().is_cpu() || tensor.scalar_type() != at::kDouble || !tensor.has_storage()) return -1;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return registry_.parameter_of_handle(tensor);
}

Stats Runtime::stats() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return {gathers_.counts(), reductions_.counts(), gradients_.counts()};
}

int64_t Runtime::eager_reads_of(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.unit(registry_.unit(index).index).eager_reads;
}

std::pair<int64_t, int64_t> Runtime::gathers_of(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto& unit = gathers_.unit(registry_.unit(index).index);
  return {unit.gathers, unit.gather_bytes};
}

std::vector<std::string> Runtime::resident_units() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.resident_units();
}

}  // namespace zerocompile
