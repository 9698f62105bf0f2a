// What Python sees of the emulated device; ../device.py puts it under torch.cuda's names.
#include "nccl.h"

namespace py = pybind11;

PYBIND11_MODULE(_emulated_device, m) {
  using namespace emulated;
  using release = py::call_guard<py::gil_scoped_release>;
  c10::SetAllocator(DeviceType::CUDA, device_allocator());
  auto index = [](int device) { return device < 0 ? current_device() : device; };

  m.def("reports", &all_reports);
  m.def("counters", [] { Lock lock; return counters; });
  m.def("waits", [] {
    Lock lock;
    std::vector<std::pair<std::string, std::string>> said;
    for (auto& wait : waits) said.emplace_back(wait.what, text(wait.site));
    return said;
  });
  m.def("trace", [] {
    Lock lock;
    std::vector<std::tuple<std::string, int, int64_t, std::string>> said;
    for (auto& each : trace) said.emplace_back(each.what, each.stream, each.bytes, text(each.site));
    return said;
  });
  m.def("pinned_bytes", [] { Lock lock; return pinned_bytes; });
  m.def("clear", &clear);
  m.def("set", [](const std::string& name, double value) {
    Lock lock;
    if (name == "limit") settings.limit = value;
    else if (name == "delay_ms") settings.delay_ms = value;
    else if (name == "poison") settings.poison = value;
    else if (name == "late") settings.late = value;
    else if (name == "races") settings.races = value;
    else if (name == "trace") settings.trace = value;
    else throw py::key_error(name);
  });
  m.def("is_over", [](int64_t event) { return !event || is_over(*(EventState*)event); });
  m.def("watch_host", &watch_host);
  m.def("host_use", [](const Tensor& tensor, bool write, const std::string& what) {
    if (!tensor.is_cuda() && tensor.numel()) host_use(range_of(tensor), write, what, here());
  });

  m.def("device_count", [] { return settings.devices; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("synchronize", [=](int device) { synchronize_device(index(device), here()); }, release());
  m.def("allocated", [=](int device) { Lock lock; return allocated[index(device)]; });
  m.def("peak", [=](int device) { Lock lock; return peak[index(device)]; });
  m.def("reserved", [=](int device) { Lock lock; return reserved[index(device)]; });
  m.def("reserved_peak", [=](int device) { Lock lock; return reserved_peak[index(device)]; });
  m.def("reset_peak", [=](int device) {
    Lock lock;
    peak[index(device)] = allocated[index(device)];
    reserved_peak[index(device)] = reserved[index(device)];
  });
  m.def("empty_cache", [=] {
    Site site = here();
    Lock lock;
    may_wait(-1, "cudaFree of empty_cache", site);
    counters["empty_cache"]++;
    int device = index(-1);
    reserved[device] = allocated[device] - pooled_lent[device] + pooled[device];
  });
  m.def("limit", [] { return settings.limit; });
  m.def("host_register", [](uintptr_t address, size_t bytes) { host_register((char*)address, bytes); });
  m.def("host_unregister", [](uintptr_t address) { return host_unregister((char*)address); });
  m.def("resize_storage", [](const Tensor& over, int64_t bytes) { resize_storage(over.storage(), bytes); }, release());
  py::class_<Graph, GraphRef>(m, "Graph")
      .def(py::init([](bool) { return std::make_shared<Graph>(); }), py::arg("keep_graph") = false)
      .def("capture_begin",
           [](const GraphRef& graph, std::optional<std::pair<int64_t, int64_t>> pool, const std::string& mode) {
             const std::map<std::string, Mode> modes = {
                 {"global", Mode::kGlobal}, {"thread_local", Mode::kThreadLocal}, {"relaxed", Mode::kRelaxed}};
             TORCH_CHECK(modes.count(mode), "Unknown capture error mode. Expected `global`, `thread_local`, or "
                         "`relaxed`, got ", mode);
             capture_begin(graph, pool ? pool->second : 0, modes.at(mode));
           },
           py::arg("pool") = py::none(), py::arg("capture_error_mode") = "global")
      .def("capture_end", &capture_end)
      .def("instantiate", [](const GraphRef&) {})
      .def("replay", &replay)
      .def("reset", [](const GraphRef& graph) { reset(*graph); })
      .def("pool", [](const GraphRef& graph) { return std::make_pair(int64_t(0), graph->pool); })
      .def("register_generator_state", [](const GraphRef&, const py::object&) {})
      .def("nodes", [](const GraphRef& graph) {
        Lock lock;
        std::vector<std::string> said;
        for (auto& node : graph->nodes) said.push_back(node.what);
        return said;
      });
  m.def("new_pool", [] { return std::make_pair(int64_t(0), new_pool()); });
  m.def("bytes_of_pool", [](std::pair<int64_t, int64_t> pool) { return bytes_of_pool(pool.second); });
  m.def("is_capturing", [] { Lock lock; return capture_of(current_stream()) != nullptr; });
  m.def("launch_kernel", [](const std::string& what, const std::vector<Tensor>& tensors,
                            const std::vector<bool>& written, py::function function) {
    auto kept = std::shared_ptr<py::function>(new py::function(std::move(function)), [](py::function* held) {
      py::gil_scoped_acquire gil;
      delete held;
    });
    launch_kernel(what, tensors, written, [kept](const std::vector<Tensor>& aliases) {
      py::gil_scoped_acquire gil;
      (*kept)(aliases);
    });
  });

  m.def("generator", [](int device) { return generator(device); });

  py::module_::import("torch.distributed");
  auto backend = py::class_<EmulatedNCCL, c10d::Backend, c10::intrusive_ptr<EmulatedNCCL>>(m, "EmulatedNCCL");
  using Options = EmulatedNCCL::Options;
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(backend, "Options")
      .def(py::init<>())
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream);
  backend.def_property_readonly("options", &EmulatedNCCL::options)
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> inner, int rank, int size,
                       c10::intrusive_ptr<Options> options) {
        return c10::make_intrusive<EmulatedNCCL>(inner, rank, size, options);
      }));
}
