#include "registry.h"

#include <algorithm>
#include <mutex>
#include <numeric>

#include "text.h"
#include "views.h"

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

}  // namespace

namespace {

int64_t identity_of(const Tensor& handle) {
  TORCH_CHECK(handle.device().is_cpu() && handle.scalar_type() == at::kDouble && handle.numel() == 1,
              text("zerocompile: a handle is a float64 CPU tensor of one element, got ", handle.toString(), " of ",
                   handle.numel(), " elements"));
  return static_cast<int64_t>(*handle.const_data_ptr<double>());
}

// With the table's mutex.
const std::pair<std::weak_ptr<Runtime>, int64_t>& record_of(const Table& table, int64_t identity) {
  const auto found = table.records.find(identity);
  TORCH_CHECK(found != table.records.end(),
              text("zerocompile: no parameter has the identity ", identity,
                   ". Its strategy was torn down: set the model up again before using it"));
  return found->second;
}

std::shared_ptr<Runtime> alive(const std::weak_ptr<Runtime>& runtime, int64_t identity) {
  auto held = runtime.lock();
  TORCH_CHECK(held != nullptr, text("zerocompile: the runtime of parameter ", identity, " is gone"));
  return held;
}

}  // namespace

Record find(const Tensor& handle) {
  const auto identity = identity_of(handle);
  auto& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  const auto& [runtime, parameter] = record_of(t, identity);
  return {alive(runtime, identity), parameter};
}

Records find_all(at::TensorList handles) {
  std::vector<int64_t> identities;
  identities.reserve(handles.size());
  for (const auto& handle : handles) identities.push_back(identity_of(handle));
  Records records;
  records.parameters.reserve(handles.size());
  auto& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  for (auto identity : identities) {
    const auto& [runtime, parameter] = record_of(t, identity);
    if (records.runtime == nullptr) records.runtime = alive(runtime, identity);
    const bool same = !runtime.owner_before(records.runtime) && !records.runtime.owner_before(runtime);
    TORCH_CHECK(same, "zerocompile: one graph uses parameters of two strategies; compile them separately");
    records.parameters.push_back(parameter);
  }
  return records;
}

int64_t Registry::add_parameter(const std::weak_ptr<Runtime>& runtime, ParameterSpec spec, Tensor master,
                                Tensor local, Tensor handle) {
  check_running();
  Parameter p;
  p.index = static_cast<int64_t>(parameters_.size());
  static_cast<ParameterSpec&>(p) = std::move(spec);
  p.replicated = p.size.empty();
  p.rows = p.replicated ? 1 : (p.size[0] + shards_.world - 1) / shards_.world;
  TORCH_CHECK(local.device().type() == device_.type(),
              text("zerocompile: parameter `", p.name, "` is on ", local.device(),
                   " but the strategy runs on ", device_));
  const int64_t first = std::min(shards_.rank * p.rows, p.replicated ? 0 : p.size[0]);
  const int64_t expected = p.replicated ? 0 : std::min(p.rows, p.size[0] - first);
  TORCH_CHECK(p.replicated || (local.dim() > 0 && local.size(0) == expected),
              text("zerocompile: the shard of `", p.name,
                   "` must hold ", expected, " rows on rank ", all_.rank, ", got a tensor of sizes ", local.sizes()));
  if (!p.stride.empty()) {
    TORCH_CHECK(p.stride.size() == p.size.size() && !p.replicated,
                text("zerocompile: parameter `", p.name, "` has ", p.size.size(), " dimensions and ", p.stride.size(),
                     " strides"));
    p.order.resize(p.size.size());
    std::iota(p.order.begin(), p.order.end(), 0);
    std::stable_sort(p.order.begin() + 1, p.order.end(), [&](auto a, auto b) { return p.stride[a] > p.stride[b]; });
  }
  p.master = std::move(master);
  p.local = std::move(local);
  p.identity = new_identity(runtime, p.index);
  handle.fill_(static_cast<double>(p.identity));
  p.handle = std::move(handle);
  by_handle_[p.handle.storage().unsafeGetStorageImpl()] = p.index;
  parameters_.push_back(std::move(p));
  return parameters_.back().index;
}

int64_t Registry::add_unit(std::string name, std::vector<int64_t> members, Lifetime lifetime) {
  check_running();
  Unit unit;
  unit.index = static_cast<int64_t>(units_.size());
  unit.name = std::move(name);
  unit.lifetime = lifetime;
  for (auto i : members) {
    TORCH_CHECK(parameter(i).unit < 0,
                text("zerocompile: parameter `", parameter(i).name, "` is in two units"));
  }
  for (auto i : members) {
    auto& p = parameters_[i];
    p.unit = unit.index;
    if (!p.replicated) unit.sent += sent_bytes(p, p.dtype);
  }
  unit.parameters = std::move(members);
  units_.push_back(std::move(unit));
  const auto sent = units_.back().sent, count = ++units_by_bytes_[sent];
  const auto usual = std::pair(usual_bytes_ > 0 ? units_by_bytes_[usual_bytes_] : 0, usual_bytes_);
  if (sent > 0 && std::pair(count, sent) > usual) usual_bytes_ = sent;
  return units_.back().index;
}

