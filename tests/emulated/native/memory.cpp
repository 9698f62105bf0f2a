// Memory and who uses it: protection, vector clocks, races, reports with the Python lines of both sides.
#include "state.h"

#include <frameobject.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <unordered_map>

namespace emulated {

namespace py = pybind11;
Settings settings;
std::map<std::string, int64_t> counters;
std::vector<Wait> waits;
std::vector<Launch> trace;
std::map<int, int64_t> allocated, peak, reserved, reserved_peak;
int64_t pinned_bytes = 0;

namespace {

std::recursive_mutex state_mutex;   // everything, but
std::recursive_mutex memory_mutex;  // the table of memory and its protection: messages' threads take this one alone
std::mutex report_mutex;            // messages' threads report too
thread_local int depth = 0;
std::vector<std::string> reports;
std::map<char*, Held> table;
std::set<Memory*> guarded;
Clock host_seen;
bool watching = false;
struct sigaction before_us;
constexpr size_t kPage = 4096;

}  // namespace

// -- the lock --------------------------------------------------------------------------------------------------------

Lock::Lock() {
  if (!state_mutex.try_lock()) without_gil([] { state_mutex.lock(); });
  depth++;
}
Lock::~Lock() {
  depth--;
  state_mutex.unlock();
}
TryLock::TryLock() : held(state_mutex.try_lock()) { depth += held; }
TryLock::~TryLock() {
  depth -= held;
  if (held) state_mutex.unlock();
}
bool locked_here() { return depth > 0; }

void without_gil(const std::function<void()>& wait) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release release;
    wait();
  } else {
    wait();
  }
}

// -- Python lines ----------------------------------------------------------------------------------------------------

namespace {

std::string file_of(PyCodeObject* code) {
  const char* name = PyUnicode_AsUTF8(code->co_filename);
  return name ? name : "?";
}

bool is_shown(PyCodeObject* code) {
  static std::unordered_map<PyCodeObject*, bool> known;  // the GIL guards it; the codes are kept for ever
  auto found = known.find(code);
  if (found != known.end()) return found->second;
  std::string file = file_of(code);
  bool shown = file.find("/site-packages/torch/") == std::string::npos && file.find('<') == std::string::npos &&
               (file.find("/lib/python3") == std::string::npos || file.find("/site-packages/") != std::string::npos) &&
               file.find("tests/emulated/device.py") == std::string::npos;
  Py_INCREF(code);
  return known[code] = shown;
}

// Python's own list of frames, since only it locks the list of threads: those that begin, as autograd's do at the first
// backward, enter themselves without the GIL before they are whole.
PyFrameObject* frame_of_backward() {
  py::error_scope kept;
  bool collects = PyGC_Disable();  // a finalizer would start behind that lock
  auto frames = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(PySys_GetObject("_current_frames")));
  if (collects) PyGC_Enable();
  if (!frames) return nullptr;
  for (auto entry : py::reinterpret_borrow<py::dict>(frames)) {
    auto* top = (PyFrameObject*)entry.second.ptr();
    Py_INCREF(top);
    for (auto* frame = top; frame;) {
      auto* code = PyFrame_GetCode(frame);
      bool runs = file_of(code).find("/torch/autograd/") != std::string::npos;
      Py_DECREF(code);
      auto* back = PyFrame_GetBack(frame);
      if (frame != top) Py_DECREF(frame);
      if (runs) {
        Py_XDECREF(back);
        return top;
      }
      frame = back;
    }
    Py_DECREF(top);
  }
  return nullptr;
}

}  // namespace

