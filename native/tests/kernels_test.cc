// The kernels against naive loops, bit by bit, on every instruction set that this machine has.
#include "kernels.h"

#include <math.h>

#include <limits>
#include <random>
#include <vector>

#include "check.h"

namespace {

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

bool Same(float a, float b) { return Bits(a) == Bits(b) || (isnan(a) && isnan(b)); }

// fp16 and bf16 by arithmetic on doubles: exact, slow, obvious.
double HalfValue(uint16_t h) {
  const int exponent = (h >> 10) & 31;
  const int mantissa = h & 1023;
  const double sign = (h & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25));
}

double BrainValue(uint16_t b) { return FromBits(static_cast<uint32_t>(b) << 16); }

// The neighbours of x in a 16-bit format are adjacent codes: search for the nearest, ties to the even code.
template <class Value>
uint16_t NearestCode(float x, uint16_t infinity, double overflow, Value value) {
  const auto sign = static_cast<uint16_t>(signbit(x) ? 0x8000 : 0);
  const double magnitude = fabs(static_cast<double>(x));
  if (magnitude >= overflow) return static_cast<uint16_t>(sign | infinity);
  uint16_t low = 0;
  uint16_t high = static_cast<uint16_t>(infinity - 1);
  while (low < high) {  // the largest code whose value is not above
    const auto middle = static_cast<uint16_t>((low + high + 1) / 2);
    if (value(middle) <= magnitude) {
      low = middle;
    } else {
      high = static_cast<uint16_t>(middle - 1);
    }
  }
  if (low == infinity - 1) {
    return static_cast<uint16_t>(sign | low);
  }
  const double below = magnitude - value(low);
  const double above = value(static_cast<uint16_t>(low + 1)) - magnitude;
  const bool up = above < below || (above == below && (low & 1) != 0);
  return static_cast<uint16_t>(sign | (up ? low + 1 : low));
}

uint16_t SlowStore(int32_t dtype, float x) {
  if (dtype == HETERO_F16) return NearestCode(x, 0x7C00, 65520.0, HalfValue);
  return NearestCode(x, 0x7F80, ldexp(511.0, 119), BrainValue);  // half way between the largest and 2^128
}

float SlowLoad(int32_t dtype, const void* grad, int64_t i) {
  if (dtype == HETERO_F32) return static_cast<const float*>(grad)[i];
  const uint16_t code = static_cast<const uint16_t*>(grad)[i];
  return static_cast<float>(dtype == HETERO_F16 ? HalfValue(code) : BrainValue(code));
}

struct Arrays {
  std::vector<float> p, m, v;
  std::vector<uint16_t> copy;
};

// kernels.h, [Note: The same bits as torch], element by element.
void SlowAdam(Arrays& a, const void* grad, int32_t grad_dtype, int32_t copy_dtype, int64_t tail, float scale,
              const hetero_hyper& h) {
  const double bc1 = 1.0 - pow(h.beta1, h.step);
  const auto sqrt_bc2 = static_cast<float>(sqrt(1.0 - pow(h.beta2, h.step)));
  const auto weight = static_cast<float>(1.0 - h.beta1);
  const auto b2 = static_cast<float>(h.beta2);
  const auto c2 = static_cast<float>(1.0 - h.beta2);
  const auto step_size = static_cast<float>(-(h.lr / bc1));
  const auto numel = static_cast<int64_t>(a.p.size());
  for (int64_t k = 0; k < numel; ++k) {
    const auto i = static_cast<size_t>(k);
    float g = SlowLoad(grad_dtype, grad, k);
    if (scale != 1.0f) g *= scale;
    if ((h.flags & HETERO_MAXIMIZE) != 0) g = -g;
    if ((h.flags & HETERO_ADAMW) != 0) {
      a.p[i] *= static_cast<float>(fma(-h.lr, h.weight_decay, 1.0));
    } else if (h.weight_decay != 0.0) {
      g = fmaf(a.p[i], static_cast<float>(h.weight_decay), g);
    }
    a.m[i] = weight < 0.5f ? fmaf(weight, g - a.m[i], a.m[i]) : fmaf(weight - 1.0f, g - a.m[i], g);
    a.v[i] = k < numel - tail ? fmaf(c2 * g, g, a.v[i] * b2) : fmaf(a.v[i], b2, c2 * g * g);
    a.p[i] += step_size * a.m[i] / (sqrtf(a.v[i]) / sqrt_bc2 + static_cast<float>(h.eps));
    if (!a.copy.empty() && !isnan(a.p[i])) a.copy[i] = SlowStore(copy_dtype, a.p[i]);
  }
}

