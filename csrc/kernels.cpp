#include "kernels.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>

#include "kernel_arguments.h"
#include "text.h"

namespace zerocompile {

namespace {

constexpr uintptr_t kVectorBytes = 16;  // the alignment that the kernels ask for

// The driver's functions have had these types since CUDA 4 (cuda.h: CUresult is an enum, the handles are pointers).
using Load = int(void**, const char*);
using Unload = int(void*);
using GetFunction = int(void**, void*, const char*);

bool fits(const at::Tensor& array, at::ScalarType dtype, int64_t numel) {
  return array.is_cuda() && array.scalar_type() == dtype && array.is_contiguous() && array.numel() == numel &&
         reinterpret_cast<uintptr_t>(array.const_data_ptr()) % kVectorBytes == 0;
}

int64_t blocks_of(int64_t numel) { return (numel + kPerBlock - 1) / kPerBlock; }

}  // namespace

void Kernels::UnloadModule::operator()(void* module) const {
  try {
    const c10::DeviceGuard guard(driver->device());
    (void)driver->function<Unload>("cuModuleUnload")(module);
  } catch (...) {  // the device has failed: nothing is left to be freed
  }
}

Kernels::Kernels(const std::string& path, c10::Device device, bool batches)
    : driver_(device, batches),
      state_(at::zeros({kBarrierStates}, at::TensorOptions(at::kInt).device(device))),
      module_(nullptr, UnloadModule{&driver_}) {
  const c10::DeviceGuard guard(device);
  void* module = nullptr;
  driver_.check(driver_.function<Load>("cuModuleLoad")(&module, path.c_str()), "loading the kernels");
  module_.reset(module);
  auto* const get = driver_.function<GetFunction>("cuModuleGetFunction");
  driver_.check(get(&cast_, module, "zerocompile_cast"), "finding the kernel of casts");
  driver_.check(get(&float8_, module, "zerocompile_float8"), "finding the kernel of casts to float8");
  driver_.check(get(&sum_, module, "zerocompile_sum"), "finding the kernel of sums");
  driver_.check(get(&barrier_, module, "zerocompile_barrier"), "finding the kernel of barriers");
  // The driver loads a kernel when it is first launched, and may wait for the device then: so now, with no elements.
  CastArguments no_casts{};
  Float8Arguments no_float8{};
  SumArguments no_sums{};
  const auto scale = at::ones({}, at::TensorOptions(at::kFloat).device(device));
  no_float8.scale[0] = static_cast<const float*>(scale.const_data_ptr());
  no_casts.count = no_float8.count = no_sums.count = 1;
  const auto words = at::zeros({kBarrierWords}, at::TensorOptions(at::kLong).pinned_memory(true));
  BarrierArguments alone{};
  alone.words = static_cast<long long*>(words.mutable_data_ptr());
  alone.state = state_.mutable_data_ptr<int>();
  alone.world = 1;
  launch(cast_, 1, &no_casts);
  launch(float8_, 1, &no_float8);
  launch(sum_, 1, &no_sums);
  launch(barrier_, 1, &alone);
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());  // it writes to `words`
}

bool Kernels::takes(const Cast& cast) {
  const auto numel = cast.from.numel();
  return fits(cast.from, at::kFloat, numel) && fits(cast.to, at::kBFloat16, numel) &&
         fits(cast.also, at::kBFloat16, numel);
}

bool Kernels::takes(const Float8Cast& cast) {
  const auto numel = cast.from.numel();
  const bool known = cast.through == at::kFloat || cast.through == at::kBFloat16 || cast.through == at::kHalf;
  return known && cast.scale.defined() && fits(cast.from, at::kFloat, numel) && fits(cast.to, at::kByte, numel) &&
         fits(cast.also, at::kByte, numel) && cast.scale.is_cuda() && cast.scale.scalar_type() == at::kFloat &&
         cast.scale.numel() == 1;
}

bool Kernels::takes(const Sum& sum) {
  const auto numel = sum.to.numel();
  return fits(sum.to, at::kFloat, numel) && fits(sum.own, at::kBFloat16, numel) &&
         sum.place * sizeof(at::BFloat16) % kVectorBytes == 0;
}

void Kernels::launch(void* function, int64_t blocks, void* argument) const {
  driver_.launch(function, blocks, kKernelThreads, argument);
}

void Kernels::barrier(const Barrier& barrier) const {
  TORCH_CHECK(barrier.world <= kKernelThreads,
              text("zerocompile: a kernel lets at most ", kKernelThreads, " ranks meet"));
  BarrierArguments arguments{};
  arguments.pads = static_cast<unsigned long long* const*>(barrier.pads);
  arguments.words = barrier.words;
  arguments.state = state_.mutable_data_ptr<int>();
  arguments.number = barrier.number;
  arguments.unit = barrier.unit;
  arguments.timeout = static_cast<unsigned long long>(barrier.timeout_ms) * 1'000'000;
  arguments.rank = static_cast<int>(barrier.rank);
  arguments.world = static_cast<int>(barrier.world);
  arguments.half = static_cast<int>(barrier.turn % 2);
  arguments.after_pushes = barrier.after_pushes;
  launch(barrier_, 1, &arguments);
}

