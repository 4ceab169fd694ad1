#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "kernels_set.h"
#include "parallel.h"

namespace hetero {

namespace {

bool Supports(int32_t isa) noexcept {
  if (isa == HETERO_ISA_BASE) return true;
#if defined(__x86_64__)
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("avx") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
  if (isa == HETERO_ISA_V3) return v3;
  if (isa == HETERO_ISA_V4) {
    return v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return false;
}

std::atomic<int32_t>& Chosen() noexcept {
  static std::atomic<int32_t> isa{Supports(HETERO_ISA_V4)   ? HETERO_ISA_V4
                                  : Supports(HETERO_ISA_V3) ? HETERO_ISA_V3
                                                            : HETERO_ISA_BASE};
  return isa;
}

const KernelSet& Kernels() noexcept {
#if defined(__x86_64__)
  const int32_t isa = Isa();
  if (isa == HETERO_ISA_V4) return kKernelsV4;
  if (isa == HETERO_ISA_V3) return kKernelsV3;
#endif
  return kKernelsBase;
}

AdamConstants ConstantsOf(const hetero_hyper& hyper, float grad_scale) noexcept {
  const bool decoupled = (hyper.flags & HETERO_ADAMW) != 0;
  const double correction1 = 1.0 - std::pow(hyper.beta1, hyper.step);
  const double correction2 = 1.0 - std::pow(hyper.beta2, hyper.step);
  AdamConstants c;
  c.grad_factor = (hyper.flags & HETERO_MAXIMIZE) != 0 ? -grad_scale : grad_scale;
  // std::fma: torch's compiler contracts this expression of doubles.
  c.decay = decoupled ? static_cast<float>(std::fma(-hyper.lr, hyper.weight_decay, 1.0)) : 1.0f;
  c.l2 = decoupled ? 0.0f : static_cast<float>(hyper.weight_decay);
  const auto lerp = static_cast<float>(1.0 - hyper.beta1);
  c.lerp_from_avg = lerp < 0.5f ? ~0u : 0u;
  c.lerp_weight = lerp < 0.5f ? lerp : lerp - 1.0f;
  c.beta2 = static_cast<float>(hyper.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  c.sqrt_correction2 = static_cast<float>(std::sqrt(correction2));
  c.eps = static_cast<float>(hyper.eps);
  c.minus_step_size = static_cast<float>(-(hyper.lr / correction1));
  return c;
}

}  // namespace

int32_t Isa() noexcept { return Chosen().load(std::memory_order_relaxed); }

bool ForceIsa(int32_t isa) noexcept {
  if (!Supports(isa)) return false;
  Chosen().store(isa, std::memory_order_relaxed);
  return true;
}

void UpdateAdam(const AdamRun& run, const hetero_hyper& hyper) noexcept {
  Kernels().adam(run, ConstantsOf(hyper, run.grad_scale));
}

void MoveLikeAdam(const AdamRun& run) noexcept { Kernels().move(run); }

double SumOfSquares(const void* x, int32_t dtype, int64_t numel, int32_t threads) {
  const int64_t num_blocks = (numel + kSumBlock - 1) / kSumBlock;
  std::vector<double> partial(static_cast<size_t>(num_blocks));
  const KernelSet& kernels = Kernels();
  ParallelFor(num_blocks, threads, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kSumBlock;
      partial[static_cast<size_t>(block)] =
          kernels.sum_block(static_cast<const char*>(x) + first * DtypeBytes(dtype), dtype, std::min(kSumBlock, numel - first));
    }
  });
  double sum = 0.0;
  for (const double value : partial) sum += value;
  return sum;
}

}  // namespace hetero
