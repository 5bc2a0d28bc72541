#include "runtime.h"
#include "text.h"
#include "views.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <exception>

namespace zerocompile {

namespace {

struct Table {
  std::mutex mutex;
  int64_t next = 1;
  std::unordered_map<int64_t, std::pair<std::weak_ptr<Runtime>, int64_t>> records;
};

Table& table() {
  static Table* instance = new Table();  // never destroyed: autograd nodes may outlive static destruction
  return *instance;
}

}  // namespace

Record find(const Tensor& handle) {
  TORCH_CHECK(handle.device().is_cpu() && handle.scalar_type() == at::kDouble && handle.numel() == 1,
              text("zerocompile: a handle is a float64 CPU tensor of one element, got ", handle.toString(), " of ",
                   handle.numel(), " elements"));
  const auto identity = static_cast<int64_t>(*handle.const_data_ptr<double>());
  auto& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto found = t.records.find(identity);
  TORCH_CHECK(found != t.records.end(),
              text("zerocompile: no parameter has the identity ", identity,
                   ". Its strategy was torn down: set the model up again before using it"));
  auto runtime = found->second.first.lock();
  TORCH_CHECK(runtime != nullptr,
              text("zerocompile: the runtime of parameter ", identity, " is gone"));
  return {std::move(runtime), found->second.second};
}

int64_t new_identity(const std::weak_ptr<Runtime>& runtime, int64_t parameter) {
  auto& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.records.emplace(t.next, std::make_pair(runtime, parameter));
  return t.next++;
}

void forget_identity(int64_t identity) {
  auto& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.records.erase(identity);
}

Runtime::Runtime(const std::string& gather_group, const std::string& reduce_group, c10::Device device)
    : device_(device),
      gather_group_(c10d::resolve_process_group(gather_group)),
      reduce_group_(c10d::resolve_process_group(reduce_group)),
      world_(gather_group_->getSize()),
      rank_(gather_group_->getRank()),
      divisor_(static_cast<double>(world_)),
      gather_lane_(device),
      reduce_lane_(device) {}

Runtime::~Runtime() {
  for (auto& p : parameters_) forget_identity(p.identity);
}

// Bytes of a half: of one rank's rows of the usual unit, or of a run of small ones ([Note: merged gathers]). What does
// not fit (an embedding, a head) goes through the process group.
int64_t Runtime::peer_bytes() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (usual_bytes_ == 0) return 0;
  int64_t all = 0;
  for (const auto& unit : units_) all += unit.sent;
  return std::max(usual_bytes_, std::min(all, merge_bytes_ / world_));
}

void Runtime::set_peers(const Tensor& buffer, int64_t timeout_ms) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check_running();
  peers_ = std::make_unique<PeerMemory>(buffer, gather_group_->getGroupName(), kernels_, timeout_ms);
}

void Runtime::set_kernels(const std::string& code) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  kernels_ = std::make_shared<Kernels>(code, device_);
}

// Bytes of a half: what the other ranks send of the usual unit's gradients. 0: kernels cannot sum them.
int64_t Runtime::summing_peer_bytes() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto usual = std::find_if(units_.begin(), units_.end(), [&](const Unit& u) { return u.sent == usual_bytes_; });
  if (kernels_ == nullptr || usual == units_.end() || world_ - 1 > Kernels::kPeers) return 0;
  int64_t bytes = 0;
  for (auto i : usual->parameters) {
    const auto& p = parameters_[i];
    const bool summed = p.cast_grad && p.reduce_dtype.value_or(p.grad_dtype) == at::kBFloat16 &&
                        p.bound_dtype == at::kFloat && !p.replicated;
    if (summed) bytes += sent_bytes(p, at::kBFloat16);
  }
  return bytes * (world_ - 1);
}

void Runtime::set_summing_peers(const Tensor& buffer, int64_t timeout_ms) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check_running();
  summing_peers_ = std::make_unique<PeerMemory>(buffer, gather_group_->getGroupName(), kernels_, timeout_ms);
}

// Waits for everything that is on its way.
void Runtime::settle() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto& u : units_) await(u);
  retire(0);
}

