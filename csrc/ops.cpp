// The operators that the model's program contains. `gather` and `reduce_grad` are traced; the others are what our
// passes lower them to. None carries a number that names a parameter: identity is the value of the handle, so equal
// blocks share one graph (lightning_zerocompile/README.md, rule 1).
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops.h"
#include "runtime.h"
#include "text.h"

namespace zerocompile {

namespace {

// ---- traced ----

Tensor gather(const Tensor& source, const Tensor& handle, at::IntArrayRef size, std::optional<at::ScalarType>) {
  auto [runtime, parameter] = find(handle);
  auto value = runtime->read(parameter);
  TORCH_CHECK(value.sizes() == size,
              text("zerocompile: gather asks for sizes ", size, ", the parameter has ", value.sizes()));
  // The schema is functional: a resident value that is the argument itself must not be the result too.
  return value.is_alias_of(source) ? value.clone() : value.alias();
}

// A parameter in the dtype of `source`, for what would cast it: see [Note: low gathers] and [Note: float8 gathers].
Tensor gather_cast(const Tensor& source, const Tensor& handle, at::IntArrayRef size, std::optional<at::ScalarType>) {
  auto [runtime, parameter] = find(handle);
  auto value = runtime->read(parameter, source.scalar_type());
  TORCH_CHECK(value.sizes() == size,
              text("zerocompile: gather_cast asks for sizes ", size, ", the parameter has ", value.sizes()));
  return value;
}

// The scale of a value that was asked for as float8. `full` is that value: so the scale is read after the gather.
Tensor float8_scale(const Tensor&, const Tensor& handle) {
  auto [runtime, parameter] = find(handle);
  return runtime->float8_scale(parameter);
}

Tensor reduce_grad(const Tensor& grad, const Tensor& handle) {
  auto [runtime, parameter] = find(handle);
  runtime->contribute({parameter}, grad, /*from_graph=*/true);
  return at::zeros_like(handle);
}

Tensor call_gather(const Tensor& source, const Tensor& handle, c10::SymIntArrayRef size, bool casts) {
  using Gather = Tensor(const Tensor&, const Tensor&, c10::SymIntArrayRef, std::optional<at::ScalarType>);
  auto& known = c10::Dispatcher::singleton();
  static const auto op = known.findSchemaOrThrow("zerocompile::gather", "").typed<Gather>();
  static const auto cast = known.findSchemaOrThrow("zerocompile::gather_cast", "").typed<Gather>();
  return (casts ? cast : op).call(source, handle, size, std::nullopt);
}

Tensor call_reduce_grad(const Tensor& grad, const Tensor& handle) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("zerocompile::reduce_grad", "")
                             .typed<Tensor(const Tensor&, const Tensor&)>();
  return op.call(grad, handle);
}

// Saves the handle, never the weight. While tracing, the dummy gradient keeps `reduce_grad` alive by dataflow; when
// it runs for real the handle must not receive a gradient. What was cast in the gather has its gradient cast back; that
// of a float8 value is in high precision anyway.
struct GatherFunction : torch::autograd::Function<GatherFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& source, const Tensor& handle,
                        c10::SymIntArrayRef size, bool casts) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({handle});
    ctx->saved_data["widens"] = casts && source.scalar_type() != kFloat8;
    ctx->set_materialize_grads(false);  // zeros would count as a gradient
    return call_gather(source, handle, size, casts);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return {Tensor(), Tensor(), Tensor(), Tensor()};
    const auto handle = ctx->get_saved_variables()[0];
    auto dummy = call_reduce_grad(ctx->saved_data["widens"].toBool() ? grads[0].to(at::kFloat) : grads[0], handle);
    const bool tracing = grads[0].unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python) ||
                         grads[0].unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Functionalize);
    return {Tensor(), tracing ? dummy : Tensor(), Tensor(), Tensor()};
  }
};

// Each use's gradient of the value becomes `dtype` before autograd adds it to the others, as at a leaf of torch; none:
// they are added as they were produced. What it is cast to is the parameter's business, not that of the value (see
// [Note: grad dtype] in gradients.cpp). A value that was cast in the gather is no leaf's: its gradient is that of a
// cast. A float8 value stands for the leaf's.
Tensor with_grad_dtype(Tensor value, std::optional<at::ScalarType> dtype) {
  if (value.grad_fn() == nullptr) return value;
  value.grad_fn()->mutable_input_metadata(value.output_nr()).set_grad_dtype(dtype);
  return value;
}

