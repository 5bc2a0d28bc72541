// The words that the barriers of one mapped buffer and the host share: see [Note: device barriers] in peers.h.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_arguments.h"

namespace zerocompile {

class DeviceBarriers {
 public:
  // `words`: [kBarrierWords] int64, zeros; pinned where there is a device. `kind`: what meets, "gather" or "reduction".
  // `units`: their names, by number.
  DeviceBarriers(at::Tensor words, std::string kind, std::vector<std::string> units);

  // Nothing of the driver's is needed to read or to write them.
  long long* words() const { return words_; }

  void end();                 // this device's barriers go on without the other ranks
  int64_t stands() const;     // the number of the barrier that the device is in; 0: in none
  std::string where() const;  // what the last barrier was for
  std::string apart() const;  // that the last barrier was another one than another rank's; "": it was not

 private:
  std::string name_of(int64_t unit) const;
  int64_t read(BarrierWord word) const { return __atomic_load_n(words_ + word, __ATOMIC_ACQUIRE); }

  at::Tensor memory_;
  long long* words_;  // in `memory_`
  std::string kind_;
  std::vector<std::string> units_;
};

}  // namespace zerocompile