namespace {

[[noreturn]] void fail(const std::string& what, int64_t rank, const std::string& why) {
  TORCH_CHECK(false, text("zerocompile: ", what, " failed on rank ", rank, ": ", why));
}

// `look` may raise, which ends the wait with that; null: there is nothing to look at.
void wait_for(Pending& pending, c10::Device device, const std::string& what, int64_t rank,
              const std::function<void()>& look) {
  std::exception_ptr raised;
  std::function<bool()> goes_on;
  if (look != nullptr) {
    goes_on = [&] {
      try {
        look();
      } catch (...) {
        raised = std::current_exception();
      }
      return raised == nullptr;
    };
  }
  try {
    pending.wait(device, goes_on);
  } catch (const c10::Error& error) {
    fail(what, rank, error.what_without_backtrace());
  } catch (const std::exception& error) {  // gloo's
    fail(what, rank, error.what());
  }
  if (raised != nullptr) std::rethrow_exception(raised);
}

}  // namespace

// Waits for the unit's gather, which fails with a message that names it. On the CPU this rank looks about once a second
// (`waiting_`) whether the others still come: one may have died, or have failed in a window that this rank is still in.
void Runtime::await(Unit& unit) {
  static const char* const names[] = {"forward", "backward"};
  if (!unit.gathering.any()) return;
  const auto what = text("the gather of unit `", unit.name, "` in ", names[unit.gathered_in]);
  wait_for(unit.gathering, device_, what, rank_, waiting_);
}

void Runtime::await(Reduction& reduction) {
  const auto what = text("the reduction of unit `", names_of(reduction.units), "` in backward number ",
                         stats_.backwards);
  for (auto& done : reduction.done) wait_for(done, device_, what, rank_, nullptr);
}

// [Note: abandoned communication] After a failure this rank waits for nobody: another may have failed before it came to
// what is on its way here. Gloo's works hold their tensors until they end, and on a device the memory stays reserved
// until the lane is done. What would block when it is destroyed (gloo's group waits for its works; peers' memory for
// the device) is left to the end of the process.
void Runtime::drop_in_flight() {
  bool gathers = false;
  for (auto& u : units_) {
    if (!u.gathering.running()) continue;
    gathers = true;
    for (auto i : u.parameters) {
      gather_lane_.keep(parameters_[i].full);
      gather_lane_.keep(parameters_[i].local);
    }
    u.gathering.drop();
  }
  drop_reductions();
  if (gathers) (void)peers_.release();
  if (reductions_dropped_) (void)summing_peers_.release();
  if (!device_.is_cpu()) return;
  if (gathers) (void)gather_group_.release();
  if (reductions_dropped_) (void)reduce_group_.release();
}

// [Note: shutdown] The process group must not be kept alive by this object: a group that is destroyed while somebody
// holds it aborts the process at exit. After shutdown every use of a parameter raises.
void Runtime::shutdown(bool wait) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (shut_down_) return;
  if (wait) settle();
  shut_down_ = true;
  if (!wait) {  // what was awaited may still wait on the device
    (void)peers_.release();
    (void)summing_peers_.release();
  }
  drop_in_flight();
  for (auto& p : parameters_) forget_identity(p.identity);
  parameters_.clear();
  units_.clear();
  by_storage_.clear();
  by_handle_.clear();
  reduced_.clear();
  bind_ = nullptr;
  agree_ = nullptr;
  compare_ = nullptr;
  unite_ = nullptr;
  waiting_ = nullptr;
  meet_ = nullptr;
  peers_.reset();
  summing_peers_.reset();
  kernels_.reset();
  gather_group_.reset();
  reduce_group_.reset();
}

int64_t Runtime::add_parameter(ParameterSpec spec, Tensor master, Tensor local, Tensor handle) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check_running();
  const auto index = static_cast<int64_t>(parameters_.size());
  Parameter p;
  static_cast<ParameterSpec&>(p) = std::move(spec);
  p.replicated = p.size.empty();
  p.rows = p.replicated ? 1 : (p.size[0] + world_ - 1) / world_;
  TORCH_CHECK(local.device().type() == device_.type(),
              text("zerocompile: parameter `", p.name, "` is on ", local.device(),
                   " but the strategy runs on ", device_));
  const int64_t first = std::min(rank_ * p.rows, p.replicated ? 0 : p.size[0]);
  const int64_t expected = p.replicated ? 0 : std::min(p.rows, p.size[0] - first);
  TORCH_CHECK(p.replicated || (local.dim() > 0 && local.size(0) == expected),
              text("zerocompile: the shard of `", p.name,
                   "` must hold ", expected, " rows on rank ", rank_, ", got a tensor of sizes ", local.sizes()));
  p.master = std::move(master);
  p.local = std::move(local);
  p.identity = new_identity(weak_from_this(), index);
  handle.fill_(static_cast<double>(p.identity));
  p.handle = std::move(handle);
  by_handle_[p.handle.storage().unsafeGetStorageImpl()] = index;
  parameters_.push_back(std::move(p));
  return index;
}

