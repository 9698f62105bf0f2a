// The emulated device's state: memory, streams, clocks, reports. What the parts mean stands in ../README.md.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace emulated {

using at::Tensor;
using c10::Device;
using c10::DeviceType;

// -- settings --------------------------------------------------------------------------------------------------------

struct Settings {
  int devices = 8;
  int64_t limit = int64_t(16) << 30;  // bytes per device
  double delay_ms = 0.5;              // most that a message is late
  bool protect = true;                // host code that touches device memory crashes
  bool poison = true;                 // what has not arrived is NaN
  bool late = true;                   // copies run when somebody comes after them
  bool races = true;
  bool trace = false;
};
extern Settings settings;

// -- Python lines ----------------------------------------------------------------------------------------------------

// The innermost Python lines outside of torch; for autograd's own threads those of the thread that called backward.
struct Site {
  std::array<std::pair<PyCodeObject*, int>, 5> lines;
  int depth = 0;
  bool backward = false;
};
Site here();  // takes the GIL: call it before the lock
std::string text(const Site& site);

// -- the lock --------------------------------------------------------------------------------------------------------

// One lock over everything below. Whoever waits for it lets go of the GIL; whoever holds it never asks for the GIL.
class Lock {
 public:
  Lock();
  ~Lock();
};
struct TryLock {
  TryLock();
  ~TryLock();
  bool held;
};
bool locked_here();
void without_gil(const std::function<void()>& wait);  // for waits that may be long

// -- clocks ----------------------------------------------------------------------------------------------------------

using Clock = std::vector<int64_t>;  // by stream: the last of its launches that is known to be over
void merge(Clock& into, const Clock& from);
inline int64_t last_of(const Clock& clock, int stream) { return stream < (int)clock.size() ? clock[stream] : 0; }

struct Range {
  char* low = nullptr;
  char* high = nullptr;
  bool empty() const { return low == high; }
  bool meets(const Range& other) const { return low < other.high && other.low < high; }
  bool holds(const Range& other) const { return low <= other.low && other.high <= high; }
};
Range range_of(const Tensor& tensor);

struct Access {
  Range range;
  int stream;
  int64_t when;
  bool write;
  std::string what;
  Site site;
};

// -- memory ----------------------------------------------------------------------------------------------------------

struct Memory {
  char* base = nullptr;
  size_t size = 0, mapped = 0;
  int device = -1;  // -1: page-locked host memory
  int home = -1;    // stream it was allocated on
  bool owned = true;
  int opened = 0;  // kernels that use it right now
  int guard = 0;   // host memory: 0 free for all, 1 the device reads it, 2 the device writes it
  std::set<int> recorded;
  std::vector<Access> log;
  Site born, died;
  bool freed = false;
  int64_t pool = 0;  // of graphs; 0: none. Its memory is lent again and again
  bool lent = true, of_graphs = false;  // was a pool's: it never goes back to the streams' blocks
  ~Memory();
  Range range() const { return {base, base + size}; }
};
using Held = std::shared_ptr<Memory>;
Held memory_at(const void* address);
void open(Memory& memory);
void close(Memory& memory);
c10::DataPtr allocate(size_t bytes, int device);  // device -1: page-locked
void free_memory(void* address);
void forget(const Held& memory);
bool is_pinned(const void* address);
void host_register(char* address, size_t bytes);
bool host_unregister(char* address);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Memory that kernels may touch for as long as this lives.
class Opened {
 public:
  void add(const Tensor& tensor);
  void add(Held memory);
  ~Opened();

 private:
  std::vector<Held> held_;
};

// -- streams ---------------------------------------------------------------------------------------------------------

struct Graph;

struct Late {
  int64_t number;
  std::function<void()> run;
  std::vector<Range> touches;
  std::function<bool()> over;  // whether running it would not block; none: it would not
};
struct StreamState {
  int id, device;
  std::deque<Late> late;
  int64_t issued = 0, done = 0;
  std::atomic<int64_t> pending{INT64_MAX};  // the first that has not been run to its end; readable without the lock
  Clock seen;
  std::shared_ptr<Graph> capture;  // what is launched here is noted in it, and not done
};
struct EventState {
  int stream = -1;
  const StreamState* on = nullptr;
  int64_t number = 0;
  Clock seen;
  int asked = 0;
  double time = 0;
  std::shared_ptr<Graph> graph;  // it was recorded while this one was captured
};

