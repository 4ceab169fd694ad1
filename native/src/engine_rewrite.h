// The tasks that write a block anew: the optimizer update and the store of patches.
//
// Ownership, thread-safety, failure: as engine_task.h says.
//
// [Note: Rewrites]
// Chunk by chunk: what the new chunk needs of the newest slot is read into staging, changed there, stamped and written to the
// slot that no record names from the same memory; the second time between two commits that is the slot it was read from. Arrays
// in RAM, and weights that are resident, are changed in place; resident weights are written straight from the weight memory.
// When all chunks have been computed the head is written; when all of it is written the slot becomes the newest. Reading may
// run ahead of a pending commit, computing and writing may not; nor may the slot get a fresh file before, since until then the
// record on the disk names it.
#ifndef HETERO_ENGINE_REWRITE_H_
#define HETERO_ENGINE_REWRITE_H_

#include <stdint.h>

#include <vector>

#include "engine_tasks.h"

namespace hetero {

class RewriteTask : public Task {
 public:
  RewriteTask(Block* block, bool weights_from_memory);
  [[nodiscard]] bool rewrites() const override { return block()->layout().has_file(); }
  [[nodiscard]] bool staged() const override { return weights_staged_ || state_staged_; }
  Status Admit() override;
  Status Start(int64_t* num_units) override;
  void Reads(Unit* unit, Transfers* transfers) override;
  Status Compute(Unit* unit) override;
  Status BeginWrites() override;
  void Writes(Unit* unit, Transfers* transfers) override;
  void Epilogue(Transfers* transfers) override;
  void Finish() override;

 protected:
  virtual void Change(Unit* unit) = 0;
  // The old weights of a staged chunk are needed.
  virtual bool NeedsWeights(int64_t chunk) const = 0;

  void ReadWeights(Unit* unit, Transfers* transfers);
  [[nodiscard]] uint8_t* WeightsOf(const Unit& unit) const;  // of the unit's first element, in staging or memory
  [[nodiscard]] float* StateOf(const Unit& unit, int32_t array) const;

  bool weights_staged_;       // otherwise they are taken from, and changed in, the weight memory
  bool state_staged_;         // the state is written to the file
  bool has_state_ = false;    // the source slot's state is read
  bool speculative_ = false;  // what it replaces is kept until the verdict
  int64_t step_ = 0;

 private:
  Status LoadStaged(Unit* unit);

  Rewrite target_;
  std::vector<Digest> weight_digests_;
  Pages head_;
};

class UpdateTask final : public RewriteTask {
 public:
  UpdateTask(Block* block, bool weights_resident, bool speculative);
  [[nodiscard]] bool ready_when_computed() const override { return !weights_staged_; }
  [[nodiscard]] bool speculative() const override { return speculative_; }
  Status Admit() override;
  Status Start(int64_t* num_units) override;
  void LateReads(Unit* unit, Transfers* transfers) override;
  Status Arm(Gradients gradients) override;

 protected:
  void Change(Unit* unit) override;
  bool NeedsWeights(int64_t chunk) const override;

 private:
  // The first segment that ends after element `begin`.
  [[nodiscard]] std::vector<hetero_segment>::const_iterator FirstSegment(int64_t begin) const;

  Gradients gradients_;
};

// Takes the block's speculative update back, see [Note: Speculation] in api.h.
class DiscardTask final : public Task {
 public:
  using Task::Task;
  [[nodiscard]] int64_t takes_back() const override { return update_; }
  Status Admit() override;
  Status Start(int64_t* num_units) override;
  Status Compute(Unit* unit) override;
  void Finish() override;

 private:
  int64_t update_ = 0;
};

class StoreTask final : public RewriteTask {
 public:
  StoreTask(Block* block, std::vector<hetero_patch> patches, bool weights_from_memory, int64_t step);
  Status Admit() override;

 protected:
  void Change(Unit* unit) override;
  bool NeedsWeights(int64_t chunk) const override;

 private:
  [[nodiscard]] bool Patches(bool (*wanted)(int32_t array)) const;

  std::vector<hetero_patch> patches_;
};

}  // namespace hetero

#endif  // HETERO_ENGINE_REWRITE_H_
