#include "io_uring.h"

#include <linux/io_uring.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <system_error>

#include "clock.h"

namespace hetero {

namespace {

constexpr int64_t kLargestTransfer = 1 << 30;  // an SQE counts bytes in 32 bits; a multiple of every block size

Status Unsupported(const char* what, int error) {
  const char* hint = error == EPERM    ? " (a seccomp profile, as in containers, or sysctl kernel.io_uring_disabled)"
                     : error == ENOMEM ? " (see ulimit -l)"
                                       : "";
  return Fail(HETERO_EUNSUPPORTED, "%s: %s (errno %d)%s. Use io_backend='pool'", what, strerror(error), error, hint);
}

}  // namespace

// The ring's memory, shared with the kernel: indices that the kernel reads are stored with release, its own are loaded with
// acquire.
class UringRing {
 public:
  UringRing() = default;
  ~UringRing() {
    if (sqes_ != nullptr) munmap(sqes_, sqes_bytes_);
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
  }
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;

  Status Open(uint32_t num_entries) {
    io_uring_params params = {};
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, num_entries, &params));
    if (fd_ < 0) return Unsupported("io_uring_setup", errno);
    // FAST_POLL came with Linux 5.7, after everything else that is used here.
    if ((params.features & IORING_FEAT_FAST_POLL) == 0) return Unsupported("io_uring before Linux 5.7", ENOSYS);
    rings_bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                                    params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    rings_ = Map(rings_bytes_, IORING_OFF_SQ_RING);
    if (rings_ != nullptr) sqes_ = static_cast<io_uring_sqe*>(Map(sqes_bytes_, IORING_OFF_SQES));
    if (sqes_ == nullptr) return Unsupported("mmap of an io_uring", errno);
    char* base = static_cast<char*>(rings_);
    sq_head_ = reinterpret_cast<uint32_t*>(base + params.sq_off.head);
    sq_tail_ = reinterpret_cast<uint32_t*>(base + params.sq_off.tail);
    sq_mask_ = params.sq_entries - 1;
    cq_head_ = reinterpret_cast<uint32_t*>(base + params.cq_off.head);
    cq_tail_ = reinterpret_cast<uint32_t*>(base + params.cq_off.tail);
    cq_mask_ = params.cq_entries - 1;
    cqes_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
    auto* sq_array = reinterpret_cast<uint32_t*>(base + params.sq_off.array);
    for (uint32_t i = 0; i < params.sq_entries; ++i) sq_array[i] = i;
    return Probe();
  }

  // A zeroed entry, queued. The caller never has more entries in the ring than it was opened for.
  io_uring_sqe* Next() {
    io_uring_sqe* sqe = &sqes_[tail_++ & sq_mask_];
    *sqe = {};
    return sqe;
  }

  // Hands over the queued entries and waits for at least one completion. 0 or an errno.
  int Enter() {
    __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
    const uint32_t num_queued = tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
    const long rc = syscall(__NR_io_uring_enter, fd_, num_queued, 1u, IORING_ENTER_GETEVENTS, nullptr, 0);
    return rc < 0 ? errno : 0;
  }

  // The next completion; false when there is none.
  bool Pop(uint64_t* user_data, int32_t* result) {
    const uint32_t head = *cq_head_;  // written by this thread only
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    const io_uring_cqe& cqe = cqes_[head & cq_mask_];
    *user_data = cqe.user_data;
    *result = cqe.res;
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
  }

 private:
  void* Map(size_t bytes, off_t offset) const {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
    return p == MAP_FAILED ? nullptr : p;
  }

  // A seccomp profile may allow the setup and deny the rest.
  Status Probe() {
    Next()->opcode = IORING_OP_NOP;
    int error = 0;
    do {
      error = Enter();
    } while (error == EINTR);
    if (error != 0) return Unsupported("io_uring_enter", error);
    uint64_t user_data = 0;
    int32_t result = -EIO;
    if (!Pop(&user_data, &result) || result != 0) return Unsupported("an empty io_uring request", -result);
    return Status::Ok();
  }

  int fd_ = -1;
  void* rings_ = nullptr;
  size_t rings_bytes_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  size_t sqes_bytes_ = 0;
  uint32_t* sq_head_ = nullptr;
  uint32_t* sq_tail_ = nullptr;
  uint32_t* cq_head_ = nullptr;
  uint32_t* cq_tail_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  uint32_t sq_mask_ = 0;
  uint32_t cq_mask_ = 0;
  uint32_t tail_ = 0;
};

namespace {

void Prepare(io_uring_sqe* sqe, const IoRequest& request) {
  sqe->fd = request.fd;
  sqe->user_data = reinterpret_cast<uintptr_t>(&request);
  if (request.kind == IoKind::kDataSync) {
    sqe->opcode = IORING_OP_FSYNC;
    sqe->fsync_flags = IORING_FSYNC_DATASYNC;
    return;
  }
  sqe->opcode = request.kind == IoKind::kRead ? IORING_OP_READ : IORING_OP_WRITE;
  sqe->addr = reinterpret_cast<uintptr_t>(request.buffer) + static_cast<uint64_t>(request.transferred);
  sqe->len = static_cast<uint32_t>(std::min(request.bytes - request.transferred, kLargestTransfer));
  sqe->off = static_cast<uint64_t>(request.offset + request.transferred);
  if (request.kind == IoKind::kWrite && request.dsync) sqe->rw_flags = RWF_DSYNC;
}

}  // namespace

