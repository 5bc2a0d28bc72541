// Gathers and reductions as copies between the memories of one host's devices.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "barriers.h"
#include "kernels.h"
#include "stream.h"

namespace zerocompile {

// [Note: copy engines] A kernel of NCCL takes multiprocessors from the very compute that is to hide it. Between devices
// that reach each other's memory a gather can be plain copies, which the copy engines do: each rank puts its rows into
// memory that all of them have mapped, all meet at a barrier on the device, and each takes the others' rows. A
// reduction's bytes move in the same way: each rank puts the rows of its gradients into the memories of those who own
// them, all meet, and one kernel sums what came, in float32, and writes it where the optimizer reads it.
//
// [Note: two halves] The mapped buffer is used by halves, in turn. A half is written again two gathers (reductions)
// later. By then the stream of the rank that writes has passed the barrier of the one in between, and every rank
// arrives at that barrier only after it has read all that it needed from the half. What is larger than a half (an
// embedding, a head) goes through the process group: in several rounds it would wait for each of its barriers, and
// measured that is slower.
//
// [Note: device barriers] The barrier is a kernel, of which no process group knows. Each rank has a pad, which all have
// mapped, of two words for each rank. Rank r signals to rank k by writing its word in k's pad, and waits until k's word in
// its own is that of the same barrier. A word holds the barrier's number and its unit. A number is taken before anything
// of a gather (reduction) can fail. So ranks of which one has left out a gather find each other's words different, and
// raise. The two words of a rank are used in turn: by then both have passed the barrier in between, so the older word was
// read. What has ended a process group must end the wait, too, while the driver may be in no state to do anything: a copy
// to pageable memory that waits on the device holds one of its locks. So the kernel looks at words in the host's memory,
// which the host writes and reads without the driver (`BarrierWord`):
//   kEnded: not 0: go on without the others; what the barrier was to protect is not valid
//   kEntered, kPassed: the number of the last barrier that was entered, and of the last that was passed
//   kUnit: the unit of that which was entered
//   kOther: the word of a rank that is in another barrier; 0: none is
// The host ends a wait that lasts for longer than `timeout`, and says which unit it was (watch.h). The kernel itself traps
// only if the host does not do so. After a barrier that was not passed this device comes to none any more.
//
// [Note: pulls after pushes] In a backward gathers pull rows from the others' memory, and reductions push rows into it.
// Where some ranks pull and others push, each of four GPUs moves 180 to 210 GB/s; where all of them pull, or all push,
// 320 to 370. So where there are more than two ranks (two are as fast either way), a rank comes to a gather's barrier
// only when it does not push, and then all begin to pull together. A number in the device's memory says whether it
// pushes. The stream of the reductions writes that number before and after its copies, which takes no kernel. A push
// waits for nothing that a gather does, so the wait ends. If copies of both streams shared a queue of the driver's, those
// of the gather could stand in front. Then the barrier gives up after 20 ms, and no later one waits.
//
// [Note: kept casts] With memory to spare each rank keeps the cast of its rows of every parameter in further mapped memory of its
// own, and gathers read from there. Then a cast is made once in a step, not in each gather, and the kernel that updates a
// master can write it at once. The version of a master tells whether its kept cast is that of what it holds now. A place
// is written again only after all ranks have read it. That is so once this rank has passed a barrier that came after the
// last gather which reads the place. If there was none, the ranks meet once more (`meet_readers`). Whether they do depends
// on what was gathered, and never on what one rank has written, so all ranks do the same.
struct KeptCast {
  int64_t begin;         // in the memory of each rank, in elements of two bytes
  int64_t version = -1;  // of the master whose cast it is; -1: it is no master's
  at::ScalarType dtype = at::kBFloat16;
  int64_t barrier = -1;  // the number of the barrier of the last gather that reads it
};

// A buffer of each rank, all of which every rank has mapped.
class MappedMemory {
 public:
  // `buffer`: this rank's, [bytes] uint8, symmetric memory of `group` (torch.distributed._symmetric_memory).
  MappedMemory(at::Tensor buffer, const std::string& group);

  const at::Tensor& buffer() const { return buffer_; }
  c10d::symmetric_memory::SymmetricMemory& memory() const { return *memory_; }
  const std::vector<at::Tensor>& as(at::ScalarType dtype);  // by rank, [elements]

