// Address space for weights, state and staging: 2 MiB aligned, huge pages advised, pages present only once touched.
//
// Ownership: the caller unreserves what it reserved. Thread-safety: any thread. Failure: null or a Status, never an exception.
#ifndef HETERO_MEMORY_H_
#define HETERO_MEMORY_H_

#include <stdint.h>

#include "status.h"

namespace hetero {

void* Reserve(int64_t bytes) noexcept;
// Replaces reserved pages by those of a file; see hetero_map.
Status Map(void* p, int64_t bytes, int file, int64_t offset, bool shared);
// Gives whole pages inside [p, p + bytes) back to the system; they read as zeros afterwards, or as the file that is not shared.
Status Drop(void* p, int64_t bytes);
Status Unreserve(void* p, int64_t bytes);

}  // namespace hetero

#endif  // HETERO_MEMORY_H_