class AllIsas {
 public:
  AllIsas() : before_(hetero::Isa()) {}
  ~AllIsas() { (void)hetero::ForceIsa(before_); }

  template <class Body>
  void operator()(const Body& body) const {
    for (const int32_t isa : {HETERO_ISA_BASE, HETERO_ISA_V3, HETERO_ISA_V4}) {
      if (hetero::ForceIsa(isa)) body(isa);
    }
  }

 private:
  int32_t before_;
};

std::vector<float> Floats(int64_t count, float scale, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = normal(*random) * scale;
  return out;
}

struct Config {
  int64_t numel, offset;
  int32_t grad_dtype, copy_dtype;  // copy_dtype F32: no copy
  float scale;
  hetero_hyper hyper;
};

void CheckConfig(const Config& c) {
  std::mt19937 random(static_cast<uint32_t>(c.numel * 31 + c.offset));
  // Every array starts `offset` elements into its allocation: misaligned for vectors.
  const int64_t total = c.numel + c.offset;
  const Arrays start{Floats(total, 1.0f, &random), Floats(total, 0.1f, &random), Floats(total, 0.1f, &random), {}};
  const auto grads = Floats(total, 0.3f, &random);
  std::vector<uint16_t> grads16(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    if (c.grad_dtype != HETERO_F32) grads16[i] = SlowStore(c.grad_dtype, grads[i]);
  }
  const void* grad = c.grad_dtype == HETERO_F32 ? static_cast<const void*>(grads.data() + c.offset) : grads16.data() + c.offset;
  const bool copies = c.copy_dtype != HETERO_F32;
  const auto slice = [&](const std::vector<float>& x) { return std::vector<float>(x.begin() + c.offset, x.end()); };
  Arrays expected{slice(start.p), slice(start.m), slice(start.v), {}};
  for (float& x : expected.v) x = fabsf(x);
  if (copies) expected.copy.resize(static_cast<size_t>(c.numel));
  SlowAdam(expected, grad, c.grad_dtype, c.copy_dtype, c.numel % 8, c.scale, c.hyper);

  AllIsas all_isas;
  all_isas([&](int32_t isa) {
    Arrays a = start;
    for (float& x : a.v) x = fabsf(x);
    a.copy.assign(static_cast<size_t>(total), 0xABCD);
    hetero::UpdateAdam({.param = a.p.data() + c.offset,
                        .exp_avg = a.m.data() + c.offset,
                        .exp_avg_sq = a.v.data() + c.offset,
                        .grad = grad,
                        .grad_dtype = c.grad_dtype,
                        .copy = copies ? a.copy.data() + c.offset : nullptr,
                        .copy_dtype = c.copy_dtype,
                        .numel = c.numel,
                        .tail = c.numel % 8,
                        .grad_scale = c.scale},
                       c.hyper);
    int64_t wrong = 0;
    for (int64_t i = 0; i < c.numel; ++i) {
      const auto e = static_cast<size_t>(i);
      const auto k = static_cast<size_t>(i + c.offset);
      wrong += !Same(a.p[k], expected.p[e]) || !Same(a.m[k], expected.m[e]) || !Same(a.v[k], expected.v[e]);
      wrong += copies ? a.copy[k] != expected.copy[e] : a.copy[k] != 0xABCD;
    }
    for (size_t k = 0; k < static_cast<size_t>(c.offset); ++k) wrong += !Same(a.p[k], start.p[k]) || a.copy[k] != 0xABCD;
    if (wrong != 0) {
      check::Report(__FILE__, __LINE__,
                    "isa " + check::Show(isa) + " numel " + check::Show(c.numel) + " grad " + check::Show(c.grad_dtype) +
                        " copy " + check::Show(c.copy_dtype) + ": " + check::Show(wrong) + " elements differ");
    }
  });
}

}  // namespace

