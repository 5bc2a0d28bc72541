// CUDA's driver, which comes with every GPU: what torch offers no function for is asked of it by name. Nothing else of
// CUDA is needed to build or to run this, so the same source serves every build of torch.
#pragma once

#include <ATen/ATen.h>
#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "text.h"

namespace zerocompile {

class Driver {
 public:
  // `numel` elements of `from`, from `from_begin` on, go to `to`, from `to_begin` on. Both are contiguous, of one dtype
  // and in memory that the device reaches, be it its own or mapped.
  struct Copy {
    const at::Tensor& to;
    int64_t to_begin;
    const at::Tensor& from;
    int64_t from_begin, numel;
  };
  // The same as addresses: who adds them keeps the tensors.
  class Copies {
   public:
    void add(const Copy& copy);  // checked

   private:
    friend class Driver;
    std::vector<uint64_t> to_, from_;
    std::vector<size_t> bytes_;
  };

  // `batches`: whether to use the driver's batches where it has them (CUDA 12.8). Raises where there is no driver.
  Driver(c10::Device device, bool batches);

  c10::Device device() const { return device_; }

  template <typename Function>
  Function* function(const char* name) const {
    auto* found = reinterpret_cast<Function*>(dlsym(driver_.get(), name));
    TORCH_CHECK(found != nullptr, text("zerocompile: the CUDA driver has no ", name));
    return found;
  }

  void check(int result, const char* what) const;  // raises if it is an error

  // On the current stream: a kernel of one argument.
  void launch(void* function, int64_t blocks, int64_t threads, void* argument) const;

  // On the current stream, by the copy engines, in any order.
  void copy(const Copies& copies) const;

  // On the current stream, without a kernel: the first number of `numbers`, int32. Returns whether the driver can.
  bool write(const at::Tensor& numbers, int value) const;

 private:
  // cuda.h: CUresult is an enum, handles are pointers, device pointers 64-bit integers.
  using Launch = int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                     void**);
  using CopyOne = int(uint64_t, uint64_t, size_t, void*);
  using Write = int(void*, uint64_t, uint32_t, unsigned);
  struct Location {
    int type, id;
  };
  struct Attributes {
    int source_order;
    Location source, target;
    unsigned flags;
  };
  using CopyBatch = int(const uint64_t*, const uint64_t*, const size_t*, size_t, Attributes*, size_t*, size_t, size_t*,
                        void*);  // as of CUDA 12.8

  struct Close {
    void operator()(void* driver) const;
  };

  c10::Device device_;
  std::unique_ptr<void, Close> driver_;
  Launch* launch_ = nullptr;
  CopyOne* copy_ = nullptr;
  CopyBatch* batch_ = nullptr;  // null: the driver has none
  Write* write_ = nullptr;      // the same
};

}  // namespace zerocompile
