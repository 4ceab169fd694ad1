#include "io_pool.h"

#include <algorithm>
#include <system_error>

namespace hetero {

Status IoPool::Create(const hetero_engine_options& options, int32_t num_disks, std::unique_ptr<IoBackend>* out) {
  std::unique_ptr<IoPool> pool(new IoPool(num_disks));
  const int32_t num_threads = std::min(options.io_threads, options.queue_depth);
  try {
    for (Disk& disk : pool->disks_) {
      for (int32_t i = 0; i < num_threads; ++i) pool->threads_.emplace_back([self = pool.get(), &disk] { self->Run(&disk); });
    }
  } catch (const std::system_error& error) {
    return Fail(HETERO_ENOMEM, "starting %d I/O threads: %s. Lower io_threads", num_threads * num_disks, error.what());
  }
  *out = std::move(pool);
  return Status::Ok();
}

IoPool::~IoPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (Disk& disk : disks_) disk.arrived.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void IoPool::Submit(IoRequest* request) {
  Disk& disk = disks_[static_cast<size_t>(request->disk)];
  {
    const std::lock_guard lock(mutex_);
    disk.queue.Push(request);
  }
  disk.arrived.notify_one();
}

void IoPool::Run(Disk* disk) {
  std::unique_lock lock(mutex_);
  for (;;) {
    disk->arrived.wait(lock, [&] { return stopping_ || !disk->queue.empty(); });
    IoRequest* request = disk->queue.Pop();
    if (request == nullptr) return;  // stopping; what another thread's `done` still submits, that thread runs itself
    lock.unlock();
    Finish(request, TransferBlocking(request));
    lock.lock();
  }
}

}  // namespace hetero
