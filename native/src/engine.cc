// What callers ask of the engine: tasks are submitted, armed, taken back, waited for.
#include "engine.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "clock.h"

namespace hetero {

namespace {

Status NoTicket(int64_t ticket) {
  return Fail(HETERO_ESTATE, "ticket %lld is unknown or released", static_cast<long long>(ticket));
}

Status CheckOptions(const hetero_engine_options& o) {
  if (o.update_threads < 1 || o.update_threads > 1024)
    return Fail(HETERO_EINVAL, "options.update_threads is %d; allowed: 1 to 1024", o.update_threads);
  if (o.queue_depth < 1 || o.queue_depth > 1024)
    return Fail(HETERO_EINVAL, "options.queue_depth is %d; allowed: 1 to 1024", o.queue_depth);
  if (o.staging_bytes < 0) return Fail(HETERO_EINVAL, "options.staging_bytes is %lld", static_cast<long long>(o.staging_bytes));
  return Status::Ok();
}

}  // namespace

Status Engine::Create(const hetero_engine_options& options, std::unique_ptr<IoBackend> backend, std::unique_ptr<Engine>* out,
                      int32_t num_disks) {
  HETERO_RETURN_IF_ERROR(CheckOptions(options));
  if (num_disks < 1 || num_disks > kMaxDisks)
    return Fail(HETERO_EINVAL, "num_disks is %d; allowed: 1 to %d", num_disks, kMaxDisks);
  std::unique_ptr<Engine> engine(new Engine);
  HETERO_RETURN_IF_ERROR(engine->staging_.Create(options.staging_bytes, options.chunk_bytes_max, num_disks));
  engine->backend_ = std::move(backend);
  if (engine->backend_ == nullptr) HETERO_RETURN_IF_ERROR(MakeIoBackend(options, &engine->backend_, num_disks));
  engine->in_flight_.resize(static_cast<size_t>(num_disks));
  engine->queue_depth_ = options.queue_depth;
  engine->num_threads_ = options.update_threads;
  try {
    for (int32_t i = 0; i < options.update_threads; ++i) {
      engine->workers_.emplace_back([raw = engine.get()] { raw->RunWorker(); });
    }
  } catch (const std::system_error& error) {
    return Fail(HETERO_ENOMEM, "update thread %zu of %d could not be started: %s", engine->workers_.size(),
                options.update_threads, error.what());
  }
  *out = std::move(engine);
  return Status::Ok();
}

Engine::~Engine() { (void)Shutdown().ok(); }

Status Engine::Shutdown() {
  Lock lock(mutex_);
  stopping_ = true;
  std::vector<Task*> idle;
  for (auto& [ticket, task] : tasks_) {
    if (task->phase == TaskPhase::kWaiting || (task->phase == TaskPhase::kRunning && !task->may_compute()))
      idle.push_back(task.get());
  }
  for (Task* task : idle) {
    if (task->phase == TaskPhase::kDone || task->draining) continue;
    task->cancelled = true;
    task->status = Fail(HETERO_ESTATE, "the engine was destroyed before the task started");
    Drain(task);
  }
  Schedule();
  Flush(&lock);
  lock.lock();
  changed_.wait(lock, [this] { return num_open_ == 0; });
  stop_workers_ = true;
  work_.notify_all();
  lock.unlock();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  backend_.reset();
  return first_error_;
}

Status Engine::Submit(std::unique_ptr<Task> owned, const hetero_task& order, int64_t* ticket) {
  Lock lock(mutex_);
  if (!first_error_.ok()) return Poisoned(first_error_);
  if (stopping_) return Fail(HETERO_ESTATE, "the engine is being destroyed");
  for (int32_t i = 0; i < order.num_after; ++i) {
    if (order.after[i] <= 0 || order.after[i] >= next_ticket_)
      return Fail(HETERO_ESTATE, "task.after[%d] is %lld, not a ticket of this engine", i,
                  static_cast<long long>(order.after[i]));
  }
  Task* task = owned.get();
  if (const Block* block = task->block(); block != nullptr && block->disk() >= static_cast<int32_t>(in_flight_.size()))
    return Fail(HETERO_EINVAL, "block %d is on disk %d; this engine serves %zu disks", block->id(), block->disk(),
                in_flight_.size());
  if (task->staged() && task->block()->staged_bytes() > staging_.buffer_bytes())
    return Fail(HETERO_EINVAL,
                "block %d stages chunks of %lld bytes; options.chunk_bytes_max is %lld. Create the engine with a larger one",
                task->block()->id(), static_cast<long long>(task->block()->staged_bytes()),
                static_cast<long long>(staging_.buffer_bytes()));
  HETERO_RETURN_IF_ERROR(task->Admit());
  const auto stopped = tasks_.find(task->takes_back());
  if (stopped != tasks_.end()) Stop(stopped->second.get());
  task->ticket = next_ticket_++;
  task->priority = order.priority;
  task->times.submitted_ns = MonotonicNs();
  AddEdges(task, order);
  tasks_.emplace(task->ticket, std::move(owned));
  ++num_open_;
  *ticket = task->ticket;
  if (task->start_edges == 0) StartTask(task);
  Schedule();
  Flush(&lock);
  return Status::Ok();
}

bool Engine::AddEdge(int64_t ticket, std::vector<Task*> Task::* list, Task* task) {
  const auto found = tasks_.find(ticket);
  if (found == tasks_.end() || found->second->phase == TaskPhase::kDone) return false;
  (found->second.get()->*list).push_back(task);
  return true;
}

void Engine::AddEdges(Task* task, const hetero_task& order) {
  for (int32_t i = 0; i < order.num_after; ++i) task->start_edges += AddEdge(order.after[i], &Task::starts, task) ? 1 : 0;
  if (Block* block = task->block()) {
    task->start_edges += AddEdge(block->last_task, &Task::starts, task) ? 1 : 0;
    block->last_task = task->ticket;
    if (task->speculative()) block->speculation = task->ticket;
    ++block->pending;
  }
  Store* store = task->store();
  if (store == nullptr) return;
  if (task->rewrites()) {
    task->write_edges += AddEdge(store->last_commit, &Task::writes, task) ? 1 : 0;
    ++task->block()->rewrites;
    store->writers.push_back(task->ticket);
  }
  if (task->takes_back() != 0) store->writers.push_back(task->ticket);  // it changes what a record says of the block
  if (task->commits()) {
    task->start_edges += AddEdge(store->last_commit, &Task::starts, task) ? 1 : 0;
    for (const int64_t writer : store->writers) task->start_edges += AddEdge(writer, &Task::starts, task) ? 1 : 0;
    for (Block* block : store->blocks()) {
      if (block != nullptr) block->rewrites = 0;
    }
    store->writers.clear();
    store->last_commit = task->ticket;
    ++store->pending;
  }
}

Status Engine::Arm(int64_t ticket, Gradients gradients, int64_t priority) {
  Lock lock(mutex_);
  if (!first_error_.ok()) return Poisoned(first_error_);
  Task* task = nullptr;
  HETERO_RETURN_IF_ERROR(Find(ticket, &task));
  if (task->armed || task->cancelled || task->phase == TaskPhase::kDone)
    return Fail(HETERO_ESTATE, "ticket %lld is no update that waits to be armed", static_cast<long long>(ticket));
  HETERO_RETURN_IF_ERROR(task->Arm(std::move(gradients)));
  task->armed = true;
  task->priority = priority;
  unsorted_ = true;
  work_.notify_all();
  Schedule();
  Flush(&lock);
  return Status::Ok();
}

Status Engine::Cancel(int64_t ticket) {
  Lock lock(mutex_);
  if (!first_error_.ok()) return Poisoned(first_error_);
  Task* task = nullptr;
  HETERO_RETURN_IF_ERROR(Find(ticket, &task));
  if (task->armed || task->cancelled)
    return Fail(HETERO_ESTATE, "ticket %lld is no update that waits to be armed", static_cast<long long>(ticket));
  task->block()->ForgetRewrite(ticket);
  if (task->block()->speculation == ticket) task->block()->speculation = 0;
  Stop(task);
  Schedule();
  Flush(&lock);
  return Status::Ok();
}

Status Engine::Keep(Block* block) {
  const Lock lock(mutex_);
  if (!first_error_.ok()) return Poisoned(first_error_);
  if (block->speculation == 0) return Fail(HETERO_ESTATE, "block %d has no update that awaits its verdict", block->id());
  const auto found = tasks_.find(block->speculation);
  if (found != tasks_.end() && !found->second->armed)
    return Fail(HETERO_ESTATE, "block %d: its update was not armed; arm or cancel it first", block->id());
  block->speculation = 0;
  return Status::Ok();
}

// Nobody wants the task's result any more. One that has not started keeps its place: its successors still wait for its
// predecessors.
void Engine::Stop(Task* task) {
  if (task->phase == TaskPhase::kDone) return;
  task->cancelled = true;
  if (task->phase == TaskPhase::kRunning) Drain(task);
}

Status Engine::Wait(int64_t ticket, bool done, double timeout_s) {
  const bool forever = timeout_s < 0;
  const auto limit = std::chrono::duration<double>(std::min(timeout_s, 1e8));
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit);
  Lock lock(mutex_);
  for (;;) {
    Task* task = nullptr;
    HETERO_RETURN_IF_ERROR(Find(ticket, &task));
    if (task->phase == TaskPhase::kDone) return task->status;
    if (task->ready && !done) return Status::Ok();
    if (forever) {
      changed_.wait(lock);
    } else if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
      HETERO_RETURN_IF_ERROR(Find(ticket, &task));
      if (task->phase == TaskPhase::kDone) return task->status;
      if (task->ready && !done) return Status::Ok();
      return Fail(HETERO_ETIMEDOUT, "ticket %lld is not %s after %g s", static_cast<long long>(ticket), done ? "DONE" : "READY",
                  timeout_s);
    }
  }
}

