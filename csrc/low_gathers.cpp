// Under autocast: whether a gather moves a parameter in full or as autocast's cast. The dtype of a parameter itself is
// decided in sharding/islands.py.
#include <algorithm>

#include "gathers.h"
#include "text.h"

namespace zerocompile {

// [Note: low gathers] Under autocast a linear layer casts its float32 weight before it computes. Such a use asks for
// the cast (`gather_cast` in a graph, `read` with `cast` in eager code), any other use for the full value. Where no
// rank has ever asked for the full value a gather can move the cast: the same bits, half the bytes. The ranks agree
// once on these parameters, at the same mark of their programs (sharding/autocast.py). Until then, and for all others,
// the runtime casts what it holds: a use never knows which it is.
//
// A full value that is asked for later has its unit gathered again in full, all of it, and that serves every use until
// the unit is dropped. What a use asks for is a property of the program, compiled or not, so all ranks do the same;
// such a gather counts as one of another unit in [Note: mismatched gathers], so ranks that differ raise.
// `full_parameters` and [Note: held units] gather in full from the beginning: no read in a window may need a
// collective. A low value is never shared with user code, so nothing is ever written to it, and autograd never saves
// it as its identity.

void Gathers::ask(const Parameter& p, at::ScalarType dtype) {
  const bool casts = dtype != p.dtype;
  const bool lower = p.dtype == at::kFloat && (dtype == at::kBFloat16 || dtype == at::kHalf);
  TORCH_CHECK(!casts || lower || (dtype == kFloat8 && of(p).float8.has_value()),
              text("zerocompile: parameter `", p.name, "`, which is gathered in ", c10::toString(p.dtype),
                   ", is asked for in ", c10::toString(dtype), "; only float32 is cast to lower precision, and only ",
                   "weights of float8 layers to float8"));
  (casts ? of(p).asked_cast : of(p).asked_full) = true;
}

// A letter for each parameter: "c": all uses on this rank so far take the cast; "f": not all, or its unit stays
// gathered between optimizer steps, for whatever use; "-": there was none.
std::string Gathers::asked() const {
  std::string letters;
  for (const auto& p : registry_.parameters()) {
    const bool full = of(p).asked_full || registry_.unit_of(p).lifetime == Lifetime::Step;
    letters += full ? 'f' : of(p).asked_cast ? 'c' : '-';
  }
  return letters;
}

// From the next gather of their units on; the same on all ranks, at the same point of their programs.
void Gathers::gather_low(const Units& indices, at::ScalarType dtype) {
  for (auto i : indices) {
    const auto& p = registry_.parameter(i);
    const bool narrower = dtype == kFloat8 ? of(p).float8.has_value() : p.dtype == at::kFloat;
    TORCH_CHECK(p.unit >= 0 && registry_.units()[p.unit].lifetime == Lifetime::Use && narrower,
                text("zerocompile: `", p.name, "` cannot be gathered in ", c10::toString(dtype)));
    of(p).low = dtype;
  }
}

at::ScalarType Gathers::gathered_dtype(const Parameter& p, bool full) const {
  const auto& v = of(p);
  if (v.full.defined()) return v.full.scalar_type();
  return full ? p.dtype : v.low.value_or(p.dtype);
}

bool Gathers::needs_full(const Parameter& p, at::ScalarType asked) const {
  const auto& low = of(p).low;
  return low.has_value() && asked != *low;
}

// Whether a gather moves in full what the ranks have agreed to move low.
bool Gathers::widens(const Unit& unit, bool full) const {
  return std::any_of(unit.parameters.begin(), unit.parameters.end(), [&](int64_t i) {
    return values_[i].low.has_value() && gathered_dtype(record(i), full) == record(i).dtype;
  });
}

}  // namespace zerocompile
