// The thread pool back end: pread, pwrite and fdatasync on min(io_threads, queue_depth) threads per disk, first in, first out.
//
// The normal case in containers, whose default seccomp profile forbids io_uring.
// Ownership, thread-safety, failure: as io.h says. Threads live from Create to the destructor, which runs what is queued.
#ifndef HETERO_IO_POOL_H_
#define HETERO_IO_POOL_H_

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "io_transfer.h"

namespace hetero {

class IoPool final : public IoBackend {
 public:
  static Status Create(const hetero_engine_options& options, int32_t num_disks, std::unique_ptr<IoBackend>* out);
  ~IoPool() override;
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  void Submit(IoRequest* request) override;
  [[nodiscard]] int32_t kind() const override { return HETERO_IO_POOL; }

 private:
  struct Disk {
    IoQueue queue;  // guarded by mutex_
    std::condition_variable arrived;
  };

  explicit IoPool(int32_t num_disks) : disks_(static_cast<size_t>(num_disks)) {}
  void Run(Disk* disk);

  std::mutex mutex_;
  std::vector<Disk> disks_;
  bool stopping_ = false;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace hetero

#endif  // HETERO_IO_POOL_H_
