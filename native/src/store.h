// The store: a directory with a commit ring and, per block, one file for each slot. It may have more directories, on other
// disks; a block has its files in one of them.
//
// Ownership: a Store owns its files and is closed after its blocks; a Block owns its slot files and the RAM of its state, the
// caller owns the weight memory. Thread-safety: opened, recovered and closed by one thread while no task runs; in between
// only the engine touches them, under its mutex (tasks of one block never overlap). Newest() may be asked at any time.
// Failure: Status; what was created is removed again.
//
// [Note: Two slots]
// A rewrite goes to the slot that is not the committed one, so the committed step survives whatever happens meanwhile. When all
// of it has been written that slot is the block's *newest*; a commit record makes the newest slots of all blocks the
// committed ones. A second rewrite before that goes to the same slot, chunk by chunk in place: which slot is written depends on
// the record alone, not on how often the block was written since. Blocks with one slot (never updated) are always written in
// place: store them before the first commit.
#ifndef HETERO_STORE_H_
#define HETERO_STORE_H_

#include <stdint.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hetero/api.h"
#include "status.h"
#include "store_commit.h"
#include "store_file.h"
#include "store_layout.h"
#include "store_runs.h"

namespace hetero {

class Block;

class Store {
 public:
  static Status Open(const std::string& directory, const hetero_store_options& options, std::unique_ptr<Store>* out);

  // Another directory for files of blocks, on another disk; its number.
  Status AddDirectory(const std::string& directory, int32_t* disk);

  // Reads the newest valid record and applies it to the open blocks; blocks opened later find it too.
  Status Recover(int64_t* step, std::string* user);

  // The stamp of the next rewrite of a block.
  Rewrite NextRewrite(int32_t block, int32_t slot, int64_t step);

  [[nodiscard]] const hetero_store_options& options() const { return options_; }
  [[nodiscard]] const File& directory(int32_t disk) const { return directories_[static_cast<size_t>(disk)]; }
  [[nodiscard]] int32_t num_disks() const { return static_cast<int32_t>(directories_.size()); }
  [[nodiscard]] const File& ring() const { return ring_; }
  [[nodiscard]] const Uuid& uuid() const { return uuid_; }
  [[nodiscard]] int64_t record_bytes() const { return record_bytes_; }
  [[nodiscard]] const CommitRecord& committed() const { return committed_; }
  [[nodiscard]] bool has_record() const { return committed_.sequence > 0; }
  [[nodiscard]] const std::vector<Block*>& blocks() const { return blocks_; }  // by id, null where not open
  [[nodiscard]] bool writes_digests() const { return options_.verify_digests != HETERO_DIGESTS_NONE; }
  [[nodiscard]] bool verifies_digests() const { return options_.verify_digests == HETERO_DIGESTS_ALWAYS; }

  void Attach(Block* block);
  void Detach(Block* block);
  void SetCommitted(CommitRecord record) { committed_ = std::move(record); }
  // No later record names the block.
  void Forget(int32_t block);

  // The engine's, under its mutex: tickets of the writers since the last commit, and of that commit.
  std::vector<int64_t> writers;
  int64_t last_commit = 0;
  std::atomic<int64_t> pending{0};  // commits not DONE

 private:
  Store() = default;

  hetero_store_options options_{};
  Uuid uuid_{};
  std::vector<File> directories_;  // by disk; the first has the ring
  File ring_;
  int64_t record_bytes_ = 0;
  CommitRecord committed_;  // sequence 0: none yet
  std::vector<Block*> blocks_;
  uint64_t next_write_id_ = 0;
};

// What one slot holds.
struct SlotContent {
  Rewrite rewrite{.slot = -1};
  bool has_state = false;  // otherwise the state reads as zeros
  bool recovered = false;  // by another process, perhaps long ago
  std::vector<Digest> weight_digests;
};

class Block {
 public:
  // `disk`: the store's directory that has its files, or gets them.
  static Status Open(Store* store, const hetero_block_geometry& geometry, void* weights, int32_t disk,
                     std::unique_ptr<Block>* out);
  // Weights that are read in place; see [Note: Runs].
  static Status OpenRuns(const Layout& layout, void* weights, std::unique_ptr<Runs> runs, std::unique_ptr<Block>* out);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  [[nodiscard]] Store* store() const { return store_; }
  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] int32_t id() const { return layout_.geometry().id; }
  [[nodiscard]] int32_t disk() const { return disk_; }
  [[nodiscard]] uint8_t* weights() const { return weights_; }
  // Other memory for weights that have a section in the file; no task of the block is under way.
  Status Bind(void* weights);
  [[nodiscard]] float* state(int32_t array) const;  // RAM; null when on disk or out of range
  [[nodiscard]] int64_t state_reserved_bytes() const { return state_bytes_; }
  [[nodiscard]] const File& file(int32_t slot) const { return files_[slot]; }
  [[nodiscard]] const Runs* runs() const { return runs_.get(); }  // null: the weights are in slots, or in RAM
  // Of one staging buffer.
  [[nodiscard]] int64_t staged_bytes() const { return runs_ == nullptr ? layout_.staged_bytes() : runs_->staged_bytes(); }

