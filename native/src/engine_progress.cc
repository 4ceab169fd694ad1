// How tasks begin, go on and end: by what the update threads compute, by transfers that complete, by errors.
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "clock.h"
#include "engine.h"

namespace hetero {

Status Engine::Poisoned(const Status& first) {
  return Status(HETERO_EPOISONED, "the engine stopped at an earlier error: " + first.message());
}

void Engine::StartTask(Task* task) {
  task->phase = TaskPhase::kRunning;
  if (task->cancelled) return FinishTask(task);
  task->times.started_ns = MonotonicNs();
  running_.push_back(task);
  unsorted_ = true;
  const Status status = task->Start(&task->num_units);
  if (!status.ok()) return Poison(task, status);
  if (task->num_units > 0) return;
  task->epilogue_begun = true;
  MaybeFinish(task);
}

void Engine::MaybeFinish(Task* task) {
  if (task->phase != TaskPhase::kRunning || task->draining || !task->epilogue_begun) return;
  if (task->units_done == task->num_units && task->epilogue_transfers == 0) FinishTask(task);
}

// The task is over: well, cancelled, or with the error in its status.
void Engine::FinishTask(Task* task) {
  if (task->status.ok() && !task->cancelled) task->Finish();
  task->phase = TaskPhase::kDone;
  task->times.done_ns = MonotonicNs();
  if (task->status.ok() && task->times.ready_ns == 0) task->times.ready_ns = task->times.done_ns;
  task->ready = true;
  if (Block* block = task->block()) --block->pending;
  if (task->commits()) --task->store()->pending;
  --num_open_;
  ++stats_.tasks_done;
  if (task->released) garbage_.push_back(task->ticket);
  if (task->write_edges > 0) Unlink(task);
  std::erase(running_, task);
  changed_.notify_all();
  if (!task->status.ok()) return;  // the engine is poisoned or stops: those that wait are ended by that
  for (Task* next : task->writes) {
    if (--next->write_edges == 0) unsorted_ = true;
  }
  if (!task->writes.empty()) work_.notify_all();
  for (Task* next : std::exchange(task->starts, {})) {
    if (--next->start_edges == 0 && next->phase == TaskPhase::kWaiting) StartTask(next);
  }
}

// A task that was taken back is over before the commit that it would have waited for.
void Engine::Unlink(Task* task) {
  for (auto& [ticket, other] : tasks_) std::erase(other->writes, task);
  task->write_edges = 0;
}

void Engine::Poison(Task* task, const Status& status) {
  if (task->status.ok() || task->status.code() == HETERO_EPOISONED) task->status = status;
  if (!first_error_.ok()) return;
  first_error_ = status;
  std::vector<Task*> open;
  for (auto& [ticket, other] : tasks_) {
    if (other->phase != TaskPhase::kDone) open.push_back(other.get());
  }
  for (Task* other : open) {
    if (other != task && other->status.ok()) other->status = Poisoned(first_error_);
    Drain(other);
  }
}

// Begins the end of a task that will not complete.
void Engine::Drain(Task* task) {
  if (task->phase == TaskPhase::kDone || task->draining) return;
  task->draining = true;
  std::erase_if(queued_, [task](const std::unique_ptr<Transfer>& t) { return t->task == task; });
  MaybeDrained(task);
}

void Engine::MaybeDrained(Task* task) {
  if (!task->draining || task->busy > 0 || task->phase == TaskPhase::kDone) return;
  for (const std::unique_ptr<Unit>& unit : task->units) {
    ReleaseStaging(unit.get());
  }
  task->units.clear();
  FinishTask(task);
}

void Engine::RunWorker() {
  pthread_setname_np(pthread_self(), "hetero-update");
  Lock lock(mutex_);
  while (!stop_workers_) {
    Unit* unit = PickUnit();
    if (unit == nullptr) {
      // LateReads may have been queued while looking.
      if (NextTransfer() != queued_.end()) {
        Flush(&lock);
        lock.lock();
        continue;
      }
      work_.wait(lock);
      continue;
    }
    Task* task = unit->task;
    unit->phase = UnitPhase::kComputing;
    ++task->busy;
    lock.unlock();
    const int64_t begin_ns = MonotonicNs();
    const Status status = task->Compute(unit);
    const int64_t end_ns = MonotonicNs();
    lock.lock();
    --task->busy;
    task->times.compute_busy_ns += end_ns - begin_ns;
    if (!status.ok()) Poison(task, status);
    if (task->draining) {
      MaybeDrained(task);
    } else {
      Computed(unit);
    }
    Schedule();
    Flush(&lock);
    lock.lock();
  }
}

void Engine::OnTransferDone(IoRequest* request, const Status& status) {
  std::unique_ptr<Transfer> transfer(static_cast<Transfer*>(request));
  Engine* engine = transfer->engine;
  engine->CompleteTransfer(std::move(transfer), status);
}

void Engine::CompleteTransfer(std::unique_ptr<Transfer> transfer, const Status& status) {
  Lock lock(mutex_);
  Task* task = transfer->task;
  Unit* unit = transfer->unit;
  --in_flight_[static_cast<size_t>(transfer->disk)];
  --task->busy;
  const int64_t busy_ns = transfer->finished_ns - transfer->started_ns;
  const bool read = transfer->kind == IoKind::kRead;
  (read ? task->times.read_busy_ns : task->times.write_busy_ns) += busy_ns;
  if (status.ok() && transfer->kind != IoKind::kDataSync) {
    (read ? task->times.bytes_read : task->times.bytes_written) += transfer->bytes;
    (read ? stats_.bytes_read : stats_.bytes_written) += transfer->bytes;
    bytes_beyond_ += transfer->beyond;
  }
  if (unit == nullptr) {
    --task->epilogue_transfers;
  } else {
    --unit->in_flight;
    --unit->transfers;
  }
  if (!status.ok()) Poison(task, status);
  if (task->draining) {
    MaybeDrained(task);
  } else if (unit == nullptr) {
    MaybeFinish(task);
  } else if (unit->transfers == 0) {
    unit->phase == UnitPhase::kReading ? Loaded(unit) : UnitDone(unit);
  }
  Schedule();
  Flush(&lock);
}

}  // namespace hetero
