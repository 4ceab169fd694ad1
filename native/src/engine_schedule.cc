// How units move: reads, computes and writes of all running tasks, in their order, within staging and queue depth.
#include <algorithm>
#include <tuple>
#include <utility>

#include "clock.h"
#include "engine.h"

namespace hetero {

namespace {

// Before the others: what may compute, by priority, then submission; then opened updates in submission order.
auto Rank(const Task& task) {
  const bool opened = !task.may_compute();
  return std::make_tuple(opened, opened ? int64_t{0} : task.priority, task.ticket);
}

// Of one priority writes go first: they set staging free.
auto Rank(const Transfer& transfer) {
  const Task& task = *transfer.task;
  const bool opened = !task.may_compute();
  return std::make_tuple(opened, opened ? int64_t{0} : task.priority, transfer.kind == IoKind::kRead, task.ticket,
                         transfer.sequence);
}

}  // namespace

void AddTransfer(Transfers* transfers, IoKind kind, const File& file, void* buffer, int64_t bytes, int64_t offset) {
  auto transfer = std::make_unique<Transfer>();
  transfer->kind = kind;
  transfer->fd = file.fd();
  transfer->disk = file.disk();
  transfer->path = file.path().c_str();
  transfer->buffer = buffer;
  transfer->bytes = bytes;
  transfer->offset = offset;
  transfers->push_back(std::move(transfer));
}

void Engine::SortRunning() {
  if (!std::exchange(unsorted_, false)) return;
  std::sort(running_.begin(), running_.end(), [](const Task* a, const Task* b) { return Rank(*a) < Rank(*b); });
}

// Begins all units that may begin. Tasks may end or start meanwhile, so the list is walked again until nothing changes.
void Engine::Schedule() {
  for (bool again = true; again;) {
    again = false;
    SortRunning();
    for (size_t i = 0; i < running_.size() && !again; ++i) again = BeginUnits(running_[i]);
  }
}

// True when the list of running tasks may have changed.
bool Engine::BeginUnits(Task* task) {
  const size_t most = static_cast<size_t>(2 * (num_threads_ + queue_depth_));
  while (!task->draining && task->next_unit < task->num_units) {
    uint8_t* buffer = nullptr;
    if (task->staged()) {
      buffer = AcquireStaging(*task);
      if (buffer == nullptr) return false;
    } else if (!task->may_compute() || task->units.size() >= most) {
      return false;
    }
    auto unit = std::make_unique<Unit>();
    unit->task = task;
    unit->index = task->next_unit++;
    unit->staging = buffer;
    Transfers transfers;
    task->Reads(unit.get(), &transfers);
    Unit* raw = unit.get();
    task->units.push_back(std::move(unit));
    if (!transfers.empty()) {
      Queue(task, raw, std::move(transfers));
      continue;
    }
    Loaded(raw);
    if (task->phase == TaskPhase::kDone || unsorted_) return true;
  }
  return false;
}

uint8_t* Engine::AcquireStaging(const Task& task) {
  const int32_t disk = task.block()->disk();
  if (!task.may_compute()) return staging_.num_free(disk) > kPrefetchReserve ? staging_.Acquire(disk) : nullptr;
  if (staging_.num_free(disk) == 0 && !TakeBack(disk)) return nullptr;
  return staging_.Acquire(disk);
}

void Engine::ReleaseStaging(Unit* unit) {
  if (unit->staging != nullptr) staging_.Release(unit->task->block()->disk(), unit->staging);
}

// Drops the last chunk read ahead by the opened update that is last in order among those of a disk.
bool Engine::TakeBack(int32_t disk) {
  SortRunning();
  for (size_t i = running_.size(); i-- > 0;) {
    Task* task = running_[i];
    if (task->may_compute()) return false;
    if (task->block()->disk() != disk) continue;
    if (task->units.empty() || task->units.back()->in_flight > 0) continue;
    DropUnit(task, task->units.back().get());
    return true;
  }
  return false;
}

void Engine::DropUnit(Task* task, Unit* unit) {
  std::erase_if(queued_, [unit](const std::unique_ptr<Transfer>& t) { return t->unit == unit; });
  ReleaseStaging(unit);
  task->next_unit = unit->index;
  task->units.pop_back();
}

void Engine::Queue(Task* task, Unit* unit, Transfers transfers) {
  for (std::unique_ptr<Transfer>& transfer : transfers) {
    transfer->engine = this;
    transfer->task = task;
    transfer->unit = unit;
    transfer->sequence = next_sequence_++;
    transfer->done = &Engine::OnTransferDone;
    (unit == nullptr ? task->epilogue_transfers : unit->transfers) += 1;
    queued_.push_back(std::move(transfer));
  }
}

void Engine::Loaded(Unit* unit) {
  unit->phase = UnitPhase::kLoaded;
  if (!unit->task->computes()) return Computed(unit);
  if (unit->task->may_compute()) work_.notify_one();
}

void Engine::Computed(Unit* unit) {
  Task* task = unit->task;
  unit->phase = UnitPhase::kWriting;
  if (task->units_computed == 0) {
    const Status status = task->BeginWrites();
    if (!status.ok()) return Poison(task, status);
  }
  Transfers transfers;
  task->Writes(unit, &transfers);
  Queue(task, unit, std::move(transfers));
  if (++task->units_computed == task->num_units) {
    Transfers epilogue;
    task->Epilogue(&epilogue);
    Queue(task, nullptr, std::move(epilogue));
    task->epilogue_begun = true;
    if (task->ready_when_computed()) {
      task->ready = true;
      task->times.ready_ns = MonotonicNs();
      changed_.notify_all();
    }
  }
  if (unit->transfers == 0) UnitDone(unit);
}

void Engine::UnitDone(Unit* unit) {
  Task* task = unit->task;
  ReleaseStaging(unit);
  ++task->units_done;
  std::erase_if(task->units, [unit](const std::unique_ptr<Unit>& u) { return u.get() == unit; });
  MaybeFinish(task);
}

Unit* Engine::PickUnit() {
  SortRunning();
  for (Task* task : running_) {
    if (!task->may_compute()) return nullptr;
    if (task->draining) continue;
    for (const std::unique_ptr<Unit>& unit : task->units) {
      if (unit->phase != UnitPhase::kLoaded) continue;
      Transfers late;
      task->LateReads(unit.get(), &late);
      if (late.empty()) return unit.get();
      unit->phase = UnitPhase::kReading;
      Queue(task, unit.get(), std::move(late));
    }
  }
  return nullptr;
}

Transfers::iterator Engine::NextTransfer() {
  auto best = queued_.end();
  for (auto it = queued_.begin(); it != queued_.end(); ++it) {
    if (HasRoom((*it)->disk) && (best == queued_.end() || Rank(**it) < Rank(**best))) best = it;
  }
  return best;
}

void Engine::Flush(Lock* lock) {
  Transfers batch;
  for (auto best = NextTransfer(); best != queued_.end(); best = NextTransfer()) {
    Transfer* transfer = best->get();
    ++in_flight_[static_cast<size_t>(transfer->disk)];
    ++transfer->task->busy;
    if (transfer->unit != nullptr) ++transfer->unit->in_flight;
    batch.push_back(std::move(*best));
    *best = std::move(queued_.back());
    queued_.pop_back();
  }
  // While stopping, tasks that were taken back may still be named as successors.
  if (!stopping_) {
    for (const int64_t ticket : std::exchange(garbage_, {})) tasks_.erase(ticket);
  }
  lock->unlock();
  for (std::unique_ptr<Transfer>& transfer : batch) backend_->Submit(transfer.release());
}

}  // namespace hetero
