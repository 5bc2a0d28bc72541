#include "runtime.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>

#include "collectives.h"
#include "text.h"
#include "views.h"

namespace zerocompile {

namespace {

Place place_in(const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  return {group->getSize(), group->getRank()};
}

}  // namespace

Runtime::Runtime(const std::string& gather_group, const std::string& reduce_group, const std::string& replica_group,
                 Place all, c10::Device device)
    : device_(device),
      reduce_group_(c10d::resolve_process_group(reduce_group)),
      replica_group_(replica_group.empty() ? nullptr : c10d::resolve_process_group(replica_group)),
      group_name_(gather_group),
      registry_(device, place_in(gather_group), all),
      gathers_(registry_, questions_, c10d::resolve_process_group(gather_group)),
      divisor_(static_cast<double>(registry_.all_ranks())),
      reduce_lane_(device) {
  const int64_t reduced = reduce_group_->getSize() * (replica_group_ ? replica_group_->getSize() : 1);
  TORCH_CHECK(reduced == registry_.all_ranks(),
              text("zerocompile: the process groups of reductions have ", reduced, " ranks, not all ",
                   registry_.all_ranks()));
}

// ---- set-up and end ----

int64_t Runtime::add_parameter(ParameterSpec spec, Tensor master, Tensor local, Tensor handle) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto index = registry_.add_parameter(weak_from_this(), std::move(spec), std::move(master), std::move(local),
                                             std::move(handle));
  gathers_.add_parameter();
  gradients_.emplace_back();
  return index;
}

int64_t Runtime::add_unit(std::string name, std::vector<int64_t> members, Lifetime lifetime) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto index = registry_.add_unit(std::move(name), std::move(members), lifetime);
  gathers_.add_unit(index);
  unit_gradients_.resize(registry_.units().size());
  return index;
}

// `bind`, which runs users' hooks, may come back: nothing is half done then. The others may not: [Note: re-entry].
void Runtime::set_callbacks(std::function<void(std::vector<ReducedGrad>)> bind,
                            std::function<std::vector<int64_t>(std::vector<int64_t>)> agree,
                            std::function<std::string(int64_t, std::string)> compare,
                            std::function<std::string(int64_t, std::string, bool)> unite,
                            std::function<void(std::string, std::string, int64_t)> waiting) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  bind_ = std::move(bind);
  questions_.set(std::move(agree), std::move(compare), std::move(unite), std::move(waiting));
}

void Runtime::set_outside(std::function<void(std::string)> outside) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  questions_.set_outside(std::move(outside));
}

void Runtime::set_in_step(bool in_step) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  questions_.in_step = in_step;
}

void Runtime::check_entry(const char* what) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  questions_.check_entry(what, registry_.global_rank());
}

int64_t Runtime::peer_bytes() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.peer_bytes();
}

void Runtime::set_peers(const Tensor& buffer, int64_t timeout_ms) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  gathers_.set_peers(std::make_unique<PeerMemory>(buffer, group_name_, kernels_, timeout_ms));
}

void Runtime::set_kernels(const std::string& code) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  kernels_ = std::make_shared<Kernels>(code, device_);
}

// Bytes of a half: what the other ranks send of the usual unit's gradients. 0: kernels cannot sum them.
int64_t Runtime::summing_peer_bytes() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto& units = registry_.units();
  const auto usual = std::find_if(units.begin(), units.end(),
                                  [&](const Unit& u) { return u.sent == registry_.usual_bytes(); });
  if (kernels_ == nullptr || usual == units.end() || registry_.world() - 1 > Kernels::kPeers) return 0;
  int64_t bytes = 0;
  for (auto i : usual->parameters) {
    const auto& p = record(i);
    const bool summed = p.cast_grad && p.reduce_dtype.value_or(p.grad_dtype) == at::kBFloat16 &&
                        p.bound_dtype == at::kFloat && !p.replicated;
    if (summed) bytes += registry_.sent_bytes(p, at::kBFloat16);
  }
  return bytes * (registry_.world() - 1);
}

void Runtime::set_summing_peers(const Tensor& buffer, int64_t timeout_ms) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  TORCH_CHECK(replica_group_ == nullptr, "zerocompile: copies between devices reduce inside one replica only");
  summing_peers_ = std::make_unique<PeerMemory>(buffer, group_name_, kernels_, timeout_ms);
}

