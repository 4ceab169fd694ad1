// The kernels' source, included by kernels_<isa>.cc only. Plain loops that the compiler vectorizes; everything has internal
// linkage (see [Note: One kernel source, several instruction sets] in CMakeLists.txt), so no standard header with inline
// functions is used either.
//
// Ownership: none. Thread-safety: pure functions. Failure: none.
#include <stdint.h>

#include "kernels_set.h"

namespace hetero {
namespace {

inline uint32_t Bits(float x) noexcept { return __builtin_bit_cast(uint32_t, x); }
inline float Float(uint32_t bits) noexcept { return __builtin_bit_cast(float, bits); }

// a where the mask's bits are set, else b. Conditional expressions keep gcc from vectorizing the loops that contain them.
inline uint32_t Blend(uint32_t mask, uint32_t a, uint32_t b) noexcept { return b ^ ((a ^ b) & mask); }
inline uint32_t Select(bool condition, uint32_t a, uint32_t b) noexcept {
  return Blend(0u - static_cast<uint32_t>(condition), a, b);
}

// Element types. Conversions are integer arithmetic: exact for denormals whatever the CPU's flush-to-zero mode, and without
// branches so that they vectorize.
struct F32 {
  using Storage = float;
  static float Load(float x) noexcept { return x; }
  static float Store(float x) noexcept { return x; }
};

struct BF16 {
  using Storage = uint16_t;
  static float Load(uint16_t x) noexcept { return Float(static_cast<uint32_t>(x) << 16); }
  static uint16_t Store(float x) noexcept {
    const uint32_t bits = Bits(x);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    return static_cast<uint16_t>(Select((bits & 0x7FFFFFFFu) > 0x7F800000u, nan, rounded));
  }
};

struct F16 {
  using Storage = uint16_t;
  static float Load(uint16_t x) noexcept {
    const uint32_t magnitude = x & 0x7FFFu;
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    const uint32_t shifted = magnitude << 13;
    const uint32_t normal = shifted + (112u << 23);                                     // exponent bias 15 -> 127
    const uint32_t special = shifted | 0x7F800000u;                                     // infinity, NaN
    const uint32_t denormal = Bits(Float(shifted + (113u << 23)) - Float(113u << 23));  // exact
    const uint32_t finite = Select(magnitude < 0x0400u, denormal, normal);
    return Float(sign | Select(magnitude >= 0x7C00u, special, finite));
  }
  static uint16_t Store(float x) noexcept {
    const uint32_t magnitude = Bits(x) & 0x7FFFFFFFu;
    const uint32_t sign = (Bits(x) >> 16) & 0x8000u;
    // Half of the unit in the last place minus one, plus one where that place is odd: to nearest, ties to even.
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t denormal = Bits(Float(magnitude) + 0.5f) - Bits(0.5f);  // the addition rounds at 2^-24
    const uint32_t finite = Select(magnitude < (113u << 23), denormal, normal);
    const uint32_t nan = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
    const uint32_t special = Select(magnitude > 0x7F800000u, nan, 0x7C00u);
    return static_cast<uint16_t>(sign | Select(magnitude >= 0x47800000u, special, finite));  // 2^16 and more
  }
};

struct NoCopy {
  using Storage = uint16_t;
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

enum class Decay : uint8_t { kDecoupled, kL2 };  // kDecoupled with decay 1 is no decay
enum class Part : uint8_t { kVector, kTail };

// One element. See [Note: The same bits as torch]. Source: torch 2.13, torch.optim.Adam/AdamW(fused=True), CPU.
template <Decay kDecay, Part kPart>
inline float Step(const AdamConstants& c, float p, float& m, float& v, float g) noexcept {
  g *= c.grad_factor;
  if constexpr (kDecay == Decay::kL2) {
    g = __builtin_fmaf(p, c.l2, g);
  } else {
    p *= c.decay;
  }
  const float difference = g - m;
  const float base = Float(Blend(c.lerp_from_avg, Bits(m), Bits(g)));
  m = __builtin_fmaf(c.lerp_weight, difference, base);
  const float scaled = c.one_minus_beta2 * g;
  v = kPart == Part::kVector ? __builtin_fmaf(scaled, g, v * c.beta2) : __builtin_fmaf(v, c.beta2, scaled * g);
  const float denominator = __builtin_sqrtf(v) / c.sqrt_correction2 + c.eps;
  return p + c.minus_step_size * m / denominator;
}

template <class Grad, class Copy, Decay kDecay, Part kPart>
inline void StepAt(const AdamConstants& c, float* __restrict p, float* __restrict m, float* __restrict v,
                   const typename Grad::Storage* __restrict g, [[maybe_unused]] typename Copy::Storage* __restrict copy,
                   int64_t i) noexcept {
  float mi = m[i];
  float vi = v[i];
  const float pi = Step<kDecay, kPart>(c, p[i], mi, vi, Grad::Load(g[i]));
  p[i] = pi;
  m[i] = mi;
  v[i] = vi;
  if constexpr (!kSame<Copy, NoCopy>) copy[i] = Copy::Store(pi);
}

// The arrays are parameters because compilers heed __restrict there only, and c is a copy because it cannot alias them then.
template <class Grad, class Copy, Decay kDecay>
__attribute__((noinline)) void Body(const AdamConstants c, float* __restrict p, float* __restrict m, float* __restrict v,
                                    const typename Grad::Storage* __restrict g, typename Copy::Storage* __restrict copy,
                                    int64_t numel) noexcept {
  for (int64_t i = 0; i < numel; ++i) StepAt<Grad, Copy, kDecay, Part::kVector>(c, p, m, v, g, copy, i);
}

template <class Grad, class Copy, Decay kDecay>
void AdamDecay(const AdamRun& run, const AdamConstants& c) noexcept {
  const auto* g = static_cast<const typename Grad::Storage*>(run.grad);
  auto* copy = static_cast<typename Copy::Storage*>(run.copy);
  const int64_t body = run.numel - run.tail;
  Body<Grad, Copy, kDecay>(c, run.param, run.exp_avg, run.exp_avg_sq, g, copy, body);
#pragma GCC unroll 1
  for (int64_t i = body; i < run.numel; ++i) {
    StepAt<Grad, Copy, kDecay, Part::kTail>(c, run.param, run.exp_avg, run.exp_avg_sq, g, copy, i);
    asm volatile("" ::: "memory");  // not worth a vectorized copy of the loop
  }
}

template <class Grad, class Copy>
void AdamTyped(const AdamRun& run, const AdamConstants& c) noexcept {
  if (c.l2 != 0.0f) {
    AdamDecay<Grad, Copy, Decay::kL2>(run, c);
  } else {
    AdamDecay<Grad, Copy, Decay::kDecoupled>(run, c);
  }
}

template <class Grad>
void AdamForGrad(const AdamRun& run, const AdamConstants& c) noexcept {
  if (run.copy == nullptr) {
    AdamTyped<Grad, NoCopy>(run, c);
  } else if (run.copy_dtype == HETERO_BF16) {
    AdamTyped<Grad, BF16>(run, c);
  } else {
    AdamTyped<Grad, F16>(run, c);
  }
}

void Adam(const AdamRun& run, const AdamConstants& c) noexcept {
  if (run.grad_dtype == HETERO_F32) {
    AdamForGrad<F32>(run, c);
  } else if (run.grad_dtype == HETERO_BF16) {
    AdamForGrad<BF16>(run, c);
  } else {
    AdamForGrad<F16>(run, c);
  }
}

// 16 running sums, one per element index modulo 16. A product of two 24-bit numbers is exact in double, so fused and
// separate multiply-adds agree on every instruction set.
template <class T>
double SumTyped(const typename T::Storage* x, int64_t numel) noexcept {
  constexpr int64_t kLanes = 16;
  double lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) {
      const double value = T::Load(x[i + k]);
      lane[k] += value * value;
    }
  }
  for (int64_t k = 0; i + k < numel; ++k) {
    const double value = T::Load(x[i + k]);
    lane[k] += value * value;
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t k = 0; k < width; ++k) lane[k] += lane[k + width];
  }
  return lane[0];
}