Site here() {
  Site site;
  if (!Py_IsInitialized() || _Py_IsFinalizing()) return site;
  if (locked_here() && !PyGILState_Check()) return site;
  py::gil_scoped_acquire gil;
  auto* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  if (!frame) {
    frame = frame_of_backward();
    site.backward = frame != nullptr;
  }
  while (frame && site.depth < (int)site.lines.size()) {
    auto* code = PyFrame_GetCode(frame);
    if (is_shown(code)) site.lines[site.depth++] = {code, PyFrame_GetLineNumber(frame)};
    Py_DECREF(code);
    auto* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return site;
}

std::string text(const Site& site) {
  std::string out = site.backward ? "backward under " : "";
  for (int i = 0; i < site.depth; i++) {
    std::string file = file_of(site.lines[i].first);  // reads a string that nobody changes
    size_t cut = std::string::npos;
    for (const char* folder : {"/deepspeed/", "/tests/", "/site-packages/"}) {
      size_t place = file.rfind(folder);
      if (place != std::string::npos && (cut == std::string::npos || place > cut)) cut = place;
    }
    out += (i ? " < " : "") + (cut == std::string::npos ? file : file.substr(cut + 1)) + ":" +
           std::to_string(site.lines[i].second);
  }
  return site.depth ? out : out + "no Python line";
}

// -- what happened ---------------------------------------------------------------------------------------------------

void report(const std::string& said) {
  std::unique_lock<std::mutex> own(report_mutex);
  if (reports.size() < 10000) reports.push_back(said);
}
std::vector<std::string> all_reports() {
  std::unique_lock<std::mutex> own(report_mutex);
  return reports;
}
void host_waits(const std::string& what, const Site& site) {
  counters["wait." + what]++;
  if (waits.size() < 100000) waits.push_back({what, site});
}
void clear() {
  Lock lock;
  std::unique_lock<std::mutex> own(report_mutex);
  reports.clear();
  counters.clear();
  waits.clear();
  trace.clear();
}

// -- memory ----------------------------------------------------------------------------------------------------------

namespace {

void protect(Memory& memory) {
  int rights = PROT_READ | PROT_WRITE;
  if (!memory.opened) {
    if (memory.device >= 0 && settings.protect) rights = PROT_NONE;
    if (memory.device < 0 && memory.guard) rights = memory.guard == 2 ? PROT_NONE : PROT_READ;
  }
  mprotect(memory.base, memory.mapped, rights);
}

// Only whole pages can be guarded: the first and last page of registered memory may hold other things.
void set_guard(Memory& memory, int guard) {
  if (memory.guard == guard || !watching || (size_t)memory.base % kPage) return;
  std::unique_lock<std::recursive_mutex> own(memory_mutex);
  memory.guard = guard;
  guard ? (void)guarded.insert(&memory) : (void)guarded.erase(&memory);
  if (!memory.opened) protect(memory);
}

void guard_by_clock(Memory& memory) {
  int guard = 0;
  for (auto& access : memory.log)
    if (access.when > last_of(host_seen, access.stream)) guard = std::max(guard, access.write ? 2 : 1);
  set_guard(memory, guard);
}

}  // namespace

Memory::~Memory() {
  if (owned && base) munmap(base, mapped);
}

Held memory_at(const void* address) {
  std::unique_lock<std::recursive_mutex> own(memory_mutex);
  auto next = table.upper_bound((char*)address);
  if (next == table.begin()) return nullptr;
  auto& found = std::prev(next)->second;
  return (char*)address < found->base + found->size ? found : nullptr;
}

void open(Memory& memory) {
  std::unique_lock<std::recursive_mutex> own(memory_mutex);
  if (memory.opened++ == 0 && (memory.device >= 0 ? settings.protect : memory.guard != 0)) protect(memory);
}
void close(Memory& memory) {
  std::unique_lock<std::recursive_mutex> own(memory_mutex);
  if (--memory.opened == 0 && (memory.device >= 0 ? settings.protect : memory.guard != 0)) protect(memory);
}
void Opened::add(Held memory) {
  if (!memory) return;
  open(*memory);
  held_.push_back(std::move(memory));
}
void Opened::add(const Tensor& tensor) { add(memory_at(tensor.unsafeGetTensorImpl()->unsafe_storage().data())); }
Opened::~Opened() {
  for (auto& memory : held_) close(*memory);
}

namespace {
void count_allocated(int device, int64_t bytes) {
  allocated[device] += bytes;
  peak[device] = std::max(peak[device], allocated[device]);
  reserved[device] = std::max(reserved[device], allocated[device] - pooled_lent[device] + pooled[device]);
  reserved_peak[device] = std::max(reserved_peak[device], reserved[device]);
}
}  // namespace

c10::DataPtr allocate(size_t bytes, int device) {
  Device where = device < 0 ? Device(DeviceType::CPU) : Device(DeviceType::CUDA, device);
  if (bytes == 0) return {nullptr, nullptr, +[](void*) {}, where};
  Site site = here();
  int home = device < 0 ? -1 : current_stream(device);
  Lock lock;
  GraphRef graph = device < 0 ? nullptr : capture_of(home);
  if (device >= 0) {
    may_launch(home, "an allocation", site);
    int64_t used = allocated[device] - pooled_lent[device] + pooled[device];
    if (used + (int64_t)bytes > settings.limit)
      C10_THROW_ERROR(OutOfMemoryError, c10::str("CUDA out of memory. Tried to allocate ", bytes, " bytes (emulated: ",
                                                 settings.limit, " bytes, ", used, " in use)"));
  }
  if (graph)
    if (Held memory = lend(graph->pool, bytes, device, home)) {
      memory->born = site;
      graph->born.insert(memory);
      count_allocated(device, memory->size);
      return {memory->base, memory->base, &free_memory, where};
    }
  auto memory = std::make_shared<Memory>();
  memory->size = bytes;
  memory->mapped = (bytes + kPage - 1) / kPage * kPage;
  memory->device = device;
  memory->home = home;
  memory->born = site;
  void* base = mmap(nullptr, memory->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(base != MAP_FAILED, "the host has no ", bytes, " bytes for the emulated device");
  memory->base = (char*)base;
  if (settings.poison) memset(base, 0xFF, bytes);
  if (device >= 0) {
    if (graph) {
      memory->pool = graph->pool;
      memory->of_graphs = true;
      memory->size = memory->mapped;  // whoever is lent it next may need more of it
      graph->born.insert(memory);
      give_to_pool(memory);
      pooled_lent[device] += memory->size;
    }
    count_allocated(device, memory->size);
    if (settings.protect) protect(*memory);
  } else {
    counters["pinned.allocations"]++;
    pinned_bytes += memory->mapped;
  }
  std::unique_lock<std::recursive_mutex> own(memory_mutex);
  table[memory->base] = memory;
  return {base, base, &free_memory, where};
}

void forget(const Held& memory) {
  memory->freed = true;
  std::unique_lock<std::recursive_mutex> own(memory_mutex);
  table.erase(memory->base);  // what is late holds the bytes
}

void free_memory(void* address) {
  Site site = here();
  Lock lock;
  Held memory = memory_at(address);
  if (!memory) return;
  if (memory->device >= 0) {
    // The caching allocator gives a block to its own stream again at once, so that stream must follow every use. A
    // pool's block comes back into use with the next capture, whose replays are compared with what is in the log.
    GraphRef graph = capture_of(memory->home);
    Clock home = stream(memory->home).seen;
    merge(home, host_seen);
    static const std::vector<Access> none;
    bool captured = graph && graph->logs.count(memory.get());
    auto& log = captured ? graph->logs[memory.get()] : memory->of_graphs ? none : memory->log;
    for (auto& access : log)
      if (access.stream != memory->home && access.when > last_of(home, access.stream) &&
          !memory->recorded.count(access.stream)) {
        report("FREED in use: memory of stream " + std::to_string(memory->home) + " [born " + text(memory->born) +
               "] was freed at [" + text(site) + "], while " + access.what + " on stream " +
               std::to_string(access.stream) + " [" + text(access.site) + "] is not known to be over");
        break;
      }
    allocated[memory->device] -= memory->size;
    if (memory->pool) {
      memory->lent = false;
      pooled_lent[memory->device] -= memory->size;
      return;
    }
  } else {
    guarded.erase(memory.get());
    pinned_bytes -= memory->mapped;
  }
  memory->died = site;
  forget(memory);
}

bool is_pinned(const void* address) {
  auto memory = memory_at(address);
  return memory && memory->device < 0;
}
void host_register(char* address, size_t bytes) {
  Lock lock;
  auto memory = std::make_shared<Memory>();
  memory->base = address;
  memory->size = bytes;
  memory->mapped = (bytes + kPage - 1) / kPage * kPage;
  memory->owned = false;
  memory->born = here();
  counters["pinned.registered"]++;
  pinned_bytes += memory->mapped;
  std::unique_lock<std::recursive_mutex> own(memory_mutex);
  table[address] = memory;
}
bool host_unregister(char* address) {
  Site site = here();
  Lock lock;
  Held memory = memory_at(address);
  if (!memory || memory->base != address || memory->owned) return false;
  host_use(memory->range(), true, "cudaHostUnregister", site);
  flush_touching(memory->range());
  set_guard(*memory, 0);
  guarded.erase(memory.get());
  pinned_bytes -= memory->mapped;
  memory->died = site;
  forget(memory);
  return true;
}

namespace {
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { return emulated::allocate(n, current_device()); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    Opened opened;
    opened.add(memory_at(to));
    opened.add(memory_at(from));
    memcpy(to, from, n);
  }
} device_memory;
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { return emulated::allocate(n, -1); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, std::size_t n) const override { memcpy(to, from, n); }
} pinned_memory;
}  // namespace
c10::Allocator* device_allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

