// What autograd saves of gathered values. A `Saved` owns what autograd keeps instead of a tensor that it saves.
//
// Lock: `pack` and `unpack` do not ask for it. The methods of the runtime that they call take it. Who calls may hold it
// already, but not to unpack a gathered parameter: that may wait for other ranks.
//
// Streams: `unpack` returns a view of a value; the current stream has been ordered after its gather.
#pragma once

#include "runtime.h"

namespace zerocompile {

// What autograd keeps instead of a saved tensor: see [Note: saved tensors].
struct Saved {
  Tensor tensor;            // an activation or a handle; undefined for a gathered parameter
  int64_t version = 0;
  int64_t parameter = -1;   // whose value it is a view of, and how it sees that memory:
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> size, stride;
  int64_t offset = 0;
  bool conj = false, neg = false;
  int64_t handle_of = -1, forward_version = 0;  // see [Note: stale backward]
};

// `plain`: Python has no subclass of it.
Saved pack(Runtime& runtime, const Tensor& tensor, bool plain);
Tensor unpack(Runtime& runtime, const Saved& saved);

// Whether autograd has recorded no operation on this value: then no gradient with respect to it can exist.
bool never_used(const Tensor& value);

}  // namespace zerocompile
