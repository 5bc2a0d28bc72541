// Gathers as copies between the memories of one host's devices.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <map>
#include <string>
#include <vector>

namespace zerocompile {

// [Note: copy engines] A kernel of NCCL takes multiprocessors from the very compute that is to hide it. Between devices
// that reach each other's memory a gather can be plain copies, which the copy engines do: each rank puts its rows into
// memory that all of them have mapped, all meet at a barrier on the device, and each takes the others' rows. A
// reduction has to be computed, so there copies only add to NCCL's work: measured, they lose.
//
// [Note: two halves] The mapped buffer is used by halves, in turn. A half is written again two gathers later; then this
// rank's stream is behind the barrier of the one in between, at which every rank arrives only after it has taken all it
// needed from the half.
class PeerMemory {
 public:
  // `buffer`: [bytes] uint8, symmetric memory of `group` (torch.distributed._symmetric_memory).
  PeerMemory(at::Tensor buffer, const std::string& group, int64_t timeout_ms);

  // Whether a gather of these inputs fits a half. Alike on all ranks, as sizes are.
  bool holds(const std::vector<at::Tensor>& inputs) const;

  // As in collectives.h: outputs[i]: [world * n_i, ...], inputs[i]: [n_i, ...], its own rows; on the current stream.
  void all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

 private:
  const std::vector<at::Tensor>& flat(at::ScalarType dtype);  // by rank, [elements of both halves]

  at::Tensor buffer_;
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> memory_;
  int64_t rank_, world_, timeout_ms_, half_bytes_, turn_ = 0;
  std::map<at::ScalarType, std::vector<at::Tensor>> flat_;
};

}  // namespace zerocompile
