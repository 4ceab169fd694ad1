// The one clock of the native core: CLOCK_MONOTONIC, what Python calls time.monotonic_ns().
//
// Ownership: none. Thread-safety: any thread. Failure: none.
#ifndef HETERO_CLOCK_H_
#define HETERO_CLOCK_H_

#include <stdint.h>
#include <time.h>

namespace hetero {

inline int64_t MonotonicNs() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace hetero

#endif  // HETERO_CLOCK_H_
