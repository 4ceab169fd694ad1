// What is read back from a store's files, given any bytes (libFuzzer): nothing but a Status may come of it.
//
//   cmake -S native -B build-fuzz -G Ninja -DHETERO_SANITIZE=fuzzer -DCMAKE_CXX_COMPILER=clang++ && cmake --build build-fuzz
//   build-fuzz/store_fuzz -max_total_time=60
//
// The first byte chooses what is parsed, and whether its checksum is made right: nothing behind a checksum would be reached by
// chance. What was accepted is written out again and must be accepted as the same.
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "digest.h"
#include "store_commit.h"
#include "store_layout.h"

namespace {

using hetero::CommitRecord;
using hetero::Digest;
using hetero::kPageBytes;
using hetero::Layout;
using hetero::Rewrite;

constexpr int64_t kRecordHeaderBytes = 56;
constexpr int64_t kRecordCrc = 52;
constexpr int64_t kStampCrc = 60;
constexpr int64_t kFooterBytes = 80;
constexpr int64_t kHeadBytes = 104;

void Require(bool holds) {
  if (!holds) abort();
}

// Bytes of an input, in order; zeros once it has ended.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  template <class T>
  T Take() {
    T value{};
    Fill(reinterpret_cast<uint8_t*>(&value), sizeof(value));
    return value;
  }
  void Fill(uint8_t* out, size_t bytes) {
    const size_t some = std::min(bytes, left_);
    memcpy(out, data_, some);
    data_ += some;
    left_ -= some;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

void PutCrc(uint8_t* bytes, int64_t at, uint32_t crc) { memcpy(bytes + at, &crc, sizeof(crc)); }

void Record(Input* input, bool repair) {
  const int32_t num_blocks = input->Take<uint8_t>() % 8;
  std::vector<uint8_t> bytes(static_cast<size_t>(kPageBytes) * (1 + input->Take<uint8_t>() % 2));
  const auto length = static_cast<int64_t>(bytes.size());
  input->Fill(bytes.data(), bytes.size());
  hetero::Uuid uuid{};
  if (repair) {
    memcpy(uuid.data(), bytes.data() + 8, uuid.size());
    int32_t user_bytes = 0;
    memcpy(&user_bytes, bytes.data() + 44, sizeof(user_bytes));
    const int64_t payload =
        std::clamp<int64_t>(num_blocks * int64_t{24} + std::max(0, user_bytes), 0, length - kRecordHeaderBytes);
    PutCrc(bytes.data(), kRecordCrc, 0);
    const uint32_t head = hetero::Crc32c(bytes.data(), kRecordHeaderBytes);
    PutCrc(bytes.data(), kRecordCrc, hetero::Crc32c(bytes.data() + kRecordHeaderBytes, payload, head));
  }
  CommitRecord record;
  if (!hetero::DecodeRecord(bytes.data(), length, uuid, num_blocks, &record).ok()) return;
  Require(record.blocks.size() == static_cast<size_t>(num_blocks));
  Require(hetero::RecordBytes(num_blocks, static_cast<int32_t>(record.user.size())) <= length);
  std::vector<uint8_t> again(bytes.size());
  hetero::EncodeRecord(record, length, again.data());
  CommitRecord same;
  Require(hetero::DecodeRecord(again.data(), length, uuid, num_blocks, &same).ok());
  Require(same.sequence == record.sequence && same.step == record.step && same.user == record.user);
}

Layout SomeLayout(Input* input) {
  hetero_block_geometry g{};
  g.weight_dtype = input->Take<uint8_t>() % 4;
  g.num_elements = 16 * (1 + input->Take<uint16_t>() % 1024);
  g.num_state = input->Take<uint8_t>() % 4;
  g.weights_on_disk_file = 1;
  g.state_on_disk_file = 1;
  g.num_slots = 2;
  g.chunk_elements = kPageBytes;
  Layout layout;
  Require(Layout::Make(g, &layout).ok());
  return layout;
}

void Head(Input* input, bool repair) {
  const Layout layout = SomeLayout(input);
  std::vector<uint8_t> bytes(static_cast<size_t>(layout.head_bytes()));
  std::vector<Digest> digests;
  Rewrite rewrite;
  hetero::SealHead(layout, rewrite, digests, bytes.data());  // what a fault changes was whole once
  const int64_t covered = kHeadBytes + layout.num_chunks() * static_cast<int64_t>(sizeof(Digest));
  const size_t at = input->Take<uint16_t>() % bytes.size();
  input->Fill(bytes.data() + at, std::min<size_t>(bytes.size() - at, input->Take<uint8_t>()));
  if (repair) {
    PutCrc(bytes.data(), kStampCrc, 0);
    PutCrc(bytes.data(), kStampCrc, hetero::Crc32c(bytes.data(), covered));
  }
  if (hetero::CheckHead(layout, rewrite, bytes.data(), "file", &digests).ok())
    Require(digests.empty() || digests.size() == static_cast<size_t>(layout.num_chunks()));
}

void State(Input* input, bool repair) {
  Layout layout = SomeLayout(input);
  if (!layout.state_in_file()) return;
  const int64_t chunk = input->Take<uint8_t>() % layout.num_chunks();
  std::vector<uint8_t> image(static_cast<size_t>(layout.StateBytes(chunk)));
  Rewrite rewrite;
  hetero::SealState(layout, rewrite, chunk, true, image.data());
  const size_t at = static_cast<size_t>(layout.FooterOffset(chunk)) + input->Take<uint8_t>() % kFooterBytes;
  input->Fill(image.data() + at, std::min<size_t>(image.size() - at, input->Take<uint8_t>()));
  if (repair) {
    uint8_t* footer = image.data() + layout.FooterOffset(chunk);
    PutCrc(footer, kStampCrc, 0);
    PutCrc(footer, kStampCrc, hetero::Crc32c(footer, kFooterBytes));
  }
  (void)hetero::CheckState(layout, rewrite, chunk, true, image.data(), "file").ok();
}

// Whatever geometry is accepted has sections that lie in its file, one behind the other.
void Geometry(Input* input) {
  const auto g = input->Take<hetero_block_geometry>();
  Layout layout;
  if (!Layout::Make(g, &layout).ok() || !layout.has_file()) return;
  const int64_t last = layout.num_chunks() - 1;
  Require(layout.num_chunks() > 0 && layout.ChunkElements(last) > 0 && layout.ChunkElements(last) <= g.chunk_elements);
  Require(layout.ChunkStart(last) + layout.ChunkElements(last) == g.num_elements);
  Require(layout.head_bytes() > 0 && layout.file_bytes() >= layout.head_bytes());
  if (layout.weights_in_file()) Require(layout.WeightsOffset(last) + layout.WeightsBytes(last) <= layout.file_bytes());
  if (!layout.state_in_file()) return;
  for (int32_t k = 0; k < g.num_state; ++k)
    Require(layout.ArrayOffset(last, k) + layout.ChunkElements(last) * 4 <= layout.FooterOffset(last));
  Require(layout.StateOffset(last) + layout.StateBytes(last) == layout.file_bytes());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const auto choice = input.Take<uint8_t>();
  const bool repair = choice % 2 == 1;
  switch (choice / 2 % 4) {
    case 0:
      Record(&input, repair);
      break;
    case 1:
      Head(&input, repair);
      break;
    case 2:
      State(&input, repair);
      break;
    default:
      Geometry(&input);
  }
  return 0;
}
