#include "io_synthetic.h"

#include <time.h>

#include <algorithm>
#include <system_error>

#include "clock.h"

namespace hetero {

namespace {

void SleepUntil(double time_ns) {
  const auto whole_ns = static_cast<int64_t>(time_ns);
  const timespec end = {static_cast<time_t>(whole_ns / 1'000'000'000), static_cast<long>(whole_ns % 1'000'000'000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, nullptr) == EINTR) {
  }
}

}  // namespace

Status IoSynthetic::Create(const hetero_engine_options& options, int32_t num_disks, std::unique_ptr<IoBackend>* out) {
  const double slowest = std::min(options.synthetic_read_bytes_per_s, options.synthetic_write_bytes_per_s);
  if (!(slowest > 0)) {
    return Fail(HETERO_EINVAL, "synthetic_read_bytes_per_s is %g and synthetic_write_bytes_per_s %g; allowed: above 0",
                options.synthetic_read_bytes_per_s, options.synthetic_write_bytes_per_s);
  }
  std::unique_ptr<IoSynthetic> device(new IoSynthetic(options, num_disks));
  try {
    for (std::deque<Direction>* directions : {&device->reads_, &device->writes_}) {
      for (Direction& direction : *directions) {
        direction.thread = std::thread([self = device.get(), &direction] { self->Run(&direction); });
      }
    }
  } catch (const std::system_error& error) {
    return Fail(HETERO_ENOMEM, "starting the synthetic device's threads: %s", error.what());
  }
  *out = std::move(device);
  return Status::Ok();
}

IoSynthetic::IoSynthetic(const hetero_engine_options& options, int32_t num_disks) {
  for (int32_t disk = 0; disk < num_disks; ++disk) {
    reads_.emplace_back(options.synthetic_read_bytes_per_s);
    writes_.emplace_back(options.synthetic_write_bytes_per_s);
  }
}

IoSynthetic::~IoSynthetic() {
  // One after the other: a write's `done` may still submit a read, a read's `done` a write.
  {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return unfinished_ == 0; });
    stopping_ = true;
  }
  for (std::deque<Direction>* directions : {&reads_, &writes_}) {
    for (Direction& direction : *directions) {
      direction.arrived.notify_one();
      if (direction.thread.joinable()) direction.thread.join();
    }
  }
}

void IoSynthetic::Submit(IoRequest* request) {
  Direction& direction = (request->kind == IoKind::kRead ? reads_ : writes_)[static_cast<size_t>(request->disk)];
  request->started_ns = MonotonicNs();
  {
    const std::lock_guard lock(mutex_);
    ++unfinished_;
    direction.queue.Push(request);
  }
  direction.arrived.notify_one();
}

void IoSynthetic::Run(Direction* direction) {
  std::unique_lock lock(mutex_);
  for (;;) {
    direction->arrived.wait(lock, [&] { return stopping_ || !direction->queue.empty(); });
    IoRequest* request = direction->queue.Pop();
    if (request == nullptr) return;
    lock.unlock();
    Finish(request, Transfer(direction, request));
    lock.lock();
    if (--unfinished_ == 0) idle_.notify_all();
  }
}

Status IoSynthetic::Transfer(Direction* direction, IoRequest* request) {
  // The device starts when it is free and the request is there, however late this thread woke up: rates stay exact.
  const double start_ns = std::max(direction->free_ns, static_cast<double>(request->started_ns));
  direction->free_ns = start_ns + static_cast<double>(request->bytes) / direction->bytes_per_s * 1e9;
  const Status status = TransferBlocking(request);
  request->started_ns = static_cast<int64_t>(start_ns);
  SleepUntil(direction->free_ns);
  return status;
}

}  // namespace hetero