// [Note: masters in host memory] The rows that an optimizer owns may be in host memory (`host`). They come to the
// device for its update only, and leave it again. What gathers read is on the device. For a unit that lives for one
// use, and for all units with `optimizer_in_backward`, it is a copy in the model's dtype (`local`), which each update
// renews. Otherwise one that lives for a step is gathered once after each update, while its rows are there; between
// updates `local` has their sizes and one element. Whatever else changes the rows in host memory (loaded weights)
// changes their version, and then a gather reads them from there. What user code writes to a gathered value goes to
// both.
void Registry::set_rows(int64_t index, Tensor local, Tensor host) {
  const auto& before = parameter(index);
  TORCH_CHECK(local.device().type() == device_.type() && local.sizes() == before.local.sizes(),
              text("zerocompile: the rows of `", before.name, "` have sizes ", before.local.sizes(), " on ", device_,
                   ", got ", local.sizes(), " on ", local.device()));
  parameters_[index].local = std::move(local);
  parameters_[index].host = std::move(host);
}

void Registry::clear() {
  for (auto& p : parameters_) forget_identity(p.identity);
  parameters_.clear();
  units_.clear();
  by_handle_.clear();
}

void Registry::shut_down() {
  shut_down_ = true;
  clear();
}

void Registry::check_running() const {
  TORCH_CHECK(!shut_down_, "zerocompile: the strategy was torn down; the model's parameters are not gathered any more");
}

const Parameter& Registry::parameter(int64_t index) const {
  check_running();
  TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(parameters_.size()),
              text("zerocompile: no parameter ", index));
  return parameters_[index];
}

const Unit& Registry::unit(int64_t index) const {
  check_running();
  TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(units_.size()), text("zerocompile: no unit ", index));
  return units_[index];
}

const Unit& Registry::unit_of(const Parameter& p) const {
  TORCH_CHECK(p.unit >= 0, text("zerocompile: parameter `", p.name, "` is used while its model is still being sharded, "
                                "so it belongs to no unit yet. Initialise the model on a real device before training, ",
                                "or use the parameter once the model is set up"));
  return units_[p.unit];
}

int64_t Registry::parameter_of_handle(const Tensor& tensor) const {
  auto found = by_handle_.find(tensor.storage().unsafeGetStorageImpl());
  return found == by_handle_.end() ? -1 : found->second;
}

std::string Registry::names_of(const std::vector<int64_t>& units) const {
  auto names = unit(units.front()).name;
  for (size_t k = 1; k < units.size(); ++k) names += text("`, `", unit(units[k]).name);
  return names;
}

Tensor Parameter::rows_in(const Tensor& memory, at::IntArrayRef sizes, int64_t begin) const {
  if (stride.empty()) return view_of(memory, sizes, begin);
  return view_of(memory, memory.scalar_type(), sizes, stride, memory.storage_offset() + begin);
}

Tensor Registry::empty_full(const Parameter& p, at::ScalarType dtype) const {
  const auto options = p.local.options().dtype(dtype).requires_grad(false);
  if (p.stride.empty()) return at::empty(padded_size(p), options);
  return at::empty_strided(padded_size(p), p.stride, options);
}

std::vector<int64_t> Registry::padded_size(const Parameter& p) const {
  if (p.replicated) return {1};
  auto size = p.size;
  size[0] = p.rows * shards_.world;
  return size;
}

// The bytes of a unit's full values, in the dtypes that the model computes with.
int64_t Registry::full_bytes(const Unit& unit) const {
  int64_t bytes = 0;
  for (auto i : unit.parameters) {
    const auto& p = parameters_[i];
    bytes += c10::multiply_integers(p.size) * static_cast<int64_t>(c10::elementSize(p.dtype));
  }
  return bytes;
}

int64_t Registry::sent_bytes(const Parameter& p, at::ScalarType dtype) const {
  const auto rows = c10::multiply_integers(padded_size(p)) / shards_.world;
  return (rows * static_cast<int64_t>(c10::elementSize(dtype)) + 511) / 512 * 512;
}

std::vector<std::vector<int64_t>> Registry::runs_of(const std::vector<int64_t>& units, int64_t limit,
                                                    bool padded) const {
  std::vector<std::vector<int64_t>> runs;
  int64_t bytes = 0;
  for (auto index : units) {
    const auto size = padded ? units_[index].sent * shards_.world : full_bytes(units_[index]);
    if (runs.empty() || bytes + size > limit) {
      runs.emplace_back();
      bytes = 0;
    }
    runs.back().push_back(index);
    bytes += size;
  }
  return runs;
}

}  // namespace zerocompile
