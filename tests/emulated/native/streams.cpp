// Streams and events that are late on purpose; and how torch reaches the device (guard, hooks).
#include "state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace emulated {

namespace {

std::vector<std::unique_ptr<StreamState>> streams;
thread_local int device_here = 0;
thread_local std::vector<int> streams_here;

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// -- streams and events ----------------------------------------------------------------------------------------------

StreamState& stream(int id) {
  Lock lock;
  while ((int)streams.size() < settings.devices) {  // the default streams have the numbers of their devices
    auto made = std::make_unique<StreamState>();
    made->id = made->device = streams.size();
    streams.push_back(std::move(made));
  }
  return *streams.at(id);
}
int new_stream(int device) {
  Lock lock;
  stream(0);
  auto made = std::make_unique<StreamState>();
  made->id = streams.size();
  made->device = device < 0 ? device_here : device;
  streams.push_back(std::move(made));
  return streams.back()->id;
}
int current_device() { return device_here; }
void set_device(int device) {
  TORCH_CHECK(device < settings.devices, "CUDA error: invalid device ordinal (emulated)");
  if (device >= 0) device_here = device;
}
int current_stream(int device) {
  while ((int)streams_here.size() < settings.devices) streams_here.push_back(streams_here.size());
  return streams_here[device < 0 ? device_here : device];
}
int exchange_stream(int device, int id) {
  current_stream(device);
  return std::exchange(streams_here[device], id);
}

void flush(int id, int64_t up_to) {
  Lock lock;
  auto& on = stream(id);
  while (!on.late.empty() && on.late.front().number <= up_to) {
    Late late = std::move(on.late.front());
    on.late.pop_front();
    late.run();
    on.done = std::max(on.done, late.number);
    on.pending = on.late.empty() ? INT64_MAX : on.late.front().number;
  }
}
int64_t push(int id, std::function<void()> run, std::vector<Range> touches, std::function<bool()> over) {
  auto& on = stream(id);
  on.late.push_back({++on.issued, std::move(run), std::move(touches), std::move(over)});
  if (on.pending > on.issued) on.pending = on.issued;
  return on.issued;
}
bool is_late(const Range& range) {
  for (auto& each : streams)
    for (auto& late : each->late)
      for (auto& touched : late.touches)
        if (touched.meets(range)) return true;
  return false;
}

void flush_touching(const Range& range) {
  for (size_t i = 0; i < streams.size(); i++)
    if (is_late(range)) flush(i);
}

static bool would_not_block(int id, int64_t up_to) {
  for (auto& late : stream(id).late)
    if (late.number <= up_to && late.over && !late.over()) return false;
  return true;
}

void record(EventState& event, int id) {
  Site site = here();
  Lock lock;
  may_launch(id, "an event", site);
  advance(id);
  auto& on = stream(id);
  event = {id, &on, on.issued, on.seen, 0, now_ms(), on.capture};
  counters["event.record"]++;
}
void wait_for(const EventState& event, int id) {
  Site site = here();
  Lock lock;
  if (event.stream < 0) return;
  GraphRef graph = capture_of(id);
  if (graph && event.graph != graph)
    refuse(graph, event.graph ? "cudaErrorStreamCaptureMerge: two captures would become one"
                              : "cudaErrorStreamCaptureIsolation: the event was recorded outside of the capture",
           "a wait for an event", site);
  if (event.graph && event.graph->state != Graph::kCapturing) check_event(event, "a wait for an event", site);
  if (event.graph && !graph) join(id, event.graph);
  counters["event.wait"]++;
  merge(stream(id).seen, event.seen);
  int from = event.stream;
  int64_t number = event.number;
  if (from != id && !stream(from).late.empty() && stream(from).late.front().number <= number)
    push(id, [from, number] { flush(from, number); }, {}, [from, number] { return would_not_block(from, number); });
}
bool is_over(const EventState& event) {
  if (any_capture()) {
    Site site = here();
    Lock lock;
    check_event(event, "cudaEventQuery", site);
  }
  if (event.stream < 0 || event.number < event.on->pending) return true;
  TryLock lock;  // whoever holds it for long waits for a message
  return lock.held && would_not_block(event.stream, event.number);
}
bool query(EventState& event) {
  Site site = here();
  Lock lock;
  check_event(event, "cudaEventQuery", site);
  if (event.stream < 0 || host_knows(event.seen, event.stream)) return true;
  if (event.asked < 3) {
    event.asked++;
    return false;
  }
  flush(event.stream, event.number);
  host_follows(event.seen);
  return true;
}
bool query_stream(int id) {
  Site site = here();
  Lock lock;
  may_wait(id, "cudaStreamQuery", site);
  return stream(id).late.empty();
}
void synchronize_event(const EventState& event, const Site& site) {
  Lock lock;
  check_event(event, "cudaEventSynchronize", site);
  if (event.stream < 0) return;
  host_waits("event", site);
  flush(event.stream, event.number);
  host_follows(event.seen);
}
void synchronize_stream(int id, const Site& site) {
  Lock lock;
  may_wait(id, "cudaStreamSynchronize", site);
  host_waits("stream", site);
  flush(id);
  host_follows(stream(id).seen);
}
void synchronize_device(int device, const Site& site) {
  Lock lock;
  for (auto& each : streams)
    if (each->device == device && each->capture) may_wait(each->id, "cudaDeviceSynchronize", site);
  may_wait(-1, "cudaDeviceSynchronize", site);
  host_waits("device", site);
  stream(0);
  for (size_t i = 0; i < streams.size(); i++)
    if (streams[i]->device == device) {
      flush(i);
      host_follows(streams[i]->seen);
    }
}

// -- how torch reaches it --------------------------------------------------------------------------------------------

const at::Generator& generator(int device) {
  static std::vector<at::Generator> made;
  while ((int)made.size() < settings.devices) made.push_back(at::detail::createCPUGenerator());
  return made[device < 0 ? device_here : device];
}

namespace {

using c10::DeviceIndex;
using c10::Stream;

int id_of(const Stream& s) { return s.id() == 0 ? (s.device_index() < 0 ? device_here : s.device_index()) : s.id(); }
Stream stream_of(int id) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, stream(id).device), id < settings.devices ? 0 : id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    Device old(DeviceType::CUDA, device_here);
    if (d.index() >= 0) device_here = d.index();
    return old;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, device_here); }
  void setDevice(Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) device_here = d.index();
  }
  Stream getStream(Device d) const override { return stream_of(current_stream(d.index())); }
  Stream getDefaultStream(Device d) const override { return stream_of(d.index() < 0 ? device_here : d.index()); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return stream_of(new_stream(d.index())); }
  Stream getNewStream(Device d, int) const override { return stream_of(new_stream(d.index())); }
  Stream exchangeStream(Stream s) const override { return stream_of(exchange_stream(s.device_index(), id_of(s))); }
  void* getStreamNativeHandle(const Stream s) const override { return (void*)(intptr_t)s.id(); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (EventState*)e; }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*e) *e = new EventState;
    emulated::record(*(EventState*)*e, id_of(s));
  }
  void block(void* e, const Stream& s) const override {
    if (e) wait_for(*(EventState*)e, id_of(s));
  }
  bool queryEvent(void* e) const override { return !e || query(*(EventState*)e); }
  void synchronizeEvent(void* e) const override {
    if (e) synchronize_event(*(EventState*)e, here());
  }
  DeviceIndex deviceCount() const noexcept override { return settings.devices; }
  bool queryStream(const Stream& s) const override { return query_stream(id_of(s)); }
  void synchronizeStream(const Stream& s) const override { synchronize_stream(id_of(s), here()); }
  void synchronizeDevice(const DeviceIndex d) const override { synchronize_device(d < 0 ? device_here : d, here()); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override {
    Lock lock;
    if (auto memory = memory_at(p.get())) memory->recorded.insert(id_of(s));
    counters["record_stream"]++;
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    return ((EventState*)b)->time - ((EventState*)a)->time;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return settings.devices; }
  int getNumGPUs() const override { return settings.devices; }
  DeviceIndex current_device() const override { return device_here; }
  DeviceIndex getCurrentDevice() const override { return device_here; }
  void setCurrentDevice(DeviceIndex d) const override { set_device(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(device_here, (int)d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  Device getDeviceFromPtr(void* p) const override {
    auto memory = memory_at(p);
    return Device(DeviceType::CUDA, memory && memory->device >= 0 ? memory->device : device_here);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return generator(d); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex d) const override { synchronize_device(d, here()); }
};

}  // namespace
}  // namespace emulated

namespace at {
using EmulatedHooks = emulated::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", EmulatedHooks)
}  // namespace at