Tensor gather_autograd(const Tensor& source, const Tensor& handle, c10::SymIntArrayRef size,
                       std::optional<at::ScalarType> grad_dtype) {
  return with_grad_dtype(GatherFunction::apply(source, handle, size, false), grad_dtype);
}

Tensor gather_cast_autograd(const Tensor& source, const Tensor& handle, c10::SymIntArrayRef size,
                            std::optional<at::ScalarType> grad_dtype) {
  auto value = GatherFunction::apply(source, handle, size, true);
  return source.scalar_type() == kFloat8 ? with_grad_dtype(std::move(value), grad_dtype) : value;
}

// ---- lowered ----

std::vector<at::ScalarType> dtypes_of(at::TensorList tensors) {
  std::vector<at::ScalarType> dtypes;
  for (const auto& tensor : tensors) dtypes.push_back(tensor.scalar_type());
  return dtypes;
}

std::vector<Tensor> gather_unit(at::TensorList sources, at::TensorList handles, at::IntArrayRef, bool expects_grad) {
  TORCH_CHECK(sources.size() == handles.size(), "zerocompile: gather_unit takes one handle per source");
  auto uses = find_all(handles);
  return uses.runtime->use(uses.parameters, dtypes_of(sources), expects_grad);
}

Tensor gather_unit_one(const Tensor& source, const Tensor& handle, at::IntArrayRef, bool expects_grad) {
  auto [runtime, parameter] = find(handle);
  return runtime->use({parameter}, {source.scalar_type()}, expects_grad).front();
}

void wait_(at::TensorList fulls, at::TensorList handles, bool expects_grad) {
  TORCH_CHECK(fulls.size() == handles.size(), "zerocompile: wait_ takes one handle per value");
  auto uses = find_all(handles);
  uses.runtime->need(uses.parameters, dtypes_of(fulls), expects_grad);
}

void wait_one_(const Tensor& full, const Tensor& handle, bool expects_grad, at::OptionalIntArrayRef) {
  auto [runtime, parameter] = find(handle);
  runtime->need({parameter}, {full.scalar_type()}, expects_grad);
}

void release_(at::TensorList fulls, at::TensorList handles, bool last) {
  TORCH_CHECK(fulls.size() == handles.size(), "zerocompile: release_ takes one handle per value");
  auto uses = find_all(handles);
  uses.runtime->release(uses.parameters, last);
}

void release_one_(const Tensor&, const Tensor& handle, bool last, at::OptionalIntArrayRef) {
  auto [runtime, parameter] = find(handle);
  runtime->release({parameter}, last);
}

void reduce_unit_(at::TensorList grads, at::TensorList handles) {
  TORCH_CHECK(grads.size() == handles.size(), "zerocompile: reduce_unit_ takes one handle per gradient");
  auto uses = find_all(handles);
  if (!grads.empty()) uses.runtime->contribute(uses.parameters, grads, /*from_graph=*/true);
}

void reduce_one_(const Tensor& grad, const Tensor& handle, at::OptionalIntArrayRef) {
  auto [runtime, parameter] = find(handle);
  runtime->contribute({parameter}, grad, /*from_graph=*/true);
}

// For the compiler alone: as long as something takes the gradient, it does not write to that memory.
void reduce_fence_(at::TensorList) {}

// ---- eager ----

// Counts a read whose gradient is still to come, until that gradient arrives or its graph is freed.
struct ReadToken : torch::CustomClassHolder {
  ReadToken(const std::shared_ptr<Runtime>& runtime, int64_t parameter, bool casts)
      : runtime(runtime), parameter(parameter), casts(casts), outstanding(runtime->outstanding_reads(parameter)) {
    outstanding->fetch_add(1);
  }
  void finish() {
    if (!finished.exchange(true)) outstanding->fetch_sub(1);
  }
  ~ReadToken() override { finish(); }
  std::weak_ptr<Runtime> runtime;
  int64_t parameter;
  bool casts;  // the value was cast, as is its gradient
  Count outstanding;
  std::atomic<bool> finished = false;
};

