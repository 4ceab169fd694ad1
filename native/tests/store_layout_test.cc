// The layout of slot files, stamps, and commit records.
#include "store_layout.h"

#include <random>

#include "engine_fixture.h"
#include "store_commit.h"

using fixture::Geometry;
using hetero::kPageBytes;
using hetero::Layout;
using hetero::Rewrite;

namespace {

constexpr int64_t kElements = 4096 * 3 + 32;

}  // namespace

TEST(sections_are_pages_apart_and_arrays_staggered) {
  for (const int32_t dtype : {HETERO_F32, HETERO_BF16}) {
    for (const int64_t n : {16, 4080, 4096, 4112, 8192, 100000}) {
      for (const int64_t chunk_elements : {4096, 16384, 1 << 20}) {
        hetero_block_geometry g = Geometry(0, dtype, n, true, true);
        g.chunk_elements = chunk_elements;
        Layout layout;
        REQUIRE_OK(Layout::Make(g, &layout));
        CHECK_EQ(layout.file_bytes(), hetero_block_file_bytes(&g));
        int64_t end = layout.WeightsOffset(0) + layout.weights_padded_bytes();
        for (int64_t chunk = 0; chunk < layout.num_chunks(); ++chunk) {
          CHECK_EQ(layout.WeightsOffset(chunk) % kPageBytes, 0);
          CHECK_EQ(layout.StateOffset(chunk), end);
          CHECK_EQ(layout.StateBytes(chunk) % kPageBytes, 0);
          int64_t array_end = 0;
          for (int32_t k = 0; k < g.num_state; ++k) {
            const int64_t offset = layout.ArrayOffset(chunk, k);
            CHECK_GE(offset, array_end);
            CHECK_EQ(offset % 64, 0);
            CHECK_EQ(offset % kPageBytes, (k + 1) * hetero::kStaggerBytes % kPageBytes);
            array_end = offset + layout.ChunkElements(chunk) * 4;
          }
          CHECK_LE(array_end, layout.FooterOffset(chunk));
          CHECK_LE(layout.staged_state_offset() + layout.StateBytes(chunk), layout.staged_bytes());
          end += layout.StateBytes(chunk);
        }
        CHECK_EQ(layout.file_bytes(), end);
      }
    }
  }
}

TEST(a_state_stamp_tells_every_difference) {
  Layout layout;
  REQUIRE_OK(Layout::Make(Geometry(3, HETERO_F32, kElements, true, true), &layout));
  const Rewrite written{{1, 2, 3}, 77, 5, 3, 1};
  std::vector<uint8_t> image(static_cast<size_t>(layout.StateBytes(1)), 9);
  SealState(layout, written, 1, true, image.data());
  CHECK_OK(CheckState(layout, written, 1, true, image.data(), "f"));
  for (int field = 0; field < 6; ++field) {
    Rewrite want = written;
    int64_t chunk = 1;
    if (field == 0) want.uuid[15] = 1;
    if (field == 1) want.write_id = 78;
    if (field == 2) want.step = 6;
    if (field == 3) want.block = 4;
    if (field == 4) want.slot = 0;
    if (field == 5) chunk = 0;
    CHECK_EQ(CheckState(layout, want, chunk, true, image.data(), "f").code(), HETERO_ECORRUPT);
  }
  // Any flipped bit: of the stamp always, of the payload with digests.
  for (size_t i = 0; i < image.size(); i += i + 200 < image.size() ? 97 : 1) {
    const bool payload = static_cast<int64_t>(i) < layout.FooterOffset(1);
    image[i] ^= 16;
    CHECK_EQ(CheckState(layout, written, 1, true, image.data(), "f").code(), HETERO_ECORRUPT);
    CHECK_EQ(CheckState(layout, written, 1, false, image.data(), "f").code(), payload ? 0 : HETERO_ECORRUPT);
    image[i] ^= 16;
  }
}

TEST(a_torn_or_random_commit_record_does_not_count) {
  hetero::CommitRecord record;
  record.uuid = {5, 6};
  record.sequence = 9;
  record.step = 8;
  record.blocks.resize(400, {8, 123, 1, 1});
  record.user = std::string(3000, 'u');
  const int64_t bytes = hetero::RecordBytes(400, 3000);
  std::vector<uint8_t> image(static_cast<size_t>(bytes));
  EncodeRecord(record, bytes, image.data());
  hetero::CommitRecord out;
  REQUIRE_OK(DecodeRecord(image.data(), bytes, record.uuid, 400, &out));
  CHECK_EQ(out.user, record.user);
  CHECK_EQ(out.step, 8);
  CHECK_EQ(out.blocks[399].write_id, uint64_t{123});
  CHECK_EQ(DecodeRecord(image.data(), bytes, {1}, 400, &out).code(), HETERO_ECORRUPT);
  CHECK_EQ(DecodeRecord(image.data(), bytes, record.uuid, 399, &out).code(), HETERO_ECORRUPT);
  const int64_t used = 56 + 400 * 24 + 3000;
  for (int64_t cut = 0; cut < used; cut += 512) {
    std::vector<uint8_t> torn = image;
    torn.resize(static_cast<size_t>(cut));
    torn.resize(image.size());
    CHECK_EQ(DecodeRecord(torn.data(), bytes, record.uuid, 400, &out).code(), cut == 0 ? HETERO_ESTATE : HETERO_ECORRUPT);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    std::vector<uint8_t> noise = image;
    for (int k = 0; k < 3; ++k) noise[random() % static_cast<size_t>(used)] ^= static_cast<uint8_t>(1 + random() % 255);
    if (noise != image) CHECK_EQ(DecodeRecord(noise.data(), bytes, record.uuid, 400, &out).code(), HETERO_ECORRUPT);
  }
}