// -- clocks and races ------------------------------------------------------------------------------------------------

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

Range range_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t low = 0, high = 0, size = tensor.itemsize();
  for (int64_t d = 0; d < tensor.dim(); d++) {
    int64_t reach = (tensor.size(d) - 1) * tensor.stride(d);
    (reach < 0 ? low : high) += reach;
  }
  char* base = (char*)tensor.unsafeGetTensorImpl()->unsafe_storage().data() + tensor.storage_offset() * size;
  return {base + low * size, base + (high + 1) * size};
}

void host_follows(const Clock& clock) {
  merge(host_seen, clock);
  std::vector<Memory*> all(guarded.begin(), guarded.end());
  for (auto* memory : all) guard_by_clock(*memory);
}

bool host_knows(const Clock& clock, int id) { return last_of(clock, id) <= last_of(host_seen, id); }

void advance(int id) {
  auto& on = stream(id);
  merge(on.seen, host_seen);
  if ((int)on.seen.size() <= id) on.seen.resize(id + 1);
  on.seen[id]++;
}
void launch(int id, const std::string& what, int64_t bytes, const Site& site) {
  may_launch(id, what, site);
  advance(id);
  if (GraphRef graph = capture_of(id)) {
    graph->last[id] = {last_of(stream(id).seen, id), site};
    graph->bytes += bytes;
    counters["launch.captured"]++;
    return;
  }
  counters["launch"]++;
  if (settings.trace) trace.push_back({what, id, bytes, site});
}

