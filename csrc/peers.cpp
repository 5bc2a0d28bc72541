#include "peers.h"

#include <utility>

#include "text.h"

namespace zerocompile {

namespace {

constexpr int64_t kAlignment = 512;        // bytes: what a copy engine and a vectorised kernel like
constexpr int64_t kSmallCopy = 256 * 1024;  // bytes: below, one kernel for many copies beats a copy engine's start

int64_t aligned(int64_t numel, at::ScalarType dtype) {
  const auto step = kAlignment / static_cast<int64_t>(c10::elementSize(dtype));
  return (numel + step - 1) / step * step;
}

}  // namespace

PeerMemory::PeerMemory(at::Tensor buffer, const std::string& group, int64_t timeout_ms)
    : buffer_(std::move(buffer)),
      memory_(c10d::symmetric_memory::rendezvous(buffer_, group)),
      rank_(memory_->get_rank()),
      world_(memory_->get_world_size()),
      timeout_ms_(timeout_ms),
      half_bytes_(buffer_.numel() / 2 / kAlignment * kAlignment) {
  TORCH_CHECK(buffer_.scalar_type() == at::kByte && buffer_.dim() == 1,
              text("zerocompile: a buffer of peers is flat and of bytes, got sizes ", buffer_.sizes()));
}

bool PeerMemory::holds(const std::vector<at::Tensor>& inputs) const {
  int64_t numel = 0;
  for (const auto& input : inputs) numel += aligned(input.numel(), input.scalar_type());
  return numel * static_cast<int64_t>(inputs.front().element_size()) <= half_bytes_;
}

const std::vector<at::Tensor>& PeerMemory::flat(at::ScalarType dtype) {
  auto& tensors = flat_[dtype];
  if (tensors.empty()) {
    const auto numel = 2 * half_bytes_ / static_cast<int64_t>(c10::elementSize(dtype));
    for (int64_t rank = 0; rank < world_; ++rank) {
      tensors.push_back(memory_->get_remote_tensor(static_cast<int>(rank), {numel}, dtype));
    }
  }
  return tensors;
}

void PeerMemory::all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  const auto dtype = inputs.front().scalar_type();
  const auto& buffers = flat(dtype);
  const auto half = half_bytes_ / static_cast<int64_t>(c10::elementSize(dtype));
  int64_t start = turn_++ % 2 * half;
  std::vector<int64_t> starts;
  std::vector<at::Tensor> staged;
  for (const auto& input : inputs) {
    starts.push_back(start);
    staged.push_back(buffers[rank_].as_strided(input.sizes(), input.strides(), start));
    start += aligned(input.numel(), dtype);
  }
  at::_foreach_copy_(staged, inputs);
  memory_->barrier(0, timeout_ms_);
  std::vector<at::Tensor> small, small_sources;
  for (int64_t step = 1; step < world_; ++step) {
    const auto peer = (rank_ + step) % world_;  // each rank reads from another one at a time
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto numel = inputs[i].numel();
      auto source = buffers[peer].as_strided({numel}, {1}, starts[i]);
      auto target = outputs[i].as_strided({numel}, {1}, outputs[i].storage_offset() + peer * numel);
      if (static_cast<int64_t>(source.nbytes()) >= kSmallCopy) {
        target.copy_(source, /*non_blocking=*/true);
      } else {
        small.push_back(std::move(target));
        small_sources.push_back(std::move(source));
      }
    }
  }
  if (!small.empty()) at::_foreach_copy_(small, small_sources);
}

}  // namespace zerocompile