void Kernels::set_pushing(bool pushing) const {
  (void)driver_.write(state_, pushing ? 1 : 0);  // an old driver cannot, and then no barrier waits
}

void Kernels::cast(const std::vector<Cast>& casts) const {
  for (size_t start = 0; start < casts.size(); start += kMostArrays) {
    CastArguments arguments;
    arguments.count = static_cast<int>(std::min<size_t>(kMostArrays, casts.size() - start));
    int64_t blocks = 0;
    for (int k = 0; k < arguments.count; ++k) {
      const auto& [from, to, also] = casts[start + k];
      TORCH_CHECK(takes(casts[start + k]), "zerocompile: a kernel cannot cast these arrays");
      arguments.first_block[k] = static_cast<int>(blocks);
      arguments.numel[k] = from.numel();
      arguments.from[k] = static_cast<const float*>(from.const_data_ptr());
      arguments.to[k] = static_cast<unsigned short*>(to.mutable_data_ptr());
      arguments.also[k] = static_cast<unsigned short*>(also.mutable_data_ptr());
      blocks += blocks_of(from.numel());
    }
    if (blocks > 0) launch(cast_, blocks, &arguments);
  }
}

void Kernels::cast(const std::vector<Float8Cast>& casts) const {
  for (size_t start = 0; start < casts.size(); start += kMostArrays) {
    Float8Arguments arguments;
    arguments.count = static_cast<int>(std::min<size_t>(kMostArrays, casts.size() - start));
    int64_t blocks = 0;
    for (int k = 0; k < arguments.count; ++k) {
      const auto& [from, to, also, scale, through] = casts[start + k];
      TORCH_CHECK(takes(casts[start + k]), "zerocompile: a kernel cannot cast these arrays to float8");
      arguments.first_block[k] = static_cast<int>(blocks);
      arguments.through[k] = through == at::kBFloat16 ? 1 : through == at::kHalf ? 2 : 0;
      arguments.numel[k] = from.numel();
      arguments.from[k] = static_cast<const float*>(from.const_data_ptr());
      arguments.scale[k] = static_cast<const float*>(scale.const_data_ptr());
      arguments.to[k] = static_cast<unsigned char*>(to.mutable_data_ptr());
      arguments.also[k] = static_cast<unsigned char*>(also.mutable_data_ptr());
      blocks += blocks_of(from.numel());
    }
    if (blocks > 0) launch(float8_, blocks, &arguments);
  }
}

void Kernels::sum(const std::vector<Sum>& sums, const std::vector<at::Tensor>& received, double divisor) const {
  TORCH_CHECK(static_cast<int64_t>(received.size()) <= kMostPeers,
              text("zerocompile: a kernel sums what at most ", kMostPeers, " peers sent, not ", received.size()));
  for (size_t start = 0; start < sums.size(); start += kMostArrays) {
    SumArguments arguments;
    arguments.count = static_cast<int>(std::min<size_t>(kMostArrays, sums.size() - start));
    arguments.peers = static_cast<int>(received.size());
    arguments.divisor = static_cast<float>(divisor);
    int exponent = 0;
    arguments.factor = std::frexp(arguments.divisor, &exponent) == 0.5f ? 1 / arguments.divisor : 0;
    for (size_t peer = 0; peer < received.size(); ++peer) {
      TORCH_CHECK(fits(received[peer], at::kBFloat16, received[peer].numel()),
                  "zerocompile: a kernel cannot sum what this peer sent");
      arguments.received[peer] = static_cast<const unsigned short*>(received[peer].const_data_ptr());
    }
    int64_t blocks = 0;
    for (int k = 0; k < arguments.count; ++k) {
      const auto& [own, to, place, adds] = sums[start + k];
      TORCH_CHECK(takes(sums[start + k]), "zerocompile: a kernel cannot sum these arrays");
      for (const auto& sent : received) {
        TORCH_CHECK(place >= 0 && place + to.numel() <= sent.numel(),
                    text("zerocompile: ", to.numel(), " elements at ", place, " are not in ", sent.numel()));
      }
      arguments.first_block[k] = static_cast<int>(blocks);
      arguments.numel[k] = to.numel();
      arguments.place[k] = place;
      arguments.own[k] = static_cast<const unsigned short*>(own.const_data_ptr());
      arguments.to[k] = static_cast<float*>(to.mutable_data_ptr());
      arguments.adds[k] = adds;
      blocks += blocks_of(to.numel());
    }
    if (blocks > 0) launch(sum_, blocks, &arguments);
  }
}

}  // namespace zerocompile
