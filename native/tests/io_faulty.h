// A back end that fails, tears, delays, spoils or loses chosen operations of another one. For tests.
//
// Ownership: owns the wrapped back end. Thread-safety: as io.h says; the plan is called under a lock, once per Submit.
// Failure: injected errors read like real ones and end with "(injected)".
#ifndef HETERO_TESTS_IO_FAULTY_H_
#define HETERO_TESTS_IO_FAULTY_H_

#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "clock.h"
#include "io_transfer.h"

namespace hetero {

enum class FaultKind : uint8_t {
  kNone,
  kFail,   // nothing is transferred; the error is reported
  kTear,   // the first half (in 512-byte sectors) is transferred, then the error is reported
  kDelay,  // succeeds, reported delay_us late and so out of order
  kHold,   // succeeds, reported once Release has been called
  kFlip,   // succeeds with one bit changed: what is read, or what reaches the disk
  kLose,   // a write that is reported and never happens; reads and flushes succeed
};

struct Fault {
  FaultKind kind = FaultKind::kNone;
  int error = EIO;
  int64_t delay_us = 0;
  uint32_t bit = 0;  // which one kFlip changes, modulo those of the transfer
};

class IoFaulty final : public IoBackend {
 public:
  // The fault of operation `index` (0, 1, ... in the order of Submit).
  using Plan = std::function<Fault(int64_t index, const IoRequest& request)>;

  IoFaulty(std::unique_ptr<IoBackend> inner, Plan plan)
      : inner_(std::move(inner)), plan_(std::move(plan)), thread_([this] { Run(); }) {}

  // Only operation n fails, with `error`.
  static Plan FailNth(int64_t n, int error = EIO, FaultKind kind = FaultKind::kFail) {
    return [=](int64_t index, const IoRequest&) { return Fault{index == n ? kind : FaultKind::kNone, error, 0}; };
  }

  ~IoFaulty() override {
    Release();
    inner_.reset();  // its last completions still need the thread
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  IoFaulty(const IoFaulty&) = delete;
  IoFaulty& operator=(const IoFaulty&) = delete;

  void Submit(IoRequest* request) override {
    Fault fault;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      fault = plan_(num_submitted_++, *request);
    }
    if (fault.kind == FaultKind::kNone) {
      inner_->Submit(request);
    } else if (fault.kind == FaultKind::kLose && request->kind == IoKind::kWrite) {
      request->started_ns = request->finished_ns = MonotonicNs();
      Report(request, Status::Ok(), fault);
    } else if (fault.kind == FaultKind::kFail) {
      request->started_ns = request->finished_ns = MonotonicNs();
      Report(request, Injected(*request, fault), fault);
    } else {
      SubmitProxy(request, fault);
    }
  }

  [[nodiscard]] int32_t kind() const override { return inner_->kind(); }

  // From now on nothing is held.
  void Release() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      released_ = true;
      results_.merge(held_);
    }
    changed_.notify_one();
  }

  int64_t num_submitted() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_submitted_;
  }

 private:
  struct Proxy {
    IoRequest request;
    IoRequest* original;
    IoFaulty* self;
    Fault fault;
    std::unique_ptr<uint8_t, decltype(&free)> copy{nullptr, free};  // of what is written, with another bit
  };
  using Clock = std::chrono::steady_clock;
  using Results = std::multimap<Clock::time_point, std::pair<IoRequest*, Status>>;

  static Status Injected(const IoRequest& request, const Fault& fault) {
    const Status status = TransferError(request, fault.error);
    return Status(status.code(), status.message() + " (injected)");
  }

  static void Flip(const IoRequest& request, uint32_t bit) {
    if (request.bytes <= 0) return;
    const int64_t at = bit % (request.bytes * 8);
    static_cast<uint8_t*>(request.buffer)[at / 8] ^= static_cast<uint8_t>(1U << (at % 8));
  }

  void SubmitProxy(IoRequest* request, const Fault& fault) {
    auto* proxy = new Proxy{*request, request, this, fault};
    if (fault.kind == FaultKind::kTear) proxy->request.bytes = request->bytes / 2 / 512 * 512;
    if (fault.kind == FaultKind::kFlip && request->kind == IoKind::kWrite && request->bytes > 0) {
      const auto room = static_cast<size_t>((request->bytes + 4095) / 4096 * 4096);
      proxy->copy.reset(static_cast<uint8_t*>(aligned_alloc(4096, room)));  // as direct I/O wants it
      memcpy(proxy->copy.get(), request->buffer, static_cast<size_t>(request->bytes));
      proxy->request.buffer = proxy->copy.get();
      Flip(proxy->request, fault.bit);
    }
    proxy->request.context = proxy;
    proxy->request.done = [](IoRequest* done, const Status& status) {
      const std::unique_ptr<Proxy> owned(static_cast<Proxy*>(done->context));
      owned->original->started_ns = done->started_ns;
      owned->original->finished_ns = done->finished_ns;
      if (status.ok() && owned->fault.kind == FaultKind::kFlip && done->kind == IoKind::kRead) Flip(*done, owned->fault.bit);
      const bool torn = status.ok() && owned->fault.kind == FaultKind::kTear;
      owned->self->Report(owned->original, torn ? Injected(*owned->original, owned->fault) : status, owned->fault);
    };
    inner_->Submit(&proxy->request);
  }

  // Hands the result to this back end's own thread.
  void Report(IoRequest* request, const Status& status, const Fault& fault) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      Results& results = fault.kind == FaultKind::kHold && !released_ ? held_ : results_;
      results.emplace(Clock::now() + std::chrono::microseconds(fault.delay_us), std::make_pair(request, status));
    }
    changed_.notify_one();
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_ || !results_.empty()) {
      if (results_.empty()) {
        changed_.wait(lock);
      } else if (const auto due = results_.begin()->first; due > Clock::now()) {
        changed_.wait_until(lock, due);
      } else {
        const auto [request, status] = results_.extract(results_.begin()).mapped();
        lock.unlock();
        request->done(request, status);
        lock.lock();
      }
    }
  }

  std::unique_ptr<IoBackend> inner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const Plan plan_;
  int64_t num_submitted_ = 0;  // guarded by mutex_
  Results results_, held_;     // guarded by mutex_
  bool released_ = false;      // guarded by mutex_
  bool stopping_ = false;      // guarded by mutex_
  std::thread thread_;
};

}  // namespace hetero

#endif  // HETERO_TESTS_IO_FAULTY_H_
