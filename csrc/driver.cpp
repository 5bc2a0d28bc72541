#include "driver.h"

#include "stream.h"

namespace zerocompile {

namespace {

// Of the elements from `begin` on; `data`: of the first of all.
uint64_t address(const at::Tensor& tensor, const void* data, int64_t begin, int64_t numel, c10::Device device) {
  TORCH_CHECK(tensor.device() == device && tensor.is_contiguous(),
              text("zerocompile: a copy engine moves contiguous memory of ", device, ", not of ", tensor.device()));
  TORCH_CHECK(begin >= 0 && numel >= 0 && begin + numel <= tensor.numel(),
              text("zerocompile: ", numel, " elements from ", begin, " on are not in ", tensor.numel()));
  return reinterpret_cast<uint64_t>(data) +
         static_cast<uint64_t>(begin) * static_cast<uint64_t>(tensor.element_size());
}

}  // namespace

void Driver::Close::operator()(void* driver) const { (void)dlclose(driver); }

Driver::Driver(c10::Device device, bool batches) : device_(device) {
  TORCH_CHECK(device_.is_cuda(), text("zerocompile: CUDA's driver is for CUDA devices, not for ", device_));
  driver_.reset(dlopen("libcuda.so.1", RTLD_NOW));
  TORCH_CHECK(driver_ != nullptr, "zerocompile: there is no CUDA driver (libcuda.so.1)");
  launch_ = function<Launch>("cuLaunchKernel");
  copy_ = function<CopyOne>("cuMemcpyDtoDAsync_v2");
  write_ = reinterpret_cast<Write*>(dlsym(driver_.get(), "cuStreamWriteValue32_v2"));  // since CUDA 11.7
  // A later CUDA has changed the function's arguments, so it is asked for by the version that it had them in.
  using Find = int(const char*, void**, int, uint64_t, void*);
  constexpr int kSince = 12080;
  auto* const find = reinterpret_cast<Find*>(dlsym(driver_.get(), "cuGetProcAddress_v2"));
  void* found = nullptr;
  if (batches && find != nullptr && find("cuMemcpyBatchAsync", &found, kSince, 0, nullptr) == 0) {
    batch_ = reinterpret_cast<CopyBatch*>(found);
  }
}

void Driver::check(int result, const char* what) const {
  if (result == 0) return;
  using GetErrorName = int(int, const char**);
  const char* name = nullptr;
  (void)function<GetErrorName>("cuGetErrorName")(result, &name);
  TORCH_CHECK(false, text("zerocompile: ", what, " failed: ", name == nullptr ? "unknown error" : name));
}

void Driver::launch(void* function, int64_t blocks, int64_t threads, void* argument) const {
  void* arguments[] = {argument};
  check(launch_(function, static_cast<unsigned>(blocks), 1, 1, static_cast<unsigned>(threads), 1, 1, 0,
                current_stream(device_).native_handle(), arguments, nullptr),
        "launching a kernel");
}

void Driver::Copies::add(const Copy& copy) {
  TORCH_CHECK(copy.to.scalar_type() == copy.from.scalar_type(),
              text("zerocompile: a copy engine does not cast ", c10::toString(copy.from.scalar_type()), " to ",
                   c10::toString(copy.to.scalar_type())));
  if (copy.numel == 0) return;
  const auto device = copy.to.device();
  to_.push_back(address(copy.to, copy.to.mutable_data_ptr(), copy.to_begin, copy.numel, device));
  from_.push_back(address(copy.from, copy.from.const_data_ptr(), copy.from_begin, copy.numel, device));
  bytes_.push_back(static_cast<size_t>(copy.numel) * copy.to.element_size());
}

// [Note: batched copies] A block of seven large parameters is 21 copies on four ranks. To ask for them costs the host
// 0.3 ms by torch's `copy_`, 0.11 by the driver one at a time, and 0.05 as one batch (timed from Python). The copies of
// a batch begin without waiting for the end of those before: 0.81 ms instead of 0.89 on 4 x H100. They run in any
// order, so none may read or write what another one writes.
void Driver::copy(const Copies& copies) const {
  auto* const stream = current_stream(device_).native_handle();
  const auto count = copies.to_.size();
  if (count == 0) return;
  if (batch_ != nullptr && stream != nullptr) {  // a batch cannot be on the default stream
    constexpr int kInStreamOrder = 1;       // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    constexpr unsigned kBesideCompute = 1;  // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
    Attributes attributes{kInStreamOrder, {0, 0}, {0, 0}, kBesideCompute};
    size_t first = 0, failed = 0;
    const int result = batch_(copies.to_.data(), copies.from_.data(), copies.bytes_.data(), count, &attributes, &first,
                              1, &failed, stream);
    if (result == 0) return;  // else some of them may have been started, which changes nothing
  }
  for (size_t k = 0; k < count; ++k) {
    check(copy_(copies.to_[k], copies.from_[k], copies.bytes_[k], stream), "a copy between devices");
  }
}

bool Driver::write(const at::Tensor& numbers, int value) const {
  TORCH_CHECK(numbers.scalar_type() == at::kInt, text("zerocompile: a stream writes int32, not ",
                                                      c10::toString(numbers.scalar_type())));
  const auto place = address(numbers, numbers.mutable_data_ptr(), 0, 1, device_);
  return write_ != nullptr &&
         write_(current_stream(device_).native_handle(), place, static_cast<uint32_t>(value), /*flags=*/0) == 0;
}

}  // namespace zerocompile
