// NCCL's rules over a gloo group: one order per communicator, equal shapes, `wait` orders a stream and nothing else.
#include "nccl.h"

#include <cstring>
#include <random>

namespace emulated {

using c10d::OpType;

// -- lanes -----------------------------------------------------------------------------------------------------------

Lane::Lane(int device) : stream(new_stream(device)) {
  thread_ = std::thread([this] { serve(); });
}

Lane::~Lane() {
  {
    std::unique_lock<std::mutex> own(mutex_);
    closing_ = true;
  }
  filled_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Lane::serve() {
  std::mt19937 random(stream);
  for (;;) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock<std::mutex> own(mutex_);
      filled_.wait(own, [&] { return closing_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    double delay = settings.delay_ms * (random() % 100) / 100;
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(delay));
    std::exception_ptr failed;
    for (auto& memory : job->memory) open(*memory);
    try {
      c10::InferenceMode plain(false);
      at::AutoDispatchBelowAutograd below;
      job->run();
    } catch (...) {
      failed = std::current_exception();
    }
    for (auto& memory : job->memory) close(*memory);
    auto promise = std::move(job->promise);
    job.reset();  // before anybody is told: it holds bytes and no tensor of the device
    failed ? promise.set_exception(failed) : promise.set_value();
  }
}

std::shared_future<void> Lane::add(std::shared_ptr<Job> job) {
  auto future = job->promise.get_future().share();
  {
    std::unique_lock<std::mutex> own(mutex_);
    jobs_.push_back(std::move(job));
  }
  filled_.notify_all();
  return future;
}

// -- work ------------------------------------------------------------------------------------------------------------

EmulatedWork::EmulatedWork(int rank, OpType op, std::string what, int stream)
    : c10d::Work(rank, op), what_(std::move(what)), stream_(stream) {}

EmulatedWork::~EmulatedWork() {
  if (held_.empty() || !Py_IsInitialized()) return;
  Lock lock;  // nobody waited: the communicator keeps the memory until it is through, as torch does
  for (auto& tensor : held_)
    if (auto memory = memory_at(tensor.storage().data())) memory->recorded.insert(stream_);
}

bool EmulatedWork::isCompleted() {
  Site site = here();
  Lock lock;
  may_wait(stream_, "cudaEventQuery", site);
  if (done_.wait_for(std::chrono::seconds(0)) != std::future_status::ready || asked_++ < 3) return false;
  host_follows(end_);
  return true;
}
bool EmulatedWork::isSuccess() const {
  try {
    done_.get();
    return true;
  } catch (...) {
    return false;
  }
}
bool EmulatedWork::wait(std::chrono::milliseconds) {
  std::vector<Tensor> dropped;
  Site site = here();
  Lock lock;
  int id = current_stream(stream(stream_).device);
  GraphRef graph = capture_of(id);
  if (!slot_ != !graph || (slot_ && stream(stream_).capture != graph)) {
    if (graph)
      refuse(graph, "cudaErrorStreamCaptureIsolation: the call was made outside of the capture", "wait of " + what_,
             site);
    TORCH_CHECK(false, "cudaErrorCapturedEvent: ", what_, " was captured, so nothing is there to wait for at [",
                text(site), "] (emulated)");
  }
  merge(stream(id).seen, end_);
  if (graph) {
    add_node(graph, "wait of " + what_, [slot = slot_] {
      (*slot)->wait();
      flush(current_stream());
    });
    dropped.swap(held_);
    return true;
  }
  auto done = done_;
  push(id, [done] { without_gil([&] { done.get(); }); }, {},
       [done] { return done.wait_for(std::chrono::seconds(0)) != std::future_status::timeout; });
  counters["nccl.wait"]++;
  dropped.swap(held_);
  return true;
}
c10::intrusive_ptr<c10::ivalue::Future> EmulatedWork::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  without_gil([&] { done_.get(); });
  Lock lock;
  host_follows(end_);
  future->markCompleted(c10::IValue(outputs_));
  return future;
}

// -- the backend -----------------------------------------------------------------------------------------------------

EmulatedNCCL::EmulatedNCCL(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size,
                           c10::intrusive_ptr<Options> options)
    : Backend(rank, size), inner_(std::move(inner)), options_(std::move(options)) {}

namespace {

void refuse_bad(const std::vector<Tensor>& tensors, const std::string& what) {
  for (auto& tensor : tensors) {
    TORCH_CHECK(tensor.is_cuda() && !tensor.is_sparse(), "Tensors must be CUDA and dense (", what, ", emulated NCCL)");
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous (", what, ", emulated NCCL)");
    TORCH_CHECK(tensor.device().index() == current_device(), "NCCL was given a tensor on ", tensor.device(),
                " while the current device is ", current_device());
  }
}

int64_t type_of(const Tensor& tensor) { return (int64_t)tensor.scalar_type(); }

std::vector<Tensor> aliases(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> made;
  for (auto& tensor : tensors) made.push_back(host_alias(tensor));
  return made;
}

int64_t bytes_of(const std::vector<Tensor>& tensors, int without = -1) {
  int64_t sum = 0;
  for (int i = 0; i < (int)tensors.size(); i++) sum += i == without ? 0 : tensors[i].nbytes();
  return sum;
}

std::string words(const int64_t* header) {
  return c10::str((const char*)(header + kHeader), " (elements or operands ", header[2], ", dtype ",
                  (at::ScalarType)header[3], ", root or sum ", header[4], ")");
}

}  // namespace

Lane& EmulatedNCCL::lane(int peer) {
  auto& found = lanes_[peer];
  if (!found) found = std::make_unique<Lane>(current_device());
  return *found;
}

// Ranks that call different things would hang or mix their bytes: all of them see it here.
void EmulatedNCCL::agree(const std::vector<int64_t>& mine, const std::string& what, const std::string& where) {
  Tensor header = at::zeros({kHeader + kWords}, at::kLong);
  auto* own = header.data_ptr<int64_t>();
  std::copy(mine.begin(), mine.end(), own);
  std::string said = what + " at [" + where + "]";
  memcpy(own + kHeader, said.data(), std::min<size_t>(said.size(), kWords * 8 - 1));
  std::vector<std::vector<Tensor>> all(1);
  for (int r = 0; r < getSize(); r++) all[0].push_back(at::empty_like(header));
  std::vector<Tensor> in = {header};
  inner_->allgather(all, in)->wait();
  for (int r = 0; r < getSize(); r++) {
    auto* theirs = all[0][r].data_ptr<int64_t>();
    if (std::equal(mine.begin(), mine.end(), theirs)) continue;
    said = c10::str("NCCL would hang or mix bytes: call ", mine[0], " of rank ", getRank(), " is ", words(own),
                    ", call ", theirs[0], " of rank ", r, " is ", words(theirs));
    report("MISMATCH: " + said);
    TORCH_CHECK(false, said);
  }
}

c10::intrusive_ptr<c10d::Work> EmulatedNCCL::enqueue(Call call) {
  Site site = call.site.depth ? call.site : here();
  refuse_bad(call.reads, call.what);
  refuse_bad(call.writes, call.what);
  std::vector<int64_t> header = {0, (int64_t)(std::hash<std::string>()(call.what) & 0xffffff)};
  header.insert(header.end(), call.signature.begin(), call.signature.end());
  header.resize(kHeader);
  Lock lock;
  Lane& on = lane(call.peer);
  int now = current_stream();
  if (GraphRef graph = capture_of(now)) return capture(graph, std::move(call), site);
  header[0] = ++on.calls;
  flush(now);  // inputs are ready when the stream has come to here
  emulated::merge(stream(on.stream).seen, stream(now).seen);
  launch(on.stream, "nccl " + call.what, call.sent, site);
  counters["launch.nccl"]++;
  counters["nccl." + call.what]++;
  counters["bytes.wire"] += call.sent;
  std::string named = c10::str("nccl ", call.what, " #", header[0]);
  for (auto& tensor : call.reads) use(on.stream, range_of(tensor), false, named, site);
  for (auto& tensor : call.writes) use(on.stream, range_of(tensor), true, named, site);
  poison(call);
  auto job = std::make_shared<Job>();
  for (auto* list : {&call.reads, &call.writes})
    for (auto& tensor : *list)
      if (auto memory = memory_at(tensor.storage().data())) job->memory.push_back(memory);
  bool agrees = call.peer < 0;
  std::string where = text(site);
  job->run = [this, header, agrees, where, what = call.what, run = std::move(call.run)] {
    if (agrees) agree(header, what, where);
    run(header);
  };
  auto work = c10::make_intrusive<EmulatedWork>(getRank(), OpType::UNKNOWN, named, on.stream);
  work->end_ = stream(on.stream).seen;
  work->outputs_ = call.writes;
  work->held_ = call.reads;
  work->held_.insert(work->held_.end(), call.writes.begin(), call.writes.end());
  if (grouping_) {
    grouped_.push_back({&on, job, work});
    return work;
  }
  work->done_ = on.add(job);
  return work;
}

// Nothing is sent during a capture. A replay makes the call, and each wait in the graph waits for that one.
c10::intrusive_ptr<c10d::Work> EmulatedNCCL::capture(const GraphRef& graph, Call call, const Site& site) {
  Lane& on = lane(call.peer);
  int now = current_stream();
  join(on.stream, graph);
  emulated::merge(stream(on.stream).seen, stream(now).seen);
  std::string named = "nccl " + call.what;
  launch(on.stream, named, call.sent, site);
  for (auto& tensor : call.reads) use(on.stream, range_of(tensor), false, named, site);
  for (auto& tensor : call.writes) use(on.stream, range_of(tensor), true, named, site);
  auto work = c10::make_intrusive<EmulatedWork>(getRank(), OpType::UNKNOWN, named, on.stream);
  work->end_ = stream(on.stream).seen;
  work->outputs_ = call.writes;
  work->held_ = call.reads;
  work->held_.insert(work->held_.end(), call.writes.begin(), call.writes.end());
  work->slot_ = std::make_shared<WorkRef>();
  std::promise<void> over;
  over.set_value();
  work->done_ = over.get_future().share();
  for (auto* list : {&call.reads, &call.writes})
    for (auto& tensor : *list) tensor = unowned(tensor);
  call.site = site;
  add_node(graph, named, [this, call, slot = work->slot_] { *slot = enqueue(call); });
  if (grouping_) grouped_.push_back({&on, nullptr, work});
  return work;
}

void EmulatedNCCL::poison(const Call& call) {
  if (!settings.poison) return;
  for (auto& written : call.writes) {
    Range target = range_of(written), kept;
    for (auto& tensor : call.reads)
      if (range_of(tensor).meets(target)) kept = range_of(tensor);  // in place
    if (!kept.empty()) counters["nccl.in_place"]++;
    if (is_late(target) || target.empty()) continue;
    Opened opened;
    opened.add(written);
    if (kept.empty()) kept = {target.high, target.high};
    memset(target.low, 0xFF, std::max<int64_t>(kept.low - target.low, 0));
    memset(std::min(kept.high, target.high), 0xFF, std::max<int64_t>(target.high - kept.high, 0));
  }
}

void EmulatedNCCL::startCoalescing() {
  Lock lock;
  grouping_ = true;
  if (GraphRef graph = capture_of(current_stream())) add_node(graph, "nccl group", [this] { startCoalescing(); });
}

// A group is one launch: its messages pass each other, so each peer's lane gets its part and none waits for another.
c10::intrusive_ptr<c10d::Work> EmulatedNCCL::endCoalescing() {
  Lock lock;
  grouping_ = false;
  auto group = std::exchange(grouped_, {});
  if (group.empty()) return nullptr;
  auto all = c10::make_intrusive<EmulatedWork>(getRank(), OpType::COALESCED, "nccl group", group[0].lane->stream);
  std::vector<std::shared_future<void>> parts;
  if (GraphRef graph = capture_of(current_stream())) {
    all->slot_ = std::make_shared<WorkRef>();
    add_node(graph, "nccl group", [this, slot = all->slot_] { *slot = endCoalescing(); });
  }
  for (auto& entry : group) {
    if (entry.job) entry.work->done_ = entry.lane->add(entry.job);
    parts.push_back(entry.work->done_);
    emulated::merge(all->end_, entry.work->end_);
    all->held_.insert(all->held_.end(), entry.work->held_.begin(), entry.work->held_.end());
    all->outputs_.insert(all->outputs_.end(), entry.work->outputs_.begin(), entry.work->outputs_.end());
  }
  all->done_ = std::async(std::launch::deferred, [parts] {
                 for (auto& part : parts) part.get();
               }).share();
  return all;
}

// -- collectives -----------------------------------------------------------------------------------------------------

using WorkRef = c10::intrusive_ptr<c10d::Work>;

WorkRef EmulatedNCCL::broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) {
  bool root = options.rootRank == getRank();
  auto alias = aliases(tensors);
  Call call{"broadcast", root ? tensors : std::vector<Tensor>{}, root ? std::vector<Tensor>{} : tensors};
  call.signature = {tensors[0].numel(), type_of(tensors[0]), options.rootRank};
  call.sent = root ? bytes_of(tensors) : 0;
  call.run = [this, alias, options](auto&) mutable { inner_->broadcast(alias, options)->wait(); };
  return enqueue(std::move(call));
}