 private:
  at::Tensor buffer_;
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> memory_;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype_;
};

class PeerMemory {
 public:
  // `buffer`: [bytes] uint8, symmetric memory of `group` (torch.distributed._symmetric_memory). `timeout_ms`: the kernel's.
  PeerMemory(at::Tensor buffer, std::shared_ptr<DeviceBarriers> barriers, const std::string& group,
             std::shared_ptr<const Kernels> kernels, int64_t timeout_ms);

  // See [Note: one pass]. Where somebody has written the cast of a master already: to the rows of the gathered value; to
  // the place in the mapped memory.
  struct Placed {
    bool own = false, staged = false;
  };
  // One parameter's gather.
  struct Rows {
    at::Tensor full, rows;   // [world * n, ...], and of it this rank's rows: [n, ...]
    at::Tensor own, master;  // [<=n, ...]: what of `rows` the local part of the master fills, and that part
    Placed placed = {};
    at::Tensor scale;  // [] float32: `own` is float8, of `master`, in `through`, times this; undefined: it is not
    at::ScalarType through = at::kFloat;
    KeptCast* kept = nullptr;  // null: its cast is not kept
    int64_t version = -1;      // of the master
  };
  // One parameter's reduction.
  struct Gradient {
    at::Tensor full;  // [world * n, ...]; bfloat16 here
    at::Tensor mean;  // [<=n, ...]: this rank's rows of the result; float32 here
    bool adds;        // to what `mean` holds
  };

  // See [Note: kept casts]. `buffer`: as that of the halves, and as large as `kept_bytes` says.
  void keep_casts(at::Tensor buffer, const std::string& group);
  static int64_t kept_elements(int64_t numel);  // that the place of so many takes
  bool keeps(const std::vector<Rows>& parameters) const;
  bool may_write(const KeptCast& kept) const { return kept.barrier < barriers_; }
  void meet_readers(int64_t unit);
  const Ready& passed() const { return passed_; }
  // The place of this rank's rows, which `may_write` allows to write: `size`, of the mapped memory. The current stream is
  // ordered after the last read of it.
  at::Tensor kept_rows(const KeptCast& kept, at::ScalarType dtype, at::IntArrayRef size);

  // Whether a gather or a reduction fits a half. The answer is the same on all ranks, as sizes are.
  bool holds(const std::vector<Rows>& parameters) const;
  bool holds(const std::vector<Gradient>& gradients) const;

  // Casts the masters' rows and gathers them, on the current stream. `parameters` are all of one dtype. `unit`: of the
  // first of them. Returns how many casts were there already, see [Note: kept casts].
  int64_t all_gather(std::vector<Rows>& parameters, int64_t unit);

  // Where the next `all_gather` takes these rows from: [n, ...], in the mapped memory. The current stream is ordered
  // after the last read of that memory. See [Note: one pass].
  std::vector<at::Tensor> places(const std::vector<Rows>& parameters);
  int64_t turn() const { return turn_; }  // how many gathers or reductions have come to their barrier

  // Sums over the ranks and divides, on the current stream. `unit`: of the first.
  void reduce_scatter(const std::vector<Gradient>& gradients, int64_t unit);

 private:
  int64_t slot_bytes() const;  // of a half: what one peer sends
  void barrier(int64_t number, int64_t unit, bool after_pushes);
  bool takes_turns() const { return world_ > 2; }  // see [Note: pulls after pushes]
  void stage(const std::vector<Rows>& parameters, const std::vector<at::Tensor>& staged);
  int64_t prepare_kept(std::vector<Rows>& parameters, int64_t unit);
  std::vector<int64_t> starts_of(const std::vector<Rows>& parameters, int64_t start) const;
  int64_t half(at::ScalarType dtype) const;  // where the next one begins

  MappedMemory halves_;
  std::optional<MappedMemory> kept_;  // absent: no casts are kept
  std::shared_ptr<DeviceBarriers> words_;
  std::shared_ptr<const Kernels> kernels_;
  int64_t rank_, world_, timeout_ms_, half_bytes_, turn_ = 0;
  int64_t asked_ = 0, barriers_ = 0;  // how many barriers were asked for, and launched: see [Note: device barriers]
  Ready passed_;  // after the last barrier
  Ready met_;     // after the last one of `meet_readers`
  int64_t met_barrier_ = 0;
};

// This rank's rows become the cast of what the masters hold here, on the current stream. `parameters` are all of one
// dtype. Those that are placed already stay as they are.
void fill_rows(const std::vector<PeerMemory::Rows>& parameters);

}  // namespace zerocompile
