#include "digest.h"

#include <string.h>

#include "digest_streams.h"

namespace hetero {

namespace {

// Reflected Castagnoli polynomial. table[k][b]: the CRC of byte b followed by k zero bytes ("slicing by eight").
struct Tables {
  uint32_t entry[8][256];
};

constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
    tables.entry[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (int k = 1; k < 8; ++k) {
      const uint32_t previous = tables.entry[k - 1][byte];
      tables.entry[k][byte] = (previous >> 8) ^ tables.entry[0][previous & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

uint32_t UpdateByte(uint32_t crc, uint8_t byte) noexcept { return (crc >> 8) ^ kTables.entry[0][(crc ^ byte) & 0xFF]; }

uint32_t UpdateWord(uint32_t crc, const uint8_t* bytes) noexcept {
  uint32_t low = 0;
  for (int i = 0; i < 4; ++i) low |= static_cast<uint32_t>(bytes[i]) << (8 * i);
  low ^= crc;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out ^= kTables.entry[7 - i][(low >> (8 * i)) & 0xFF];
  for (int i = 0; i < 4; ++i) out ^= kTables.entry[3 - i][bytes[4 + i]];
  return out;
}

// The streams' registers start at all ones and are inverted at the end, as CRC32C's are.
struct Streams {
  uint32_t crc[4] = {~0u, ~0u, ~0u, ~0u};
};

void PortableStreams(const uint8_t* bytes, int64_t num_groups, uint32_t crc[4]) noexcept {
  for (int64_t group = 0; group < num_groups; ++group, bytes += 32) {
    for (int stream = 0; stream < 4; ++stream) crc[stream] = UpdateWord(crc[stream], bytes + 8 * stream);
  }
}

StreamsFunction ChooseStreams() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return &Sse42Streams;
#endif
  return &PortableStreams;
}

Digest Finish(Streams streams, const uint8_t* rest, int64_t num_rest) noexcept {
  for (int64_t i = 0; i < num_rest; ++i) streams.crc[0] = UpdateByte(streams.crc[0], rest[i]);
  Digest digest;
  for (int stream = 0; stream < 4; ++stream) {
    const uint32_t value = ~streams.crc[stream];
    for (int i = 0; i < 4; ++i) digest[static_cast<size_t>(4 * stream + i)] = static_cast<uint8_t>(value >> (8 * i));
  }
  return digest;
}

}  // namespace

Digest DigestOf(const void* data, int64_t bytes) noexcept {
  static const StreamsFunction run = ChooseStreams();
  const auto* begin = static_cast<const uint8_t*>(data);
  const int64_t num_groups = bytes / 32;
  Streams streams;
  run(begin, num_groups, streams.crc);
  return Finish(streams, begin + 32 * num_groups, bytes % 32);
}

Digest PortableDigestOf(const void* data, int64_t bytes) noexcept {
  const auto* begin = static_cast<const uint8_t*>(data);
  Streams streams;
  PortableStreams(begin, bytes / 32, streams.crc);
  return Finish(streams, begin + bytes / 32 * 32, bytes % 32);
}

uint32_t Crc32c(const void* data, int64_t bytes, uint32_t seed) noexcept {
  const auto* p = static_cast<const uint8_t*>(data);
  uint32_t crc = ~seed;
  for (; bytes >= 8; bytes -= 8, p += 8) crc = UpdateWord(crc, p);
  for (; bytes > 0; --bytes, ++p) crc = UpdateByte(crc, *p);
  return ~crc;
}

}  // namespace hetero
