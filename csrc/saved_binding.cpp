// [Note: cheap hooks] Autograd calls `pack` for each tensor that a forward saves, and `unpack` for each one that a
// backward asks for: some thirty times for a compiled block. pybind would take longer for a call, and for the object
// that it returns, than all the rest of it. So `Saved` is a class of Python's own C interface here, and the two methods
// take their only argument as it is.
//
// They do not release the GIL where there is no need. But who holds the GIL must not wait for the runtime's mutex. So
// they take the mutex only if it is free, and release the GIL before they wait for it (`hold`).
#include "saved_binding.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <mutex>
#include <new>
#include <utility>

#include "runtime.h"
#include "saved.h"

namespace py = pybind11;

namespace zerocompile {

namespace {

struct SavedObject {
  PyObject_HEAD
  Saved saved;
};

void free_saved(PyObject* self) {
  reinterpret_cast<SavedObject*>(self)->saved.~Saved();
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject make_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "lightning_zerocompile.runtime.core.Saved";
  type.tp_basicsize = sizeof(SavedObject);
  type.tp_dealloc = free_saved;
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  return type;
}

PyTypeObject* saved_type() {  // `pack` alone makes objects of it
  static PyTypeObject type = make_type();
  return &type;
}

Runtime& runtime_of(PyObject* self) {
  static const auto* const type = py::detail::get_type_info(typeid(Runtime));
  py::detail::type_caster_generic caster(type);
  TORCH_CHECK_TYPE(caster.load(self, /*convert=*/false) && caster.value != nullptr,
                   "zerocompile: this Runtime was never made");
  return *static_cast<Runtime*>(caster.value);
}

// The runtime's mutex, for who holds the GIL.
std::unique_lock<std::recursive_mutex> hold(const Runtime& runtime) {
  auto lock = runtime.lock_if_free();
  if (!lock.owns_lock()) {
    const py::gil_scoped_release released;
    lock.lock();
  }
  return lock;
}

PyObject* pack_object(PyObject* self, PyObject* argument) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(THPVariable_Check(argument), "zerocompile: pack takes a tensor");
  auto& runtime = runtime_of(self);
  const auto tensor = THPVariable_Unpack(argument);
  const bool plain = THPVariable_CheckTypeExact(Py_TYPE(argument));
  auto saved = [&] {
    const auto lock = hold(runtime);
    return pack(runtime, tensor, plain);
  }();
  auto* object = PyObject_New(SavedObject, saved_type());
  if (object == nullptr) return nullptr;
  new (&object->saved) Saved(std::move(saved));
  return reinterpret_cast<PyObject*>(object);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack_object(PyObject* self, PyObject* argument) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(Py_IS_TYPE(argument, saved_type()), "zerocompile: unpack takes what pack has returned");
  auto& runtime = runtime_of(self);
  const auto& saved = reinterpret_cast<SavedObject*>(argument)->saved;
  if (saved.parameter < 0) {
    const auto lock = hold(runtime);
    return THPVariable_Wrap(unpack(runtime, saved));
  }
  const auto value = [&] {  // a gather, which may wait for others
    const py::gil_scoped_release released;
    return unpack(runtime, saved);
  }();
  return THPVariable_Wrap(value);
  END_HANDLE_TH_ERRORS
}

// Their first lines are signatures as pybind writes them: tests/unit/test_core.py compares these with core.pyi.
PyMethodDef pack_method = {
    "pack", pack_object, METH_O,
    "pack(self: lightning_zerocompile.runtime.core.Runtime, arg0: torch.Tensor) -> "
    "lightning_zerocompile.runtime.core.Saved\n"};
PyMethodDef unpack_method = {
    "unpack", unpack_object, METH_O,
    "unpack(self: lightning_zerocompile.runtime.core.Runtime, arg0: lightning_zerocompile.runtime.core.Saved) -> "
    "torch.Tensor\n"};

void add_method(const py::object& cls, PyMethodDef& method) {
  auto* const type = reinterpret_cast<PyTypeObject*>(cls.ptr());
  const auto descriptor = py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &method));
  if (!descriptor) throw py::error_already_set();
  cls.attr(method.ml_name) = descriptor;
}

}  // namespace

void bind_saved(py::module_& module, const py::object& runtime_class) {
  if (PyType_Ready(saved_type()) != 0) throw py::error_already_set();
  module.attr("Saved") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(saved_type()));
  add_method(runtime_class, pack_method);
  add_method(runtime_class, unpack_method);
}

}  // namespace zerocompile