int64_t Runtime::add_unit(std::string name, std::vector<int64_t> members, Lifetime lifetime) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check_running();
  const auto index = static_cast<int64_t>(units_.size());
  Unit unit;
  unit.name = std::move(name);
  unit.lifetime = lifetime;
  for (auto i : members) {
    auto& p = parameter(i);
    TORCH_CHECK(p.unit < 0,
                text("zerocompile: parameter `", p.name, "` is in two units"));
    if (lifetime == Lifetime::Step) allocate(p, p.dtype);
  }
  for (auto i : members) parameters_[i].unit = index;
  unit.parameters = std::move(members);
  unit.sent = sent_bytes(unit);
  units_.push_back(std::move(unit));
  seen_forward_.push_back(0);
  const auto sent = units_.back().sent, count = ++units_by_bytes_[sent];
  const auto usual = std::pair(usual_bytes_ > 0 ? units_by_bytes_[usual_bytes_] : 0, usual_bytes_);
  if (sent > 0 && std::pair(count, sent) > usual) usual_bytes_ = sent;
  return index;
}

// Of its full values in the model's dtypes.
int64_t Runtime::full_bytes(const Unit& unit) const {
  int64_t bytes = 0;
  for (auto i : unit.parameters) {
    const auto& p = parameters_[i];
    bytes += c10::multiply_integers(p.size) * static_cast<int64_t>(c10::elementSize(p.dtype));
  }
  return bytes;
}

int64_t Runtime::sent_bytes(const Unit& unit) const {
  int64_t bytes = 0;
  for (auto i : unit.parameters) {
    if (!parameters_[i].replicated) bytes += sent_bytes(parameters_[i], parameters_[i].dtype);
  }
  return bytes;
}

int64_t Runtime::sent_bytes(const Parameter& p, at::ScalarType dtype) const {
  const auto rows = c10::multiply_integers(padded_size(p)) / world_;
  return (rows * static_cast<int64_t>(c10::elementSize(dtype)) + 511) / 512 * 512;
}

namespace {

// `flag` is set while the function runs.
template <typename Result, typename... Arguments>
std::function<Result(Arguments...)> flagged(std::function<Result(Arguments...)> function, bool& flag) {
  if (function == nullptr) return nullptr;
  return [function = std::move(function), &flag](Arguments... arguments) {
    struct Running {
      explicit Running(bool& flag) : flag(flag) { flag = true; }
      ~Running() { flag = false; }
      bool& flag;
    };
    const Running running(flag);
    return function(std::move(arguments)...);
  };
}

}  // namespace

void Runtime::set_callbacks(std::function<void(std::vector<ReducedGrad>)> bind,
                            std::function<std::vector<int64_t>(std::vector<int64_t>)> agree,
                            std::function<std::string(int64_t, std::string)> compare,
                            std::function<std::string(int64_t, std::string, bool)> unite,
                            std::function<void()> waiting) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  bind_ = std::move(bind);
  agree_ = flagged(std::move(agree), asking_);
  compare_ = flagged(std::move(compare), asking_);
  unite_ = flagged(std::move(unite), asking_);
  waiting_ = flagged(std::move(waiting), asking_);
}

// [Note: re-entry] What asks the other ranks (`agree_`, `compare_`, `unite_`, `waiting_`) is Python code, in the middle of
// a gather or of a reduction, with our mutex held. Python runs signal handlers between its instructions on the main
// thread, so a handler that saves a checkpoint (Lightning's for SLURM) or reads a parameter would come back in here on
// the same thread, which owns the mutex: its collectives would run before those that were announced, and tear-down would
// free what the interrupted call goes on with. So whatever changes anything raises. Other threads wait for the mutex.
// `bind_`, which runs users' hooks, may come back: nothing is half done then.
void Runtime::check_entry(const char* what) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(!asking_,
              text("zerocompile: `", what, "` was called on rank ", rank_, " while this rank was asking the others what ",
                   "they gather or reduce next, so by a signal handler that Python has run in between. Its ",
                   "collectives would be mixed with those of the call that it has interrupted. Let the handler note the ",
                   "signal, and act on it between two steps (for example in `on_train_batch_end`)"));
}

