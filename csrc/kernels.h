// Device kernels of our own (see kernels.cu), launched through the CUDA driver.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "driver.h"

namespace zerocompile {

class Kernels {
 public:
  // From a float32 array to two bfloat16 arrays, all [n].
  struct Cast {
    at::Tensor from, to, also;
  };
  // From a float32 array to two float8_e4m3fn arrays (uint8), all [n]: rounded to `through`, times `scale`, which is []
  // of float32.
  struct Float8Cast {
    at::Tensor from, to, also, scale;
    at::ScalarType through;
  };
  // This rank's bfloat16 array [n] and, from each peer, the [n] elements from `place` on of what it sent: their sum
  // goes to a float32 array [n].
  struct Sum {
    at::Tensor own, to;
    int64_t place;
    bool adds;  // to what is there
  };
  // See [Note: device barriers].
  struct Barrier {
    void* pads;        // on the device: [world] pointers
    long long* words;  // of `DeviceBarriers`
    int64_t turn;      // how many barriers were launched before
    int64_t number, unit;
    int64_t timeout_ms, rank, world;
    bool after_pushes;  // see [Note: pulls after pushes]
  };

  // `path`: of what kernels.cu was compiled to. `batches`: see `Driver`. Raises where there is no driver, or one that
  // cannot read it.
  Kernels(const std::string& path, c10::Device device, bool batches);
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  const Driver& driver() const { return driver_; }
  // Whether the arrays have the dtypes, the layout and the alignment that the kernels ask for.
  static bool takes(const Cast& cast);
  static bool takes(const Float8Cast& cast);
  static bool takes(const Sum& sum);

  // On the current stream.
  void cast(const std::vector<Cast>& casts) const;
  void cast(const std::vector<Float8Cast>& casts) const;

  // to = (own + all received) / divisor; `received`: [elements] bfloat16, from one peer each.
  void sum(const std::vector<Sum>& sums, const std::vector<at::Tensor>& received, double divisor) const;

  void barrier(const Barrier& barrier) const;

  // From here on in the current stream this rank pushes, or does not: see [Note: pulls after pushes].
  void set_pushing(bool pushing) const;

 private:
  void launch(void* function, int64_t blocks, void* argument) const;

  struct UnloadModule {
    const Driver* driver;
    void operator()(void* module) const;
  };

  Driver driver_;
  at::Tensor state_;  // int32, by `BarrierState`
  std::unique_ptr<void, UnloadModule> module_;
  void *cast_ = nullptr, *float8_ = nullptr, *sum_ = nullptr, *barrier_ = nullptr;  // of the module
};

}  // namespace zerocompile
