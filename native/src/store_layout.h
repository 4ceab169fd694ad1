// Where the bytes of a block lie inside a slot's file, and the stamps that say what they are.
//
// Ownership: values. Thread-safety: immutable after Make. Failure: Status; sealing cannot fail.
//
// [Note: Slot file]
//   head      stamp of the rewrite, geometry, one digest per chunk of weights                      whole pages
//   weights   all elements in order; chunk c starts at c * chunk_elements                          padded to a page at the end
//   state     chunk after chunk: the arrays of the chunk and a footer, moved by one transfer       each chunk whole pages
// Weights come first and without gaps, so that they can be fetched alone, straight into the weight memory, by transfers of
// any number of chunks. That memory must reach to the end of the last page: whole pages are moved.
// Inside a state chunk the arrays start at different offsets modulo a page: equal ones collide in the caches (a stream as
// wide as Adam's runs at less than half the bandwidth). Staging memory holds the same image, so nothing is moved twice.
#ifndef HETERO_STORE_LAYOUT_H_
#define HETERO_STORE_LAYOUT_H_

#include <stdint.h>

#include <array>
#include <string>
#include <vector>

#include "digest.h"
#include "hetero/api.h"
#include "status.h"

namespace hetero {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kStaggerBytes = 17 * 64;  // an odd number of cache lines
constexpr int32_t kMaxStateArrays = 8;
constexpr int32_t kMaxDisks = 64;

constexpr int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

using Uuid = std::array<uint8_t, 16>;

class Layout {
 public:
  // EINVAL names the field that is out of range.
  static Status Make(const hetero_block_geometry& geometry, Layout* out);

  [[nodiscard]] const hetero_block_geometry& geometry() const { return geometry_; }
  [[nodiscard]] bool has_file() const { return file_bytes_ > 0; }
  [[nodiscard]] bool weights_in_file() const { return geometry_.weights_on_disk_file != 0; }
  [[nodiscard]] bool state_in_file() const { return geometry_.state_on_disk_file != 0 && geometry_.num_state > 0; }
  [[nodiscard]] bool has_master() const;  // 16-bit weights with an fp32 master as state array 0

  [[nodiscard]] int64_t num_chunks() const { return num_chunks_; }
  [[nodiscard]] int64_t ChunkStart(int64_t chunk) const { return chunk * geometry_.chunk_elements; }
  [[nodiscard]] int64_t ChunkElements(int64_t chunk) const;
  [[nodiscard]] int64_t weight_bytes_per_element() const { return weight_bytes_; }

  [[nodiscard]] int64_t file_bytes() const { return file_bytes_; }
  [[nodiscard]] int64_t head_bytes() const { return head_bytes_; }
  // Bytes of the weight memory that transfers touch: whole pages.
  [[nodiscard]] int64_t weights_padded_bytes() const;
  [[nodiscard]] int64_t WeightsOffset(int64_t chunk) const;               // in the file
  [[nodiscard]] int64_t WeightsBytes(int64_t chunk) const;                // payload
  [[nodiscard]] int64_t StateOffset(int64_t chunk) const;                 // in the file
  [[nodiscard]] int64_t StateBytes(int64_t chunk) const;                  // the transfer: arrays, footer, whole pages
  [[nodiscard]] int64_t FooterOffset(int64_t chunk) const;                // from the state chunk's start
  [[nodiscard]] int64_t ArrayOffset(int64_t chunk, int32_t array) const;  // from the state chunk's start

  // A staging buffer holds [weights][state chunk]; either part is absent when it has no section in the file.
  [[nodiscard]] int64_t staged_state_offset() const;
  [[nodiscard]] int64_t staged_bytes() const;

 private:
  hetero_block_geometry geometry_{};
  int64_t num_chunks_ = 0;
  int64_t weight_bytes_ = 0;
  int64_t head_bytes_ = 0;
  int64_t state_start_ = 0;
  int64_t state_stride_ = 0;
  int64_t file_bytes_ = 0;
};

// Identity of one rewrite of a block. `write_id` is unique to it, so that any chunk left over from another rewrite (a lost
// or misdirected write, another file) is told apart even when the step is the same.
struct Rewrite {
  Uuid uuid{};
  uint64_t write_id = 0;
  int64_t step = 0;
  int32_t block = 0;
  int32_t slot = 0;
};

// Ends a state chunk: stamps it, with a digest of its payload when `with_digest`.
void SealState(const Layout& layout, const Rewrite& rewrite, int64_t chunk, bool with_digest, uint8_t* image);
// ECORRUPT with what differs. Digests that were not written are not checked.
Status CheckState(const Layout& layout, const Rewrite& rewrite, int64_t chunk, bool with_digest, const uint8_t* image,
                  const std::string& path);

// `digests` is empty, or one per chunk of the weights. `head` has head_bytes() bytes.
void SealHead(const Layout& layout, const Rewrite& rewrite, const std::vector<Digest>& digests, uint8_t* head);
Status CheckHead(const Layout& layout, const Rewrite& rewrite, const uint8_t* head, const std::string& path,
                 std::vector<Digest>* digests);
Status CheckWeights(const Layout& layout, int64_t chunk, const Digest& digest, const void* payload, const std::string& path);

}  // namespace hetero

#endif  // HETERO_STORE_LAYOUT_H_
