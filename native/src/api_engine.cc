// The engine section of api.h. Validates every argument before it reaches a task.
#include <math.h>

#include <memory>
#include <string>
#include <vector>

#include "api_engine_handles.h"
#include "engine_rewrite.h"
#include "engine_tasks.h"
#include "hetero/api.h"
#include "kernels.h"

using hetero::Block;
using hetero::CommitTask;
using hetero::DiscardTask;
using hetero::DtypeBytes;
using hetero::Engine;
using hetero::Fail;
using hetero::FetchTask;
using hetero::FromHandle;
using hetero::Gradients;
using hetero::Guarded;
using hetero::Layout;
using hetero::ReadTask;
using hetero::ReleaseTask;
using hetero::Report;
using hetero::Status;
using hetero::Store;
using hetero::StoreTask;
using hetero::Task;
using hetero::ToHandle;
using hetero::UpdateTask;

namespace {

using ll = long long;

bool Aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0; }

Status NeedEngine(const hetero_engine* engine) {
  return engine == nullptr ? Fail(HETERO_EINVAL, "engine is null") : Status::Ok();
}

Status NeedTaskArguments(const hetero_engine* engine, const hetero_block* block, const hetero_task* task) {
  HETERO_RETURN_IF_ERROR(NeedEngine(engine));
  if (block == nullptr) return Fail(HETERO_EINVAL, "block is null");
  if (task == nullptr) return Fail(HETERO_EINVAL, "task is null");
  if (task->num_after < 0 || (task->num_after > 0 && task->after == nullptr))
    return Fail(HETERO_EINVAL, "task.num_after is %d with after %p; allowed: 0 or more tickets", task->num_after,
                static_cast<const void*>(task->after));
  return Status::Ok();
}

Status CheckPatches(const Block& block, const hetero_patch* patches, int32_t num_patches) {
  const hetero_block_geometry& g = block.layout().geometry();
  if (num_patches < 0 || (num_patches > 0 && patches == nullptr))
    return Fail(HETERO_EINVAL, "num_patches is %d with patches %p", num_patches, static_cast<const void*>(patches));
  for (int32_t i = 0; i < num_patches; ++i) {
    const hetero_patch& p = patches[i];
    if (p.array < -1 || p.array >= g.num_state)
      return Fail(HETERO_EINVAL, "block %d: patches[%d].array is %d; allowed: -1 (weights) to %d", g.id, i, p.array,
                  g.num_state - 1);
    if (p.offset < 0 || p.numel <= 0 || p.offset > g.num_elements || p.numel > g.num_elements - p.offset)
      return Fail(HETERO_EINVAL, "block %d: patches[%d] is [%lld, +%lld); allowed: a run inside [0, %lld)", g.id, i,
                  static_cast<ll>(p.offset), static_cast<ll>(p.numel), static_cast<ll>(g.num_elements));
    if (p.data == nullptr || !Aligned(p.data, p.array < 0 ? DtypeBytes(g.weight_dtype) : 4))
      return Fail(HETERO_EINVAL, "block %d: patches[%d].data is %p; allowed: an address aligned to its element", g.id, i,
                  p.data);
  }
  return Status::Ok();
}

Status CheckSegment(const hetero_block_geometry& g, const hetero_segment* segments, int32_t i, int32_t num_hypers) {
  const hetero_segment& s = segments[i];
  if (s.offset < 0 || s.offset % 16 != 0 || s.numel <= 0 || s.offset > g.num_elements || s.numel > g.num_elements - s.offset)
    return Fail(HETERO_EINVAL,
                "block %d: segments[%d] is [%lld, +%lld); allowed: a run inside [0, %lld) whose offset is a multiple of 16",
                g.id, i, static_cast<ll>(s.offset), static_cast<ll>(s.numel), static_cast<ll>(g.num_elements));
  if (i > 0 && s.offset < segments[i - 1].offset + segments[i - 1].numel)
    return Fail(HETERO_EINVAL,
                "block %d: segments[%d] starts at %lld, before the end of the one before; allowed: sorted and disjoint", g.id,
                i, static_cast<ll>(s.offset));
  if (s.grad_dtype != HETERO_F32 && s.grad_dtype != HETERO_BF16 && s.grad_dtype != HETERO_F16)
    return Fail(HETERO_EINVAL, "block %d: segments[%d].grad_dtype is %d; allowed: F32, BF16, F16", g.id, i, s.grad_dtype);
  if (s.grad == nullptr || !Aligned(s.grad, DtypeBytes(s.grad_dtype)))
    return Fail(HETERO_EINVAL, "block %d: segments[%d].grad is %p; allowed: an address aligned to its element", g.id, i,
                s.grad);
  if (s.hyper < 0 || s.hyper >= num_hypers)
    return Fail(HETERO_EINVAL, "block %d: segments[%d].hyper is %d; allowed: 0 to %d", g.id, i, s.hyper, num_hypers - 1);
  return Status::Ok();
}

