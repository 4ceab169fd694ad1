#include "store_commit.h"

#include <string.h>

#include <algorithm>

#include "digest.h"

namespace hetero {

namespace {

constexpr uint64_t kRecordMagic = 0x31544d4d434f5448;  // "HTOCMMT1"

struct RecordHeader {
  uint64_t magic;
  Uuid uuid;
  int64_t sequence;
  int64_t step;
  int32_t num_blocks;
  int32_t user_bytes;
  uint32_t version;
  uint32_t crc;  // of header (with this field 0), blocks and user blob
};
static_assert(sizeof(RecordHeader) == 56);
static_assert(sizeof(CommittedBlock) == 24);

int64_t BlocksBytes(int32_t num_blocks) { return num_blocks * static_cast<int64_t>(sizeof(CommittedBlock)); }

uint32_t RecordCrc(RecordHeader header, const uint8_t* payload) {
  header.crc = 0;
  return Crc32c(payload, BlocksBytes(header.num_blocks) + header.user_bytes, Crc32c(&header, sizeof(header)));
}

}  // namespace

int64_t RecordBytes(int32_t num_blocks, int32_t user_bytes) {
  return RoundUp(static_cast<int64_t>(sizeof(RecordHeader)) + BlocksBytes(num_blocks) + user_bytes, kPageBytes);
}

void EncodeRecord(const CommitRecord& record, int64_t record_bytes, uint8_t* out) {
  memset(out, 0, static_cast<size_t>(record_bytes));
  RecordHeader header{};
  header.magic = kRecordMagic;
  header.uuid = record.uuid;
  header.sequence = record.sequence;
  header.step = record.step;
  header.num_blocks = static_cast<int32_t>(record.blocks.size());
  header.user_bytes = static_cast<int32_t>(record.user.size());
  header.version = 1;
  uint8_t* payload = out + sizeof(header);
  const auto blocks_bytes = static_cast<size_t>(BlocksBytes(header.num_blocks));
  if (blocks_bytes > 0) memcpy(payload, record.blocks.data(), blocks_bytes);
  memcpy(payload + blocks_bytes, record.user.data(), record.user.size());
  header.crc = RecordCrc(header, payload);
  memcpy(out, &header, sizeof(header));
}

Status DecodeRecord(const uint8_t* bytes, int64_t record_bytes, const Uuid& uuid, int32_t num_blocks, CommitRecord* out) {
  RecordHeader header;
  memcpy(&header, bytes, sizeof(header));
  if (std::all_of(bytes, bytes + sizeof(header), [](uint8_t b) { return b == 0; })) return Fail(HETERO_ESTATE, "no record");
  if (header.magic != kRecordMagic || header.version != 1) return Fail(HETERO_ECORRUPT, "not a commit record of version 1");
  if (header.uuid != uuid) return Fail(HETERO_ECORRUPT, "the record is of another store");
  if (header.num_blocks != num_blocks)
    return Fail(HETERO_ECORRUPT, "the record has %d blocks; expected %d", header.num_blocks, num_blocks);
  const int64_t room = record_bytes - static_cast<int64_t>(sizeof(header)) - BlocksBytes(num_blocks);
  if (header.user_bytes < 0 || header.user_bytes > room) return Fail(HETERO_ECORRUPT, "the record's length is out of range");
  const uint8_t* payload = bytes + sizeof(header);
  if (header.crc != RecordCrc(header, payload)) return Fail(HETERO_ECORRUPT, "the record's checksum differs");
  out->uuid = header.uuid;
  out->sequence = header.sequence;
  out->step = header.step;
  out->blocks.resize(static_cast<size_t>(num_blocks));
  if (num_blocks > 0) memcpy(out->blocks.data(), payload, static_cast<size_t>(BlocksBytes(num_blocks)));
  out->user.assign(reinterpret_cast<const char*>(payload) + BlocksBytes(num_blocks), static_cast<size_t>(header.user_bytes));
  return Status::Ok();
}

}  // namespace hetero
