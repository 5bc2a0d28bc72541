#include "peers.h"

#include <algorithm>
#include <utility>

#include "collectives.h"
#include "float8.h"
#include "text.h"
#include "views.h"

namespace zerocompile {

namespace {

constexpr int64_t kCopyAlignment = 512;     // bytes: what a copy engine and a vectorised kernel like
constexpr int64_t kSmallCopy = 256 * 1024;  // bytes: below, one kernel for many copies beats a copy engine's start

int64_t aligned(int64_t numel, at::ScalarType dtype) {
  const auto step = kCopyAlignment / static_cast<int64_t>(c10::elementSize(dtype));
  return (numel + step - 1) / step * step;
}

// What copy engines move, and what is too small for them: that is moved by one kernel.
class Copies {
 public:
  void add(const Driver::Copy& copy) {
    if (copy.numel * static_cast<int64_t>(copy.to.element_size()) >= kSmallCopy) {
      large_.add(copy);
    } else {
      targets_.push_back(view_of(copy.to, {copy.numel}, copy.to_begin));
      sources_.push_back(view_of(copy.from, {copy.numel}, copy.from_begin));
    }
  }

  void start(const Driver& driver) const {
    driver.copy(large_);
    if (!targets_.empty()) at::_foreach_copy_(targets_, sources_);
  }