static void reduce_all(c10d::Backend& inner, Tensor values, c10d::ReduceOp op, int size) {
  c10d::AllreduceOptions options;
  bool mean = op.op_ == c10d::ReduceOp::AVG;
  options.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  std::vector<Tensor> list = {values};
  inner.allreduce(list, options)->wait();
  if (mean) values.div_(size);
}

WorkRef EmulatedNCCL::allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) {
  auto alias = aliases(tensors);
  auto op = options.reduceOp;
  Call call{"all_reduce", tensors, tensors};
  call.signature = {tensors[0].numel(), type_of(tensors[0]), (int64_t)op.op_};
  call.sent = 2 * bytes_of(tensors) * (getSize() - 1) / getSize();
  call.run = [this, alias, op](auto&) {
    for (auto& values : alias) reduce_all(*inner_, values, op, getSize());
  };
  return enqueue(std::move(call));
}
WorkRef EmulatedNCCL::allreduce_coalesced(std::vector<Tensor>& tensors,
                                          const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkRef EmulatedNCCL::reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& options) {
  auto alias = host_alias(tensors[0]);
  Call call{"reduce", tensors, options.rootRank == getRank() ? tensors : std::vector<Tensor>{}};
  call.signature = {tensors[0].numel(), type_of(tensors[0]), options.rootRank};
  call.sent = options.rootRank == getRank() ? 0 : bytes_of(tensors);
  call.run = [this, alias, options](auto&) mutable {
    Tensor sum = alias.clone();
    reduce_all(*inner_, sum, options.reduceOp, getSize());
    if (options.rootRank == getRank()) alias.copy_(sum);
  };
  return enqueue(std::move(call));
}