void Runtime::set_gradient_divisor(double divisor) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  divisor_ = divisor;
}

void Runtime::set_prefetch(int64_t distance) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.set_prefetch(distance);
}

void Runtime::set_merge_bytes(int64_t bytes) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  merge_bytes_ = bytes;
  gathers_.set_merge_bytes(bytes);
}

void Runtime::set_copies_gradients(bool copies) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  copies_gradients_ = copies;
}

// Waits for everything that is on its way.
void Runtime::settle() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.settle();
  retire(0);
}

void Runtime::await(Reduction& reduction) {
  const auto what = text("the reduction of unit `", registry_.names_of(reduction.units), "` in backward number ",
                         stats_.backwards);
  const auto look = questions_.look(what, "reduction", reduction.number);
  for (auto& done : reduction.done) wait_for(done, device_, what, registry_.global_rank(), look);
}

// [Note: abandoned communication] After a failure this rank waits for nobody: another may have failed before it came to
// what is on its way here. Gloo's works hold their tensors until they end, and on a device the memory stays reserved
// until the lane is done. What would block when it is destroyed (gloo's group waits for its works; peers' memory for
// the device) is left to the end of the process.
void Runtime::drop_in_flight() {
  drop_reductions();
  if (!reductions_dropped_) return;
  (void)summing_peers_.release();
  if (device_.is_cpu()) (void)reduce_group_.release();
}

// [Note: shutdown] The process group must not be kept alive by this object: a group that is destroyed while somebody
// holds it aborts the process at exit. After shutdown every use of a parameter raises.
void Runtime::shutdown(bool wait) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (registry_.is_shut_down()) return;
  if (wait) settle();
  gathers_.abandon(/*devices_too=*/!wait);
  drop_in_flight();
  if (!wait) (void)summing_peers_.release();  // what was awaited may still wait on the device
  registry_.shut_down();
  gathers_.clear();
  gradients_.clear();
  unit_gradients_.clear();
  reduced_.clear();
  bind_ = nullptr;
  questions_.clear();
  summing_peers_.reset();
  kernels_.reset();
  reduce_group_.reset();
  replica_group_.reset();
}

// ---- gathered values ----

// A use begins, in a forward or in a backward.
Phase Runtime::begin_use() {
  registry_.check_running();
  questions_.check_entry("gather", registry_.global_rank());
  abort_failed_backward();
  const auto now = phase();
  if (now == Phase::Backward) arm();
  return now;
}

Tensor Runtime::resident_value(int64_t parameter) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.resident_value(parameter);
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

// What the masters do not hold any more is gathered anew, by all ranks at once.
void Runtime::refresh(const std::vector<int64_t>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  abort_failed_backward();
  gathers_.refresh(units);
}

// A region begins and ends. Both return how often a parameter was read outside of graphs.
int64_t Runtime::enter(const std::vector<int64_t>& units, bool trusted) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  for (auto index : units) (void)registry_.unit(index);  // there is one
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
  if (expects_grad && now != Phase::Backward) now = Phase::Forward;  // autograd disables grad mode inside its functions
  gathers_.need(parameters, dtypes, now);
  if (!expects_grad || now != Phase::Forward) return;
  for (auto i : parameters) {
    if (record(i).master.requires_grad()) gradients_[i].graph_outstanding += 1;
  }
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

// All units, in the order of their first use in rank 0's forward; before any backward in the order of the model.
std::vector<int64_t> Runtime::unit_order() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<int64_t> order(reduce_order_.rbegin(), reduce_order_.rend());
  for (int64_t index = 0; order.size() < registry_.units().size(); ++index) order.push_back(index);
  return order;
}

void Runtime::masters_changed(const std::vector<int64_t>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  registry_.check_running();
  gathers_.masters_changed(units, unit_order());
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
  for (auto index : units) (void)registry_.unit(index);  // there is one
  abort_failed_backward();
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

std::string Runtime::asked() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.asked();
}

void Runtime::gather_low(const std::vector<int64_t>& parameters, at::ScalarType dtype) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gathers_.gather_low(parameters, dtype);
}

std::string Runtime::gathered_so_far() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return gathers_.so_far();
}

// ---- identity, and counts ----

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

bool Runtime::deferred() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return deferred_;
}

bool Runtime::pending() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return pending_;
}

Stats Runtime::stats() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto stats = stats_;
  static_cast<GatherCounts&>(stats) = gathers_.counts();
  return stats;
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
