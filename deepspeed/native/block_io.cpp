// Block I/O: a few threads that move tensors to and from files, several blocks at a time, past the page cache where
// offset and length allow it; unaligned memory is copied through a page-aligned block. deepspeed/ops/aio/threads.py is
// the equivalent in Python.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__GLIBC__) && defined(__x86_64__)
// glibc 2.34 moved these symbols into libc.so with new versions. The old versions still exist there, and older systems
// have only those. With them, a library built on a new system loads on all systems that torch's wheels support.
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_join, pthread_join@GLIBC_2.2.5");
__asm__(".symver pthread_attr_setstacksize, pthread_attr_setstacksize@GLIBC_2.2.5");
#endif

namespace {

constexpr int64_t kAlignment = 4096;
constexpr size_t kStack = 256 * 1024;  // threads only make system calls; the default stack takes 8 MB of the data limit

struct Job {
  int direct, plain;  // descriptors; direct is -1 where the file system has no direct I/O
  char *memory;
  int64_t offset, bytes;
  bool writing;
  int64_t claimed, moved;
  int running, error;
  Job *next;
};

// Queue of jobs in order of submission, as an intrusive list: no allocation in a thread (see `Aligned`), and no `free`
// either.
class Line {
 public:
  bool empty() const { return !first_; }
  Job *front() const { return first_; }
  void push(Job *job) {
    *last_ = job;
    last_ = &job->next;
  }
  // Unknown jobs are ignored.
  void remove(const Job *job) {
    for (Job **at = &first_; *at; at = &(*at)->next)
      if (*at == job) {
        *at = job->next;
        if (last_ == &job->next) last_ = at;
        return;
      }
  }

 private:
  Job *first_ = nullptr;
  Job **last_ = &first_;
};

// std::condition_variable::wait would need a newer libstdc++ than the other code.
class Signal {
 public:
  Signal() = default;
  Signal(const Signal &) = delete;
  Signal &operator=(const Signal &) = delete;
  ~Signal() { pthread_cond_destroy(&condition_); }
  void notify_all() { pthread_cond_broadcast(&condition_); }
  template <typename Met> void wait(std::unique_lock<std::mutex> &guard, Met met) {
    while (!met()) pthread_cond_wait(&condition_, guard.mutex()->native_handle());
  }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

struct Queue {
  std::mutex lock;
  Signal work, over;
  Line jobs;
  std::vector<pthread_t> threads;
  int64_t block;
  bool stopping;
};

// Aligned block of one thread, for jobs with unaligned memory. Mapped with mmap, because a thread's first malloc would
// create a heap for it: 64 MB of address space, temporarily 128 MB, which count towards a limit.
class Aligned {
 public:
  explicit Aligned(int64_t bytes) : bytes_(bytes) {}
  Aligned(const Aligned &) = delete;
  Aligned &operator=(const Aligned &) = delete;
  ~Aligned() {
    if (memory_) munmap(memory_, bytes_);
  }
  // Null if out of memory.
  char *pages() {
    if (!memory_) {
      void *mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped != MAP_FAILED) memory_ = static_cast<char *>(mapped);
    }
    return memory_;
  }

 private:
  const size_t bytes_;
  char *memory_ = nullptr;
};

// Move one block. Returns the bytes moved; fewer bytes with *error 0 mean the end of the file.
int64_t move(const Job &job, int64_t start, int64_t stop, Aligned &aligned, int *error) {
  int64_t at = start;
  bool refused = job.direct < 0;
  while (at < stop) {
    char *memory = job.memory + at;
    const int64_t offset = job.offset + at;
    // Bytes that direct I/O does not accept, also after a short count, use the page cache, which reports their errors.
    bool direct = !refused && offset % kAlignment == 0 && stop - at >= kAlignment;
    char *between = memory;
    if (direct && reinterpret_cast<uintptr_t>(memory) % kAlignment != 0) {
      between = aligned.pages();
      direct = between != nullptr;
    }
    if (!direct) between = memory;
    const size_t length = direct ? (stop - at) / kAlignment * kAlignment : stop - at;
    const int file = direct ? job.direct : job.plain;
    if (job.writing && between != memory) std::memcpy(between, memory, length);
    const ssize_t count = job.writing ? pwrite(file, between, length, offset) : pread(file, between, length, offset);
    if (count > 0 && !job.writing && between != memory) std::memcpy(memory, between, count);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && direct && errno == EINVAL) {
      refused = true;
      continue;
    }
    if (count < 0) *error = errno;
    if (count <= 0) break;
    at += count;
  }
  return at - start;
}

