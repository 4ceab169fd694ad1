// The functions of api.h that need no engine: version, errors, instruction set, memory, kernels. Validates every argument.
#include <math.h>

#include <algorithm>
#include <exception>

#include "digest.h"
#include "hetero/api.h"
#include "kernels.h"
#include "memory.h"
#include "parallel.h"
#include "status.h"

namespace {

using hetero::AdamRun;
using hetero::DtypeBytes;
using hetero::Fail;
using hetero::Status;

constexpr int64_t kLargestNumel = int64_t{1} << 44;  // keeps every byte count inside int64
constexpr int64_t kSplit = 16;                       // pieces start at multiples of this: see kernels.h
constexpr int64_t kTorchVector = 8;                  // torch's vector width for fp32; the rest is its scalar tail
constexpr int32_t kMostThreads = 1024;

bool IsFloat(int32_t dtype) { return dtype == HETERO_F32 || dtype == HETERO_BF16 || dtype == HETERO_F16; }

Status CheckArray(const char* name, const void* p, int64_t element_bytes) {
  if (p == nullptr) return Fail(HETERO_EINVAL, "%s is null; allowed: the address of numel elements", name);
  if (reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(element_bytes) != 0) {
    return Fail(HETERO_EINVAL, "%s is at %p; allowed: a multiple of its element's %lld bytes", name, p,
                static_cast<long long>(element_bytes));
  }
  return Status::Ok();
}

Status CheckNumel(int64_t numel) {
  if (numel >= 0 && numel <= kLargestNumel) return Status::Ok();
  return Fail(HETERO_EINVAL, "numel is %lld; allowed: 0 to 2^44", static_cast<long long>(numel));
}

Status CheckThreads(int32_t threads) {
  if (threads >= 1 && threads <= kMostThreads) return Status::Ok();
  return Fail(HETERO_EINVAL, "threads is %d; allowed: 1 to %d", threads, kMostThreads);
}

Status CheckHyper(const hetero_hyper* hyper) {
  if (hyper == nullptr) return Fail(HETERO_EINVAL, "hyper is null; allowed: the address of a hetero_hyper");
  const bool betas = hyper->beta1 >= 0.0 && hyper->beta1 < 1.0 && hyper->beta2 >= 0.0 && hyper->beta2 < 1.0;
  if (!betas) return Fail(HETERO_EINVAL, "betas are (%g, %g); allowed: 0 <= beta < 1", hyper->beta1, hyper->beta2);
  if (!(isfinite(hyper->lr) && isfinite(hyper->weight_decay) && isfinite(hyper->eps) && hyper->eps >= 0.0)) {
    return Fail(HETERO_EINVAL, "lr %g, weight_decay %g, eps %g; allowed: finite, eps >= 0", hyper->lr, hyper->weight_decay,
                hyper->eps);
  }
  if (!(hyper->step >= 1.0 && isfinite(hyper->step))) {
    return Fail(HETERO_EINVAL, "step is %g; allowed: >= 1 (the count after the increment)", hyper->step);
  }
  if ((hyper->flags & ~int64_t{HETERO_ADAMW | HETERO_MAXIMIZE}) != 0) {
    return Fail(HETERO_EINVAL, "flags are %#llx; allowed: HETERO_ADAMW, HETERO_MAXIMIZE",
                static_cast<unsigned long long>(hyper->flags));
  }
  return Status::Ok();
}

struct Range {
  const char* name;
  uintptr_t begin, end;
};

Range RangeOf(const char* name, const void* p, int64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(p);
  return {name, begin, begin + static_cast<uintptr_t>(bytes)};
}

Status CheckDisjoint(const AdamRun& run) {
  const int64_t fp32 = run.numel * 4;
  const Range ranges[] = {RangeOf("param", run.param, fp32), RangeOf("exp_avg", run.exp_avg, fp32),
                          RangeOf("exp_avg_sq", run.exp_avg_sq, fp32),
                          RangeOf("grad", run.grad, run.numel * DtypeBytes(run.grad_dtype)),
                          RangeOf("copy", run.copy, run.copy == nullptr ? 0 : run.numel * DtypeBytes(run.copy_dtype))};
  for (const Range* a = std::begin(ranges); a != std::end(ranges); ++a) {
    for (const Range* b = a + 1; b != std::end(ranges); ++b) {
      if (a->begin < b->end && b->begin < a->end) {
        return Fail(HETERO_EINVAL, "%s and %s overlap; allowed: separate arrays", a->name, b->name);
      }
    }
  }
  return Status::Ok();
}

Status CheckRun(const AdamRun& run, int32_t threads) {
  HETERO_RETURN_IF_ERROR(CheckNumel(run.numel));
  HETERO_RETURN_IF_ERROR(CheckThreads(threads));
  HETERO_RETURN_IF_ERROR(CheckArray("param", run.param, 4));
  HETERO_RETURN_IF_ERROR(CheckArray("exp_avg", run.exp_avg, 4));
  HETERO_RETURN_IF_ERROR(CheckArray("exp_avg_sq", run.exp_avg_sq, 4));
  if (!IsFloat(run.grad_dtype)) {
    return Fail(HETERO_EINVAL, "grad_dtype is %d; allowed: HETERO_F32, HETERO_BF16, HETERO_F16", run.grad_dtype);
  }
  HETERO_RETURN_IF_ERROR(CheckArray("grad", run.grad, DtypeBytes(run.grad_dtype)));
  if (run.copy != nullptr) {
    if (run.copy_dtype != HETERO_BF16 && run.copy_dtype != HETERO_F16) {
      return Fail(HETERO_EINVAL, "copy_dtype is %d; allowed: HETERO_BF16, HETERO_F16", run.copy_dtype);
    }
    HETERO_RETURN_IF_ERROR(CheckArray("copy", run.copy, DtypeBytes(run.copy_dtype)));
  }
  return CheckDisjoint(run);
}

// The elements [begin, end) of a run.
AdamRun Piece(const AdamRun& run, int64_t begin, int64_t end) {
  AdamRun piece = run;
  piece.param += begin;
  piece.exp_avg += begin;
  piece.exp_avg_sq += begin;
  piece.grad = static_cast<const char*>(run.grad) + begin * DtypeBytes(run.grad_dtype);
  if (run.copy != nullptr) piece.copy = static_cast<char*>(run.copy) + begin * DtypeBytes(run.copy_dtype);
  piece.numel = end - begin;
  piece.tail = end == run.numel ? run.tail : 0;
  return piece;
}

template <class Body>
void ForPieces(const AdamRun& run, int32_t threads, const Body& body) {
  const int64_t num_units = (run.numel + kSplit - 1) / kSplit;
  hetero::ParallelFor(num_units, threads, [&](int64_t begin, int64_t end) noexcept {
    if (begin < end) body(Piece(run, begin * kSplit, std::min(end * kSplit, run.numel)));
  });
}

// Runs `body` and turns what it throws (for want of memory) into a code.
template <class Body>
int32_t Guard(const Body& body) noexcept {
  try {
    return hetero::Report(body());
  } catch (const std::exception&) {
    return HETERO_ENOMEM;
  }
}

}  // namespace