Status CheckHyper(const hetero_hyper& h, int32_t i) {
  const bool betas = h.beta1 >= 0.0 && h.beta1 < 1.0 && h.beta2 >= 0.0 && h.beta2 < 1.0;
  if (!betas) return Fail(HETERO_EINVAL, "hypers[%d].betas are (%g, %g); allowed: 0 <= beta < 1", i, h.beta1, h.beta2);
  if (!(isfinite(h.lr) && isfinite(h.weight_decay) && isfinite(h.eps) && h.eps >= 0.0))
    return Fail(HETERO_EINVAL, "hypers[%d]: lr %g, weight_decay %g, eps %g; allowed: finite, eps >= 0", i, h.lr, h.weight_decay,
                h.eps);
  if (!(isfinite(h.step) && h.step >= 1.0)) return Fail(HETERO_EINVAL, "hypers[%d].step is %g; allowed: >= 1", i, h.step);
  if ((h.flags & ~int64_t{HETERO_ADAMW | HETERO_MAXIMIZE}) != 0)
    return Fail(HETERO_EINVAL, "hypers[%d].flags are %#llx; allowed: HETERO_ADAMW, HETERO_MAXIMIZE", i,
                static_cast<unsigned long long>(h.flags));
  return Status::Ok();
}

Status CheckCounts(const hetero_segment* segments, int32_t num_segments, const hetero_hyper* hypers, int32_t num_hypers) {
  if (num_segments < 0 || (num_segments > 0 && segments == nullptr))
    return Fail(HETERO_EINVAL, "num_segments is %d with segments %p", num_segments, static_cast<const void*>(segments));
  if (num_hypers < 0 || (num_hypers > 0 && hypers == nullptr))
    return Fail(HETERO_EINVAL, "num_hypers is %d with hypers %p", num_hypers, static_cast<const void*>(hypers));
  return Status::Ok();
}

// Makes the task and submits it; the ticket, or the code.
template <class Make>
int64_t Submit(hetero_engine* engine, const hetero_task* task, const Make& make) {
  int64_t ticket = 0;
  const Status status = Guarded([&] {
    std::unique_ptr<Task> made;
    HETERO_RETURN_IF_ERROR(make(&made));
    return FromHandle(engine)->Submit(std::move(made), *task, &ticket);
  });
  const int32_t code = Report(status);
  return code != 0 ? code : ticket;
}

int64_t OpenUpdate(hetero_engine* engine, hetero_block* block, bool weights_resident, bool speculative,
                   const hetero_task* task) {
  return Submit(engine, task, [&](std::unique_ptr<Task>* out) {
    HETERO_RETURN_IF_ERROR(NeedTaskArguments(engine, block, task));
    if (!weights_resident && !FromHandle(block)->layout().weights_in_file())
      return Fail(HETERO_EINVAL, "weights_resident is 0, but block %d has no weights on disk; allowed: 1",
                  FromHandle(block)->id());
    *out = std::make_unique<UpdateTask>(FromHandle(block), weights_resident, speculative);
    return Status::Ok();
  });
}

}  // namespace

hetero_engine* hetero_engine_create(const hetero_engine_options* options) { return hetero_engine_create_for(options, 1); }

hetero_engine* hetero_engine_create_for(const hetero_engine_options* options, int32_t num_disks) {
  std::unique_ptr<Engine> engine;
  const Status status = Guarded([&] {
    if (options == nullptr) return Fail(HETERO_EINVAL, "options is null");
    return Engine::Create(*options, nullptr, &engine, num_disks);
  });
  return Report(status) == 0 ? ToHandle(engine.release()) : nullptr;
}

int32_t hetero_engine_destroy(hetero_engine* handle) {
  if (handle == nullptr) return 0;
  const std::unique_ptr<Engine> engine(FromHandle(handle));
  return Report(Guarded([&] { return engine->Shutdown(); }));
}

int32_t hetero_engine_io_backend(hetero_engine* engine) {
  const int32_t code = Report(NeedEngine(engine));
  return code != 0 ? code : FromHandle(engine)->io_backend();
}

int32_t hetero_engine_resize_staging(hetero_engine* engine, int64_t staging_bytes) {
  return Report(Guarded([&] {
    HETERO_RETURN_IF_ERROR(NeedEngine(engine));
    if (staging_bytes < 0) return Fail(HETERO_EINVAL, "staging_bytes is %lld", static_cast<ll>(staging_bytes));
    return FromHandle(engine)->ResizeStaging(staging_bytes);
  }));
}

