#include "barriers.h"

#include <utility>

#include "text.h"

namespace zerocompile {

DeviceBarriers::DeviceBarriers(at::Tensor words, std::string kind, std::vector<std::string> units)
    : memory_(std::move(words)), kind_(std::move(kind)), units_(std::move(units)) {
  TORCH_CHECK(memory_.is_cpu() && memory_.scalar_type() == at::kLong && memory_.numel() == kBarrierWords &&
                  memory_.is_contiguous(),
              text("zerocompile: the words of barriers are ", static_cast<int>(kBarrierWords),
                   " of int64 in the host's memory, got sizes ", memory_.sizes()));
  words_ = static_cast<long long*>(memory_.mutable_data_ptr());
}

void DeviceBarriers::end() { __atomic_store_n(words_ + kEnded, 1, __ATOMIC_RELEASE); }

int64_t DeviceBarriers::stands() const {
  const auto passed = read(kPassed), entered = read(kEntered);
  return read(kEnded) != 0 || read(kOther) != 0 || passed >= entered ? 0 : entered;
}

std::string DeviceBarriers::where() const { return name_of(read(kUnit)); }

std::string DeviceBarriers::apart() const {
  const auto other = static_cast<uint64_t>(read(kOther));
  if (other == 0) return "";
  return text("ranks are in different barriers: this rank's device was in ", where(),
              " (barrier ", read(kEntered), "), another rank's in ", name_of(static_cast<uint32_t>(other)),
              " (barrier ", other >> 32,
              "). They have not started the same gathers or reductions, so what they compute from here on is wrong. If "
              "a rank catches errors of a training step, let it raise them instead.");
}

std::string DeviceBarriers::name_of(int64_t unit) const {
  const bool known = unit >= 0 && unit < static_cast<int64_t>(units_.size());
  return text("the ", kind_, " of unit ", known ? text("`", units_[unit], "`") : std::to_string(unit));
}

}  // namespace zerocompile