TEST(adam_equals_the_naive_loop_for_all_dtypes_lengths_and_options) {
  for (int64_t numel = 0; numel <= 70; ++numel) {
    for (const int32_t grad_dtype : {HETERO_F32, HETERO_BF16, HETERO_F16}) {
      for (const int32_t copy_dtype : {HETERO_F32, HETERO_BF16, HETERO_F16}) {
        const bool odd = (numel + grad_dtype + copy_dtype) % 2 != 0;
        const hetero_hyper hyper{.lr = 1e-3,
                                 .beta1 = numel % 3 == 0 ? 0.3 : 0.9,
                                 .beta2 = 0.999,
                                 .eps = 1e-8,
                                 .weight_decay = numel % 5 == 0 ? 0.0 : 0.1,
                                 .step = static_cast<double>(1 + numel),
                                 .flags = (odd ? HETERO_ADAMW : 0) | (numel % 7 == 0 ? HETERO_MAXIMIZE : 0)};
        CheckConfig({numel, numel % 4, grad_dtype, copy_dtype, numel % 2 == 0 ? 1.0f : 0.37f, hyper});
      }
    }
  }
}

TEST(every_half_gradient_is_converted_exactly) {
  std::vector<uint16_t> codes(65536);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
  // beta1 = 0 makes exp_avg the gradient itself.
  const hetero_hyper hyper{.lr = 0, .beta1 = 0, .beta2 = 0, .eps = 1, .weight_decay = 0, .step = 1, .flags = HETERO_ADAMW};
  AllIsas all_isas;
  for (const int32_t dtype : {HETERO_BF16, HETERO_F16}) {
    all_isas([&](int32_t) {
      std::vector<float> p(65536), m(65536), v(65536);
      hetero::UpdateAdam({.param = p.data(),
                          .exp_avg = m.data(),
                          .exp_avg_sq = v.data(),
                          .grad = codes.data(),
                          .grad_dtype = dtype,
                          .copy = nullptr,
                          .numel = 65536},
                         hyper);
      int64_t wrong = 0;
      for (int64_t i = 0; i < 65536; ++i) {
        const float expected = SlowLoad(dtype, codes.data(), i);
        const float got = m[static_cast<size_t>(i)];
        wrong += isfinite(expected) ? expected != got : !isnan(got);  // inf - 0 + 0 * inf is NaN in the update
      }
      CHECK_EQ(wrong, 0);
    });
  }
}