 private:
  Driver::Copies large_;
  std::vector<at::Tensor> targets_, sources_;
};

}  // namespace

MappedMemory::MappedMemory(at::Tensor buffer, const std::string& group) : buffer_(std::move(buffer)) {
  TORCH_CHECK(buffer_.scalar_type() == at::kByte && buffer_.dim() == 1,
              text("zerocompile: a buffer of peers is flat and of bytes, got sizes ", buffer_.sizes(), " of ",
                   c10::toString(buffer_.scalar_type())));
  memory_ = c10d::symmetric_memory::rendezvous(buffer_, group);
}

const std::vector<at::Tensor>& MappedMemory::as(at::ScalarType dtype) {
  auto& tensors = by_dtype_[dtype];
  if (tensors.empty()) {
    const auto numel = buffer_.numel() / static_cast<int64_t>(c10::elementSize(dtype));
    for (int rank = 0; rank < memory_->get_world_size(); ++rank) {
      tensors.push_back(memory_->get_remote_tensor(rank, {numel}, dtype));
    }
  }
  return tensors;
}

PeerMemory::PeerMemory(at::Tensor buffer, std::shared_ptr<DeviceBarriers> barriers, const std::string& group,
                       std::shared_ptr<const Kernels> kernels, int64_t timeout_ms)
    : halves_(std::move(buffer), group),
      words_(std::move(barriers)),
      kernels_(std::move(kernels)),
      rank_(halves_.memory().get_rank()),
      world_(halves_.memory().get_world_size()),
      timeout_ms_(timeout_ms),
      half_bytes_(halves_.buffer().numel() / 2 / kCopyAlignment * kCopyAlignment) {
  TORCH_CHECK(world_ > 1, "zerocompile: a buffer of peers is for two ranks or more");
  const auto pad = 2 * static_cast<size_t>(world_) * sizeof(long long);
  TORCH_CHECK(pad <= halves_.memory().get_signal_pad_size(), text("zerocompile: torch's signal pads are too small for ",
                                                                  world_, " ranks"));
  TORCH_CHECK(kernels_ != nullptr, "zerocompile: peers meet by a kernel, and there are none");
}

int64_t PeerMemory::slot_bytes() const { return half_bytes_ / (world_ - 1) / kCopyAlignment * kCopyAlignment; }

bool PeerMemory::holds(const std::vector<Rows>& parameters) const {
  int64_t numel = 0;
  for (const auto& p : parameters) numel += aligned(p.rows.numel(), p.rows.scalar_type());
  return numel * static_cast<int64_t>(parameters.front().rows.element_size()) <= half_bytes_;
}

bool PeerMemory::holds(const std::vector<Gradient>& gradients) const {
  int64_t numel = 0;
  for (const auto& g : gradients) numel += aligned(g.full.numel() / world_, at::kBFloat16);
  return numel * static_cast<int64_t>(sizeof(at::BFloat16)) <= slot_bytes();
}

int64_t PeerMemory::half(at::ScalarType dtype) const {
  return turn_ % 2 * (half_bytes_ / static_cast<int64_t>(c10::elementSize(dtype)));
}

// Where each parameter's rows begin in the mapped memory.
std::vector<int64_t> PeerMemory::starts_of(const std::vector<Rows>& parameters, int64_t start) const {
  std::vector<int64_t> starts;
  for (const auto& p : parameters) {
    starts.push_back(start);
    start += aligned(p.rows.numel(), p.rows.scalar_type());
  }
  return starts;
}

std::vector<at::Tensor> PeerMemory::places(const std::vector<Rows>& parameters) {
  const auto dtype = parameters.front().rows.scalar_type();
  const auto& own = halves_.as(dtype)[rank_];
  const auto starts = starts_of(parameters, half(dtype));
  if (passed_) passed_->block(current_stream(halves_.buffer().device()));  // see [Note: two halves]
  std::vector<at::Tensor> staged;
  for (size_t i = 0; i < parameters.size(); ++i) {
    staged.push_back(view_of(own, parameters[i].rows.sizes(), starts[i]));
  }
  return staged;
}

void PeerMemory::barrier(int64_t number, int64_t unit, bool after_pushes) {
  const auto apart = words_->apart();
  TORCH_CHECK(apart.empty(), text("zerocompile: ", apart));
  kernels_->barrier({halves_.memory().get_signal_pad_ptrs_dev(), words_->words(), barriers_, number, unit, timeout_ms_,
                     rank_, world_, after_pushes});
  barriers_ += 1;
}

void PeerMemory::keep_casts(at::Tensor buffer, const std::string& group) {
  const auto device = halves_.buffer().device();
  TORCH_CHECK(buffer.device() == device,
              text("zerocompile: the memory of kept casts is on ", device, ", not on ", buffer.device()));
  kept_.emplace(std::move(buffer), group);
}

int64_t PeerMemory::kept_elements(int64_t numel) { return aligned(numel, at::kBFloat16); }

bool PeerMemory::keeps(const std::vector<Rows>& parameters) const {
  return kept_.has_value() && std::all_of(parameters.begin(), parameters.end(), [](const Rows& p) {
    return p.kept != nullptr && p.rows.element_size() == sizeof(at::BFloat16);
  });
}

// On the current stream: afterwards all ranks have read what they have gathered so far.
void PeerMemory::meet_readers(int64_t unit) {
  barrier(++asked_, unit, /*after_pushes=*/false);
  passed_ = met_ = mark(halves_.buffer().device());
  met_barrier_ = barriers_;
}

at::Tensor PeerMemory::kept_rows(const KeptCast& kept, at::ScalarType dtype, at::IntArrayRef size) {
  const auto& free = kept.barrier < met_barrier_ ? met_ : passed_;
  if (free) free->block(current_stream(halves_.buffer().device()));
  return view_of(kept_->as(dtype)[rank_], size, kept.begin);
}

// Says which casts are there, and lets the ranks meet if others may still read a place. Returns how many are there.
int64_t PeerMemory::prepare_kept(std::vector<Rows>& parameters, int64_t unit) {
  if (!std::all_of(parameters.begin(), parameters.end(), [this](const Rows& p) { return may_write(*p.kept); })) {
    meet_readers(unit);
  }
  int64_t found = 0;
  for (auto& p : parameters) {
    p.placed.staged = p.kept->version == p.version && p.kept->dtype == p.rows.scalar_type();
    found += p.placed.staged;
    p.kept->version = -1;  // until it is written
  }
  return found;
}

int64_t PeerMemory::all_gather(std::vector<Rows>& parameters, int64_t unit) {
  const auto dtype = parameters.front().rows.scalar_type();
  const bool keeps = this->keeps(parameters);
  const auto found = keeps ? prepare_kept(parameters, unit) : 0;
  const auto number = ++asked_;
  const auto& buffers = keeps ? kept_->as(dtype) : halves_.as(dtype);
  std::vector<int64_t> starts;
  if (!keeps) starts = starts_of(parameters, half(dtype));
  for (size_t i = 0; keeps && i < parameters.size(); ++i) starts.push_back(parameters[i].kept->begin);
  std::vector<at::Tensor> staged;
  for (size_t i = 0; i < parameters.size(); ++i) {
    staged.push_back(view_of(buffers[rank_], parameters[i].rows.sizes(), starts[i]));
  }
  Copies copies;
  for (int64_t step = 1; step <= world_; ++step) {
    const auto peer = (rank_ + step) % world_;  // each rank reads from another one at a time
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& p = parameters[i];
      if (peer == rank_ && (p.placed.own || !p.placed.staged)) continue;  // `stage` fills them
      const auto numel = p.rows.numel();
      copies.add({p.full, peer * numel, buffers[peer], starts[i], numel});
    }
  }
  stage(parameters, staged);
  barrier(number, unit, /*after_pushes=*/takes_turns());
  turn_ += !keeps;
  passed_ = mark(halves_.buffer().device());
  copies.start(kernels_->driver());
  for (auto& p : parameters) {
    if (!keeps) break;
    p.kept->version = p.version;
    p.kept->dtype = dtype;
    p.kept->barrier = barriers_;
  }
  return found;
}