Status Engine::Poll(int64_t ticket, int32_t* state) {
  const Lock lock(mutex_);
  Task* task = nullptr;
  HETERO_RETURN_IF_ERROR(Find(ticket, &task));
  *state = task->phase == TaskPhase::kDone ? HETERO_DONE : task->ready ? HETERO_READY : 0;
  return task->phase == TaskPhase::kDone ? task->status : Status::Ok();
}

Status Engine::Release(int64_t ticket) {
  const Lock lock(mutex_);
  Task* task = nullptr;
  HETERO_RETURN_IF_ERROR(Find(ticket, &task));
  if (!task->armed && !task->cancelled && task->phase != TaskPhase::kDone)
    return Fail(HETERO_ESTATE, "ticket %lld is an update that waits to be armed; cancel it first",
                static_cast<long long>(ticket));
  task->released = true;
  if (task->phase == TaskPhase::kDone) tasks_.erase(ticket);
  return Status::Ok();
}

Status Engine::Times(int64_t ticket, hetero_times* out) {
  const Lock lock(mutex_);
  Task* task = nullptr;
  HETERO_RETURN_IF_ERROR(Find(ticket, &task));
  *out = task->times;
  return Status::Ok();
}

hetero_engine_stats Engine::Stats() {
  const Lock lock(mutex_);
  hetero_engine_stats stats = stats_;
  stats.staging_bytes = staging_.total_bytes();
  stats.staging_in_use_peak_bytes = staging_.peak_bytes();
  return stats;
}