Status IoUring::Create(const hetero_engine_options& options, int32_t num_disks, std::unique_ptr<IoBackend>* out) {
  std::unique_ptr<IoUring> backend(new IoUring(options.queue_depth * num_disks));
  HETERO_RETURN_IF_ERROR(backend->Start());
  *out = std::move(backend);
  return Status::Ok();
}

Status IoUring::Start() {
  wake_fd_ = eventfd(0, EFD_CLOEXEC);
  if (wake_fd_ < 0) return FailErrno("eventfd of the io_uring back end", errno);
  std::promise<Status> started;
  std::future<Status> opened = started.get_future();
  try {
    thread_ = std::thread([this, started = std::move(started)]() mutable {
      UringRing ring;
      Status status = ring.Open(static_cast<uint32_t>(queue_depth_) + 1);  // 1: the read of the eventfd
      const bool usable = status.ok();
      started.set_value(std::move(status));
      if (usable) Run(&ring);
    });
  } catch (const std::system_error& error) {
    return Fail(HETERO_ENOMEM, "starting the io_uring thread: %s", error.what());
  }
  return opened.get();
}

IoUring::~IoUring() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  if (wake_fd_ >= 0) Wake();
  if (thread_.joinable()) thread_.join();
  if (wake_fd_ >= 0) close(wake_fd_);
}

void IoUring::Submit(IoRequest* request) {
  request->transferred = 0;
  request->started_ns = 0;
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    arrived_.Push(request);
    wake = std::exchange(sleeping_, false);
  }
  if (wake) Wake();
}

void IoUring::Wake() const {
  const uint64_t one = 1;
  while (write(wake_fd_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void IoUring::Run(UringRing* ring) {
  for (;;) {
    const bool running = TakeArrived();
    if (!running && waiting_.empty() && in_flight_ == 0 && !wake_armed_) return;
    Fill(ring, running);
    if (std::exchange(starved_, false)) {
      const timespec pause = {0, 100'000};
      nanosleep(&pause, nullptr);
    }
    const int error = ring->Enter();
    if (error == EAGAIN || error == EBUSY) {
      starved_ = true;
    } else if (error != 0 && error != EINTR) {
      // The kernel keeps the buffers of what is in flight and will never say when it lets go of them.
      fprintf(stderr, "hetero: io_uring_enter: %s (errno %d)\n", strerror(error), error);
      abort();
    }
    Reap(ring);
  }
}

bool IoUring::TakeArrived() {
  const std::lock_guard lock(mutex_);
  while (IoRequest* request = arrived_.Pop()) waiting_.Push(request);
  sleeping_ = true;
  return !stopping_;
}

void IoUring::Fill(UringRing* ring, bool running) {
  if (running && !wake_armed_) {
    io_uring_sqe* sqe = ring->Next();
    sqe->opcode = IORING_OP_READ;
    sqe->fd = wake_fd_;
    sqe->addr = reinterpret_cast<uintptr_t>(&wake_count_);
    sqe->len = sizeof(wake_count_);
    wake_armed_ = true;  // user_data stays 0
  }
  while (in_flight_ < queue_depth_ && !waiting_.empty()) {
    IoRequest* request = waiting_.Pop();
    if (request->started_ns == 0) request->started_ns = MonotonicNs();
    Prepare(ring->Next(), *request);
    ++in_flight_;
  }
}

void IoUring::Reap(UringRing* ring) {
  {
    const std::lock_guard lock(mutex_);
    sleeping_ = false;  // awake: what `done` submits is found without a system call
  }
  uint64_t user_data = 0;
  int32_t result = 0;
  while (ring->Pop(&user_data, &result)) {
    if (user_data == 0) {
      wake_armed_ = false;
      continue;
    }
    --in_flight_;
    Complete(reinterpret_cast<IoRequest*>(static_cast<uintptr_t>(user_data)), result);
  }
  for (auto& [request, status] : finished_) Finish(request, status);
  finished_.clear();
}

void IoUring::Complete(IoRequest* request, int32_t result) {
  if (result == -EAGAIN || result == -EINTR) {
    starved_ = starved_ || result == -EAGAIN;
    waiting_.Push(request);
    return;
  }
  if (result < 0) {
    finished_.emplace_back(request, TransferError(*request, -result));
    return;
  }
  request->transferred += result;
  if (IsComplete(*request)) {
    finished_.emplace_back(request, Status::Ok());
  } else if (result == 0) {
    finished_.emplace_back(request, NoProgress(*request));
  } else {
    waiting_.Push(request);
  }
}

}  // namespace hetero
