// The tasks that rewrite nothing: fetch, release, read, and the commit.
//
// Ownership, thread-safety, failure: as engine_task.h says.
#ifndef HETERO_ENGINE_TASKS_H_
#define HETERO_ENGINE_TASKS_H_

#include <stdint.h>

#include <string>
#include <vector>

#include "engine_task.h"

namespace hetero {

// Weights of the newest slot into the weight memory, in transfers of several chunks. Nothing to do for weights in RAM. Weights
// that are read in place go through staging.
class FetchTask final : public Task {
 public:
  using Task::Task;
  Status Admit() override;
  Status Start(int64_t* num_units) override;
  [[nodiscard]] bool staged() const override { return block()->runs() != nullptr; }
  [[nodiscard]] bool computes() const override { return check_ || staged(); }
  void Reads(Unit* unit, Transfers* transfers) override;
  Status Compute(Unit* unit) override;

 private:
  [[nodiscard]] int64_t LastChunk(const Unit& unit) const;

  bool check_ = false;
  int64_t chunks_per_unit_ = 1;
};

// Gives the pages of the weight memory back.
class ReleaseTask final : public Task {
 public:
  using Task::Task;
  Status Admit() override;
  Status Start(int64_t* num_units) override;
  Status Compute(Unit* unit) override;
};

// Copies runs of arrays out, chunk by chunk; arrays on disk go through staging.
class ReadTask final : public Task {
 public:
  ReadTask(Block* block, std::vector<hetero_patch> patches);
  [[nodiscard]] bool staged() const override { return weights_from_file_ || state_from_file_; }
  Status Admit() override;
  Status Start(int64_t* num_units) override;
  void Reads(Unit* unit, Transfers* transfers) override;
  Status Compute(Unit* unit) override;

 private:
  void CopyRuns(const Unit& unit) const;

  std::vector<hetero_patch> patches_;
  bool weights_from_file_ = false;
  bool state_from_file_ = false;
  bool state_is_zero_ = false;
  std::vector<int64_t> chunks_;  // those that hold a part of a patch; of weights that are read in place: units
};

// Flushes (power), writes the record, and makes the newest slots the committed ones.
class CommitTask final : public Task {
 public:
  CommitTask(Store* store, int64_t step, std::string user)
      : Task(nullptr), store_(store), step_(step), user_(std::move(user)) {}
  [[nodiscard]] Store* store() const override { return store_; }
  [[nodiscard]] bool commits() const override { return true; }
  Status Admit() override;
  Status Start(int64_t* num_units) override;
  void Reads(Unit* unit, Transfers* transfers) override;
  Status Compute(Unit* unit) override;
  void Writes(Unit* unit, Transfers* transfers) override;
  void Finish() override;

 private:
  Store* store_;
  int64_t step_;
  std::string user_;
  CommitRecord record_;
  std::vector<int32_t> retired_;  // ids of blocks that it leaves out
  int64_t num_bytes_ = 0;
  Pages bytes_;
};

// The part of `patch` inside a chunk: elements [begin, end) of the block; empty when begin >= end.
struct Overlap {
  int64_t begin = 0;
  int64_t end = 0;
};
Overlap OverlapOf(const Layout& layout, int64_t chunk, int64_t offset, int64_t numel);

// Transfers of one chunk's sections between a slot's file and memory.
void AddWeights(Transfers* transfers, IoKind kind, const Block& block, int32_t slot, int64_t chunk, uint8_t* memory);
void AddState(Transfers* transfers, IoKind kind, const Block& block, int32_t slot, int64_t chunk, uint8_t* memory);

// The transfers of one unit of weights that are read in place.
void AddRuns(Transfers* transfers, const Runs& runs, const RunUnit& unit, uint8_t* staging);

// Checks what was read from the newest slot.
Status CheckStagedState(const Block& block, int64_t chunk, const uint8_t* image);
Status CheckStagedWeights(const Block& block, int64_t chunk, const uint8_t* weights);

}  // namespace hetero

#endif  // HETERO_ENGINE_TASKS_H_