StreamState& stream(int id);
int new_stream(int device);
int current_device();
void set_device(int device);
int current_stream(int device = -1);  // of this thread
int exchange_stream(int device, int id);
void flush(int id, int64_t up_to = INT64_MAX);  // run what is late
int64_t push(int id, std::function<void()> run, std::vector<Range> touches = {}, std::function<bool()> over = {});
bool is_late(const Range& range);  // whether something that is late touches it
void flush_touching(const Range& range);
void advance(int id);              // one more point in a stream's time
void launch(int id, const std::string& what, int64_t bytes, const Site& site);  // one more piece of work on it
void host_follows(const Clock& clock);
bool host_knows(const Clock& clock, int id);
void use(int id, const Range& range, bool write, const std::string& what, const Site& site);
void host_use(const Range& range, bool write, const std::string& what, const Site& site);

void record(EventState& event, int id);
bool query_stream(int id);
void wait_for(const EventState& event, int id);
bool query(EventState& event);
bool is_over(const EventState& event);  // for an onlooker: changes nothing and never blocks
void synchronize_event(const EventState& event, const Site& site);
void synchronize_stream(int id, const Site& site);
void synchronize_device(int device, const Site& site);

// -- graphs ----------------------------------------------------------------------------------------------------------

enum class Mode { kGlobal, kThreadLocal, kRelaxed };  // whose unsafe calls end a capture: all, its thread's, none

struct Node {
  std::string what;
  std::function<void()> run;
  bool python = false;  // it calls Python, so it runs without the lock
};
struct Graph : std::enable_shared_from_this<Graph> {
  struct Noted {
    Held memory;
    Range range;
    bool write;
    std::string what;
  };
  enum { kEmpty, kCapturing, kReady } state = kEmpty;
  Mode mode = Mode::kGlobal;
  int64_t number = 0, pool = 0;
  int device = 0, origin = -1;
  Site began;
  std::string invalid;                           // why the capture cannot end well
  std::vector<Node> nodes;
  std::map<std::tuple<char*, char*, bool>, Noted> noted;  // what a replay touches, each range once
  std::map<int, Clock> streams;                  // that have joined, with their clocks before
  std::map<int, std::pair<int64_t, Site>> last;  // launch on each of them
  std::map<Memory*, std::vector<Access>> logs;   // of the capture, for races within it
  std::map<Held, std::vector<char>> before;      // bytes that are written, as they were
  std::set<Held> born;                           // memory lent during the capture
  Tensor numbers;                                // the generator's state before
  int64_t bytes = 0;
  Clock end;                                     // of the last replay: two never overlap
  ~Graph();
};
using GraphRef = std::shared_ptr<Graph>;
GraphRef capture_of(int stream);                    // the graph that its launches go into, or none
void may_launch(int stream, const std::string& what, const Site& site);  // refuses what a capture would miss
void may_wait(int stream, const std::string& what, const Site& site);  // refuses waits that a capture forbids; -1: any
[[noreturn]] void refuse(const GraphRef& graph, const std::string& why, const std::string& what, const Site& site);
void join(int stream, const GraphRef& graph);
void note(const GraphRef& graph, const Held& memory, const Range& range, bool write, const std::string& what,
          const Site& site);
void add_node(const GraphRef& graph, const std::string& what, std::function<void()> run, bool python = false);
void check_event(const EventState& event, const std::string& what, const Site& site);
Held lend(int64_t pool, size_t bytes, int device, int home);  // memory of a pool that nobody uses, or none
void give_to_pool(const Held& memory);
int64_t new_pool();
int64_t bytes_of_pool(int64_t pool);
void capture_begin(const GraphRef& graph, int64_t pool, Mode mode);
void capture_end(const GraphRef& graph);
void replay(const GraphRef& graph);
void reset(Graph& graph);
bool any_capture();  // readable without the lock
void launch_kernel(const std::string& what, const std::vector<Tensor>& tensors, const std::vector<bool>& written,
                   const std::function<void(const std::vector<Tensor>&)>& function);
extern std::map<int, int64_t> pooled, pooled_lent;  // bytes of pools by device, and those of them in tensors
Tensor unowned(const Tensor& tensor);               // the same bytes as a tensor of the device; does not keep them

// -- what happened ---------------------------------------------------------------------------------------------------

struct Wait {
  std::string what;
  Site site;
};
std::vector<std::string> all_reports();
extern std::map<std::string, int64_t> counters;
extern std::vector<Wait> waits;
struct Launch {
  std::string what;
  int stream;
  int64_t bytes;
  Site site;
};
extern std::vector<Launch> trace;  // of every launch, while settings.trace
extern int64_t pinned_bytes;
extern std::map<int, int64_t> allocated, peak, reserved, reserved_peak;
void report(const std::string& text);
void host_waits(const std::string& what, const Site& site);
void watch_host();  // from now on, host code that touches page-locked memory in use is reported
void clear();       // reports and counters

const at::Generator& generator(int device);
Tensor host_alias(const Tensor& tensor);  // the same bytes as a CPU tensor; does not keep them
void resize_storage(const at::Storage& storage, int64_t bytes);

}  // namespace emulated