WorkRef EmulatedNCCL::allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                                const c10d::AllgatherOptions&) {
  auto out = aliases(outputs[0]);
  auto in = host_alias(inputs[0]);
  Call call{"all_gather", inputs, outputs[0]};
  call.signature = {inputs[0].numel(), type_of(inputs[0])};
  call.sent = bytes_of(inputs) * (getSize() - 1);
  call.run = [this, out, in](auto&) {
    std::vector<std::vector<Tensor>> lists = {out};
    std::vector<Tensor> own = {in.clone()};
    inner_->allgather(lists, own)->wait();
  };
  return enqueue(std::move(call));
}

WorkRef EmulatedNCCL::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  std::vector<Tensor> outputs = {output}, inputs = {input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkRef EmulatedNCCL::allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                                      const c10d::AllgatherOptions&) {
  Call call{outputs.size() > 1 ? "all_gather_into_tensor, a group" : "all_gather_into_tensor", inputs, outputs};
  int64_t numel = 0;
  for (size_t i = 0; i < outputs.size(); i++) {
    TORCH_CHECK(outputs[i].numel() == inputs[i].numel() * getSize(),
                "output tensor size must be equal to world_size times input tensor size");
    TORCH_CHECK(outputs[i].dtype() == inputs[i].dtype(), "output tensor must have the same type as input tensor");
    numel += inputs[i].numel();
  }
  call.signature = {numel, type_of(inputs[0])};
  call.sent = bytes_of(inputs) * (getSize() - 1);
  auto out = aliases(outputs), in = aliases(inputs);
  call.run = [this, out, in](auto&) {
    for (size_t i = 0; i < out.size(); i++) {
      std::vector<std::vector<Tensor>> lists = {out[i].view(-1).chunk(getSize())};
      std::vector<Tensor> own = {in[i].reshape(-1).clone()};
      inner_->allgather(lists, own)->wait();
    }
  };
  return enqueue(std::move(call));
}