int32_t hetero_engine_error(hetero_engine* engine) {
  const int32_t code = Report(NeedEngine(engine));
  return code != 0 ? code : Report(FromHandle(engine)->first_error());
}

int64_t hetero_submit_fetch(hetero_engine* engine, hetero_block* block, const hetero_task* task) {
  return Submit(engine, task, [&](std::unique_ptr<Task>* out) {
    HETERO_RETURN_IF_ERROR(NeedTaskArguments(engine, block, task));
    *out = std::make_unique<FetchTask>(FromHandle(block));
    return Status::Ok();
  });
}

int64_t hetero_submit_release(hetero_engine* engine, hetero_block* block, const hetero_task* task) {
  return Submit(engine, task, [&](std::unique_ptr<Task>* out) {
    HETERO_RETURN_IF_ERROR(NeedTaskArguments(engine, block, task));
    *out = std::make_unique<ReleaseTask>(FromHandle(block));
    return Status::Ok();
  });
}

int64_t hetero_open_update(hetero_engine* engine, hetero_block* block, int32_t weights_resident, const hetero_task* task) {
  return OpenUpdate(engine, block, weights_resident != 0, false, task);
}

int64_t hetero_open_speculative_update(hetero_engine* engine, hetero_block* block, int32_t weights_resident,
                                       const hetero_task* task) {
  return OpenUpdate(engine, block, weights_resident != 0, true, task);
}

int32_t hetero_keep_update(hetero_engine* engine, hetero_block* block) {
  return Report(Guarded([&] {
    HETERO_RETURN_IF_ERROR(NeedEngine(engine));
    if (block == nullptr) return Fail(HETERO_EINVAL, "block is null");
    return FromHandle(engine)->Keep(FromHandle(block));
  }));
}

int64_t hetero_submit_discard(hetero_engine* engine, hetero_block* block, const hetero_task* task) {
  return Submit(engine, task, [&](std::unique_ptr<Task>* out) {
    HETERO_RETURN_IF_ERROR(NeedTaskArguments(engine, block, task));
    *out = std::make_unique<DiscardTask>(FromHandle(block));
    return Status::Ok();
  });
}

int32_t hetero_arm_update(hetero_engine* engine, int64_t ticket, const hetero_segment* segments, int32_t num_segments,
                          const hetero_hyper* hypers, int32_t num_hypers, double grad_scale, int64_t step, int64_t priority) {
  return Report(Guarded([&] {
    HETERO_RETURN_IF_ERROR(NeedEngine(engine));
    HETERO_RETURN_IF_ERROR(CheckCounts(segments, num_segments, hypers, num_hypers));
    if (!isfinite(static_cast<float>(grad_scale)))
      return Fail(HETERO_EINVAL, "grad_scale is %g; allowed: finite in fp32", grad_scale);
    if (step < 1) return Fail(HETERO_EINVAL, "step is %lld; allowed: 1 or more", static_cast<ll>(step));
    const Block* block = nullptr;
    HETERO_RETURN_IF_ERROR(FromHandle(engine)->FindUpdateBlock(ticket, &block));
    for (int32_t i = 0; i < num_segments; ++i)
      HETERO_RETURN_IF_ERROR(CheckSegment(block->layout().geometry(), segments, i, num_hypers));
    for (int32_t i = 0; i < num_hypers; ++i) HETERO_RETURN_IF_ERROR(CheckHyper(hypers[i], i));
    Gradients gradients;
    gradients.segments.assign(segments, segments + num_segments);
    gradients.hypers.assign(hypers, hypers + num_hypers);
    gradients.scale = static_cast<float>(grad_scale);
    gradients.step = step;
    return FromHandle(engine)->Arm(ticket, std::move(gradients), priority);
  }));
}

int32_t hetero_cancel_update(hetero_engine* engine, int64_t ticket) {
  return Report(Guarded([&] {
    HETERO_RETURN_IF_ERROR(NeedEngine(engine));
    return FromHandle(engine)->Cancel(ticket);
  }));
}

int64_t hetero_submit_store(hetero_engine* engine, hetero_block* block, const hetero_patch* patches, int32_t num_patches,
                            int32_t weights_from_memory, int64_t step, const hetero_task* task) {
  return Submit(engine, task, [&](std::unique_ptr<Task>* out) {
    HETERO_RETURN_IF_ERROR(NeedTaskArguments(engine, block, task));
    HETERO_RETURN_IF_ERROR(CheckPatches(*FromHandle(block), patches, num_patches));
    if (step < 0) return Fail(HETERO_EINVAL, "step is %lld; allowed: 0 or more", static_cast<ll>(step));
    for (int32_t i = 0; i < num_patches && weights_from_memory != 0; ++i) {
      if (patches[i].array < 0)
        return Fail(
            HETERO_EINVAL,
            "block %d: patches[%d] is of the weights, which weights_from_memory takes whole from memory; pass one of the two",
            FromHandle(block)->id(), i);
    }
    *out = std::make_unique<StoreTask>(FromHandle(block), std::vector<hetero_patch>(patches, patches + num_patches),
                                       weights_from_memory != 0, step);
    return Status::Ok();
  });
}