extern "C" {

int32_t hetero_abi_version(void) { return HETERO_ABI_VERSION; }

const char* hetero_last_error(void) { return hetero::LastError(); }

int32_t hetero_last_code(void) { return hetero::LastCode(); }

int32_t hetero_isa(void) { return hetero::Isa(); }

int32_t hetero_force_isa(int32_t isa) {
  return Guard([&]() -> Status {
    if (isa < HETERO_ISA_BASE || isa > HETERO_ISA_V4) {
      return Fail(HETERO_EINVAL, "isa is %d; allowed: HETERO_ISA_BASE, HETERO_ISA_V3, HETERO_ISA_V4", isa);
    }
    if (!hetero::ForceIsa(isa)) return Fail(HETERO_EUNSUPPORTED, "this CPU lacks instruction set %d", isa);
    return Status::Ok();
  });
}

void* hetero_reserve(int64_t bytes) {
  void* p = hetero::Reserve(bytes);
  if (p == nullptr) {
    (void)Guard([&] { return hetero::FailErrno("reserving " + std::to_string(bytes) + " bytes of address space", errno); });
  }
  return p;
}

int32_t hetero_map(void* p, int64_t bytes, int32_t file, int64_t offset, int32_t shared) {
  return Guard([&] { return hetero::Map(p, bytes, file, offset, shared != 0); });
}

int32_t hetero_drop(void* p, int64_t bytes) {
  return Guard([&] { return hetero::Drop(p, bytes); });
}

int32_t hetero_unreserve(void* p, int64_t bytes) {
  return Guard([&] { return hetero::Unreserve(p, bytes); });
}

int32_t hetero_adam(float* param, float* exp_avg, float* exp_avg_sq, const void* grad, int32_t grad_dtype, void* copy,
                    int32_t copy_dtype, int64_t numel, const hetero_hyper* hyper, double grad_scale, int32_t threads) {
  return Guard([&]() -> Status {
    const AdamRun run{.param = param,
                      .exp_avg = exp_avg,
                      .exp_avg_sq = exp_avg_sq,
                      .grad = grad,
                      .grad_dtype = grad_dtype,
                      .copy = copy,
                      .copy_dtype = copy_dtype,
                      .numel = numel,
                      .tail = numel % kTorchVector,
                      .grad_scale = static_cast<float>(grad_scale)};
    HETERO_RETURN_IF_ERROR(CheckRun(run, threads));
    HETERO_RETURN_IF_ERROR(CheckHyper(hyper));
    ForPieces(run, threads, [&](const AdamRun& piece) noexcept { hetero::UpdateAdam(piece, *hyper); });
    return Status::Ok();
  });
}

int32_t hetero_move_like_adam(float* param, float* exp_avg, float* exp_avg_sq, const void* grad, int32_t grad_dtype, void* copy,
                              int64_t numel, int32_t threads) {
  return Guard([&]() -> Status {
    const AdamRun run{.param = param,
                      .exp_avg = exp_avg,
                      .exp_avg_sq = exp_avg_sq,
                      .grad = grad,
                      .grad_dtype = grad_dtype,
                      .copy = copy,
                      .copy_dtype = HETERO_BF16,
                      .numel = numel};
    HETERO_RETURN_IF_ERROR(CheckRun(run, threads));
    ForPieces(run, threads, [](const AdamRun& piece) noexcept { hetero::MoveLikeAdam(piece); });
    return Status::Ok();
  });
}

int32_t hetero_sum_of_squares(const void* x, int32_t dtype, int64_t numel, int32_t threads, double* out) {
  return Guard([&]() -> Status {
    if (!IsFloat(dtype)) {
      return Fail(HETERO_EINVAL, "dtype is %d; allowed: HETERO_F32, HETERO_BF16, HETERO_F16", dtype);
    }
    HETERO_RETURN_IF_ERROR(CheckNumel(numel));
    HETERO_RETURN_IF_ERROR(CheckThreads(threads));
    HETERO_RETURN_IF_ERROR(CheckArray("x", x, DtypeBytes(dtype)));
    HETERO_RETURN_IF_ERROR(CheckArray("out", out, alignof(double)));
    *out = hetero::SumOfSquares(x, dtype, numel, threads);
    return Status::Ok();
  });
}

int32_t hetero_digest(const void* x, int64_t bytes, uint8_t out[16]) {
  return Guard([&]() -> Status {
    HETERO_RETURN_IF_ERROR(CheckArray("x", x, 1));
    HETERO_RETURN_IF_ERROR(CheckArray("out", out, 1));
    if (bytes < 0) return Fail(HETERO_EINVAL, "bytes is %lld; allowed: >= 0", static_cast<long long>(bytes));
    const hetero::Digest digest = hetero::DigestOf(x, bytes);
    std::copy(digest.begin(), digest.end(), out);
    return Status::Ok();
  });
}

}  // extern "C"
