// A c10d backend that keeps NCCL's rules; see nccl.cpp.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <future>
#include <thread>

#include "state.h"

namespace emulated {

constexpr int kHeader = 6;  // call number, operation, elements, dtype, root or sum, 0
constexpr int kWords = 64;  // and, in as many words, what is called where

// What a lane's thread does. It holds bytes and no tensor of the device: the thread may not free one.
struct Job {
  std::promise<void> promise;
  std::function<void()> run;
  std::vector<Held> memory;
};

// One communicator: a stream, and a thread that runs its calls one after the other, each a little late.
class Lane {
 public:
  explicit Lane(int device);
  ~Lane();
  std::shared_future<void> add(std::shared_ptr<Job> job);
  const int stream;
  int64_t calls = 0;

 private:
  void serve();
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool closing_ = false;
};

// `wait` makes the calling thread's current stream come after the call; the host goes on.
class EmulatedWork : public c10d::Work {
 public:
  EmulatedWork(int rank, c10d::OpType op, std::string what, int stream);
  ~EmulatedWork() override;
  bool isCompleted() override;
  bool isSuccess() const override;
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  friend class EmulatedNCCL;
  std::string what_;
  int stream_, asked_ = 0;
  Clock end_;
  std::shared_future<void> done_;
  std::vector<Tensor> held_, outputs_;
  std::shared_ptr<c10::intrusive_ptr<c10d::Work>> slot_;  // captured: what a replay has called
};

class EmulatedNCCL : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    Options() : c10d::Backend::Options("nccl") {}
    bool is_high_priority_stream = false;
  };
  using WorkRef = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;
  EmulatedNCCL(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, c10::intrusive_ptr<Options> options);
  c10::intrusive_ptr<Options> options() { return options_; }

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { Lock lock; return lane(-1).calls; }
  void setTimeout(std::chrono::milliseconds) override {}
  void startCoalescing() override;
  WorkRef endCoalescing() override;
  WorkRef broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkRef allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkRef allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkRef reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkRef allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkRef _allgather_base(Tensor&, Tensor&, const c10d::AllgatherOptions&) override;
  WorkRef allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkRef reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  WorkRef _reduce_scatter_base(Tensor&, Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkRef reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  WorkRef alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkRef alltoall_base(Tensor&, Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override;
  WorkRef gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkRef scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkRef send(Tensors&, int, int) override;
  WorkRef recv(Tensors&, int, int) override;
  WorkRef barrier(const c10d::BarrierOptions&) override;

 private:
  struct Call {
    std::string what;
    Tensors reads, writes;
    std::vector<int64_t> signature;                          // must be equal on all ranks
    int64_t sent = 0;                                        // bytes this rank puts on the wire
    int peer = -1;                                           // -1: all ranks
    std::function<void(const std::vector<int64_t>&)> run;    // gets the header
    Site site;                                               // of its capture, in a replay
  };
  struct Grouped {
    Lane* lane;
    std::shared_ptr<Job> job;
    c10::intrusive_ptr<EmulatedWork> work;
  };
  Lane& lane(int peer);
  WorkRef enqueue(Call call);
  WorkRef capture(const GraphRef& graph, Call call, const Site& site);
  void poison(const Call& call);
  void agree(const std::vector<int64_t>& mine, const std::string& what, const std::string& where);

  c10::intrusive_ptr<c10d::Backend> inner_;
  c10::intrusive_ptr<Options> options_;
  std::map<int, std::unique_ptr<Lane>> lanes_;
  std::vector<Grouped> grouped_;
  bool grouping_ = false;
};

}  // namespace emulated