int64_t Engine::BytesBeyond() {
  const Lock lock(mutex_);
  return bytes_beyond_;
}

Status Engine::ResizeStaging(int64_t bytes) {
  const Lock lock(mutex_);
  if (!first_error_.ok()) return Poisoned(first_error_);
  if (num_open_ > 0)
    return Fail(HETERO_ESTATE, "staging cannot be resized while %lld tasks are open; wait for them first",
                static_cast<long long>(num_open_));
  return staging_.Resize(bytes);
}

Status Engine::first_error() {
  const Lock lock(mutex_);
  return first_error_;
}

Status Engine::FindUpdateBlock(int64_t ticket, const Block** block) {
  const Lock lock(mutex_);
  if (!first_error_.ok()) return Poisoned(first_error_);
  Task* task = nullptr;
  HETERO_RETURN_IF_ERROR(Find(ticket, &task));
  if (task->armed || task->cancelled || task->phase == TaskPhase::kDone)
    return Fail(HETERO_ESTATE, "ticket %lld is no update that waits to be armed", static_cast<long long>(ticket));
  *block = task->block();
  return Status::Ok();
}

Status Engine::Find(int64_t ticket, Task** task) {
  const auto found = tasks_.find(ticket);
  if (found == tasks_.end() || found->second->released) return NoTicket(ticket);
  *task = found->second.get();
  return Status::Ok();
}

}  // namespace hetero