WorkRef EmulatedNCCL::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  std::vector<Tensor> outputs = {output}, inputs = {input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkRef EmulatedNCCL::reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                                      const c10d::ReduceScatterOptions& options) {
  Call call{outputs.size() > 1 ? "reduce_scatter_tensor, a group" : "reduce_scatter_tensor", inputs, outputs};
  int64_t numel = 0;
  for (size_t i = 0; i < outputs.size(); i++) {
    TORCH_CHECK(inputs[i].numel() == outputs[i].numel() * getSize(),
                "input tensor must be the same size as output size times world size");
    TORCH_CHECK(outputs[i].dtype() == inputs[i].dtype(), "input tensor must be the same type as the output tensor.");
    numel += outputs[i].numel();
  }
  auto op = options.reduceOp;
  call.signature = {numel, type_of(outputs[0]), (int64_t)op.op_};
  call.sent = bytes_of(outputs) * (getSize() - 1);
  auto out = aliases(outputs), in = aliases(inputs);
  call.run = [this, out, in, op](auto&) {
    for (size_t i = 0; i < out.size(); i++) {
      Tensor sum = in[i].reshape(-1).clone();
      reduce_all(*inner_, sum, op, getSize());
      out[i].view(-1).copy_(sum.chunk(getSize())[getRank()]);
    }
  };
  return enqueue(std::move(call));
}