void fill_rows(const std::vector<PeerMemory::Rows>& parameters) {
  std::vector<at::Tensor> own, masters;
  for (const auto& p : parameters) {
    if (p.master.numel() == 0 || p.placed.own) continue;
    own.push_back(p.own);
    masters.push_back(p.scale.defined() ? on_the_wire(to_float8(p.master.to(p.through), p.scale)) : p.master);
  }
  if (!own.empty()) at::_foreach_copy_(own, masters);
}

// The masters' rows go to the gathered values and to the mapped memory.
void PeerMemory::stage(const std::vector<Rows>& parameters, const std::vector<at::Tensor>& staged) {
  std::vector<Kernels::Cast> casts;
  std::vector<Kernels::Float8Cast> float8_casts;
  std::vector<at::Tensor> targets, sources;
  std::vector<Rows> padded;
  std::vector<at::Tensor> padded_targets, padded_rows;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    if (p.placed.staged) continue;
    Kernels::Cast cast{p.master, p.rows, staged[i]};
    if (p.placed.own) {
      targets.push_back(staged[i]);
      sources.push_back(p.rows);
    } else if (Kernels::Float8Cast float8{p.master, p.rows, staged[i], p.scale, p.through};
               Kernels::takes(float8)) {
      float8_casts.push_back(std::move(float8));
    } else if (p.master.numel() != p.rows.numel() || p.scale.defined()) {
      padded.push_back(p);
      padded_targets.push_back(staged[i]);
      padded_rows.push_back(p.rows);
    } else if (Kernels::takes(cast)) {
      casts.push_back(std::move(cast));
    } else {
      targets.insert(targets.end(), {p.own, staged[i]});
      sources.insert(sources.end(), 2, p.master);
    }
  }
  if (!targets.empty()) at::_foreach_copy_(targets, sources);
  fill_rows(padded);
  if (!padded.empty()) at::_foreach_copy_(padded_targets, padded_rows);
  if (!casts.empty()) kernels_->cast(casts);
  if (!float8_casts.empty()) kernels_->cast(float8_casts);
}

void PeerMemory::reduce_scatter(const std::vector<Gradient>& gradients, int64_t unit) {
  const auto number = ++asked_;
  const auto& buffers = halves_.as(at::kBFloat16);
  const auto half = this->half(at::kBFloat16), slot = slot_bytes() / static_cast<int64_t>(sizeof(at::BFloat16));
  std::vector<int64_t> places;
  int64_t place = 0;
  for (const auto& g : gradients) {
    places.push_back(place);
    place += aligned(g.full.numel() / world_, at::kBFloat16);
  }
  Copies copies;
  for (int64_t step = 1; step < world_; ++step) {
    const auto peer = (rank_ + step) % world_;  // each rank writes to another one at a time, into a slot of its own
    const auto begin = half + (step - 1) * slot;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const auto numel = gradients[i].full.numel() / world_;
      copies.add({buffers[peer], begin + places[i], gradients[i].full, peer * numel, numel});
    }
  }
  if (takes_turns()) kernels_->set_pushing(true);
  copies.start(kernels_->driver());
  if (takes_turns()) kernels_->set_pushing(false);
  barrier(number, unit, /*after_pushes=*/false);
  turn_ += 1;
  std::vector<at::Tensor> received;
  for (int64_t step = 1; step < world_; ++step) {
    received.push_back(view_of(buffers[rank_], {slot}, half + (step - 1) * slot));
  }
  std::vector<Kernels::Sum> sums;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& [full, mean, adds] = gradients[i];
    const auto numel = mean.numel();  // without padding
    if (numel == 0) continue;
    Kernels::Sum sum{view_of(full, {numel}, rank_ * (full.numel() / world_)), mean, places[i], adds};
    if (Kernels::takes(sum)) {
      sums.push_back(std::move(sum));
      continue;
    }
    auto total = sum.own.to(at::kFloat);
    for (const auto& sent : received) total.add_(view_of(sent, {numel}, places[i]));
    total = total.div_(world_).view(mean.sizes());
    if (adds) mean.add_(total);
    else mean.copy_(total);
  }
  if (!sums.empty()) kernels_->sum(sums, received, static_cast<double>(world_));
}

}  // namespace zerocompile
