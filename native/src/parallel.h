// A loop over [0, count) on several threads, for the synchronous functions of api.h. The engine has threads of its own.
//
// Ownership: none. Thread-safety: any thread. Failure: a thread that cannot be started leaves its share to the caller.
#ifndef HETERO_PARALLEL_H_
#define HETERO_PARALLEL_H_

#include <stdint.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace hetero {

// Calls body(begin, end), which must not throw, on disjoint contiguous pieces that cover [0, count); the caller's thread
// takes the first. Returns when all are done.
template <class Body>
void ParallelFor(int64_t count, int32_t threads, const Body& body) {
  const int64_t num_pieces = std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1));
  const auto start = [&](int64_t piece) { return count / num_pieces * piece + std::min(piece, count % num_pieces); };
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(num_pieces - 1));
  int64_t next = 1;
  try {
    for (; next < num_pieces; ++next) {
      others.emplace_back([&body, begin = start(next), end = start(next + 1)] { body(begin, end); });
    }
  } catch (const std::system_error&) {
  }
  body(start(0), start(1));
  if (next < num_pieces) body(start(next), count);
  for (std::thread& other : others) other.join();
}

}  // namespace hetero

#endif  // HETERO_PARALLEL_H_
