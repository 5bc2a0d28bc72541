// Which parameters and units there are, and how large they are.
//
// `Registry` owns their records: names, sizes, dtypes, masters and handles. Parameters and units have numbers, from 0.
// By these numbers the other classes keep what is gathered of them and what gradients they have.
//
// Lock: whoever calls holds the runtime's mutex. Only the table of identities (`find`) has a mutex of its own, the
// innermost one.
//
// Streams: its tensors (masters, rows, handles) come from set-up or from `set_rows`, and live until they
// are replaced or until `shut_down`.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace zerocompile {

using at::Tensor;

class Runtime;

// How long a gathered value lives (ZeRO-3: one use; ZeRO-1 and 2: until the optimizer's next step).
enum class Lifetime : int64_t { Use = 0, Step = 1 };

struct ParameterSpec {
  std::string name;            // fully qualified
  std::vector<int64_t> size;   // of the full parameter; empty for a 0-dim one, which is replicated
  std::vector<int64_t> stride; // of its elements; empty: contiguous, see [Note: memory formats]
  at::ScalarType dtype;        // of the gathered value: what the model computes with
  bool cast_grad;              // false: grad_dtype=None, see [Note: agreed dtype]
  at::ScalarType grad_dtype;   // the master's; the raw gradient is cast to it before anything else
  std::optional<at::ScalarType> reduce_dtype;  // of the communication; absent: the gradient's own
  std::optional<at::ScalarType> bound_dtype;   // of master.grad; absent: as agreed, see [Note: agreed dtype]
};

// Identity and layout.
//
// [Note: memory formats] A weight of a convolution may be `channels_last`, and one that was transposed may keep the
// order that it had. Each of its rows is contiguous in memory, in another order of dimensions. So rows of it are moved
// as those of any parameter, without a copy. Masters, gathered values and reduced gradients have its sizes and strides,
// and what moves, or goes to a kernel, is a view with the dimensions in the order of memory (`in_order`).
struct Parameter : ParameterSpec {
  int64_t index = 0;    // in the registry
  int64_t identity = 0;
  int64_t unit = -1;
  int64_t rows = 1;     // padded rows of one rank: ceil(size[0] / world)
  bool replicated = false;
  Tensor master;        // the optimizer's leaf (a DTensor)
  Tensor local;         // its local part, [<=rows, ...]; what gathers read
  Tensor host;          // the local part, if it is in host memory: see [Note: masters in host memory]
  Tensor handle;        // [1] float64: its value is the identity
  std::vector<int64_t> order;  // of the dimensions in memory; empty: as they are

  // Rows of it, of these sizes, in flat memory, from this element on.
  Tensor rows_in(const Tensor& memory, at::IntArrayRef sizes, int64_t begin) const;
  // Rows of it with the dimensions in the order of memory: contiguous, if they are laid out as the parameter is.
  Tensor in_order(const Tensor& rows) const { return order.empty() ? rows : rows.permute(order); }
  int64_t version() const { return master._version() + (host.defined() ? host : local)._version(); }
};

struct Unit {
  int64_t index = 0;  // in the registry
  std::string name;
  Lifetime lifetime;
  std::vector<int64_t> parameters;
  int64_t sent = 0;   // bytes of one rank's rows of it
};

// This rank's place in a group of ranks.
struct Place {
  int64_t world = 1, rank = 0;
};

// [Note: replicas] Parameters are sharded over W ranks, the shard group. R such groups hold the same rows, one replica
// each. A gather is inside one of them. A gradient is the mean over all R * W ranks. Whatever ranks agree on, all R * W
// ranks agree on. On devices a reduction is inside the shard group first; what is left, this rank's rows, is then
// reduced over the R ranks that have them. On the CPU it is one collective of all ranks, as gloo reduces whole
// gradients anyway.
class Registry {
 public:
  Registry(c10::Device device, Place shards, Place all) : device_(device), shards_(shards), all_(all) {}
  ~Registry() { clear(); }
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  int64_t add_parameter(const std::weak_ptr<Runtime>& runtime, ParameterSpec spec, Tensor master, Tensor local,
                        Tensor handle);
  int64_t add_unit(std::string name, std::vector<int64_t> parameters, Lifetime lifetime);
  void set_rows(int64_t parameter, Tensor local, Tensor host);
  void live_for_a_step(int64_t unit) { units_[unit].lifetime = Lifetime::Step; }
  void shut_down();  // from here on every use of a parameter raises
  bool is_shut_down() const { return shut_down_; }

  // [Note: checked indices] An index that comes from outside (Python, an operator, what autograd has saved) goes
  // through these methods: the runtime may be shut down, and a parameter may belong to no unit yet. Then they raise an
  // error that says so.
  void check_running() const;
  const Parameter& parameter(int64_t index) const;
  const Unit& unit(int64_t index) const;
  const Unit& unit_of(const Parameter& p) const;

  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::vector<Unit>& units() const { return units_; }
  int64_t parameter_of_handle(const Tensor& tensor) const;  // -1: it is none's
  std::string names_of(const std::vector<int64_t>& units) const;  // for messages and traces

  c10::Device device() const { return device_; }
  int64_t world() const { return shards_.world; }  // of the shard group
  int64_t rank() const { return shards_.rank; }
  int64_t all_ranks() const { return all_.world; }
  int64_t global_rank() const { return all_.rank; }
  int64_t usual_bytes() const { return usual_bytes_; }  // `sent` of the most frequent unit: the repeated block
  std::vector<int64_t> padded_size(const Parameter& p) const;
  Tensor empty_full(const Parameter& p, at::ScalarType dtype) const;  // memory for its value, padded
  int64_t sent_bytes(const Parameter& p, at::ScalarType dtype) const;
  // Runs of units that follow each other, each of up to `limit` bytes of full values (`padded`: with what pads them for
  // the gather). A larger unit is a run of its own; with a negative limit each unit is.
  std::vector<std::vector<int64_t>> runs_of(const std::vector<int64_t>& units, int64_t limit, bool padded) const;

 private:
  void clear();
  int64_t full_bytes(const Unit& unit) const;

  c10::Device device_;
  Place shards_, all_;
  std::vector<Parameter> parameters_;
  std::vector<Unit> units_;
  std::unordered_map<const void*, int64_t> by_handle_;  // storage of a handle -> parameter
  std::map<int64_t, int64_t> units_by_bytes_;           // how many have this `sent`
  int64_t usual_bytes_ = 0;
  bool shut_down_ = false;
};

// The only global table: from a parameter's identity to its runtime and number. An entry ends with its registry.
struct Record {
  std::shared_ptr<Runtime> runtime;
  int64_t parameter;
};
Record find(const Tensor& handle);

// The same for several handles, all of one runtime; null: there are no handles.
struct Records {
  std::shared_ptr<Runtime> runtime;
  std::vector<int64_t> parameters;
};
Records find_all(at::TensorList handles);

}  // namespace zerocompile
