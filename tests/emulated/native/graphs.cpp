// Graphs: what a stream captures is noted and undone at the end; a replay does it on the same addresses.
//
// An operator is computed while it is captured, since only its result tells the shape. Nobody can see that: the host
// may not wait, bytes that were there before are put back at the end, and memory of the capture becomes NaN.
#include "state.h"

#include <cstring>

namespace emulated {

std::map<int, int64_t> pooled, pooled_lent;

namespace {

struct Pool {
  int users = 0;  // graphs
  std::vector<Held> blocks;
};
auto& pools = *new std::map<int64_t, Pool>;  // never destroyed: Python lets go of graphs last
int64_t pools_made = 0, graphs_made = 0;
auto& capturing = *new std::vector<std::weak_ptr<Graph>>;
thread_local std::weak_ptr<Graph> capturing_here;  // begun by this thread

GraphRef of_this_thread() {
  GraphRef graph = capturing_here.lock();
  return graph && graph->state == Graph::kCapturing ? graph : nullptr;
}

}  // namespace

// -- what a capture refuses ------------------------------------------------------------------------------------------

GraphRef capture_of(int id) { return stream(id).capture; }

void refuse(const GraphRef& graph, const std::string& why, const std::string& what, const Site& site) {
  std::string said = c10::str(why, " (emulated): ", what, " at [", text(site), "], while a graph is captured since [",
                              text(graph->began), "]");
  if (graph->invalid.empty()) graph->invalid = said;
  report("CAPTURE: " + said);
  TORCH_CHECK(false, said);
}

void may_launch(int id, const std::string& what, const Site& site) {
  if (GraphRef graph = capture_of(id)) {
    TORCH_CHECK(graph->invalid.empty(), "cudaErrorStreamCaptureInvalidated: ", graph->invalid);
    return;
  }
  GraphRef graph = of_this_thread();
  if (graph && graph->mode != Mode::kRelaxed)
    refuse(graph, c10::str("stream ", id, " has not joined the capture by an event: this runs now and in no replay"),
           what, site);
}

void may_wait(int id, const std::string& what, const Site& site) {
  GraphRef graph = id < 0 ? nullptr : capture_of(id);
  if (!graph) {
    graph = of_this_thread();
    if (graph && graph->mode == Mode::kRelaxed) graph = nullptr;
  }
  for (auto& each : capturing) {
    GraphRef other = each.lock();
    if (!graph && other && other->mode == Mode::kGlobal) graph = other;
  }
  const char* why = "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing";
  if (graph) refuse(graph, why, what, site);
}

void check_event(const EventState& event, const std::string& what, const Site& site) {
  if (event.graph && event.graph->state == Graph::kCapturing)
    refuse(event.graph, "cudaErrorCapturedEvent: the event is part of the capture", what, site);
  TORCH_CHECK(!event.graph, "cudaErrorCapturedEvent: the event was recorded while a graph was captured (emulated): ",
              what, " at [", text(site), "]");
  may_wait(-1, what, site);
}

void join(int id, const GraphRef& graph) {
  auto& on = stream(id);
  if (on.capture == graph) return;
  graph->streams[id] = on.seen;
  on.capture = graph;
}

bool any_capture() {
  static std::atomic<size_t>& count = *new std::atomic<size_t>;
  if (locked_here()) count = capturing.size();
  return count > 0;
}

// -- what is noted ---------------------------------------------------------------------------------------------------

void note(const GraphRef& graph, const Held& memory, const Range& range, bool write, const std::string& what,
          const Site& site) {
  auto& noted = graph->noted[{range.low, range.high, write}];
  if (!noted.memory || write) noted = {memory, range, write, what + " (captured at [" + text(site) + "])"};
  if (!write || graph->born.count(memory) || graph->before.count(memory)) return;
  Opened opened;
  opened.add(memory);
  graph->before[memory].assign(memory->base, memory->base + memory->size);
}

void add_node(const GraphRef& graph, const std::string& what, std::function<void()> run, bool python) {
  graph->nodes.push_back({what, std::move(run), python});
}

// -- pools -----------------------------------------------------------------------------------------------------------

int64_t new_pool() {
  Lock lock;
  return ++pools_made;
}

int64_t bytes_of_pool(int64_t pool) {
  Lock lock;
  int64_t sum = 0;
  for (auto& block : pools[pool].blocks) sum += block->size;
  return sum;
}

Held lend(int64_t pool, size_t bytes, int device, int home) {
  Held best;
  for (auto& block : pools[pool].blocks)
    if (!block->lent && block->device == device && block->home == home && block->size >= bytes)
      if (!best || block->size < best->size) best = block;
  if (!best) return nullptr;
  best->lent = true;
  pooled_lent[device] += best->size;
  if (settings.poison) {
    Opened opened;
    opened.add(best);
    memset(best->base, 0xFF, best->size);
  }
  return best;
}

void give_to_pool(const Held& memory) {
  pools[memory->pool].blocks.push_back(memory);
  pooled[memory->device] += memory->size;
}

static void leave_pool(int64_t number, const Site& site) {
  auto& pool = pools[number];
  if (--pool.users > 0) return;
  for (auto& block : pool.blocks) {
    pooled[block->device] -= block->size;
    block->pool = 0;
    if (block->lent) {  // a tensor has it still: the tensor's end frees it
      pooled_lent[block->device] -= block->size;
    } else {
      block->died = site;
      forget(block);
    }
  }
  pools.erase(number);
}

// -- capture and replay ----------------------------------------------------------------------------------------------

void capture_begin(const GraphRef& graph, int64_t pool, Mode mode) {
  Site site = here();
  Lock lock;
  int id = current_stream();
  TORCH_CHECK(graph->state == Graph::kEmpty, "This CUDAGraph instance already owns a captured graph. To capture a new "
              "graph, create a new instance. (emulated)");
  TORCH_CHECK(id >= settings.devices, "CUDA graphs must be captured on a non-default stream. (However, after capture, "
              "it's ok to replay them on the default stream.) (emulated)");
  TORCH_CHECK(!capture_of(id) && !of_this_thread(), "cudaErrorIllegalState: a capture is under way at [", text(site),
              "] (emulated)");
  for (int each = 0; each <= id; each++) flush(each);  // what is noted now is computed now, on values that are there
  graph->state = Graph::kCapturing;
  graph->mode = mode;
  graph->number = ++graphs_made;
  graph->pool = pool ? pool : new_pool();
  pools[graph->pool].users++;
  graph->device = current_device();
  graph->origin = id;
  graph->began = site;
  graph->numbers = Tensor(generator(graph->device).unsafeGetGeneratorImpl()->get_state());
  join(id, graph);
  capturing.push_back(graph);
  capturing_here = graph;
  any_capture();
}

// Undoes what computing has done, and lets the streams go.
static void end_capture(const GraphRef& graph) {
  for (auto& [memory, bytes] : graph->before) {
    Opened opened;
    opened.add(memory);
    memcpy(memory->base, bytes.data(), bytes.size());
  }
  for (auto& memory : graph->born) {
    if (!settings.poison) break;
    Opened opened;
    opened.add(memory);
    memset(memory->base, 0xFF, memory->size);
  }
  generator(graph->device).unsafeGetGeneratorImpl()->set_state(*graph->numbers.unsafeGetTensorImpl());
  for (auto& [id, seen] : graph->streams) {
    stream(id).capture = nullptr;
    stream(id).seen = seen;
  }
  graph->before.clear();
  graph->logs.clear();
  graph->streams.clear();
  graph->born.clear();
  std::erase_if(capturing, [&](auto& each) { return each.expired() || each.lock() == graph; });
  any_capture();
}

void capture_end(const GraphRef& graph) {
  Site site = here();
  Lock lock;
  TORCH_CHECK(graph->state == Graph::kCapturing, "cudaErrorIllegalState: no capture is under way (emulated)");
  std::string wrong = graph->invalid.empty() ? "" : "cudaErrorStreamCaptureInvalidated: " + graph->invalid;
  if (wrong.empty() && capture_of(current_stream(graph->device)) != graph)
    wrong = "cudaErrorStreamCaptureUnmatched: the capture ends on another stream";
  Clock seen = stream(graph->origin).seen;
  for (auto& [id, last] : graph->last)
    if (wrong.empty() && id != graph->origin && last.first > last_of(seen, id)) {
      wrong = c10::str("cudaErrorStreamCaptureUnjoined: stream ", id, " was not joined again after [",
                       text(last.second), "]");
      report(c10::str("CAPTURE: ", wrong, ", and the capture ends at [", text(site), "]"));
    }
  end_capture(graph);
  graph->state = Graph::kReady;
  if (wrong.empty()) return;
  reset(*graph);
  TORCH_CHECK(false, wrong, " (emulated, at [", text(site), "])");
}

void replay(const GraphRef& graph) {
  Site site = here();
  {
    Lock lock;
    TORCH_CHECK(graph->state == Graph::kReady,
                "Called CUDAGraph::replay without a preceding successful capture. (emulated)");
    int id = current_stream(graph->device);
    TORCH_CHECK(!capture_of(id), "the emulated device captures no replay of another graph");
    for (auto& [key, noted] : graph->noted)
      if (noted.memory->freed) {
        std::string said = c10::str("a graph is replayed at [", text(site), "] after memory of its ", noted.what,
                                    " was freed at [", text(noted.memory->died), "]");
        report("GRAPH: " + said);
        TORCH_CHECK(false, said, " (emulated)");
      }
    flush(id);
    merge(stream(id).seen, graph->end);  // a device runs one replay of a graph after the other
    launch(id, c10::str("graph ", graph->number), graph->bytes, site);
    counters["graph.replays"]++;
    counters["graph.nodes"] += graph->nodes.size();
    for (auto& [key, noted] : graph->noted) use(id, noted.range, noted.write, noted.what, site);
  }
  for (auto& node : graph->nodes) {
    if (node.python) {
      node.run();
    } else {
      Lock lock;
      node.run();
    }
  }
  Lock lock;
  graph->end = stream(current_stream(graph->device)).seen;
}

Graph::~Graph() {
  if (state == kReady && Py_IsInitialized()) reset(*this);
}

void reset(Graph& graph) {
  Site site = here();
  std::vector<Node> nodes;  // their arguments go without the lock
  Lock lock;
  if (graph.state == Graph::kEmpty) return;
  nodes.swap(graph.nodes);
  graph.noted.clear();
  graph.state = Graph::kEmpty;
  graph.invalid.clear();
  graph.last.clear();
  leave_pool(graph.pool, site);
}

// -- kernels of the package ------------------------------------------------------------------------------------------

// One launch of a function of the host over the bytes of tensors; `written`: which of them it writes.
void launch_kernel(const std::string& what, const std::vector<Tensor>& tensors, const std::vector<bool>& written,
                   const std::function<void(const std::vector<Tensor>&)>& function) {
  Site site = here();
  std::vector<Tensor> aliases, places;
  std::function<void()> run;
  {
    Lock lock;
    int id = current_stream();
    flush(id);
    int64_t bytes = 0;
    for (auto& tensor : tensors) bytes += tensor.nbytes();
    launch(id, what, bytes, site);
    for (size_t i = 0; i < tensors.size(); i++) use(id, range_of(tensors[i]), written[i], what, site);
    for (auto& tensor : tensors) {
      aliases.push_back(host_alias(tensor));
      places.push_back(unowned(tensor));
    }
    run = [=] {
      Opened opened;
      for (auto& place : places) opened.add(place);
      function(aliases);
    };
    if (GraphRef graph = capture_of(id)) add_node(graph, what, run, true);
  }
  run();
}

}  // namespace emulated
