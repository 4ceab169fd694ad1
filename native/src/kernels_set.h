// One instruction set's kernels as a table of functions, and the constants that they take.
//
// Ownership: none. Thread-safety: constants. Failure: none.
#ifndef HETERO_KERNELS_SET_H_
#define HETERO_KERNELS_SET_H_

#include <stdint.h>

#include "kernels.h"

namespace hetero {

// What every element of an Adam run shares: computed in double, rounded once.
struct AdamConstants {
  float grad_factor;  // the gradient scale, negated for maximize
  float decay;        // AdamW: 1 - lr * weight_decay; 1 otherwise
  float l2;           // Adam: weight_decay; 0 otherwise
  // As torch.lerp does: from exp_avg by 1 - beta1 where that is below 0.5 (all bits set), else back from the gradient by beta1.
  uint32_t lerp_from_avg;
  float lerp_weight;
  float beta2;
  float one_minus_beta2;
  float sqrt_correction2;
  float eps;
  float minus_step_size;
};

// Elements whose squares are summed into one partial sum.
constexpr int64_t kSumBlock = 65536;

struct KernelSet {
  void (*adam)(const AdamRun& run, const AdamConstants& constants) noexcept;
  double (*sum_block)(const void* x, int32_t dtype, int64_t numel) noexcept;  // numel <= kSumBlock
  // Reads and writes the bytes of an Adam update and does next to no arithmetic: the memory's own speed (benchmarks).
  void (*move)(const AdamRun& run) noexcept;
};

extern const KernelSet kKernelsBase;
extern const KernelSet kKernelsV3;
extern const KernelSet kKernelsV4;

}  // namespace hetero

#endif  // HETERO_KERNELS_SET_H_
