// Views for the runtime's own use.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>

namespace zerocompile {

// [Note: cheap views] A view that an operator makes costs the host 1 to 5 us, for the dispatcher and for what autograd
// might want to know of it. A gather or a reduction needs several of every parameter, none of which is differentiated.
// These are made without either. They share memory and versions with what they are views of, as torch's do.
inline at::Tensor view_of(const at::Tensor& tensor) {
  const auto* self = tensor.unsafeGetTensorImpl();
  return at::Tensor(self->shallow_copy_and_detach(self->version_counter(), /*allow_tensor_metadata_change=*/true));
}

// How many bytes of memory a view with these sizes and strides needs; 0 if it has no elements.
inline size_t bytes_of_view(at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  int64_t last = offset;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return static_cast<size_t>(last + 1) * c10::elementSize(dtype);
}

// Contiguous, from this element of the (contiguous) tensor on.
inline at::Tensor view_of(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t offset) {
  TORCH_CHECK(offset >= 0 && offset + c10::multiply_integers(sizes) <= tensor.numel(),
              "zerocompile: a view beyond its tensor");
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKey::Python);  // they would see a view of other sizes
  auto view = view_of(tensor);
  auto* self = view.unsafeGetTensorImpl();
  self->set_sizes_contiguous(sizes);
  self->set_storage_offset(tensor.storage_offset() + offset);
  return view;
}

// Any view of the tensor's memory; `offset` and `strides` count elements of `dtype`.
inline at::Tensor view_of(const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef sizes,
                          at::IntArrayRef strides, int64_t offset) {
  TORCH_CHECK(bytes_of_view(dtype, sizes, strides, offset) <= tensor.storage().nbytes(),
              "zerocompile: a view beyond its tensor's memory");
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKey::Python);  // as above
  auto view = view_of(tensor);
  auto* self = view.unsafeGetTensorImpl();
  self->set_storage_and_dtype(tensor.storage(), c10::scalarTypeToTypeMeta(dtype));
  self->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

}  // namespace zerocompile
