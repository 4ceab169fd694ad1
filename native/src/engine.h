// The engine: carries out tasks with one I/O back end, update threads and bounded staging memory.
//
// Ownership: owns tasks, staging, threads and the back end. Blocks, stores, weight memory, gradients and patch data stay the
// callers' until the ticket is DONE. Thread-safety: every function from any thread, except that nothing may be called while
// or after the destructor runs. Failure: the first error of a transfer or check poisons the engine: nothing is written any
// more, its task ends with that error, all other tasks and later submits with EPOISONED. Nothing ever hangs on an error.
//
// [Note: Engine locks]
// One mutex guards all scheduling state: tasks, units, queues, staging, and the fields of stores and blocks marked as the
// engine's. Back-end threads and update threads take it for bookkeeping only; Compute, IoBackend::Submit and system calls
// run without it. Block's newest_mutex_ is the only lock taken inside.
//
// [Note: Order and staging]
// Tasks that may compute come first (by priority, then submission), then updates that are only opened. Each in turn begins
// units while buffers last. An opened update leaves kPrefetchReserve buffers free, and a task that may compute takes loaded
// buffers back from opened ones, whose chunks are then read again. So a task that may compute always gets a buffer, and a unit
// with a buffer needs nothing more to complete: there is no deadlock with 3 buffers or any number of tasks.
// All of this holds for each disk by itself: disks have buffers of their own, and a queue depth each.
#ifndef HETERO_ENGINE_H_
#define HETERO_ENGINE_H_

#include <stdint.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine_staging.h"
#include "engine_task.h"
#include "hetero/api.h"
#include "io.h"
#include "status.h"

namespace hetero {

class Engine {
 public:
  static constexpr int64_t kPrefetchReserve = 2;

  // `backend` null: the one that the options ask for. Tests pass their own.
  static Status Create(const hetero_engine_options& options, std::unique_ptr<IoBackend> backend, std::unique_ptr<Engine>* out,
                       int32_t num_disks = 1);
  // As Shutdown.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes opened updates and tasks that have not started back, waits for the others, joins all threads. The first error, or OK.
  Status Shutdown();

  Status Submit(std::unique_ptr<Task> task, const hetero_task& order, int64_t* ticket);
  Status Arm(int64_t ticket, Gradients gradients, int64_t priority);
  Status Cancel(int64_t ticket);
  // The verdict on the block's speculative update: it holds.
  Status Keep(Block* block);
  Status Wait(int64_t ticket, bool done, double timeout_s);
  // 0, HETERO_READY or HETERO_DONE.
  Status Poll(int64_t ticket, int32_t* state);
  Status Release(int64_t ticket);
  Status Times(int64_t ticket, hetero_times* out);
  hetero_engine_stats Stats();
  int64_t BytesBeyond();
  Status ResizeStaging(int64_t bytes);
  Status first_error();
  // The block of an update that waits to be armed, for the validation of segments; ESTATE when the ticket is none.
  Status FindUpdateBlock(int64_t ticket, const Block** block);
  [[nodiscard]] int32_t io_backend() const { return backend_->kind(); }
  [[nodiscard]] int64_t buffer_bytes() const { return staging_.buffer_bytes(); }

 private:
  using Lock = std::unique_lock<std::mutex>;

  Engine() = default;
  void RunWorker();
  static void OnTransferDone(IoRequest* request, const Status& status);
  void CompleteTransfer(std::unique_ptr<Transfer> transfer, const Status& status);
  static Status Poisoned(const Status& first);

  // engine.cc: tickets. All under the mutex from here on.
  Status Find(int64_t ticket, Task** task);
  void AddEdges(Task* task, const hetero_task& order);
  bool AddEdge(int64_t ticket, std::vector<Task*> Task::* list, Task* task);
  void Stop(Task* task);

  // engine_progress.cc: tasks.
  void StartTask(Task* task);
  void FinishTask(Task* task);
  void Unlink(Task* task);
  void MaybeFinish(Task* task);
  void Poison(Task* task, const Status& status);
  void Drain(Task* task);
  void MaybeDrained(Task* task);

  // engine_schedule.cc: units.
  void Schedule();
  bool BeginUnits(Task* task);
  uint8_t* AcquireStaging(const Task& task);
  bool TakeBack(int32_t disk);
  void ReleaseStaging(Unit* unit);
  void DropUnit(Task* task, Unit* unit);
  void Queue(Task* task, Unit* unit, Transfers transfers);
  void Loaded(Unit* unit);
  void Computed(Unit* unit);
  void UnitDone(Unit* unit);
  Unit* PickUnit();
  void SortRunning();
  [[nodiscard]] bool HasRoom(int32_t disk) const { return in_flight_[static_cast<size_t>(disk)] < queue_depth_; }
  // The best queued transfer of a disk that may have another one in flight; the end where there is none.
  Transfers::iterator NextTransfer();
  // Hands queued transfers to the back end, best first, while the queue depth of their disks allows; unlocks.
  void Flush(Lock* lock);

  std::mutex mutex_;
  std::condition_variable work_;     // update threads: a unit may be loaded
  std::condition_variable changed_;  // waiters: a task became READY or DONE
  std::unordered_map<int64_t, std::unique_ptr<Task>> tasks_;
  std::vector<Task*> running_;    // started, not DONE; in order unless unsorted_
  std::vector<int64_t> garbage_;  // released and DONE
  Transfers queued_;
  Staging staging_;
  Status first_error_;
  int64_t next_ticket_ = 1;
  int64_t next_sequence_ = 1;
  int64_t num_open_ = 0;            // tasks not DONE
  std::vector<int32_t> in_flight_;  // by disk
  int32_t queue_depth_ = 1;         // of each disk
  int32_t num_threads_ = 1;
  bool unsorted_ = false;
  bool stopping_ = false;  // no submits
  bool stop_workers_ = false;
  hetero_engine_stats stats_{};
  int64_t bytes_beyond_ = 0;

  std::unique_ptr<IoBackend> backend_;
  std::vector<std::thread> workers_;
};

}  // namespace hetero

#endif  // HETERO_ENGINE_H_
