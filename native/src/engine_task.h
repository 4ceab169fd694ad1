// Tasks: what a ticket stands for, cut into units (chunks) that are read, computed and written independently.
//
// Ownership: the engine owns tasks, units and transfers. A task refers to its block, store and the caller's gradients.
// Thread-safety: everything is guarded by the engine's mutex, except Compute, which runs on an update thread without it and
// has its unit to itself; what Compute reads of the task does not change once the task may compute.
// Failure: a Status from Start or Compute poisons the engine.
#ifndef HETERO_ENGINE_TASK_H_
#define HETERO_ENGINE_TASK_H_

#include <stdint.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "hetero/api.h"
#include "io.h"
#include "status.h"
#include "store.h"

namespace hetero {

class Engine;
class Task;

enum class UnitPhase : uint8_t { kReading, kLoaded, kComputing, kWriting };

// A part of a task on its way through memory.
struct Unit {
  Task* task = nullptr;
  int64_t index = 0;
  UnitPhase phase = UnitPhase::kReading;
  uint8_t* staging = nullptr;  // null where nothing is staged
  int32_t transfers = 0;       // queued or in flight
  int32_t in_flight = 0;
  bool weights_read = false;  // the staged weights are those of the source slot
};

struct Transfer : IoRequest {
  Engine* engine = nullptr;
  Task* task = nullptr;
  Unit* unit = nullptr;  // null: the task's epilogue
  int64_t sequence = 0;
  int64_t beyond = 0;  // bytes that nobody wants: pages are moved whole
};

using Transfers = std::vector<std::unique_ptr<Transfer>>;

void AddTransfer(Transfers* transfers, IoKind kind, const File& file, void* buffer, int64_t bytes, int64_t offset);

// What hetero_arm_update hands over.
struct Gradients {
  std::vector<hetero_segment> segments;  // sorted by offset, disjoint
  std::vector<hetero_hyper> hypers;
  float scale = 1.0f;
  int64_t step = 0;
};

enum class TaskPhase : uint8_t { kWaiting, kRunning, kDone };

class Task {
 public:
  explicit Task(Block* block) : block_(block) {}
  virtual ~Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  [[nodiscard]] Block* block() const { return block_; }  // null: a commit
  [[nodiscard]] virtual Store* store() const { return block_ == nullptr ? nullptr : block_->store(); }
  [[nodiscard]] virtual bool rewrites() const { return false; }  // writes a slot of the block
  [[nodiscard]] virtual bool commits() const { return false; }
  [[nodiscard]] virtual bool staged() const { return false; }   // every unit needs a staging buffer
  [[nodiscard]] virtual bool computes() const { return true; }  // units pass through an update thread
  [[nodiscard]] virtual bool ready_when_computed() const { return false; }
  [[nodiscard]] virtual bool speculative() const { return false; }  // the block awaits a verdict on it
  [[nodiscard]] virtual int64_t takes_back() const { return 0; }    // the update that it stops and undoes

  // Submission: whether the protocol allows the task after all that were submitted before. Changes nothing on failure.
  virtual Status Admit() { return Status::Ok(); }
  // Its edges are met: how many units there are.
  virtual Status Start(int64_t* num_units) = 0;
  // Transfers that a unit needs before it can compute; LateReads once more when the task may compute.
  virtual void Reads(Unit*, Transfers*) {}
  virtual void LateReads(Unit*, Transfers*) {}
  virtual Status Compute(Unit*) { return Status::Ok(); }
  // Before the first Writes: the first unit has computed.
  virtual Status BeginWrites() { return Status::Ok(); }
  virtual void Writes(Unit*, Transfers*) {}
  // Transfers after the last unit has computed.
  virtual void Epilogue(Transfers*) {}
  // All transfers have completed.
  virtual void Finish() {}
  // Updates only.
  virtual Status Arm(Gradients) { return Fail(HETERO_ESTATE, "ticket %lld is not an update", static_cast<long long>(ticket)); }

  // Scheduling state, the engine's.
  int64_t ticket = 0;
  int64_t priority = 0;
  TaskPhase phase = TaskPhase::kWaiting;
  bool armed = true;  // false: an update without gradients yet
  bool cancelled = false;
  bool draining = false;  // nothing new begins; it ends when what is in flight has come back
  bool ready = false;
  bool released = false;
  bool epilogue_begun = false;
  Status status;
  int32_t start_edges = 0;    // tasks to wait for before it starts
  int32_t write_edges = 0;    // commits to wait for before it computes and writes
  std::vector<Task*> starts;  // tasks that wait for this one
  std::vector<Task*> writes;
  int64_t num_units = 0;
  int64_t next_unit = 0;
  int64_t units_computed = 0;
  int64_t units_done = 0;
  int32_t epilogue_transfers = 0;
  int32_t busy = 0;                         // transfers in flight and running Computes
  std::deque<std::unique_ptr<Unit>> units;  // begun, not done, by index
  hetero_times times{};

  [[nodiscard]] bool may_compute() const { return armed && write_edges == 0; }

 private:
  Block* block_;
};

}  // namespace hetero

#endif  // HETERO_ENGINE_TASK_H_
