// The inner loop of the digest, once per instruction set. See digest.h.
//
// Ownership: none. Thread-safety: pure functions. Failure: none.
#ifndef HETERO_DIGEST_STREAMS_H_
#define HETERO_DIGEST_STREAMS_H_

#include <stdint.h>

#include "digest.h"

namespace hetero {

// Feeds num_groups groups of 4 x 8 bytes into the four registers.
using StreamsFunction = void (*)(const uint8_t* bytes, int64_t num_groups, uint32_t crc[4]) noexcept;

void Sse42Streams(const uint8_t* bytes, int64_t num_groups, uint32_t crc[4]) noexcept;

// DigestOf without the CPU's crc32 instruction: the same value (for tests).
Digest PortableDigestOf(const void* data, int64_t bytes) noexcept;

}  // namespace hetero

#endif  // HETERO_DIGEST_STREAMS_H_