TEST(copies_round_to_nearest_even_and_keep_denormals_infinities_and_nans) {
  std::vector<float> values{0.0f,
                            -0.0f,
                            65504.0f,
                            65519.996f,
                            65520.0f,
                            -65520.0f,
                            1e30f,
                            3.3895314e38f,
                            3.4e38f,
                            FromBits(0x7F7FFFFF),
                            INFINITY,
                            -INFINITY,
                            NAN,
                            FromBits(0xFF800001),
                            FromBits(0x7F800001),
                            FromBits(1),
                            FromBits(0x00008000),
                            FromBits(0x00018000),
                            FromBits(0x007FFFFF)};
  for (int exponent = -30; exponent <= 17; ++exponent) {  // around every half boundary and its ties
    for (uint32_t mantissa = 0; mantissa < 8; ++mantissa) {
      for (const uint32_t low : {0u, 0x0FFFu, 0x1000u, 0x1001u, 0x7FFFu, 0x8000u, 0x8001u}) {
        values.push_back(FromBits((static_cast<uint32_t>(exponent + 127) << 23) | (mantissa << 13) | low));
        values.push_back(-values.back());
      }
    }
  }
  std::mt19937 random(5);
  for (int i = 0; i < 20000; ++i) values.push_back(FromBits(static_cast<uint32_t>(random())));
  const auto numel = static_cast<int64_t>(values.size());
  const hetero_hyper hyper{.lr = 0, .beta1 = 0, .beta2 = 0, .eps = 1, .weight_decay = 0, .step = 1, .flags = HETERO_ADAMW};
  AllIsas all_isas;
  for (const int32_t dtype : {HETERO_BF16, HETERO_F16}) {
    all_isas([&](int32_t) {
      std::vector<float> p = values;
      std::vector<float> m(values.size()), v(values.size()), g(values.size());
      std::vector<uint16_t> copy(values.size());
      hetero::UpdateAdam({.param = p.data(),
                          .exp_avg = m.data(),
                          .exp_avg_sq = v.data(),
                          .grad = g.data(),
                          .grad_dtype = HETERO_F32,
                          .copy = copy.data(),
                          .copy_dtype = dtype,
                          .numel = numel},
                         hyper);
      int64_t wrong = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        if (isnan(values[i])) {
          wrong += !isnan(dtype == HETERO_F16 ? HalfValue(copy[i]) : BrainValue(copy[i]));
        } else {
          const uint16_t expected = SlowStore(dtype, values[i]);
          // -0 - 0 is +0 in the update: the sign of zero is not the copy's to keep.
          wrong += copy[i] != expected && !(values[i] == 0.0f && (copy[i] & 0x7FFF) == 0);
        }
      }
      CHECK_EQ(wrong, 0);
    });
  }
}

TEST(sum_of_squares_is_exact_and_the_same_for_all_threads_and_isas) {
  std::mt19937 random(9);
  AllIsas all_isas;
  for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{17}, int64_t{65536}, int64_t{300001}}) {
    const auto x = Floats(numel, 1.0f, &random);
    long double expected = 0;
    for (const float value : x) expected += static_cast<long double>(value) * value;
    const double first = hetero::SumOfSquares(x.data(), HETERO_F32, numel, 1);
    CHECK_LE(fabsl(first - expected), 1e-12L * expected);
    all_isas([&](int32_t) {
      for (const int32_t threads : {1, 2, 3, 7}) CHECK_EQ(hetero::SumOfSquares(x.data(), HETERO_F32, numel, threads), first);
    });
  }
  const std::vector<uint16_t> halves(1000, 0x3C00);
  CHECK_EQ(hetero::SumOfSquares(halves.data(), HETERO_F16, 1000, 2), 1000.0);
  const std::vector<uint16_t> brains(1000, 0x3F80);
  CHECK_EQ(hetero::SumOfSquares(brains.data(), HETERO_BF16, 1000, 2), 1000.0);
  const float big[] = {1e30f, INFINITY};
  CHECK_EQ(hetero::SumOfSquares(big, HETERO_F32, 1, 1), static_cast<double>(1e30f) * static_cast<double>(1e30f));
  CHECK_EQ(hetero::SumOfSquares(big, HETERO_F32, 2, 1), std::numeric_limits<double>::infinity());
}