double SumBlock(const void* x, int32_t dtype, int64_t numel) noexcept {
  if (dtype == HETERO_F32) return SumTyped<F32>(static_cast<const float*>(x), numel);
  if (dtype == HETERO_BF16) return SumTyped<BF16>(static_cast<const uint16_t*>(x), numel);
  return SumTyped<F16>(static_cast<const uint16_t*>(x), numel);
}

template <class Grad, bool kCopy>
__attribute__((noinline)) void MoveTyped(float* __restrict p, float* __restrict m, float* __restrict v,
                                         const typename Grad::Storage* __restrict g, [[maybe_unused]] uint16_t* __restrict copy,
                                         int64_t numel) noexcept {
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = Bits(p[i]) ^ Bits(Grad::Load(g[i]));
    p[i] = Float(bits);
    m[i] = Float(Bits(m[i]) ^ 1u);
    v[i] = Float(Bits(v[i]) ^ 1u);
    if constexpr (kCopy) copy[i] = static_cast<uint16_t>(bits >> 16);
  }
}

template <class Grad>
void MoveForGrad(const AdamRun& run) noexcept {
  const auto* g = static_cast<const typename Grad::Storage*>(run.grad);
  auto* copy = static_cast<uint16_t*>(run.copy);
  const auto move = copy == nullptr ? &MoveTyped<Grad, false> : &MoveTyped<Grad, true>;
  move(run.param, run.exp_avg, run.exp_avg_sq, g, copy, run.numel);
}

void Move(const AdamRun& run) noexcept { run.grad_dtype == HETERO_F32 ? MoveForGrad<F32>(run) : MoveForGrad<BF16>(run); }

}  // namespace
}  // namespace hetero
