// Error messages.
#pragma once

#include <ATen/ATen.h>

#include <concepts>
#include <string>

namespace zerocompile {

inline std::string part(const char* text) { return text; }
inline std::string part(const std::string& text) { return text; }
inline std::string part(const c10::Device& device) { return device.str(); }
template <std::integral T>
std::string part(T number) {
  return std::to_string(number);
}
inline std::string part(at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  return text + "]";
}

// [Note: messages] A message is one string, made without streams: TORCH_CHECK writes numbers to a std::ostringstream
// that it instantiates in this library, which crashes where the compiler links its C++ library statically.
template <typename... Parts>
std::string text(const Parts&... parts) {
  return (part(parts) + ...);
}

}  // namespace zerocompile
