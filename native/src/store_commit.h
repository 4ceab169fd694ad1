// Commit records: one small write that makes the newest slots of all blocks the committed ones.
//
// Ownership: values. Thread-safety: pure functions. Failure: Decode says why a record does not count.
//
// [Note: Commit ring]
// The file holds kRingRecords records of equal size; record `sequence` lies at sequence % kRingRecords, so a torn write can
// only lose the step that was never acknowledged. The newest record with a good checksum counts.
#ifndef HETERO_STORE_COMMIT_H_
#define HETERO_STORE_COMMIT_H_

#include <stdint.h>

#include <string>
#include <vector>

#include "status.h"
#include "store_layout.h"

namespace hetero {

constexpr int64_t kRingRecords = 16;

// What a record says of one block.
struct CommittedBlock {
  int64_t step = 0;
  uint64_t write_id = 0;
  int32_t slot = -1;      // -1: never stored
  int32_t has_state = 0;  // 0: state reads as zeros
};

struct CommitRecord {
  Uuid uuid{};
  int64_t sequence = 0;
  int64_t step = 0;
  std::vector<CommittedBlock> blocks;
  std::string user;
};

// Bytes of a record, whole pages.
int64_t RecordBytes(int32_t num_blocks, int32_t user_bytes);

// `out` has RecordBytes(...) bytes; the record's user blob fits.
void EncodeRecord(const CommitRecord& record, int64_t record_bytes, uint8_t* out);

// ESTATE: the place was never written. ECORRUPT: torn, or of another store or size.
Status DecodeRecord(const uint8_t* bytes, int64_t record_bytes, const Uuid& uuid, int32_t num_blocks, CommitRecord* out);

}  // namespace hetero

#endif  // HETERO_STORE_COMMIT_H_
