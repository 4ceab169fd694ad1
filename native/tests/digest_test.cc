#include "digest.h"

#include <random>
#include <vector>

#include "check.h"
#include "digest_streams.h"
#include "hetero/api.h"

namespace {

// CRC32C from its definition, one bit at a time.
uint32_t SlowCrc(const std::vector<uint8_t>& bytes) {
  uint32_t crc = ~0u;
  for (const uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

// digest.h's definition: 8-byte word i to stream i % 4, the rest (bytes % 32) to stream 0.
hetero::Digest SlowDigest(const std::vector<uint8_t>& bytes) {
  std::vector<uint8_t> stream[4];
  const size_t whole = bytes.size() / 32 * 32;
  for (size_t i = 0; i < whole; ++i) stream[i / 8 % 4].push_back(bytes[i]);
  stream[0].insert(stream[0].end(), bytes.begin() + static_cast<int64_t>(whole), bytes.end());
  hetero::Digest digest;
  for (size_t s = 0; s < 4; ++s) {
    const uint32_t crc = SlowCrc(stream[s]);
    for (size_t i = 0; i < 4; ++i) digest[4 * s + i] = static_cast<uint8_t>(crc >> (8 * i));
  }
  return digest;
}

std::vector<uint8_t> RandomBytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

int64_t Size(const std::vector<uint8_t>& bytes) { return static_cast<int64_t>(bytes.size()); }

}  // namespace

TEST(crc_of_the_standard_check_string) {
  CHECK_EQ(hetero::Crc32c("123456789", 9), 0xE3069283u);  // RFC 3720, B.4 names the same polynomial
  CHECK_EQ(hetero::Crc32c("", 0), 0u);
}

TEST(crc_continues_from_a_seed) {
  const auto bytes = RandomBytes(101, 1);
  for (int64_t cut = 0; cut <= Size(bytes); ++cut) {
    const uint32_t first = hetero::Crc32c(bytes.data(), cut);
    CHECK_EQ(hetero::Crc32c(bytes.data() + cut, Size(bytes) - cut, first), SlowCrc(bytes));
  }
}

TEST(digest_equals_its_definition_for_every_length_and_alignment) {
  for (size_t length = 0; length < 200; ++length) {
    const auto bytes = RandomBytes(length, static_cast<uint32_t>(length));
    const hetero::Digest expected = SlowDigest(bytes);
    CHECK(hetero::DigestOf(bytes.data(), Size(bytes)) == expected);
    CHECK(hetero::PortableDigestOf(bytes.data(), Size(bytes)) == expected);
    for (size_t shift = 1; shift < 8; ++shift) {
      std::vector<uint8_t> shifted(shift, 0);
      shifted.insert(shifted.end(), bytes.begin(), bytes.end());
      CHECK(hetero::DigestOf(shifted.data() + shift, Size(bytes)) == expected);
    }
  }
}

TEST(every_single_bit_flip_changes_the_digest) {
  auto bytes = RandomBytes(96 + 5, 3);
  const hetero::Digest original = hetero::DigestOf(bytes.data(), Size(bytes));
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    CHECK(hetero::DigestOf(bytes.data(), Size(bytes)) != original);
    bytes[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
  }
}

TEST(the_c_interface_checks_its_arguments) {
  uint8_t out[16];
  CHECK_EQ(hetero_digest(nullptr, 1, out), HETERO_EINVAL);
  CHECK_EQ(hetero_digest(out, -1, out), HETERO_EINVAL);
  CHECK_EQ(hetero_digest(out, 1, nullptr), HETERO_EINVAL);
  const auto bytes = RandomBytes(77, 4);
  CHECK_EQ(hetero_digest(bytes.data(), Size(bytes), out), 0);
  CHECK_EQ(std::memcmp(out, SlowDigest(bytes).data(), 16), 0);
}
