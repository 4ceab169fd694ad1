#include "store_layout.h"

#include <string.h>

#include <algorithm>
#include <limits>

#include "kernels.h"

namespace hetero {

namespace {

constexpr uint64_t kHeadMagic = 0x31444145484f5448;    // "HTOHEAD1"
constexpr uint64_t kFooterMagic = 0x31544f4f464f5448;  // "HTOFOOT1"

// The on-disk structures are little-endian images of these; all fields are naturally aligned.
struct Stamp {
  uint64_t magic;
  Uuid uuid;
  uint64_t write_id;
  int64_t step;
  int32_t block;
  int32_t slot;
  int64_t chunk;
  uint32_t has_digest;
  uint32_t crc;  // of the structure with this field 0, and for heads of the digests
};
static_assert(sizeof(Stamp) == 64);

struct Footer {
  Stamp stamp;
  Digest digest;
};
static_assert(sizeof(Footer) == 80);

struct Head {
  Stamp stamp;
  hetero_block_geometry geometry;
};
static_assert(sizeof(hetero_block_geometry) == 40);

Stamp MakeStamp(uint64_t magic, const Rewrite& rewrite, int64_t chunk, bool has_digest) {
  Stamp stamp{};
  stamp.magic = magic;
  stamp.uuid = rewrite.uuid;
  stamp.write_id = rewrite.write_id;
  stamp.step = rewrite.step;
  stamp.block = rewrite.block;
  stamp.slot = rewrite.slot;
  stamp.chunk = chunk;
  stamp.has_digest = has_digest ? 1 : 0;
  return stamp;
}

Status Corrupt(const std::string& path, int64_t offset, int32_t block, int64_t chunk, const char* what) {
  return Fail(HETERO_ECORRUPT, "%s at offset %lld: block %d, chunk %lld: %s", path.c_str(), static_cast<long long>(offset),
              block, static_cast<long long>(chunk), what);
}

// What is wrong with a stamp, or null.
const char* StampFault(const Stamp& got, const Stamp& want) {
  if (got.magic != want.magic) return "no stamp is here: the write was lost or torn";
  if (got.uuid != want.uuid) return "the stamp names another store";
  if (got.block != want.block || got.slot != want.slot || got.chunk != want.chunk)
    return "the stamp names another place: a write was misdirected or files were exchanged";
  if (got.write_id != want.write_id || got.step != want.step) return "the stamp is of another rewrite: a write was lost";
  return nullptr;
}

uint32_t FooterCrc(Footer footer) {
  footer.stamp.crc = 0;
  return Crc32c(&footer, sizeof(footer));
}

uint32_t HeadCrc(Head head, const uint8_t* digests, int64_t digest_bytes) {
  head.stamp.crc = 0;
  return Crc32c(digests, digest_bytes, Crc32c(&head, sizeof(head)));
}

int64_t DigestBytes(const Layout& layout) { return layout.num_chunks() * static_cast<int64_t>(sizeof(Digest)); }

}  // namespace

Status Layout::Make(const hetero_block_geometry& g, Layout* out) {
  const int64_t weight_bytes = DtypeBytes(g.weight_dtype);
  if (weight_bytes == 0) return Fail(HETERO_EINVAL, "geometry.weight_dtype is %d; allowed: F32, BF16, F16, U8", g.weight_dtype);
  if (g.id < 0) return Fail(HETERO_EINVAL, "geometry.id is %d; allowed: 0 or more", g.id);
  if (g.num_elements <= 0 || g.num_elements % 16 != 0 || g.num_elements > std::numeric_limits<int64_t>::max() / 64)
    return Fail(HETERO_EINVAL, "block %d: geometry.num_elements is %lld; allowed: a positive multiple of 16", g.id,
                static_cast<long long>(g.num_elements));
  if (g.num_state < 0 || g.num_state > kMaxStateArrays)
    return Fail(HETERO_EINVAL, "block %d: geometry.num_state is %d; allowed: 0 to %d", g.id, g.num_state, kMaxStateArrays);
  if (g.chunk_elements <= 0 || g.chunk_elements % kPageBytes != 0 || g.chunk_elements > (int64_t{1} << 40))
    return Fail(HETERO_EINVAL, "block %d: geometry.chunk_elements is %lld; allowed: a positive multiple of 4096", g.id,
                static_cast<long long>(g.chunk_elements));
  if (g.num_slots < 1 || g.num_slots > 2 || (g.num_slots == 1 && g.num_state > 0))
    return Fail(HETERO_EINVAL, "block %d: geometry.num_slots is %d; allowed: 2, or 1 for a block without state", g.id,
                g.num_slots);
  Layout layout;
  layout.geometry_ = g;
  layout.weight_bytes_ = weight_bytes;
  layout.num_chunks_ = (g.num_elements + g.chunk_elements - 1) / g.chunk_elements;
  if (layout.weights_in_file() || layout.state_in_file()) {
    layout.head_bytes_ = RoundUp(static_cast<int64_t>(sizeof(Head)) + DigestBytes(layout), kPageBytes);
    layout.state_start_ = layout.head_bytes_ + (layout.weights_in_file() ? layout.weights_padded_bytes() : 0);
    layout.file_bytes_ = layout.state_start_;
    if (layout.state_in_file()) {
      layout.state_stride_ = layout.StateBytes(0);
      const int64_t last = layout.num_chunks_ - 1;
      layout.file_bytes_ = layout.StateOffset(last) + layout.StateBytes(last);
    }
  }
  *out = layout;
  return Status::Ok();
}

bool Layout::has_master() const { return geometry_.weight_dtype == HETERO_BF16 || geometry_.weight_dtype == HETERO_F16; }

int64_t Layout::ChunkElements(int64_t chunk) const {
  return std::min(geometry_.chunk_elements, geometry_.num_elements - ChunkStart(chunk));
}

int64_t Layout::weights_padded_bytes() const { return RoundUp(geometry_.num_elements * weight_bytes_, kPageBytes); }

int64_t Layout::WeightsOffset(int64_t chunk) const { return head_bytes_ + ChunkStart(chunk) * weight_bytes_; }

int64_t Layout::WeightsBytes(int64_t chunk) const { return ChunkElements(chunk) * weight_bytes_; }

int64_t Layout::StateOffset(int64_t chunk) const { return state_start_ + chunk * state_stride_; }

int64_t Layout::ArrayOffset(int64_t chunk, int32_t array) const {
  const int64_t array_bytes = ChunkElements(chunk) * static_cast<int64_t>(sizeof(float));
  int64_t offset = kStaggerBytes;
  for (int32_t k = 1; k <= array; ++k) {
    const int64_t residue = (k + 1) * kStaggerBytes % kPageBytes;
    offset = RoundUp(offset + array_bytes - residue, kPageBytes) + residue;
  }
  return offset;
}

int64_t Layout::FooterOffset(int64_t chunk) const { return StateBytes(chunk) - static_cast<int64_t>(sizeof(Footer)); }

int64_t Layout::StateBytes(int64_t chunk) const {
  const int64_t payload =
      ArrayOffset(chunk, geometry_.num_state - 1) + ChunkElements(chunk) * static_cast<int64_t>(sizeof(float));
  return RoundUp(payload + static_cast<int64_t>(sizeof(Footer)), kPageBytes);
}

int64_t Layout::staged_state_offset() const { return weights_in_file() ? RoundUp(WeightsBytes(0), kPageBytes) : 0; }

int64_t Layout::staged_bytes() const { return staged_state_offset() + (state_in_file() ? StateBytes(0) : 0); }

void SealState(const Layout& layout, const Rewrite& rewrite, int64_t chunk, bool with_digest, uint8_t* image) {
  const int64_t offset = layout.FooterOffset(chunk);
  Footer footer{};
  footer.stamp = MakeStamp(kFooterMagic, rewrite, chunk, with_digest);
  if (with_digest) footer.digest = DigestOf(image, offset);
  footer.stamp.crc = FooterCrc(footer);
  memcpy(image + offset, &footer, sizeof(footer));
}

Status CheckState(const Layout& layout, const Rewrite& rewrite, int64_t chunk, bool with_digest, const uint8_t* image,
                  const std::string& path) {
  const int64_t offset = layout.FooterOffset(chunk);
  const int64_t place = layout.StateOffset(chunk) + offset;
  Footer footer;
  memcpy(&footer, image + offset, sizeof(footer));
  const Stamp want = MakeStamp(kFooterMagic, rewrite, chunk, false);
  if (const char* fault = StampFault(footer.stamp, want)) return Corrupt(path, place, rewrite.block, chunk, fault);
  if (footer.stamp.crc != FooterCrc(footer)) return Corrupt(path, place, rewrite.block, chunk, "the footer's checksum differs");
  if (with_digest && footer.stamp.has_digest != 0 && DigestOf(image, offset) != footer.digest)
    return Corrupt(path, layout.StateOffset(chunk), rewrite.block, chunk, "the state's digest differs");
  return Status::Ok();
}

void SealHead(const Layout& layout, const Rewrite& rewrite, const std::vector<Digest>& digests, uint8_t* bytes) {
  memset(bytes, 0, static_cast<size_t>(layout.head_bytes()));
  Head head{};
  head.stamp = MakeStamp(kHeadMagic, rewrite, layout.num_chunks(), !digests.empty());
  head.geometry = layout.geometry();
  uint8_t* tail = bytes + sizeof(head);
  if (!digests.empty()) memcpy(tail, digests.data(), static_cast<size_t>(DigestBytes(layout)));
  head.stamp.crc = HeadCrc(head, tail, DigestBytes(layout));
  memcpy(bytes, &head, sizeof(head));
}

Status CheckHead(const Layout& layout, const Rewrite& rewrite, const uint8_t* bytes, const std::string& path,
                 std::vector<Digest>* digests) {
  Head head;
  memcpy(&head, bytes, sizeof(head));
  const Stamp want = MakeStamp(kHeadMagic, rewrite, layout.num_chunks(), false);
  if (const char* fault = StampFault(head.stamp, want)) return Corrupt(path, 0, rewrite.block, -1, fault);
  if (head.stamp.crc != HeadCrc(head, bytes + sizeof(head), DigestBytes(layout)))
    return Corrupt(path, 0, rewrite.block, -1, "the head's checksum differs");
  if (memcmp(&head.geometry, &layout.geometry(), sizeof(head.geometry)) != 0)
    return Corrupt(path, 0, rewrite.block, -1, "the block's geometry differs from the file's");
  digests->clear();
  if (head.stamp.has_digest != 0) {
    digests->resize(static_cast<size_t>(layout.num_chunks()));
    memcpy(digests->data(), bytes + sizeof(head), static_cast<size_t>(DigestBytes(layout)));
  }
  return Status::Ok();
}

Status CheckWeights(const Layout& layout, int64_t chunk, const Digest& digest, const void* payload, const std::string& path) {
  if (DigestOf(payload, layout.WeightsBytes(chunk)) == digest) return Status::Ok();
  return Corrupt(path, layout.WeightsOffset(chunk), layout.geometry().id, chunk, "the weights' digest differs");
}

}  // namespace hetero
