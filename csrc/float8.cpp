// Gathers that move float8: the weights of torchao's linear layers.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "gathers.h"
#include "text.h"

namespace zerocompile {

namespace {

constexpr double kSmallest = 1e-12;  // torchao's `EPS`

}  // namespace

// [Note: float8 gathers] A linear layer of torchao multiplies its weight, which is gathered in `dtype`, by one scale
// and casts it to float8 before it computes. A gather can move that cast instead: the same bits, a quarter or half of
// the bytes. It is a cast in the sense of [Note: low gathers], with one thing more: the scale is that of the largest
// element of the whole weight, of which each rank has some rows. So before rows are cast that are newer than the scale,
// the ranks agree on the scales of all such weights, in one all-reduce. After an optimizer's step that is before the
// first gather, once for the whole model (as torchao does it for FSDP2, `precompute_float8_dynamic_scale_for_fsdp`).
//
// All ranks must come to the same all-reduces. A scale is out of date when the master has another version, when an
// optimizer has run, and when user code may have written to a value in full, perhaps through `data`, of which no
// version tells (`write_back`). Such a value was gathered in full, so all ranks know of it. Where a rank alone may read
// one (in a window that holds its units, in unequal work) all scales are out of date afterwards, on every rank. In
// unequal work the rank whose turn it is decides. A gather with new scales counts as one of another unit in
// [Note: mismatched gathers].
//
// A value that is held in full is cast with the scale of what is held. Every rank has all of it, so none has to be
// asked. Such a scale is computed for each use, and kept apart from the one that the ranks have agreed on.
//
// The numbers are torchao's (float8_utils.py): rows go to `dtype` first, and the scale is the reciprocal in float64.
void Gathers::read_as_float8(int64_t index, bool power_of_two) {
  const auto& p = registry_.parameter(index);
  TORCH_CHECK(p.dtype == at::kFloat || p.dtype == at::kBFloat16 || p.dtype == at::kHalf,
              text("zerocompile: parameter `", p.name, "`, which is gathered in ", c10::toString(p.dtype),
                   ", cannot be read as float8"));
  auto& v = of(p);
  v.float8 = Float8{};
  v.float8->power_of_two = power_of_two;
}

Tensor Gathers::largest_of(const Tensor& value) {
  return value.numel() > 0 ? value.abs().max() : at::zeros({}, value.options());
}

Tensor Gathers::scale_of(const Tensor& largest, at::ScalarType dtype, bool power_of_two) {
  auto scale = largest.to(dtype).to(at::kDouble).clamp_min(kSmallest).reciprocal().mul_(kLargestFloat8).to(at::kFloat);
  return power_of_two ? scale.log2().floor().exp2() : scale;
}

// The value that is held, in a dtype that a use asks for.
Tensor Gathers::cast_of(const Parameter& p, at::ScalarType dtype) {
  auto& v = of(p);
  if (dtype != kFloat8) return v.value.to(dtype);
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  v.float8->held = scale_of(largest_of(v.value), p.dtype, v.float8->power_of_two);
  return to_float8(v.value, v.float8->held);
}

// A copy of the scale of what a use has asked for: [] of float32.
Tensor Gathers::float8_scale(int64_t index) {
  const auto& p = registry_.parameter(index);
  auto& v = of(p);
  TORCH_CHECK(v.float8.has_value() && v.full.defined(),
              text("zerocompile: parameter `", p.name, "` is not gathered to be read as float8"));
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  const auto& scale = v.full.scalar_type() == kFloat8 ? v.float8->agreed : v.float8->held;
  TORCH_CHECK(scale.defined(), text("zerocompile: parameter `", p.name, "` has no scale yet"));
  if (!registry_.device().is_cpu()) keep_for(scale, current_stream(registry_.device()));
  return scale.clone();
}

// Whether rows of the unit would be cast with a scale that is older than they are. `full`: as for `launch`.
bool Gathers::needs_scales(const Unit& unit, bool full) const {
  return std::any_of(unit.parameters.begin(), unit.parameters.end(), [&](int64_t i) {
    const auto& p = record(i);
    const auto& float8 = values_[i].float8;
    return float8.has_value() && gathered_dtype(p, full) == kFloat8 && float8->version != p.version();
  });
}

bool Gathers::needs_scales(const Units& units, bool full) const {
  return std::any_of(units.begin(), units.end(),
                     [&](int64_t index) { return needs_scales(registry_.units()[index], full); });
}

// This scale is out of date, on every rank.
void Gathers::forget_scale(GatheredValue& v) {
  if (v.float8.has_value()) v.float8->version = -1;
}

// What user code has written here has changed no version. So the scale stays the one of this version, but is that of
// these values, which all ranks have.
void Gathers::scale_again(const Parameter& p, const FullValue& from) {
  auto& float8 = of(p).float8;
  if (!float8.has_value() || float8->version != p.version()) return;
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  if (!registry_.device().is_cpu()) keep_for(float8->agreed, current_stream(registry_.device()));
  float8->agreed.copy_(scale_of(largest_of(from.value), p.dtype, float8->power_of_two));
}

// `full` in the dtype of `low`, which has the same shape.
void Gathers::cast_into(const Parameter& p, const Tensor& full, Tensor& low) {
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  const bool scales = low.scalar_type() == kFloat8 && full.scalar_type() != kFloat8;
  low.copy_(scales ? to_float8(full, of(p).float8->agreed) : full);
}

void Gathers::forget_scales() {
  for (auto& v : values_) forget_scale(v);
}

// The ranks agree on the scales of all weights that gathers move as float8.
void Gathers::agree_on_scales() {
  take_late();  // so that the ranks' rows are equally new
  Units indices;
  for (const auto& p : registry_.parameters()) {
    if (of(p).float8.has_value() && of(p).low == kFloat8) indices.push_back(p.index);
  }
  if (indices.empty()) return;
  c10::InferenceMode normal_tensors(false);
  at::NoGradGuard no_grad;
  for (auto i : indices) {
    const auto& written = of(registry_.unit_of(record(i))).written;
    if (written) written->block(current_stream(registry_.device()));
  }
  std::vector<Pending> started;
  {
    Lane::Launch launch(lane_, started);
    std::vector<Tensor> norms(indices.size()), wide;
    for (size_t k = 0; k < indices.size(); ++k) {
      const auto rows = rows_of(record(indices[k]));
      const bool together = rows.scalar_type() == at::kFloat && rows.numel() > 0;
      if (together) wide.push_back(rows);
      else norms[k] = largest_of(rows).to(at::kFloat);
    }
    if (!wide.empty()) {
      auto next = at::_foreach_norm(wide, std::numeric_limits<double>::infinity());
      size_t taken = 0;
      for (auto& norm : norms) {
        if (!norm.defined()) norm = std::move(next[taken++]);
      }
    }
    const auto largest = at::stack(norms);
    if (registry_.world() > 1) {
      all_reduce(*group_, launch, largest, c10d::ReduceOp::MAX);
      started_one();
    }
    launch.then([this, indices, largest] { take_scales(indices, largest); });
    launch.finish();
  }
  scaling_ = std::move(started.front());
  if (!registry_.device().is_cpu()) {
    scaling_.order(current_stream(registry_.device()));  // whoever writes to the masters next comes after this
    return;
  }
  const std::string what = "the all-reduce of the scales of float8 weights";
  wait_for(scaling_, registry_.device(), what, registry_.global_rank(), questions_.look(what, "gather", started_ + 1));
}

void Gathers::take_scales(const Units& indices, const Tensor& largest) {
  std::map<std::pair<at::ScalarType, bool>, Tensor> scales;
  for (size_t k = 0; k < indices.size(); ++k) {
    const auto& p = record(indices[k]);
    auto& float8 = *of(p).float8;
    auto& all = scales[{p.dtype, float8.power_of_two}];
    if (!all.defined()) all = scale_of(largest, p.dtype, float8.power_of_two);
    float8.agreed = all.select(0, static_cast<int64_t>(k));
    float8.version = p.version();
  }
}

}  // namespace zerocompile