struct ReadFunction : torch::autograd::Function<ReadFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& handle, const Tensor& value,
                        const c10::intrusive_ptr<ReadToken>& token) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->set_materialize_grads(false);  // zeros would count as a gradient
    ctx->saved_data["token"] = c10::IValue::make_capsule(token);
    auto result = value.alias();  // with the value's versions: torch's check sees what the optimizer's step gathers
    torch::autograd::impl::set_version_counter(result, torch::autograd::impl::version_counter(value));
    return result;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    auto token = c10::static_intrusive_pointer_cast<ReadToken>(ctx->saved_data["token"].toCapsule());
    auto runtime = token->runtime.lock();
    TORCH_CHECK(runtime != nullptr, "zerocompile: backward through a model whose strategy was torn down");
    token->finish();
    if (grads[0].defined()) {
      const bool shared = grads[0].use_count() > 1;  // a Function may keep its result: AccumulateGrad asks the same
      runtime->contribute({token->parameter}, token->casts ? grads[0].to(at::kFloat) : grads[0],
                          /*from_graph=*/false, shared && !token->casts);
    }
    return {Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

// [Note: eager read] The same gather and the same reduction as in a graph, without the operator: an eager value may
// alias what is resident, which a functional schema forbids.
Tensor read(const std::shared_ptr<Runtime>& runtime, int64_t parameter, const Tensor& handle, bool requires_grad,
            std::optional<at::ScalarType> cast) {
  auto value = runtime->read(parameter, cast);
  if (!requires_grad || (cast.has_value() && !at::GradMode::is_enabled())) return value.detach();
  // A parameter of torch that is read under `no_grad` or `inference_mode` still requires grad where it is used later.
  c10::InferenceMode normal_tensors(false);
  at::AutoGradMode records(true);
  const bool in_backward = runtime->in_backward();
  auto token = c10::make_intrusive<ReadToken>(runtime, parameter, cast.has_value());
  if (in_backward) token->finish();  // a recomputation: its graph gives no gradient, or gives it at once
  auto result = ReadFunction::apply(handle, value, token);
  return cast.has_value() ? result : with_grad_dtype(std::move(result), runtime->grad_dtype(parameter));
}

TORCH_LIBRARY(zerocompile, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe};
  m.def("gather(Tensor source, Tensor handle, SymInt[] size, ScalarType? grad_dtype=None) -> Tensor", tags);
  m.def("gather_cast(Tensor source, Tensor handle, SymInt[] size, ScalarType? grad_dtype=None) -> Tensor", tags);
  m.def("float8_scale(Tensor full, Tensor handle) -> Tensor", tags);
  m.def("reduce_grad(Tensor grad, Tensor handle) -> Tensor", tags);
  m.def("gather_unit(Tensor[] sources, Tensor[] handles, int[] sizes, bool expects_grad) -> Tensor[]", tags);
  m.def("wait_(Tensor(a!)[] fulls, Tensor[] handles, bool expects_grad) -> ()", tags);
  m.def("release_(Tensor(a!)[] fulls, Tensor[] handles, bool last) -> ()", tags);
  m.def("reduce_unit_(Tensor(a!)[] grads, Tensor[] handles) -> ()", tags);
  m.def("reduce_fence_(Tensor(a!)[] grads) -> ()", tags);
  // For a single parameter: calls cost less without lists. `unused` is never given: it keeps Inductor's C++ wrapper
  // from torch's C interface, which would lose the texts of our errors.
  m.def("gather_unit.one(Tensor source, Tensor handle, int[] size, bool expects_grad) -> Tensor", tags);
  m.def("wait_.one(Tensor(a!) full, Tensor handle, bool expects_grad, int[]? unused=None) -> ()", tags);
  m.def("release_.one(Tensor(a!) full, Tensor handle, bool last, int[]? unused=None) -> ()", tags);
  m.def("reduce_unit_.one(Tensor(a!) grad, Tensor handle, int[]? unused=None) -> ()", tags);
}

void register_kernels(torch::Library& m) {
  m.impl("gather", gather);
  m.impl("gather_cast", gather_cast);
  m.impl("float8_scale", float8_scale);
  m.impl("reduce_grad", reduce_grad);
  m.impl("gather_unit", gather_unit);
  m.impl("wait_", wait_);
  m.impl("release_", release_);
  m.impl("reduce_unit_", reduce_unit_);
  m.impl("reduce_fence_", reduce_fence_);
  m.impl("gather_unit.one", gather_unit_one);
  m.impl("wait_.one", wait_one_);
  m.impl("release_.one", release_one_);
  m.impl("reduce_unit_.one", reduce_one_);
}

TORCH_LIBRARY_IMPL(zerocompile, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(zerocompile, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(zerocompile, Autograd, m) {
  m.impl("gather", gather_autograd);
  m.impl("gather_cast", gather_cast_autograd);
  for (const auto* lowered : {"float8_scale", "gather_unit", "wait_", "release_", "reduce_unit_", "reduce_fence_",
                              "gather_unit.one", "wait_.one", "release_.one", "reduce_unit_.one"}) {
    m.impl(lowered, torch::CppFunction::makeFallthrough());  // they run below autograd: torch's fallback costs time
  }
}

}  // namespace zerocompile