WorkRef EmulatedNCCL::reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                                     const c10d::ReduceScatterOptions& options) {
  auto out = host_alias(outputs[0]);
  auto in = aliases(inputs[0]);
  auto op = options.reduceOp;
  Call call{"reduce_scatter", inputs[0], outputs};
  call.signature = {outputs[0].numel(), type_of(outputs[0]), (int64_t)op.op_};
  call.sent = bytes_of(outputs) * (getSize() - 1);
  call.run = [this, out, in, op](auto&) mutable {
    for (int r = 0; r < getSize(); r++) {
      Tensor sum = in[r].clone();
      reduce_all(*inner_, sum, op, getSize());
      if (r == getRank()) out.copy_(sum);
    }
  };
  return enqueue(std::move(call));
}

static void exchange(c10d::Backend& inner, std::vector<Tensor> out, std::vector<Tensor> in) {
  std::vector<WorkRef> works;
  std::vector<Tensor> kept;
  int me = inner.getRank();
  for (int r = 0; r < inner.getSize(); r++) {
    if (r == me) continue;
    if (out[r].numel()) {
      std::vector<Tensor> list = {out[r]};
      works.push_back(inner.recv(list, r, 1));
    }
    if (in[r].numel()) {
      kept.push_back(in[r].contiguous());
      std::vector<Tensor> list = {kept.back()};
      works.push_back(inner.send(list, r, 1));
    }
  }
  if (out[me].numel()) out[me].copy_(in[me].view_as(out[me]));
  for (auto& work : works) work->wait();
}

WorkRef EmulatedNCCL::alltoall(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                               const c10d::AllToAllOptions&) {
  auto out = aliases(outputs), in = aliases(inputs);
  Call call{"all_to_all", inputs, outputs};
  call.signature = {(int64_t)inputs.size(), type_of(inputs[0])};
  call.sent = bytes_of(inputs, getRank());
  call.run = [this, out, in](auto&) { exchange(*inner_, out, in); };
  return enqueue(std::move(call));
}

