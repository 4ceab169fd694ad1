#include "io_pool.h"

#include <algorithm>
#include <system_error>

namespace hetero {

Status IoPool::Create(const hetero_engine_options& options, std::unique_ptr<IoBackend>* out) {
  std::unique_ptr<IoPool> pool(new IoPool());
  const int32_t num_threads = std::min(options.io_threads, options.queue_depth);
  try {
    for (int32_t i = 0; i < num_threads; ++i) pool->threads_.emplace_back([self = pool.get()] { self->Run(); });
  } catch (const std::system_error& error) {
    return Fail(HETERO_ENOMEM, "starting %d I/O threads: %s. Lower io_threads", num_threads, error.what());
  }
  *out = std::move(pool);
  return Status::Ok();
}

IoPool::~IoPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  arrived_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void IoPool::Submit(IoRequest* request) {
  {
    const std::lock_guard lock(mutex_);
    queue_.Push(request);
  }
  arrived_.notify_one();
}

void IoPool::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    IoRequest* request = queue_.Pop();
    if (request == nullptr) return;  // stopping; what another thread's `done` still submits, that thread runs itself
    lock.unlock();
    Finish(request, TransferBlocking(request));
    lock.lock();
  }
}

}  // namespace hetero