void Runtime::check_running() const {
  TORCH_CHECK(!shut_down_, "zerocompile: the strategy was torn down; the model's parameters are not gathered any more");
}

const Parameter& Runtime::parameter(int64_t index) const {
  check_running();
  TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(parameters_.size()),
              text("zerocompile: no parameter ", index));
  return parameters_[index];
}

const Unit& Runtime::unit(int64_t index) const {
  check_running();
  TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(units_.size()), text("zerocompile: no unit ", index));
  return units_[index];
}

const Unit& Runtime::unit_of(const Parameter& p) const {
  TORCH_CHECK(p.unit >= 0, text("zerocompile: parameter `", p.name, "` is used while its model is still being sharded, ",
                                "so it belongs to no unit yet. Initialise the model on a real device before training, ",
                                "or use the parameter once the model is set up"));
  return units_[p.unit];
}

// ---- what Python asks for or sets ----

int64_t Runtime::identity(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return parameter(index).identity;
}

int64_t Runtime::seen_version(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return parameter(index).seen_version();
}

std::string Runtime::parameter_name(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return parameter(index).name;
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
  return stats_;
}

int64_t Runtime::eager_reads_of(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return unit(index).eager_reads;
}

std::pair<int64_t, int64_t> Runtime::gathers_of(int64_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto& u = unit(index);
  return {u.gathers, u.gather_bytes};
}

void Runtime::set_gradient_divisor(double divisor) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  divisor_ = divisor;
}

void Runtime::set_prefetch(int64_t distance) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  prefetch_ = distance;
}

void Runtime::set_merge_bytes(int64_t bytes) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  merge_bytes_ = bytes;
}

void Runtime::set_copies_gradients(bool copies) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  copies_gradients_ = copies;
}

std::vector<int64_t> Runtime::padded_size(const Parameter& p) const {
  if (p.replicated) return {1};
  auto size = p.size;
  size[0] = p.rows * world_;
  return size;
}

void Runtime::allocate(Parameter& p, at::ScalarType dtype) {
  p.full = at::empty(padded_size(p), p.local.options().dtype(dtype).requires_grad(false));
  p.value = p.rows_here = p.own = p.full;
  if (p.replicated) {
    p.value = p.own = p.full.squeeze(0);
  } else {
    auto rows = p.full.sizes().vec();
    const auto begin = p.full.numel() / world_ * rank_;
    rows[0] = p.rows;
    if (p.size[0] < p.full.size(0)) p.value = view_of(p.full, p.size, 0);
    if (world_ > 1) p.rows_here = view_of(p.full, rows, begin);
    p.own = p.local.size(0) < p.rows ? view_of(p.full, p.local.sizes(), begin) : p.rows_here;
  }
  p.value = p.value.variable_data();  // with versions of its own: those of `full` change as the collective writes
}

void Runtime::forget(Parameter& p) {
  if (!p.full.defined()) return;
  by_storage_.erase(p.full.storage().unsafeGetStorageImpl());
  p.full.reset();
  p.value.reset();
  p.rows_here.reset();
  p.own.reset();
}

int64_t Runtime::parameter_of(const Tensor& value) const {
  if (!value.has_storage()) return -1;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto found = by_storage_.find(value.storage().unsafeGetStorageImpl());
  return found == by_storage_.end() ? -1 : found->second;
}

int64_t Runtime::parameter_of_handle(const Tensor& tensor) const {
  if (!tensor.device().is_cpu() || tensor.scalar_type() != at::kDouble || !tensor.has_storage()) return -1;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto found = by_handle_.find(tensor.storage().unsafeGetStorageImpl());
  return found == by_handle_.end() ? -1 : found->second;
}

Runtime::Phase Runtime::phase() const {
  if (torch::autograd::get_current_graph_task_id() != -1) return Phase::Backward;
  return at::GradMode::is_enabled() ? Phase::Forward : Phase::NoGrad;
}

std::vector<std::string> Runtime::resident_units() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<std::string> names;
  for (const auto& u : units_) {
    if (u.resident && u.lifetime == Lifetime::Use) names.push_back(u.name);
  }
  return names;
}

}  // namespace zerocompile