  // Stable while a task of the block runs.
  [[nodiscard]] const SlotContent& newest() const { return newest_; }
  [[nodiscard]] bool stored() const { return newest_.rewrite.slot >= 0; }
  // Whether what is read of it is compared with its digests, where it has any.
  [[nodiscard]] bool checks_digests() const { return newest_.recovered || store_->verifies_digests(); }
  // The slot for a rewrite: not the one that the last record names or, while one is pending, will name.
  [[nodiscard]] int32_t target_slot(bool record_pending) const;
  // Before a slot is written: one whose file has other names, as checkpoints by hard links have them, gets a fresh file.
  Status Unlink(int32_t slot);
  void SetNewest(SlotContent content);
  // Slot and step for other threads; slot -1 when nothing was stored.
  void Newest(int32_t* slot, int64_t* step) const;
  // The slot that the last record names; -1: none.
  [[nodiscard]] int32_t committed_slot() const;
  // Reads and checks the head of the slot that a record names.
  Status Apply(const CommittedBlock& committed);

  // The spare copy of arrays in RAM, for updates that may be taken back; null for arrays in the file. Chunk by chunk, any
  // number of chunks at a time. A chunk is brought back only if the update of this ticket has saved it.
  Status ReserveSpare();
  void BeginSpare(int64_t update);
  void SaveChunk(int64_t chunk);
  [[nodiscard]] bool HasSpare(int64_t update) const { return spare_of_ == update && !saved_.empty(); }
  void RestoreChunk(int64_t chunk);
  // A rewrite that may be taken back has replaced the newest content.
  void Replace(int64_t update, SlotContent content);
  // Undoes that; nothing if this update never came so far.
  void TakeBack(int64_t update);
  // A submitted rewrite will not be.
  void ForgetRewrite(int64_t ticket);

  // The engine's, under its mutex.
  int64_t last_task = 0;          // the ticket that the next task of this block follows
  int64_t rewrites = 0;           // submitted since the last commit was, and not taken back
  bool content_promised = false;  // a submitted task stores, or something is stored
  bool state_promised = false;
  int64_t speculation = 0;               // the update that awaits its verdict; 0: none
  bool content_promised_before = false;  // before that update
  bool state_promised_before = false;
  bool unsynced[2] = {false, false};
  std::atomic<int64_t> pending{0};    // tasks not DONE
  std::atomic<bool> retired = false;  // commits submitted later do not name it

 private:
  Block() = default;
  Status OpenFiles(bool create);
  Status ReserveState();
  template <class Copy>
  void ForSpareRuns(int64_t chunk, const Copy& copy);

  Store* store_ = nullptr;
  int32_t disk_ = 0;
  Layout layout_;
  uint8_t* weights_ = nullptr;
  uint8_t* state_ = nullptr;
  int64_t state_bytes_ = 0;
  std::vector<int64_t> state_offsets_;
  File files_[2];
  std::unique_ptr<Runs> runs_;
  mutable std::mutex newest_mutex_;  // a leaf: nothing is locked under it
  SlotContent newest_;
  SlotContent replaced_;  // what the rewrite of ticket replaced_by_ has replaced
  int64_t replaced_by_ = 0;
  uint8_t* spare_ = nullptr;
  int64_t spare_bytes_ = 0;
  int64_t spare_of_ = 0;        // the update that saves there
  std::vector<uint8_t> saved_;  // by chunk
};

}  // namespace hetero

#endif  // HETERO_STORE_H_