int64_t hetero_submit_read(hetero_engine* engine, hetero_block* block, const hetero_patch* patches, int32_t num_patches,
                           const hetero_task* task) {
  return Submit(engine, task, [&](std::unique_ptr<Task>* out) {
    HETERO_RETURN_IF_ERROR(NeedTaskArguments(engine, block, task));
    HETERO_RETURN_IF_ERROR(CheckPatches(*FromHandle(block), patches, num_patches));
    *out = std::make_unique<ReadTask>(FromHandle(block), std::vector<hetero_patch>(patches, patches + num_patches));
    return Status::Ok();
  });
}

int64_t hetero_submit_commit(hetero_engine* engine, hetero_store* store, int64_t step, const void* user, int64_t user_bytes,
                             const hetero_task* task) {
  return Submit(engine, task, [&](std::unique_ptr<Task>* out) {
    HETERO_RETURN_IF_ERROR(NeedEngine(engine));
    if (store == nullptr || task == nullptr) return Fail(HETERO_EINVAL, "%s is null", store == nullptr ? "store" : "task");
    if (task->num_after < 0 || (task->num_after > 0 && task->after == nullptr))
      return Fail(HETERO_EINVAL, "task.num_after is %d with after %p", task->num_after, static_cast<const void*>(task->after));
    if (step < 0) return Fail(HETERO_EINVAL, "step is %lld; allowed: 0 or more", static_cast<ll>(step));
    const int64_t most = FromHandle(store)->options().user_bytes;
    if (user_bytes < 0 || user_bytes > most || (user_bytes > 0 && user == nullptr))
      return Fail(HETERO_EINVAL, "user_bytes is %lld with user %p; allowed: 0 to %lld (options.user_bytes)",
                  static_cast<ll>(user_bytes), user, static_cast<ll>(most));
    std::string blob =
        user_bytes > 0 ? std::string(static_cast<const char*>(user), static_cast<size_t>(user_bytes)) : std::string();
    *out = std::make_unique<CommitTask>(FromHandle(store), step, std::move(blob));
    return Status::Ok();
  });
}

int32_t hetero_wait(hetero_engine* engine, int64_t ticket, int32_t what, double timeout_s) {
  return Report(Guarded([&] {
    HETERO_RETURN_IF_ERROR(NeedEngine(engine));
    if (what != HETERO_READY && what != HETERO_DONE)
      return Fail(HETERO_EINVAL, "what is %d; allowed: 1 (READY), 2 (DONE)", what);
    if (isnan(timeout_s)) return Fail(HETERO_EINVAL, "timeout_s is NaN");
    return FromHandle(engine)->Wait(ticket, what == HETERO_DONE, timeout_s);
  }));
}

int32_t hetero_poll(hetero_engine* engine, int64_t ticket) {
  int32_t state = 0;
  const int32_t code = Report(Guarded([&] {
    HETERO_RETURN_IF_ERROR(NeedEngine(engine));
    return FromHandle(engine)->Poll(ticket, &state);
  }));
  return code != 0 ? code : state;
}

int32_t hetero_release_ticket(hetero_engine* engine, int64_t ticket) {
  return Report(Guarded([&] {
    HETERO_RETURN_IF_ERROR(NeedEngine(engine));
    return FromHandle(engine)->Release(ticket);
  }));
}

int32_t hetero_ticket_times(hetero_engine* engine, int64_t ticket, hetero_times* out) {
  return Report(Guarded([&] {
    HETERO_RETURN_IF_ERROR(NeedEngine(engine));
    if (out == nullptr) return Fail(HETERO_EINVAL, "out is null");
    return FromHandle(engine)->Times(ticket, out);
  }));
}

int64_t hetero_engine_bytes_beyond(hetero_engine* engine) {
  const int32_t code = Report(NeedEngine(engine));
  return code != 0 ? code : FromHandle(engine)->BytesBeyond();
}

int32_t hetero_engine_get_stats(hetero_engine* engine, hetero_engine_stats* out) {
  return Report(Guarded([&] {
    HETERO_RETURN_IF_ERROR(NeedEngine(engine));
    if (out == nullptr) return Fail(HETERO_EINVAL, "out is null");
    *out = FromHandle(engine)->Stats();
    return Status::Ok();
  }));
}
