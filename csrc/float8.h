// What a cast to float8 is: see [Note: float8 gathers] in float8.cpp.
#pragma once

#include <ATen/ATen.h>

namespace zerocompile {

constexpr auto kFloat8 = at::ScalarType::Float8_e4m3fn;
constexpr double kLargestFloat8 = 448.0;

inline at::Tensor to_float8(const at::Tensor& value, const at::Tensor& scale) {
  return value.to(at::kFloat).mul(scale).clamp_(-kLargestFloat8, kLargestFloat8).to(kFloat8);
}

}  // namespace zerocompile