void *serve(void *argument) {
  Queue &queue = *static_cast<Queue *>(argument);
  Aligned aligned(queue.block);
  std::unique_lock<std::mutex> guard(queue.lock);
  for (;;) {
    queue.work.wait(guard, [&] { return !queue.jobs.empty() || queue.stopping; });
    if (queue.jobs.empty()) return nullptr;
    Job *job = queue.jobs.front();
    const int64_t start = job->claimed;
    const int64_t stop = std::min(start + queue.block, job->bytes);
    job->claimed = stop;
    job->running++;
    if (stop == job->bytes) queue.jobs.remove(job);

    guard.unlock();
    int error = 0;
    const int64_t moved = move(*job, start, stop, aligned, &error);
    guard.lock();

    job->running--;
    job->moved += moved;
    if (error && !job->error) job->error = error;
    if (moved < stop - start && job->claimed < job->bytes) {  // skip the remaining blocks
      job->claimed = job->bytes;
      queue.jobs.remove(job);
    }
    if (!job->running && job->claimed == job->bytes) queue.over.notify_all();
  }
}

bool is_over(const Job *job) { return !job->running && job->claimed == job->bytes; }

}  // namespace

extern "C" {

// End the threads after all jobs, and free the queue.
void ds_io_stop(void *opaque) {
  Queue *queue = static_cast<Queue *>(opaque);
  {
    std::lock_guard<std::mutex> guard(queue->lock);
    queue->stopping = true;
  }
  queue->work.notify_all();
  for (pthread_t thread : queue->threads) pthread_join(thread, nullptr);
  delete queue;
}

// Create a queue with `threads` requests of `block` bytes in flight; null if no thread could be started.
void *ds_io_start(int threads, int64_t block) {
  Queue *queue = new Queue();
  queue->block = block;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStack);
  for (int index = 0; index < threads; index++) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, serve, queue) != 0) break;
    queue->threads.push_back(thread);
  }
  pthread_attr_destroy(&attributes);
  if (!queue->threads.empty()) return queue;
  delete queue;
  return nullptr;
}

// Start moving `bytes` between memory and the file; returns a job to wait for.
void *ds_io_submit(void *opaque, int direct, int plain, void *memory, int64_t offset, int64_t bytes, int writing) {
  Queue *queue = static_cast<Queue *>(opaque);
  Job *job = new Job{direct, plain, static_cast<char *>(memory), offset, bytes, writing != 0, 0, 0, 0, 0, nullptr};
  {
    std::lock_guard<std::mutex> guard(queue->lock);
    if (bytes) queue->jobs.push(job);  // an empty job is finished already; waiting frees it
  }
  queue->work.notify_all();
  return job;
}

// Whether the job is finished.
int ds_io_done(void *opaque, void *job) {
  std::lock_guard<std::mutex> guard(static_cast<Queue *>(opaque)->lock);
  return is_over(static_cast<Job *>(job));
}

// Wait for the job and free it. Returns 0 or the first errno; stores the bytes moved.
int ds_io_wait(void *opaque, void *waited, int64_t *moved) {
  Queue *queue = static_cast<Queue *>(opaque);
  Job *job = static_cast<Job *>(waited);
  std::unique_lock<std::mutex> guard(queue->lock);
  queue->over.wait(guard, [&] { return is_over(job); });
  guard.unlock();
  const int error = job->error;
  *moved = job->moved;
  delete job;
  return error;
}

}  // extern "C"
