// Reductions: in which order units are reduced, in which dtypes, and what of it is on its way.
//
// `Reductions` owns the process groups of reductions (or the memory that devices have mapped for them), their lane,
// the order that all ranks agree on and the place in it, the reductions in flight with all that they read and write,
// and the reduced rows until `Gradients::bind` takes them.
//
// Lock: whoever calls holds the runtime's mutex; `started` is an atomic count and needs none.
//
// Streams: the lane of reductions reads the gradients and makes their casts and padded copies. The partition of the
// reduced rows is allocated on the caller's stream if the lane is ordered after all that this stream holds, else on
// the lane ([Note: late reductions]). Where there are replicas on devices, a second lane sums these rows over them,
// ordered after the first for each reduction. `Reduction::inputs` keeps all of this until the stream of the backward is
// ordered after the reduction (`retire`). What is dropped or left on its way before that is reserved for the lane
// (`reserve`). Rows that an optimizer reads on another stream stay until the backward's stream, and the lane, are
// ordered after that (`retire_updates`).
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "collectives.h"
#include "gather_order.h"
#include "gradients.h"
#include "peers.h"
#include "questions.h"
#include "registry.h"
#include "stream.h"

namespace zerocompile {

struct ReductionCounts {
  int64_t peer_reductions = 0;                  // reductions that copies between devices did
  int64_t reductions = 0, reduce_bytes = 0;     // collectives, bytes of the full gradients
  int64_t padded_copies = 0;                    // gradients whose rows the world size does not divide
  int64_t backwards = 0;                        // that have ended
};

class Reductions {
 public:
  using Units = std::vector<int64_t>;
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // `group`: the shard group's, on the CPU that of all ranks. `replicas`: that of the ranks that hold the same rows, or
  // null: see [Note: replicas].
  Reductions(const Registry& registry, Questions& questions, const GatherOrder& gather_order, Gradients& gradients,
             Group group, Group replicas);

  // set-up and end
  void add_unit() {
    launched_.resize(registry_.units().size());
    taken_.resize(registry_.units().size());
  }
  void set_merge_bytes(int64_t bytes) { merge_bytes_ = bytes; }
  void set_packing(Packing packing) { packing_ = packing; }
  int64_t peer_bytes() const;
  void check_peers() const;
  void set_peers(std::unique_ptr<PeerMemory> peers) { peers_ = std::move(peers); }
  void abandon(bool devices_too);
  void clear();

  // their order
  void agree_on_order();
  const Units& order() const { return order_; }
  Units unit_order() const;

  // a backward, and its end or that of a window
  void begin_backward();
  void count_backward() { counts_.backwards += 1; }
  void launch_complete(const Ready& latest);
  Units take_reduced();
  void updated();
  void retire_updates(size_t keep);
  std::vector<char> agree_on_used(const std::function<void()>& meanwhile);
  void reduce_everything(bool partial, bool merged = false);

  // what is on its way
  void settle() { retire(0); }
  void await_all();
  void await_gradients(int64_t unit);
  void await_gradients_of(const std::vector<int64_t>& parameters);
  void drop_in_flight();
  void forget();

  const ReductionCounts& counts() const { return counts_; }
  int64_t started() const { return started_; }  // without the lock
  int64_t begun() const { return begun_; }      // the same

 private:
  // One that is started or about to be: it holds what the collective reads until the compute stream is ordered after
  // it, or until the backward ends (see [Note: reductions after a backward], [Note: unfinished launches]).
  struct Reduction {
    Units units;
    bool early = false;  // see [Note: bounded windows] and [Note: partial reductions]
    Ready ready;         // what it is ordered after; null: all that the caller's stream holds
    std::vector<Tensor> inputs;
    bool in_graph = false;  // some of them: see [Note: gradients of CUDA graphs]
    std::vector<Pending> done;
    int64_t number = 0;  // among all
  };
  // One parameter's part of the result: added to what is bound already, or in the partition, which is bound.
  struct Shard {
    Tensor existing, own;   // [<=rows, ...]; one of the two
    Tensor part;            // [<=rows, ...]: see [Note: partial reductions]; or undefined
    int64_t offset;         // in the partition
    int64_t gradient = -1;  // which of the collective's; -1: it has no elements
  };

  // Rows that an optimizer reads on a stream of its own, beside the backward.
  struct Updating {
    Ready done;  // null: it has not begun
    std::vector<Tensor> rows;
  };

  const Parameter& record(int64_t parameter) const { return registry_.parameters()[parameter]; }
  at::ScalarType communicated_dtype(const Parameter& p) const { return p.reduce_dtype.value_or(gradients_.dtype(p)); }
  at::ScalarType kept_dtype(const Parameter& p, bool early) const;
  bool trainable(const Unit& unit) const;
  void launch(const Units& units, const Ready& latest = {}, bool early = false);
  std::vector<Units> runs(bool merged) const;
  void launch_contributed(const std::vector<Units>& runs, bool partial);
  void launch_begun(int64_t units);
  void reduce_group(const std::vector<int64_t>& group, Reduction& reduction);
  void reduce_by_collective(Lane::Launch& launch, Reduction& reduction, const std::vector<int64_t>& group,
                            const std::vector<Shard>& shards, const std::vector<PeerMemory::Gradient>& gradients,
                            const Tensor& partition, int64_t total, at::ScalarType communicated);
  void replicate_group(const std::vector<int64_t>& group, Reduction& reduction);
  void await(Reduction& reduction);
  void retire(size_t keep, bool completed = false);
  void reserve(const Reduction& reduction);
  void keep_reduced(const std::vector<char>& used);
  bool may_be_late() const;
  void leave_in_flight();

  const Registry& registry_;
  Questions& questions_;
  const GatherOrder& gather_order_;
  Gradients& gradients_;
  Group group_, replicas_;  // the second may be null: what the first has reduced is the sum of all ranks
  std::unique_ptr<PeerMemory> peers_;  // null: the process groups do all
  // The second lane is for the sums over replicas: that of one unit goes beside the reduce-scatter of the next.
  Lane lane_, replica_lane_;
  Packing packing_ = Packing::Each;
  int64_t merge_bytes_ = 0;  // see [Note: merged reductions]

  Units order_;              // agreed by all ranks before the first reduction
  size_t next_ = 0;          // the first of them that may still have to be launched in this backward
  std::vector<bool> launched_;  // by unit: since the backward began, or since all was reduced
  Units untaken_;                // launched since then, and not given to an optimizer yet
  std::vector<bool> taken_;      // by unit: whether it was, since then
  bool again_ = false;       // a unit was reduced a second time in the backward that runs
  int64_t exchanges_ = 0;    // of used flags so far
  std::vector<Reduction> in_flight_;
  std::vector<Updating> updating_;    // see [Note: updates in backward]
  std::vector<ReducedGrad> reduced_;  // launched, and not bound yet
  std::optional<c10::Stream> home_;   // of the backward that left reductions: [Note: reductions after a backward]
  std::vector<Pending> last_retired_;  // the last reduction that is not in flight any more
  bool dropped_ = false;              // some are on their way for which nobody waits
  ReductionCounts counts_;
  NotStarted not_started_;
  std::atomic<int64_t> started_ = 0;
  std::atomic<int64_t> begun_ = 0;  // units of the order, in the backward that runs: see [Note: begun reductions]
};

}  // namespace zerocompile