TEST(threads_do_not_change_the_result) {
  std::mt19937 random(2);
  const int64_t numel = 100003;
  const auto p = Floats(numel, 1.0f, &random);
  const auto g = Floats(numel, 0.1f, &random);
  const hetero_hyper hyper{
      .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = 3, .flags = HETERO_ADAMW};
  Arrays first;
  for (const int32_t threads : {1, 2, 3, 16, 1024}) {
    Arrays a{p, g, std::vector<float>(p.size(), 0.3f), std::vector<uint16_t>(p.size())};
    CHECK_EQ(hetero_adam(a.p.data(), a.m.data(), a.v.data(), g.data(), HETERO_F32, a.copy.data(), HETERO_BF16, numel, &hyper,
                         1.0, threads),
             0);
    if (threads == 1) first = a;
    CHECK(a.p == first.p && a.m == first.m && a.v == first.v && a.copy == first.copy);
  }
}

TEST(bad_arguments_are_refused_and_change_nothing) {
  alignas(64) float p[32] = {1}, m[32] = {}, v[32] = {}, g[32] = {1};
  const hetero_hyper good{.lr = 1, .beta1 = 0.9, .beta2 = 0.9, .eps = 0, .weight_decay = 0, .step = 1, .flags = 0};
  const auto adam = [&](float* pp, const void* gg, int32_t dtype, void* copy, int32_t copy_dtype, int64_t numel,
                        hetero_hyper hyper, int32_t threads) {
    return hetero_adam(pp, m, v, gg, dtype, copy, copy_dtype, numel, &hyper, 1.0, threads);
  };
  CHECK_EQ(adam(nullptr, g, HETERO_F32, nullptr, 1, 8, good, 1), HETERO_EINVAL);
  CHECK_EQ(adam(reinterpret_cast<float*>(reinterpret_cast<char*>(p) + 2), g, HETERO_F32, nullptr, 1, 8, good, 1),
           HETERO_EINVAL);
  CHECK_EQ(adam(p, g, 7, nullptr, 1, 8, good, 1), HETERO_EINVAL);
  CHECK_EQ(adam(p, g, HETERO_F32, g + 16, HETERO_F32, 8, good, 1), HETERO_EINVAL);
  CHECK_EQ(adam(p, g, HETERO_F32, nullptr, 1, -1, good, 1), HETERO_EINVAL);
  CHECK_EQ(adam(p, g, HETERO_F32, nullptr, 1, 8, good, 0), HETERO_EINVAL);
  CHECK_EQ(adam(p, p + 4, HETERO_F32, nullptr, 1, 8, good, 1), HETERO_EINVAL);
  CHECK_EQ(adam(p, g, HETERO_F32, p, HETERO_BF16, 8, good, 1), HETERO_EINVAL);
  for (auto change :
       {+[](hetero_hyper* h) { h->beta1 = 1; }, +[](hetero_hyper* h) { h->beta2 = -0.1; },
        +[](hetero_hyper* h) { h->step = 0; }, +[](hetero_hyper* h) { h->lr = NAN; }, +[](hetero_hyper* h) { h->eps = -1; },
        +[](hetero_hyper* h) { h->flags = 8; }, +[](hetero_hyper* h) { h->weight_decay = INFINITY; }}) {
    hetero_hyper bad = good;
    change(&bad);
    CHECK_EQ(adam(p, g, HETERO_F32, nullptr, 1, 8, bad, 1), HETERO_EINVAL);
  }
  CHECK_EQ(p[0], 1.0f);
  CHECK_EQ(adam(p, g, HETERO_F32, nullptr, 1, 0, good, 1), 0);
  CHECK_EQ(p[0], 1.0f);
  CHECK_EQ(adam(p, g, HETERO_F32, nullptr, 1, 8, good, 1), 0);
  CHECK_NE(p[0], 1.0f);
  double out = 0;
  CHECK_EQ(hetero_sum_of_squares(p, HETERO_U8, 4, 1, &out), HETERO_EINVAL);
  CHECK_EQ(hetero_sum_of_squares(p, HETERO_F32, 4, 1, nullptr), HETERO_EINVAL);
  CHECK_EQ(hetero_force_isa(17), HETERO_EINVAL);
}