WorkRef EmulatedNCCL::alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& out_sizes,
                                    std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions&) {
  auto cut = [this](const Tensor& tensor, const std::vector<int64_t>& sizes) {
    auto even = std::vector<int64_t>(getSize(), tensor.size(0) / getSize());
    return host_alias(tensor).split_with_sizes(sizes.empty() ? even : sizes);
  };
  auto out = cut(output, out_sizes), in = cut(input, in_sizes);
  Call call{"all_to_all_single", {input}, {output}};
  call.signature = {(int64_t)getSize(), type_of(input)};
  call.sent = bytes_of(in, getRank());
  call.run = [this, out, in](auto&) { exchange(*inner_, out, in); };
  return enqueue(std::move(call));
}

WorkRef EmulatedNCCL::gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                             const c10d::GatherOptions& options) {
  bool root = options.rootRank == getRank();
  auto written = root ? outputs[0] : std::vector<Tensor>{};
  auto out = aliases(written);
  auto in = host_alias(inputs[0]);
  Call call{"gather", inputs, written};
  call.signature = {inputs[0].numel(), type_of(inputs[0]), options.rootRank};
  call.sent = root ? 0 : bytes_of(inputs);
  call.run = [this, out, in, root, options](auto&) {
    std::vector<std::vector<Tensor>> lists(root ? 1 : 0, out);
    std::vector<Tensor> own = {in.clone()};
    inner_->gather(lists, own, options)->wait();
  };
  return enqueue(std::move(call));
}

WorkRef EmulatedNCCL::scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                              const c10d::ScatterOptions& options) {
  bool root = options.rootRank == getRank();
  auto read = root ? inputs[0] : std::vector<Tensor>{};
  auto in = aliases(read);
  auto out = host_alias(outputs[0]);
  Call call{"scatter", read, outputs};
  call.signature = {outputs[0].numel(), type_of(outputs[0]), options.rootRank};
  call.sent = bytes_of(read, root ? getRank() : -1);
  call.run = [this, out, in, root, options](auto&) {
    std::vector<std::vector<Tensor>> lists(root ? 1 : 0);
    for (auto& each : in) lists[0].push_back(each.clone());
    std::vector<Tensor> own = {out};
    inner_->scatter(own, lists, options)->wait();
  };
  return enqueue(std::move(call));
}

// Two ranks have a communicator and a stream of their own for messages; only a group lets two messages pass each other.
WorkRef EmulatedNCCL::send(std::vector<Tensor>& tensors, int to, int) {
  auto alias = host_alias(tensors[0]);
  Call call{"send", tensors, {}};
  call.signature = {tensors[0].numel(), type_of(tensors[0])};
  call.sent = bytes_of(tensors);
  call.peer = to;
  call.run = [this, alias, to](auto& header) {
    std::vector<Tensor> head = {at::tensor({header[2], header[3]}, at::kLong)}, body = {alias};
    inner_->send(head, to, 2)->wait();
    inner_->send(body, to, 3)->wait();
  };
  return enqueue(std::move(call));
}

WorkRef EmulatedNCCL::recv(std::vector<Tensor>& tensors, int from, int) {
  auto alias = host_alias(tensors[0]);
  Call call{"recv", {}, tensors};
  call.signature = {tensors[0].numel(), type_of(tensors[0])};
  call.peer = grouping_ ? getSize() + from : from;
  call.run = [this, alias, from](auto& header) {
    std::vector<Tensor> head = {at::empty({2}, at::kLong)}, body = {alias};
    inner_->recv(head, from, 2)->wait();
    auto* sent = head[0].template data_ptr<int64_t>();
    TORCH_CHECK(sent[0] == header[2] && sent[1] == header[3], "NCCL would mix bytes: rank ", from, " sends ", sent[0],
                " elements, this rank expects ", header[2]);
    inner_->recv(body, from, 3)->wait();
  };
  return enqueue(std::move(call));
}

WorkRef EmulatedNCCL::barrier(const c10d::BarrierOptions&) {
  std::vector<Tensor> one = {at::zeros({1}, at::TensorOptions().device(Device(DeviceType::CUDA, current_device())))};
  auto work = allreduce(one, c10d::AllreduceOptions());
  work->wait();
  synchronize_stream(current_stream(), here());
  return work;
}

}  // namespace emulated
