// Staging memory: equal page-aligned buffers cut from one huge-page reservation. It grows and shrinks only while all are free.
//
// Ownership: owns the reservation; a buffer belongs to who acquired it until it is released. Thread-safety: none, the engine's
// mutex guards it. Failure: Create and Resize give ENOMEM/EINVAL and change nothing; Acquire gives null when all buffers are in
// use.
#ifndef HETERO_ENGINE_STAGING_H_
#define HETERO_ENGINE_STAGING_H_

#include <stdint.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "memory.h"
#include "status.h"
#include "store_layout.h"

namespace hetero {

class Staging {
 public:
  static constexpr int64_t kMinBuffers = 3;  // one being read, one computed, one written

  Staging() = default;
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() {
    if (base_ != nullptr) (void)Unreserve(base_, total_bytes_).ok();
  }

  Status Create(int64_t bytes, int64_t chunk_bytes_max) {
    if (chunk_bytes_max < 0 || chunk_bytes_max > bytes)
      return Fail(HETERO_EINVAL, "options.chunk_bytes_max is %lld; allowed: 0 to staging_bytes (%lld)",
                  static_cast<long long>(chunk_bytes_max), static_cast<long long>(bytes));
    buffer_bytes_ = RoundUp(chunk_bytes_max, kPageBytes);
    if (buffer_bytes_ == 0) return Status::Ok();
    const int64_t count = bytes / buffer_bytes_;
    if (count < kMinBuffers)
      return Fail(
          HETERO_EINVAL,
          "options.staging_bytes is %lld; allowed: at least %lld (%lld chunks of %lld bytes). Raise it or use smaller chunks",
          static_cast<long long>(bytes), static_cast<long long>(kMinBuffers * buffer_bytes_),
          static_cast<long long>(kMinBuffers), static_cast<long long>(buffer_bytes_));
    total_bytes_ = count * buffer_bytes_;
    base_ = static_cast<uint8_t*>(Reserve(total_bytes_));
    if (base_ == nullptr)
      return Fail(HETERO_ENOMEM, "no address space for %lld bytes of staging", static_cast<long long>(total_bytes_));
    for (int64_t i = count; i-- > 0;) free_.push_back(base_ + i * buffer_bytes_);
    return Status::Ok();
  }

  // All buffers are free. The peak so far stays.
  Status Resize(int64_t bytes) {
    Staging other;
    HETERO_RETURN_IF_ERROR(other.Create(bytes, buffer_bytes_));
    std::swap(base_, other.base_);
    std::swap(total_bytes_, other.total_bytes_);
    free_.swap(other.free_);
    return Status::Ok();
  }

  [[nodiscard]] int64_t buffer_bytes() const { return buffer_bytes_; }
  [[nodiscard]] int64_t total_bytes() const { return total_bytes_; }
  [[nodiscard]] int64_t peak_bytes() const { return peak_bytes_; }
  [[nodiscard]] int64_t num_free() const { return static_cast<int64_t>(free_.size()); }

  uint8_t* Acquire() {
    if (free_.empty()) return nullptr;
    uint8_t* buffer = free_.back();  // the one used last: its pages are present, its lines may be cached
    free_.pop_back();
    peak_bytes_ = std::max(peak_bytes_, total_bytes_ - num_free() * buffer_bytes_);
    return buffer;
  }
  void Release(uint8_t* buffer) { free_.push_back(buffer); }

 private:
  uint8_t* base_ = nullptr;
  int64_t buffer_bytes_ = 0;
  int64_t total_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  std::vector<uint8_t*> free_;
};

}  // namespace hetero

#endif  // HETERO_ENGINE_STAGING_H_
