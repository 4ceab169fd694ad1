// The io_uring back end: raw system calls, one ring, one thread that submits and reaps.
//
// [Note: One ring thread]
// Only the ring thread touches the ring, so its indices are shared with the kernel alone. Callers queue requests under a
// mutex and wake the thread through an eventfd that the ring itself reads. A caller that submitted on its own would tie its
// requests to its own life: the kernel cancels what an exiting thread has queued, and interrupts it for each completion.
//
// Ownership, thread-safety, failure: as io.h says. At most queue_depth transfers are with the kernel; the others wait in line.
#ifndef HETERO_IO_URING_H_
#define HETERO_IO_URING_H_

#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "io_transfer.h"

namespace hetero {

class UringRing;

class IoUring final : public IoBackend {
 public:
  // EUNSUPPORTED where the kernel lacks io_uring or denies it.
  static Status Create(const hetero_engine_options& options, int32_t num_disks, std::unique_ptr<IoBackend>* out);
  ~IoUring() override;
  IoUring(const IoUring&) = delete;
  IoUring& operator=(const IoUring&) = delete;

  void Submit(IoRequest* request) override;
  [[nodiscard]] int32_t kind() const override { return HETERO_IO_URING; }

 private:
  explicit IoUring(int32_t queue_depth) : queue_depth_(queue_depth) {}
  Status Start();
  void Run(UringRing* ring);
  bool TakeArrived();  // false: stopping
  void Fill(UringRing* ring, bool running);
  void Reap(UringRing* ring);
  void Complete(IoRequest* request, int32_t result);
  void Wake() const;

  const int32_t queue_depth_;
  int wake_fd_ = -1;
  std::thread thread_;

  std::mutex mutex_;
  IoQueue arrived_;        // guarded by mutex_
  bool sleeping_ = false;  // guarded by mutex_: the next Submit has to wake the ring thread
  bool stopping_ = false;  // guarded by mutex_

  // The ring thread's own.
  IoQueue waiting_;
  int32_t in_flight_ = 0;
  bool wake_armed_ = false;
  bool starved_ = false;     // the kernel said EAGAIN: pause before asking again
  uint64_t wake_count_ = 0;  // where the ring reads the eventfd into
  std::vector<std::pair<IoRequest*, Status>> finished_;
};

}  // namespace hetero

#endif  // HETERO_IO_URING_H_
