// Four streams because the crc32 instruction takes three cycles and a core starts one per cycle.
#include <nmmintrin.h>
#include <string.h>

#include "digest_streams.h"

namespace hetero {

void Sse42Streams(const uint8_t* bytes, int64_t num_groups, uint32_t crc[4]) noexcept {
  uint64_t c0 = crc[0], c1 = crc[1], c2 = crc[2], c3 = crc[3];
  for (int64_t group = 0; group < num_groups; ++group, bytes += 32) {
    uint64_t word[4];
    memcpy(word, bytes, sizeof(word));
    c0 = _mm_crc32_u64(c0, word[0]);
    c1 = _mm_crc32_u64(c1, word[1]);
    c2 = _mm_crc32_u64(c2, word[2]);
    c3 = _mm_crc32_u64(c3, word[3]);
  }
  crc[0] = static_cast<uint32_t>(c0);
  crc[1] = static_cast<uint32_t>(c1);
  crc[2] = static_cast<uint32_t>(c2);
  crc[3] = static_cast<uint32_t>(c3);
}

}  // namespace hetero
