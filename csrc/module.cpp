// What Python sees. The runtime calls Python while it holds its mutex, so the order is the mutex, then the GIL: two
// threads that took them in different orders would wait for each other. So whatever takes the mutex releases the GIL
// first, and every method of the runtime that locks is bound with `Release`, or takes the mutex only if it is free
// (`lock_if_free`).
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "gather_order.h"
#include "ops.h"
#include "runtime.h"
#include "saved.h"
#include "saved_binding.h"
#include "watch.h"

namespace py = pybind11;

namespace zerocompile {

namespace {

using Release = py::call_guard<py::gil_scoped_release>;

// A method that changes something: it raises inside a question to the other ranks, see [Note: re-entry].
template <typename Result, typename... Arguments>
auto changes(const char* name, Result (Runtime::*method)(Arguments...)) {
  return [name, method](Runtime& self, Arguments... arguments) -> Result {
    self.check_entry(name);
    return (self.*method)(std::forward<Arguments>(arguments)...);
  };
}

}  // namespace

}  // namespace zerocompile

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace zerocompile;

  py::enum_<Lifetime>(m, "Lifetime").value("USE", Lifetime::Use).value("STEP", Lifetime::Step);

  py::enum_<Unbound>(m, "Unbound")
      .value("REDUCED", Unbound::Reduced)
      .value("SUM", Unbound::Sum)
      .value("EARLY", Unbound::Early);

  // What knows no tensors is tested on its own (tests/unit/test_gather_order.py).
  py::enum_<Way>(m, "Way").value("FORTH", Way::Forth).value("BACK", Way::Back);

  py::class_<GatherOrder>(m, "GatherOrder")
      .def(py::init())
      .def("demand", &GatherOrder::demand)
      .def("next", &GatherOrder::next)
      .def("restart", &GatherOrder::restart)
      .def("use_in_forward", &GatherOrder::use_in_forward)
      .def("first_uses", &GatherOrder::first_uses)
      .def("forget", &GatherOrder::forget);

  py::class_<GatherSequence>(m, "GatherSequence")
      .def(py::init())
      .def("begin",
           [](GatherSequence& self, const std::vector<int64_t>& units, Way way, int64_t count) {
             const auto step = self.begin(units, way, count);
             return std::pair(step.number, step.known);
           })
      .def("agreed", &GatherSequence::agreed)
      .def("started_one", &GatherSequence::started_one)
      .def("started", &GatherSequence::started)
      .def("forget", &GatherSequence::forget)
      .def("gathered", &GatherSequence::gathered)
      .def("course", &GatherSequence::course);

  m.def("never_used", &never_used);

  py::class_<DeviceBarriers, std::shared_ptr<DeviceBarriers>>(m, "DeviceBarriers")
      .def(py::init<Tensor, std::string, std::vector<std::string>>())
      .attr("WORDS") = static_cast<int>(kBarrierWords);

  // Its mutex is held for moments, and never while it asks for the GIL. So only `close`, which waits, releases the GIL.
  py::class_<Watch, std::shared_ptr<Watch>>(m, "Watch")
      .def(py::init<int64_t, int64_t, double>())
      .def("start", &Watch::start)
      .def("close", &Watch::close, Release())
      .def("close_copies", &Watch::close_copies)
      .def("send", &Watch::send)
      .def("take", &Watch::take)
      .def("file", &Watch::file)
      .def("refuse", &Watch::refuse)
      .def("leave", &Watch::leave)
      .def("gone", &Watch::gone)
      .def("left", &Watch::left)
      .def("add_barriers", &Watch::add_barriers)
      .def("set_groups", &Watch::set_groups)
      .def("standing", &Watch::standing)
      .def("end", &Watch::end)
      .def("ended", &Watch::ended);

  py::class_<Stats>(m, "Stats")
      .def_readonly("gathers", &Stats::gathers)
      .def_readonly("gather_bytes", &Stats::gather_bytes)
      .def_readonly("reductions", &Stats::reductions)
      .def_readonly("reduce_bytes", &Stats::reduce_bytes)
      .def_readonly("peer_gathers", &Stats::peer_gathers)
      .def_readonly("kept_casts", &Stats::kept_casts)
      .def_readonly("peer_reductions", &Stats::peer_reductions)
      .def_readonly("prefetched", &Stats::prefetched)
      .def_readonly("place_copies", &Stats::place_copies)
      .def_readonly("served", &Stats::served)
      .def_readonly("inner_gathers", &Stats::inner_gathers)
      .def_readonly("host_writes", &Stats::host_writes)
      .def_readonly("secondary_bytes", &Stats::secondary_bytes)
      .def_readonly("eager_reads", &Stats::eager_reads)
      .def_readonly("eager_gathers", &Stats::eager_gathers)
      .def_readonly("graph_uses", &Stats::graph_uses)
      .def_readonly("graph_reductions", &Stats::graph_reductions)
      .def_readonly("graph_copies", &Stats::graph_copies)
      .def_readonly("padded_copies", &Stats::padded_copies)
      .def_readonly("resident_bytes", &Stats::resident_bytes)
      .def_readonly("peak_resident_bytes", &Stats::peak_resident_bytes)
      .def_readonly("backwards", &Stats::backwards);

  auto runtime = py::class_<Runtime, std::shared_ptr<Runtime>>(m, "Runtime");
  bind_saved(m, runtime);
  runtime
      .def(py::init([](const std::string& gather_group, const std::string& reduce_group,
                       const std::string& replica_group, const std::string& inner_group, int64_t all_ranks,
                       int64_t global_rank, const std::string& device) {
        return std::make_shared<Runtime>(gather_group, reduce_group, replica_group, inner_group,
                                         Place{all_ranks, global_rank}, c10::Device(device));
      }))
      .def("add_parameter",
           [](Runtime& self, std::string name, std::vector<int64_t> size, std::vector<int64_t> stride,
              at::ScalarType dtype, std::optional<at::ScalarType> grad_dtype, std::optional<at::ScalarType> reduce_dtype,
              std::optional<at::ScalarType> bound_dtype, Tensor master, Tensor local, Tensor handle) {
             ParameterSpec spec{std::move(name), std::move(size), std::move(stride), dtype, grad_dtype.has_value(),
                                grad_dtype.value_or(dtype), reduce_dtype, bound_dtype};
             return self.add_parameter(std::move(spec), std::move(master), std::move(local), std::move(handle));
           },
           Release())
      .def("add_unit", changes("add_unit", &Runtime::add_unit), Release())
      .def("set_callbacks", changes("set_callbacks", &Runtime::set_callbacks), Release())
      .def("set_outside", changes("set_outside", &Runtime::set_outside), Release())
      .def("set_update", changes("set_update", &Runtime::set_update), Release())
      .def("set_updates", changes("set_updates", &Runtime::set_updates), Release())
      .def("set_turns", changes("set_turns", &Runtime::set_turns), Release())
      .def("set_in_step", &Runtime::set_in_step, Release())
      .def("set_evaluates", &Runtime::set_evaluates, Release())
      .def("shutdown", changes("shutdown", &Runtime::shutdown), py::arg("wait"), Release())
      .def("peer_bytes", &Runtime::peer_bytes, Release())
      .def("set_peers", changes("set_peers", &Runtime::set_peers), Release())
      .def("kept_cast_bytes", &Runtime::kept_cast_bytes, Release())
      .def("keep_casts", changes("keep_casts", &Runtime::keep_casts), Release())
      .def("set_kernels", changes("set_kernels", &Runtime::set_kernels), Release())
      .def("summing_peer_bytes", &Runtime::summing_peer_bytes, Release())
      .def("set_summing_peers", changes("set_summing_peers", &Runtime::set_summing_peers), Release())
      .def("identity", &Runtime::identity, Release())
      .def("resident_value", &Runtime::resident_value, Release())
      .def("fix_places", &Runtime::fix_places, Release())
      .def("fixed_value", &Runtime::fixed_value, Release())
      .def("parameter_of", &Runtime::parameter_of, Release())
      .def("read", [](const std::shared_ptr<Runtime>& self, int64_t parameter, const Tensor& handle,
                      bool requires_grad, std::optional<at::ScalarType> cast) {
             self->check_entry("read");
             return zerocompile::read(self, parameter, handle, requires_grad, cast);
           },
           py::arg("parameter"), py::arg("handle"), py::arg("requires_grad"), py::arg("cast") = py::none(), Release())
      .def("asked", &Runtime::asked, Release())
      .def("gather_low", changes("gather_low", &Runtime::gather_low), Release())
      .def("read_as_float8", changes("read_as_float8", &Runtime::read_as_float8), Release())
      .def("refresh", changes("refresh", &Runtime::refresh), Release())
      .def("begin_unequal", changes("begin_unequal", &Runtime::begin_unequal), Release())
      .def("end_unequal", changes("end_unequal", &Runtime::end_unequal), py::arg("raised"), Release())
      .def("unequal", &Runtime::unequal, Release())
      .def("meet_others", changes("meet_others", &Runtime::meet_others), Release())
      .def("tell_failure", changes("tell_failure", &Runtime::tell_failure), Release())
      .def("come_apart", changes("come_apart", &Runtime::come_apart), Release())
      .def("enter", changes("enter", &Runtime::enter), Release())
      .def("leave", changes("leave", &Runtime::leave), Release())
      .def("unit_order", &Runtime::unit_order, Release())
      .def("masters_changed", changes("masters_changed", &Runtime::masters_changed), py::arg("units"),
           py::arg("placed") = std::vector<int64_t>(), Release())
      .def("place", changes("place", &Runtime::place), Release())
      .def("meet_readers", changes("meet_readers", &Runtime::meet_readers), Release())
      .def("masters_written", changes("masters_written", &Runtime::masters_written), Release())
      .def("set_rows", changes("set_rows", &Runtime::set_rows), Release())
      .def("follow_gathers", &Runtime::follow_gathers, Release())
      .def("write_back", changes("write_back", static_cast<void (Runtime::*)()>(&Runtime::write_back)), Release())
      .def("write_back_parameter", &Runtime::write_back_parameter, Release())
      .def("disown_values", &Runtime::disown_values, Release())
      .def("keep", changes("keep", &Runtime::keep), Release())
      .def("lend", changes("lend", &Runtime::lend), Release())
      .def("lent_value", changes("lent_value", &Runtime::lent_value), Release())
      .def("take_back", changes("take_back", &Runtime::take_back), Release())
      .def("lent_unit", &Runtime::lent_unit, Release())
      .def("end_forward", changes("end_forward", &Runtime::end_forward), py::arg("raised") = false, Release())
      .def("watch_backward", changes("watch_backward", &Runtime::watch_backward), Release())
      .def("arm", changes("arm", &Runtime::arm), Release())
      .def("finish_backward", changes("finish_backward", &Runtime::finish_ended_backward), Release())
      .def("set_deferred", changes("set_deferred", &Runtime::set_deferred), Release())
      .def("set_partial", changes("set_partial", &Runtime::set_partial), Release())
      .def("set_window", changes("set_window", &Runtime::set_window), Release())
      .def("hold", changes("hold", &Runtime::hold), Release())
      .def("let_go", changes("let_go", &Runtime::let_go), py::arg("raised") = false, Release())
      .def("deferred", &Runtime::deferred, Release())
      .def("pending", &Runtime::pending, Release())
      .def("publish_order", changes("publish_order", &Runtime::publish_order), Release())
      .def("check_backward_ended", &Runtime::check_backward_ended, Release())
      .def("drop_gradient", changes("drop_gradient", &Runtime::drop_gradient), Release())
      .def("drop_waiting", changes("drop_waiting", &Runtime::drop_waiting), Release())
      .def("unbound_gradient",
           [](Runtime& self, int64_t parameter, bool waiting) -> std::optional<std::pair<Tensor, Unbound>> {
             self.check_entry("grad");
             auto found = self.unbound_gradient(parameter, waiting);
             return found.first.defined() ? std::optional(std::move(found)) : std::nullopt;
           },
           Release())
      .def("may_have_gradient",  // it does not wait for the mutex, so it need not release the GIL
           [](const Runtime& self, int64_t parameter) {
             const auto lock = self.lock_if_free();
             return !lock.owns_lock() || self.may_have_gradient(parameter);
           })
      .def("trainable", &Runtime::trainable, Release())
      .def("lend_gradients", changes("lend_gradients", &Runtime::lend_gradients), Release())
      .def("release_gradients", changes("release_gradients", &Runtime::release_gradients), Release())
      .def("any_other_dtype", &Runtime::any_other_dtype, Release())
      .def("flush", changes("flush", &Runtime::flush), Release())
      .def("drop_gradients", changes("drop_gradients", &Runtime::drop_gradients), Release())
      .def("backward_raised", &Runtime::backward_raised, Release())
      .def("drop_failed_backward", changes("drop_failed_backward", &Runtime::drop_failed_backward), Release())
      .def("deferred_bytes", &Runtime::deferred_bytes, Release())
      .def("bound", changes("bound", &Runtime::bound), Release())
      .def("forget_outstanding", changes("forget_outstanding", &Runtime::forget_outstanding), Release())
      .def("stats", &Runtime::stats, Release())
      .def("resident_units", &Runtime::resident_units, Release())
      .def("gathered_so_far", &Runtime::gathered_so_far, Release())
      .def("started", &Runtime::started)
      .def("begun", &Runtime::begun)
      .def("eager_reads_of", &Runtime::eager_reads_of, Release())
      .def("gathers_of", &Runtime::gathers_of, Release())
      .def("set_prefetch", changes("set_prefetch", &Runtime::set_prefetch), Release())
      .def("set_spans_hosts", changes("set_spans_hosts", &Runtime::set_spans_hosts), Release())
      .def("set_merge_bytes", changes("set_merge_bytes", &Runtime::set_merge_bytes), Release())
      .def("set_cuda_graphs", changes("set_cuda_graphs", &Runtime::set_cuda_graphs), Release());
}