void use(int id, const Range& range, bool write, const std::string& what, const Site& site) {
  if ((!settings.races && !stream(id).capture) || range.empty()) return;
  Held memory = memory_at(range.low);
  if (!memory) return;
  auto& on = stream(id);
  if (on.capture) note(on.capture, memory, range, write, what, site);
  auto& log = on.capture ? on.capture->logs[memory.get()] : memory->log;
  std::vector<Access> kept;
  kept.reserve(log.size() + 1);
  for (auto& access : log) {
    bool ordered = access.stream == id || access.when <= last_of(on.seen, access.stream);
    if (!ordered && (write || access.write) && access.range.meets(range))
      report(std::string("RACE on ") + (memory->device < 0 ? "pinned" : "device") + " memory: " +
             (write ? "write by " : "read by ") + what + " on stream " + std::to_string(id) + " [" + text(site) +
             "] does not come after " + (access.write ? "write by " : "read by ") + access.what + " on stream " +
             std::to_string(access.stream) + " [" + text(access.site) + "]");
    if (ordered && range.holds(access.range) && (write || (access.stream == id && !access.write))) continue;
    kept.push_back(std::move(access));
  }
  if (kept.size() > 128) {  // what the host follows, every later launch follows: it can meet nobody any more
    auto settled = [&](const Access& access) { return access.when <= last_of(host_seen, access.stream); };
    kept.erase(std::remove_if(kept.begin(), kept.end(), settled), kept.end());
  }
  kept.push_back({range, id, last_of(on.seen, id), write, what, site});
  log = std::move(kept);
  if (memory->device < 0) guard_by_clock(*memory);
}

void host_use(const Range& range, bool write, const std::string& what, const Site& site) {
  Lock lock;
  Held memory = memory_at(range.low);
  if (!memory || memory->device >= 0) return;
  for (auto& access : memory->log) {
    bool over = access.when <= last_of(host_seen, access.stream);
    if (over || !(write || access.write) || !access.range.meets(range)) continue;
    report(std::string("HOST RACE: the host ") + (write ? "writes" : "reads") + " pinned memory (" + what + ") [" +
           text(site) + "], while " + access.what + (access.write ? ", which writes it," : ", which reads it,") +
           " on stream " + std::to_string(access.stream) + " [" + text(access.site) + "] may still be under way");
    set_guard(*memory, 0);
    return;
  }
}

namespace {

// Host code has touched protected memory: a race on pinned memory is reported and goes on, device memory is a crash.
void on_fault(int signal, siginfo_t* info, void* context) {
  auto memory = memory_at(info->si_addr);
  if (memory && memory->device < 0 && memory->guard) {
    bool write = memory->guard == 1;
#if defined(__x86_64__)
    write = ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2;
#endif
    Site site = here();
    char* address = (char*)info->si_addr;
    host_use({address, address + 1}, write, "by an instruction", site);
    Lock lock;
    set_guard(*memory, 0);
    return;
  }
  if (memory) {
    std::string said = "the host touches device memory at [" + text(here()) + "]: a GPU would end the process here\n";
    (void)!write(2, said.data(), said.size());
  }
  sigaction(signal, &before_us, nullptr);  // the instruction runs again and meets whoever was here before
}

}  // namespace

void watch_host() {
  struct sigaction ours = {};
  ours.sa_sigaction = &on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, watching ? nullptr : &before_us);
  watching = true;
}

}  // namespace emulated
