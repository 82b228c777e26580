// SPDX-License-Identifier: Apache-2.0
// What single instructions compute, bit for bit: the numerics contract and
// every comparison with the emulator stand on it. In the emulator this holds by
// construction, and tests the probe; on a GPU it is the first thing to run. A
// mismatch prints the smallest failing sum and which other model of the step
// would explain what was seen (numerics.h and device/tensor_core.h are then
// to be mended).

#include "tests/kernels/cuda/probe/probe.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <map>

#include "absl/strings/str_format.h"
#include "kernels/cpu/float_env.h"
#include "kernels/quantise.h"
#include "tests/kernels/cuda/fixture.h"

namespace tandem::kernels::cuda {
namespace {

using Random = std::mt19937_64;

// ---- Inputs.

enum class Kind : uint8_t {
  kPlain,         // normal numbers of like size
  kWide,          // exponents from all over
  kCancelling,    // large ones that cancel, small ones that are left
  kSubnormal,     // products and sums below the normal numbers
  kSpecial,       // infinities and what is not a number
  kAccumulators,  // sums so far of every magnitude
  kEdge,          // one product of 1, others around the last bits kept
  kBits,          // any bits
};
constexpr std::pair<Kind, const char*> kKinds[] = {
    {Kind::kPlain, "plain"},
    {Kind::kWide, "wide exponents"},
    {Kind::kCancelling, "cancellation"},
    {Kind::kSubnormal, "subnormals"},
    {Kind::kSpecial, "infinities and NaNs"},
    {Kind::kAccumulators, "accumulators of all magnitudes"},
    {Kind::kEdge, "last bits"},
    {Kind::kBits, "any bits"}};

uint16_t Encoded(bool half, float value) {
  return BitsOf(half ? DType::kF16 : DType::kBF16, value);
}
float Signed(Random& random, float value) {
  return (random() & 1) != 0 ? -value : value;
}
// 1.xxx * 2^exponent
float Scaled(Random& random, int exponent) {
  return Signed(
      random,
      std::ldexp(1.0f + static_cast<float>(random() % 256) / 256.0f, exponent));
}
int Between(Random& random, int low, int high) {
  return low +
         static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
}

uint16_t Input(Kind kind, bool half, int k, bool first, Random& random) {
  const int widest = half ? 7 : 30;
  switch (kind) {
    case Kind::kPlain:
    case Kind::kAccumulators:
      return Encoded(half, Scaled(random, Between(random, -3, 1)));
    case Kind::kWide:
      return Encoded(half, Scaled(random, Between(random, -widest, widest)));
    case Kind::kCancelling: {
      // Neighbours have one product, of opposite sign; some are small.
      if (k % 8 >= 6) return Encoded(half, Scaled(random, -widest / 2));
      const float value =
          std::ldexp(1.0f + static_cast<float>(k / 2) / 64.0f, widest / 2);
      return Encoded(half, first && k % 2 != 0 ? -value : value);
    }
    case Kind::kSubnormal:
      if (half || first) {
        return static_cast<uint16_t>(random() & (half ? 0x83ffu : 0x807fu));
      }
      return Encoded(half, Scaled(random, Between(random, -12, 4)));
    case Kind::kSpecial: {
      const uint16_t infinity = half ? 0x7c00 : 0x7f80;
      const uint64_t draw = random() % 64;
      if (draw == 0) return infinity;
      if (draw == 1) return infinity | 0x8000u;
      if (draw == 2) return infinity + 1;
      if (draw < 8) return 0;
      return Encoded(half, Scaled(random, Between(random, -3, 3)));
    }
    case Kind::kEdge:
      if (k % 16 == 0) return Encoded(half, 1.0f);
      return Encoded(half, Scaled(random, Between(random, -14, -11)));
    case Kind::kBits:
      return static_cast<uint16_t>(random());
  }
  return 0;
}

float Accumulator(Kind kind, Random& random) {
  switch (kind) {
    case Kind::kAccumulators:
      return std::bit_cast<float>(static_cast<uint32_t>(random()) %
                                      0x7f800000u |
                                  static_cast<uint32_t>(random() & 1) << 31);
    case Kind::kCancelling:
      return Scaled(random, Between(random, -20, 40));
    case Kind::kSubnormal:
      return std::bit_cast<float>(static_cast<uint32_t>(random()) &
                                  0x80ffffffu);
    case Kind::kSpecial:
      return random() % 32 == 0 ? Signed(random, HUGE_VALF)
                                : Scaled(random, Between(random, -3, 3));
    case Kind::kBits:
      return std::bit_cast<float>(static_cast<uint32_t>(random()));
    default:
      return random() % 4 == 0 ? 0.0f : Scaled(random, Between(random, -26, 3));
  }
}

// ---- Models of a step. A chain's steps follow one another.

TensorVector Vector(bool half, const uint16_t* bits) {
  TensorVector vector;
  for (int i = 0; i < 16; ++i) {
    half ? vector.SetF16(i, bits[i]) : vector.SetBf16(i, bits[i]);
  }
  return vector;
}

struct StepModel {
  int bits;    // kept below the leading one
  int inputs;  // that are added at a time
  bool reversed;
  auto operator<=>(const StepModel&) const = default;
};

template <int kBits>
float StepOf(const StepModel& model, const TensorVector& a,
             const TensorVector& b, float c) {
  using internal::Step;
  if (model.inputs == 16) return Step<0, 16, kBits>(a, b, c);
  if (model.inputs == 8) {
    return model.reversed
               ? Step<0, 8, kBits>(a, b, Step<8, 16, kBits>(a, b, c))
               : Step<8, 16, kBits>(a, b, Step<0, 8, kBits>(a, b, c));
  }
  if (model.reversed) {
    c = Step<12, 16, kBits>(a, b, c);
    c = Step<8, 12, kBits>(a, b, c);
    c = Step<4, 8, kBits>(a, b, c);
    return Step<0, 4, kBits>(a, b, c);
  }
  c = Step<0, 4, kBits>(a, b, c);
  c = Step<4, 8, kBits>(a, b, c);
  c = Step<8, 12, kBits>(a, b, c);
  return Step<12, 16, kBits>(a, b, c);
}
float StepOf(const StepModel& model, const TensorVector& a,
             const TensorVector& b, float c, bool half) {
  if (a.special || b.special || !std::isfinite(c)) {
    return internal::SpecialStep(a, b, 0, 16, c, half);
  }
  switch (model.bits) {
    case 23:
      return StepOf<23>(model, a, b, c);
    case 24:
      return StepOf<24>(model, a, b, c);
    case 25:
      return StepOf<25>(model, a, b, c);
    case 26:
      return StepOf<26>(model, a, b, c);
    default:
      return StepOf<27>(model, a, b, c);
  }
}

std::vector<StepModel> OtherModels() {
  std::vector<StepModel> models;
  for (int bits = 23; bits <= 27; ++bits) {
    models.push_back({bits, 16, false});
    for (const int inputs : {8, 4}) {
      models.push_back({bits, inputs, false});
      models.push_back({bits, inputs, true});
    }
  }
  return models;
}

// ---- Sums: what one output is made of.

struct Sum {
  std::vector<uint16_t> a;  // [kProbeInputs]
  std::vector<uint16_t> b;
  float c = 0;
};

float Expected(const Sum& sum, int steps, Generation generation, bool half) {
  float chain = sum.c;
  for (int s = 0; s < steps; ++s) {
    chain = TensorCoreStep(generation, Vector(half, &sum.a[At(s * 16)]),
                           Vector(half, &sum.b[At(s * 16)]), chain, half);
  }
  return chain;
}
float ExpectedBy(const StepModel& model, const Sum& sum, int steps, bool half) {
  float chain = sum.c;
  for (int s = 0; s < steps; ++s) {
    chain = StepOf(model, Vector(half, &sum.a[At(s * 16)]),
                   Vector(half, &sum.b[At(s * 16)]), chain, half);
  }
  return chain;
}

bool SameFloat(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

struct Form {
  ProbeStep step;
  bool half;
  int tokens;
  int steps;
};
std::string NameOf(const Form& form) {
  const char* const names[] = {"mma.sync", "wgmma", "wgmma, A in registers"};
  return absl::StrFormat("%s %s, %d tokens, %d steps",
                         names[static_cast<int>(form.step)],
                         form.half ? "f16" : "bf16", form.tokens, form.steps);
}

struct Matrices {
  int cases;
  int tokens;
  std::vector<uint16_t> a, b;
  std::vector<float> c, d;

  Matrices(int count, int width)
      : cases(count),
        tokens(width),
        a(At(int64_t{count} * kProbeRows * kProbeInputs)),
        b(At(int64_t{count} * width * kProbeInputs)),
        c(At(int64_t{count} * kProbeRows * width)),
        d(c.size(), std::numeric_limits<float>::quiet_NaN()) {}

  void Fill(Kind kind, bool half, uint64_t seed) {
    Random random(seed);
    for (size_t i = 0; i < a.size(); ++i) {
      a[i] =
          Input(kind, half, static_cast<int>(i % kProbeInputs), true, random);
    }
    for (size_t i = 0; i < b.size(); ++i) {
      b[i] =
          Input(kind, half, static_cast<int>(i % kProbeInputs), false, random);
    }
    for (float& value : c) value = Accumulator(kind, random);
  }
  int Run(const Form& form) {
    return LaunchProbeMatrix(
        StreamOf(Generation::kHopper), form.step, form.half,
        {a.data(), b.data(), c.data(), d.data(), cases, tokens, form.steps});
  }
  Sum At3(int one, int row, int token) const {
    const auto from =
        a.begin() + (int64_t{one} * kProbeRows + row) * kProbeInputs;
    const auto with =
        b.begin() + (int64_t{one} * tokens + token) * kProbeInputs;
    return {{from, from + kProbeInputs},
            {with, with + kProbeInputs},
            c[At((int64_t{one} * kProbeRows + row) * tokens + token)]};
  }
};

// The sum alone, everything around it zero.
float Alone(const Form& form, const Sum& sum) {
  Matrices one(1, form.tokens);
  std::copy(sum.a.begin(), sum.a.end(), one.a.begin());
  std::copy(sum.b.begin(), sum.b.end(), one.b.begin());
  one.c[0] = sum.c;
  if (one.Run(form) != 0) return 0;
  return one.d[0];
}

// Leaves away what a failing sum does not need.
Sum Smallest(const Form& form, Sum sum) {
  const auto fails = [&](const Sum& s) {
    return !SameFloat(Alone(form, s),
                      Expected(s, form.steps, Generation::kHopper, form.half));
  };
  if (!fails(sum)) return sum;  // only in company: print it whole
  for (int k = 0; k < kProbeInputs; ++k) {
    Sum less = sum;
    less.a[At(k)] = less.b[At(k)] = 0;
    if (fails(less)) sum = less;
  }
  Sum less = sum;
  less.c = 0;
  return fails(less) ? less : sum;
}

std::string Report(const Form& form, const Sum& sum) {
  std::string text = absl::StrFormat("c %08x", std::bit_cast<uint32_t>(sum.c));
  for (int k = 0; k < form.steps * 16; ++k) {
    if ((sum.a[At(k)] & 0x7fffu) != 0 && (sum.b[At(k)] & 0x7fffu) != 0) {
      absl::StrAppendFormat(&text, ", [%d] %04x * %04x", k, sum.a[At(k)],
                            sum.b[At(k)]);
    }
  }
  const auto bits = [](float f) { return std::bit_cast<uint32_t>(f); };
  absl::StrAppendFormat(
      &text, ": got %08x, expected %08x", bits(Alone(form, sum)),
      bits(Expected(sum, form.steps, Generation::kHopper, form.half)));
  return text;
}

// What the probe does with all mismatches: counts which model they follow.
class Findings {
 public:
  void Add(const Form& form, const char* kind, const Sum& sum, float got) {
    ++checked_;
    if (SameFloat(got,
                  Expected(sum, form.steps, Generation::kHopper, form.half))) {
      return;
    }
    ++wrong_;
    if (wrong_ <= 3) {
      examples_ += "\n  " + NameOf(form) + ", " + kind + "\n    " +
                   Report(form, Smallest(form, sum));
    }
    if (seen_++ > 20000) return;
    for (const StepModel& model : models_) {
      explains_[model] +=
          SameFloat(got, ExpectedBy(model, sum, form.steps, form.half));
    }
  }
  testing::AssertionResult Verdict() const {
    if (wrong_ == 0) return testing::AssertionSuccess();
    auto failure = testing::AssertionFailure();
    failure << wrong_ << " of " << checked_ << " sums have other bits"
            << examples_ << "\n  the mismatches, by other models:";
    std::vector<std::pair<int, StepModel>> order;
    for (const auto& [model, count] : explains_)
      order.push_back({count, model});
    std::sort(order.rbegin(), order.rend());
    for (size_t i = 0; i < order.size() && i < 4; ++i) {
      const StepModel& m = order[i].second;
      failure << absl::StrFormat(
          "\n    %d bits below the leading one, %d inputs at a time%s: %d "
          "explained",
          m.bits, m.inputs, m.reversed ? ", last first" : "", order[i].first);
    }
    return failure;
  }
  int64_t checked() const { return checked_; }

 private:
  const std::vector<StepModel> models_ = OtherModels();
  std::map<StepModel, int> explains_;
  std::string examples_;
  int64_t checked_ = 0;
  int64_t wrong_ = 0;
  int seen_ = 0;
};

void ProbeForms(ProbeStep step, const std::vector<int>& widths) {
  Findings findings;
  for (const auto& [kind, name] : kKinds) {
    for (const bool half : {false, true}) {
      for (const int tokens : widths) {
        for (const int steps : {1, 4}) {
          const Form form{step, half, tokens, steps};
          Matrices matrices(OnDevice() ? 16 : 1, tokens);
          matrices.Fill(kind, half,
                        At(tokens * 100 + steps * 10 + static_cast<int>(kind)));
          ASSERT_EQ(matrices.Run(form), 0)
              << NameOf(form) << " " << emulator::LastFault();
          // Some of the outputs: the model is slower than the device.
          const int64_t count = static_cast<int64_t>(matrices.d.size());
          const int64_t stride = std::max<int64_t>(1, count / 4096);
          for (int64_t i = 0; i < count; i += stride) {
            // Off the grid, so that every row and token has its turn.
            const int64_t at = std::min(count - 1, i + i / stride % stride);
            const int token = static_cast<int>(at % tokens);
            const int row = static_cast<int>(at / tokens % kProbeRows);
            const int one = static_cast<int>(at / tokens / kProbeRows);
            findings.Add(form, name, matrices.At3(one, row, token),
                         matrices.d[At(at)]);
          }
        }
      }
    }
  }
  EXPECT_TRUE(findings.Verdict());
  std::printf("%ld sums compared\n", static_cast<long>(findings.checked()));
}

TEST(Probe, MmaSyncIsTheModelsStep) { ProbeForms(ProbeStep::kMma, {8}); }

TEST(Probe, WarpgroupStepIsTheSameForEveryWidth) {
  if (OnDevice() && DeviceGeneration() != 90) GTEST_SKIP() << "Hopper's own";
  ProbeForms(ProbeStep::kWgmma, OnDevice()
                                    ? std::vector<int>{8, 16, 32, 64, 128, 256}
                                    : std::vector<int>{8, 64});
}

TEST(Probe, WarpgroupStepWithRowsInRegistersIsTheSame) {
  if (OnDevice() && DeviceGeneration() != 90) GTEST_SKIP() << "Hopper's own";
  ProbeForms(ProbeStep::kWgmmaRegisters,
             OnDevice() ? std::vector<int>{8, 16, 32, 64, 128, 256}
                        : std::vector<int>{16});
}

// The report itself: a step that cuts off one bit earlier is found out, and
// named.
TEST(Probe, NamesTheModelThatExplainsAMismatch) {
  Findings findings;
  const Form form{ProbeStep::kMma, false, 8, 1};
  Matrices matrices(1, 8);
  matrices.Fill(Kind::kPlain, false, 3);
  const StepModel other{24, 8, false};
  for (int row = 0; row < kProbeRows; ++row) {
    const Sum sum = matrices.At3(0, row, row % 8);
    findings.Add(form, "seeded", sum, ExpectedBy(other, sum, 1, false));
  }
  const std::string said = findings.Verdict().message();
  EXPECT_NE(said.find("24 bits below the leading one, 8 inputs at a time"),
            std::string::npos)
      << said;
}

// ---- Functions of one or two numbers.

std::vector<float> Map(ProbeFunction function, const std::vector<float>& x,
                       const std::vector<float>& y) {
  std::vector<float> out(x.size(), std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(LaunchProbeMap(
                StreamOf(Generation::kHopper), function,
                {x.data(), y.data(), out.data(), static_cast<int>(x.size())}),
            0)
      << emulator::LastFault();
  return out;
}

std::vector<float> Numbers(int count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values = {
      0.0f,     -0.0f,    1.0f,     -1.0f,   0x1p-126f, -0x1p-126f, 65504.0f,
      65520.0f, 0x1p-24f, 0x1p-25f, 3.4e38f, HUGE_VALF, -HUGE_VALF};
  while (static_cast<int>(values.size()) < count) {
    const float value = Scaled(random, Between(random, -126, 126));
    values.push_back(value);
  }
  return values;
}

TEST(Probe, ArithmeticHasTheHostsBits) {
  const int count = OnDevice() ? 1 << 20 : 3000;
  const auto x = Numbers(count, 1);
  auto y = Numbers(count, 2);
  std::rotate(y.begin(), y.begin() + 5, y.end());
  const cpu::ScopedFlushDenormals flush;
  const auto same = [&](ProbeFunction function, auto reference) {
    const auto got = Map(function, x, y);
    int wrong = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const float expected = reference(x[i], y[i]);
      if (std::isnan(expected) && std::isnan(got[i])) continue;
      if (!SameFloat(got[i], expected) && ++wrong <= 3) {
        ADD_FAILURE() << "function " << static_cast<int>(function) << " of "
                      << absl::StrFormat("%a, %a: got %a, expected %a", x[i],
                                         y[i], got[i], expected);
      }
    }
    EXPECT_EQ(wrong, 0);
  };
  same(ProbeFunction::kExp, [](float a, float) { return Exp(a); });
  same(ProbeFunction::kDiv, [](float a, float b) { return Div(a, b); });
  same(ProbeFunction::kSqrt, [](float a, float) { return Sqrt(a); });
  same(ProbeFunction::kFmaChain, [](float a, float b) {
    for (int i = 0; i < 8; ++i) b = Fma(a, b, a);
    return b;
  });
  same(ProbeFunction::kToBf16,
       [](float a, float) { return ToFloat(FromFloat<BFloat16>(a)); });
  same(ProbeFunction::kToF16,
       [](float a, float) { return ToFloat(FromFloat<Half>(a)); });
}

TEST(Probe, E4M3WidensExactly) {
  std::vector<float> codes;
  for (uint32_t bits = 0; bits < 256; ++bits) {
    if ((bits & 0x7fu) != 0x7f) codes.push_back(std::bit_cast<float>(bits));
  }
  for (const auto function :
       {ProbeFunction::kE4M3ToBf16, ProbeFunction::kE4M3ToF16}) {
    const auto got = Map(function, codes, codes);
    for (size_t i = 0; i < codes.size(); ++i) {
      const auto bits = static_cast<uint8_t>(std::bit_cast<uint32_t>(codes[i]));
      EXPECT_EQ(got[i], FloatFromE4M3(bits)) << static_cast<int>(bits);
    }
  }
}

// PTX promises 2^-22. Which of the values it is may differ between
// generations of GPU: the sum printed tells them apart.
TEST(Probe, Exp2IsNearAndRepeats) {
  std::vector<float> x = {0.0f, -0.0f, -HUGE_VALF, -1.0f, -126.0f, -200.0f};
  Random random(4);
  const size_t count = OnDevice() ? 1 << 22 : 3000;
  while (x.size() < count) {
    x.push_back(
        -std::ldexp(1.0f + static_cast<float>(random() % 8388608) / 8388608.0f,
                    Between(random, -30, 6)));
  }
  const auto got = Map(ProbeFunction::kExp2, x, x);
  EXPECT_TRUE(SameBits(got, Map(ProbeFunction::kExp2, x, x)));
  EXPECT_EQ(got[0], 1.0f);
  EXPECT_EQ(got[1], 1.0f);
  EXPECT_EQ(got[2], 0.0f);
  double worst = 0;
  uint64_t sum = 14695981039346656037u;
  for (size_t i = 0; i < x.size(); ++i) {
    sum = (sum ^ std::bit_cast<uint32_t>(got[i])) * 1099511628211u;
    const double expected = std::exp2(double{x[i]});
    if (expected < 0x1p-126) {
      EXPECT_LE(got[i], 0x1p-126f);
      continue;
    }
    worst = std::max(worst, std::fabs(got[i] - expected) / expected);
  }
  EXPECT_LE(worst, 0x1p-22);
  std::printf("ex2: largest relative error 2^%.2f, sum %016lx\n",
              std::log2(worst), static_cast<unsigned long>(sum));
}

}  // namespace
}  // namespace tandem::kernels::cuda
