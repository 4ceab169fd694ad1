// Update kernels: one portable source compiled per instruction set (kernels_impl.h), the same bits from all of them.
//
// Ownership: none. Thread-safety: pure functions of their arguments; Isa() is decided once. Failure: none; callers validate.
//
// [Note: The same bits as torch]
// RunAdam gives the bits of torch.optim.Adam/AdamW(fused=True) on a CPU (checked by tests/property/test_kernels.py). Constants
// are computed in double and rounded once; every fused multiply-add is written out. torch's last numel % 8 elements of a
// *tensor* go through its scalar loop, which its compiler contracts differently: `tail` says how many of the last elements of
// this run are such.
#ifndef HETERO_KERNELS_H_
#define HETERO_KERNELS_H_

#include <stdint.h>

#include "hetero/api.h"

namespace hetero {

struct AdamRun {
  float* param = nullptr;  // fp32 master, updated in place
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  const void* grad = nullptr;
  int32_t grad_dtype = HETERO_F32;
  void* copy = nullptr;  // null, or the new weights rounded to nearest even in copy_dtype
  int32_t copy_dtype = HETERO_BF16;
  int64_t numel = 0;
  int64_t tail = 0;         // the last `tail` elements (0..7) belong to a tensor's scalar tail
  float grad_scale = 1.0f;  // multiplies the gradient in fp32 first; 1: no multiplication
};

// One update on the calling thread. The engine calls it per chunk and splits tensors at multiples of 16 elements only.
void UpdateAdam(const AdamRun& run, const hetero_hyper& hyper) noexcept;

// Moves the bytes that UpdateAdam moves, with next to no arithmetic: the memory's own speed. The values are meaningless.
void MoveLikeAdam(const AdamRun& run) noexcept;

// Sum of squares in double in a fixed order that depends neither on threads nor on the instruction set.
double SumOfSquares(const void* x, int32_t dtype, int64_t numel, int32_t threads);

// Bytes of one element; 0 for an unknown dtype.
constexpr int64_t DtypeBytes(int32_t dtype) {
  return dtype == HETERO_F32 ? 4 : dtype == HETERO_BF16 || dtype == HETERO_F16 ? 2 : dtype == HETERO_U8 ? 1 : 0;
}

int32_t Isa() noexcept;
bool ForceIsa(int32_t isa) noexcept;  // false: the CPU lacks it

}  // namespace hetero

#endif  // HETERO_KERNELS_H_
