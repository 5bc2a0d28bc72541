#include "saved.h"

#include <torch/csrc/autograd/variable.h>

#include "text.h"
#include "views.h"

namespace zerocompile {

// [Note: saved tensors] A gathered weight that eager code saves for backward is kept as its identity and gathered again
// when backward asks for it. What was saved may be any view of the weight's memory: of other sizes, of a part, in
// another dtype (`view_as_complex`, `view(dtype)`), conjugated or negated by a bit. All of that is kept. A subclass of
// Tensor that dispatches operators itself is kept as it is, which keeps the gathered memory: only it knows what it is.
// One that does not comes back as a plain tensor, as torch's hooks have it. Hooks switch torch's own check for in-place
// writes off, so it is repeated here.
namespace {

bool dispatches_itself(const Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

void describe(Saved& saved, const Runtime& runtime, const Tensor& tensor) {
  const bool known = tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested();
  TORCH_CHECK(known, text("zerocompile: autograd is to save a value of parameter `",
                          runtime.parameter_name(saved.parameter), "` as a ", tensor.toString(),
                          ", which cannot be made again for the backward. Compute it from a copy (`clone()`)"));
  saved.dtype = tensor.scalar_type();
  saved.size = tensor.sizes().vec();
  saved.stride = tensor.strides().vec();
  saved.offset = tensor.storage_offset();
  saved.conj = tensor.is_conj();
  saved.neg = tensor.is_neg();
  TORCH_CHECK(bytes_of_view(saved.dtype, saved.size, saved.stride, saved.offset) <= tensor.storage().nbytes(),
              text("zerocompile: autograd is to save a view of parameter `", runtime.parameter_name(saved.parameter),
                   "` that reaches beyond it: sizes ", tensor.sizes(), ", strides ", tensor.strides(), ", offset ",
                   saved.offset));
}

}  // namespace

Saved pack(Runtime& runtime, const Tensor& tensor, bool plain) {
  Saved saved;
  saved.parameter = dispatches_itself(tensor) ? -1 : runtime.parameter_of(tensor);
  if (saved.parameter >= 0) {
    saved.version = runtime.seen_version(saved.parameter);
    describe(saved, runtime, tensor);
  } else {
    saved.handle_of = runtime.parameter_of_handle(tensor);
    if (saved.handle_of >= 0) saved.forward_version = runtime.seen_version(saved.handle_of);
    // One that an operation has made is not kept itself: its graph would keep itself alive. (So it is in torch.)
    saved.tensor = plain && tensor.is_leaf() ? tensor : view_of(tensor);
    saved.version = tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
  }
  return saved;
}

Tensor unpack(Runtime& runtime, const Saved& saved) {
  if (saved.parameter < 0) {
    TORCH_CHECK(saved.tensor.is_inference() || saved.version == static_cast<int64_t>(saved.tensor._version()),
                text("one of the variables needed for gradient computation has been modified by an inplace operation: ",
                     "a ", saved.tensor.toString(), " of sizes ", saved.tensor.sizes(), " is at version ",
                     saved.tensor._version(), "; expected version ", saved.version, " instead"));
    if (saved.handle_of >= 0) runtime.forward_saw(saved.handle_of, saved.forward_version);
    return saved.tensor;
  }
  TORCH_CHECK(saved.version == runtime.seen_version(saved.parameter),
              text("zerocompile: parameter `", runtime.parameter_name(saved.parameter),
                   "` was modified between its forward and its backward (by an optimizer step or an in-place write), ",
                   "so the gradients would be wrong. Run the backward before the modification"));
  const auto value = runtime.value_in_backward(saved.parameter);
  auto view = view_of(value, saved.dtype, saved.size, saved.stride, saved.offset);
  if (saved.conj) view.unsafeGetTensorImpl()->_set_conj(true);
  if (saved.neg) view.unsafeGetTensorImpl()->_set_neg(true);
  return view;
}

bool never_used(const Tensor& value) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(value);
  return meta != nullptr && meta->grad_fn_ != nullptr && meta->grad_fn_.use_count() == 1;
}

}  // namespace zerocompile
