// CRC32C over four interleaved streams: accidents on the way to the disk and back, not attackers.
#ifndef HETERO_DIGEST_H_
#define HETERO_DIGEST_H_

#include <stdint.h>

#include <array>

namespace hetero {

using Digest = std::array<uint8_t, 16>;

// The digest of `bytes` bytes. 8-byte word i of the buffer belongs to stream i % 4; the rest (bytes % 32) to stream 0.
// The same on every machine; uses the CPU's crc32 instruction where there is one.
Digest DigestOf(const void* data, int64_t bytes) noexcept;
// Plain CRC32C (Castagnoli) of a small record, continuing from `seed`.
uint32_t Crc32c(const void* data, int64_t bytes, uint32_t seed = 0) noexcept;

}  // namespace hetero

#endif  // HETERO_DIGEST_H_
