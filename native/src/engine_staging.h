// Staging memory: equal page-aligned buffers cut from one huge-page reservation. It grows and shrinks only while all are free.
// Each disk has as many of them for itself, so that a task on one disk never waits for buffers that wait for another disk.
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

  Status Create(int64_t bytes, int64_t chunk_bytes_max, int32_t num_disks) {
    if (chunk_bytes_max < 0 || chunk_bytes_max > bytes)
      return Fail(HETERO_EINVAL, "options.chunk_bytes_max is %lld; allowed: 0 to staging_bytes (%lld)",
                  static_cast<long long>(chunk_bytes_max), static_cast<long long>(bytes));
    buffer_bytes_ = RoundUp(chunk_bytes_max, kPageBytes);
    free_.resize(static_cast<size_t>(num_disks));
    if (buffer_bytes_ == 0) return Status::Ok();
    of_each_ = bytes / buffer_bytes_ / num_disks;
    const int64_t least = kMinBuffers * num_disks;
    if (of_each_ < kMinBuffers)
      return Fail(
          HETERO_EINVAL,
          "options.staging_bytes is %lld; allowed: at least %lld (%lld chunks of %lld bytes). Raise it or use smaller chunks",
          static_cast<long long>(bytes), static_cast<long long>(least * buffer_bytes_), static_cast<long long>(least),
          static_cast<long long>(buffer_bytes_));
    const int64_t count = of_each_ * num_disks;
    total_bytes_ = count * buffer_bytes_;
    base_ = static_cast<uint8_t*>(Reserve(total_bytes_));
    if (base_ == nullptr)
      return Fail(HETERO_ENOMEM, "no address space for %lld bytes of staging", static_cast<long long>(total_bytes_));
    for (int64_t i = count; i-- > 0;) free_[static_cast<size_t>(i / of_each_)].push_back(base_ + i * buffer_bytes_);
    return Status::Ok();
  }

  // All buffers are free. The peak so far stays.
  Status Resize(int64_t bytes) {
    Staging other;
    HETERO_RETURN_IF_ERROR(other.Create(bytes, buffer_bytes_, static_cast<int32_t>(free_.size())));
    std::swap(base_, other.base_);
    std::swap(total_bytes_, other.total_bytes_);
    std::swap(of_each_, other.of_each_);
    free_.swap(other.free_);
    return Status::Ok();
  }

  [[nodiscard]] int64_t buffer_bytes() const { return buffer_bytes_; }
  [[nodiscard]] int64_t total_bytes() const { return total_bytes_; }
  [[nodiscard]] int64_t peak_bytes() const { return peak_bytes_; }
  [[nodiscard]] int64_t num_free(int32_t disk) const { return static_cast<int64_t>(free_[static_cast<size_t>(disk)].size()); }

  uint8_t* Acquire(int32_t disk) {
    std::vector<uint8_t*>& free = free_[static_cast<size_t>(disk)];
    if (free.empty()) return nullptr;
    uint8_t* buffer = free.back();  // the one used last: its pages are present, its lines may be cached
    free.pop_back();
    peak_bytes_ = std::max(peak_bytes_, ++in_use_ * buffer_bytes_);
    return buffer;
  }
  void Release(int32_t disk, uint8_t* buffer) {
    free_[static_cast<size_t>(disk)].push_back(buffer);
    --in_use_;
  }

 private:
  uint8_t* base_ = nullptr;
  int64_t buffer_bytes_ = 0;
  int64_t total_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t of_each_ = 0;
  int64_t in_use_ = 0;
  std::vector<std::vector<uint8_t*>> free_;  // by disk
};

}  // namespace hetero

#endif  // HETERO_ENGINE_STAGING_H_
