#include "peers.h"

#include <algorithm>
#include <utility>

#include "text.h"

namespace zerocompile {

namespace {

constexpr int64_t kAlignment = 512;        // bytes: what a copy engine and a vectorised kernel like
constexpr int64_t kSmallCopy = 256 * 1024;  // bytes: below, one kernel for many copies beats a copy engine's start
constexpr int64_t kRounds = 8;              // at most: many small ones would be slower than a collective

int64_t aligned(int64_t numel, at::ScalarType dtype) {
  const auto step = kAlignment / static_cast<int64_t>(c10::elementSize(dtype));
  return (numel + step - 1) / step * step;
}

// Copies that are too small for a copy engine are made by one kernel.
class Copies {
 public:
  void add(at::Tensor target, at::Tensor source) {
    if (static_cast<int64_t>(source.nbytes()) >= kSmallCopy) {
      target.copy_(source, /*non_blocking=*/true);
    } else {
      targets_.push_back(std::move(target));
      sources_.push_back(std::move(source));
    }
  }

  void finish() {
    if (!targets_.empty()) at::_foreach_copy_(targets_, sources_);
  }

 private:
  std::vector<at::Tensor> targets_, sources_;
};

at::Tensor flat_part(const at::Tensor& tensor, int64_t start, int64_t numel) {
  return tensor.as_strided({numel}, {1}, tensor.storage_offset() + start);
}

}  // namespace

PeerMemory::PeerMemory(at::Tensor buffer, const std::string& group, std::shared_ptr<Kernels> kernels,
                       int64_t timeout_ms)
    : buffer_(std::move(buffer)),
      memory_(c10d::symmetric_memory::rendezvous(buffer_, group)),
      kernels_(std::move(kernels)),
      rank_(memory_->get_rank()),
      world_(memory_->get_world_size()),
      timeout_ms_(timeout_ms),
      half_bytes_(buffer_.numel() / 2 / kAlignment * kAlignment) {
  TORCH_CHECK(buffer_.scalar_type() == at::kByte && buffer_.dim() == 1,
              text("zerocompile: a buffer of peers is flat and of bytes, got sizes ", buffer_.sizes()));
}

int64_t PeerMemory::slot_bytes() const { return half_bytes_ / (world_ - 1) / kAlignment * kAlignment; }

bool PeerMemory::holds(const std::vector<Rows>& parameters) const {
  int64_t numel = 0;
  for (const auto& p : parameters) numel += aligned(p.rows.numel(), p.rows.scalar_type());
  return numel * static_cast<int64_t>(parameters.front().rows.element_size()) <= kRounds * half_bytes_;
}

bool PeerMemory::holds(const std::vector<Gradient>& gradients) const {
  int64_t numel = 0;
  for (const auto& g : gradients) numel += aligned(g.full.numel() / world_, at::kBFloat16);
  return numel * static_cast<int64_t>(sizeof(at::BFloat16)) <= kRounds * slot_bytes();
}

// `bytes`: of a half, or of a slot in it; a multiple of the alignment.
std::vector<PeerMemory::Round> PeerMemory::rounds(const std::vector<int64_t>& numels, int64_t bytes,
                                                  at::ScalarType dtype) {
  const auto capacity = bytes / static_cast<int64_t>(c10::elementSize(dtype));
  std::vector<Round> rounds(1);
  int64_t place = 0;
  for (size_t k = 0; k < numels.size(); ++k) {
    for (int64_t start = 0; start < numels[k];) {
      if (place == capacity) {
        rounds.emplace_back();
        place = 0;
      }
      const auto numel = std::min(numels[k] - start, capacity - place);
      rounds.back().push_back({k, start, numel, place});
      start += numel;
      place += aligned(numel, dtype);
    }
  }
  return rounds;
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

int64_t PeerMemory::next_half(at::ScalarType dtype) {
  return turn_++ % 2 * (half_bytes_ / static_cast<int64_t>(c10::elementSize(dtype)));
}

void PeerMemory::all_gather(const std::vector<Rows>& parameters) {
  std::vector<int64_t> numels;
  for (const auto& p : parameters) numels.push_back(p.rows.numel());
  for (const auto& round : rounds(numels, half_bytes_, parameters.front().rows.scalar_type())) {
    gather(parameters, round);
  }
}

void PeerMemory::gather(const std::vector<Rows>& parameters, const Round& round) {
  const auto dtype = parameters.front().rows.scalar_type();
  const auto& buffers = flat(dtype);
  const auto half = next_half(dtype);
  std::vector<Rows> parts;
  std::vector<at::Tensor> staged;
  for (const auto& piece : round) {
    auto part = parameters[piece.parameter];
    if (piece.numel < part.rows.numel()) {
      const auto filled = std::clamp<int64_t>(part.master.numel() - piece.start, 0, piece.numel);
      part.rows = flat_part(part.rows, piece.start, piece.numel);
      part.own = flat_part(part.own, piece.start, filled);
      part.master = flat_part(part.master, piece.start, filled);
    }
    staged.push_back(buffers[rank_].as_strided(part.rows.sizes(), part.rows.strides(), half + piece.place));
    parts.push_back(std::move(part));
  }
  stage(parts, staged);
  memory_->barrier(0, timeout_ms_);
  Copies copies;
  for (int64_t step = 1; step < world_; ++step) {
    const auto peer = (rank_ + step) % world_;  // each rank reads from another one at a time
    for (const auto& [parameter, start, numel, place] : round) {
      const auto& [full, rows, own, master] = parameters[parameter];
      copies.add(flat_part(full, peer * rows.numel() + start, numel), flat_part(buffers[peer], half + place, numel));
    }
  }
  copies.finish();
}

// The masters' rows go to the gathered values and to the mapped memory.
void PeerMemory::stage(const std::vector<Rows>& parts, const std::vector<at::Tensor>& staged) {
  std::vector<Kernels::Cast> casts;
  std::vector<at::Tensor> own, masters, targets, rows;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& part = parts[i];
    Kernels::Cast cast{part.master, part.rows, staged[i]};
    if (kernels_ != nullptr && part.master.numel() == part.rows.numel() && Kernels::takes(cast)) {
      casts.push_back(std::move(cast));
      continue;
    }
    if (part.master.numel() > 0) {
      own.push_back(part.own);
      masters.push_back(part.master);
    }
    targets.push_back(staged[i]);
    rows.push_back(part.rows);
  }
  if (!own.empty()) at::_foreach_copy_(own, masters);
  if (!targets.empty()) at::_foreach_copy_(targets, rows);
  if (!casts.empty()) kernels_->cast(casts);
}

void PeerMemory::reduce_scatter(const std::vector<Gradient>& gradients, double divisor) {
  TORCH_CHECK(kernels_ != nullptr, "zerocompile: peers sum with kernels, and there are none");
  std::vector<int64_t> numels;
  for (const auto& g : gradients) numels.push_back(g.full.numel() / world_);
  for (const auto& round : rounds(numels, slot_bytes(), at::kBFloat16)) reduce(gradients, round, divisor);
}

void PeerMemory::reduce(const std::vector<Gradient>& gradients, const Round& round, double divisor) {
  const auto& buffers = flat(at::kBFloat16);
  const auto half = next_half(at::kBFloat16), slot = slot_bytes() / static_cast<int64_t>(sizeof(at::BFloat16));
  Copies copies;
  for (int64_t step = 1; step < world_; ++step) {
    const auto peer = (rank_ + step) % world_;  // each rank writes to another one at a time, into a slot of its own
    const auto begin = half + (step - 1) * slot;
    for (const auto& [parameter, start, numel, place] : round) {
      const auto& full = gradients[parameter].full;
      copies.add(flat_part(buffers[peer], begin + place, numel),
                 flat_part(full, peer * (full.numel() / world_) + start, numel));
    }
  }
  copies.finish();
  memory_->barrier(0, timeout_ms_);
  std::vector<at::Tensor> received;
  for (int64_t step = 1; step < world_; ++step) {
    received.push_back(flat_part(buffers[rank_], half + (step - 1) * slot, slot));
  }
  std::vector<Kernels::Sum> sums;
  for (const auto& [parameter, start, size, place] : round) {
    const auto& [full, mean, adds] = gradients[parameter];
    const auto numel = std::clamp<int64_t>(mean.numel() - start, 0, size);  // the rest is padding
    if (numel == 0) continue;
    Kernels::Sum sum{flat_part(full, rank_ * (full.numel() / world_) + start, numel),
                     numel == mean.numel() ? mean : flat_part(mean, start, numel), place, adds};
    if (Kernels::takes(sum)) {
      sums.push_back(std::move(sum));
      continue;
    }
    auto total = sum.own.to(at::kFloat);
    for (const auto& sent : received) total.add_(flat_part(sent, place, numel));
    total = total.div_(divisor).view(sum.to.sizes());
    if (adds) sum.to.add_(total);
    else sum.to.copy_(total);
  }
  if (!sums.empty()) kernels_->sum(sums, received, divisor);
}

}  // namespace zerocompile
