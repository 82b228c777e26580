// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters: float64 bounds, the same bits whatever else is in the
// batch, and halves that are gated as GatedMatMul does it.

#include "tests/kernels/lora_case.h"

namespace tandem::kernels {
namespace {

// A sum of k rounded products is off by at most k + 1 roundings of what its
// terms' magnitudes add up to.
TEST(LoraTest, SumsAreWithinTheErrorBoundOfFloat64) {
  for (const LoraCase& c : LoraCases()) {
    const LoraValues v = MakeLora(c);
    Device device(MakeBackend("auto", 2));
    const auto got = RunLora(device, c, v);
    for (int r = 0; r < c.num_rows; ++r) {
      const auto expected = LoraInFloat64(c, v, r);
      for (int o = 0; o < c.stride; ++o) {
        const auto at = static_cast<size_t>(r * c.stride + o);
        const double bound =
            (c.cols + 40) * 6e-8 * expected.magnitude[static_cast<size_t>(o)];
        ASSERT_NEAR(got[at], expected.value[static_cast<size_t>(o)], bound)
            << "row " << r << " output " << o << " of " << c.cols << " inputs";
      }
    }
  }
}

TEST(LoraTest, RowsWithoutAnAdapterKeepTheirBits) {
  const LoraCase c = LoraCases().back();
  const LoraValues v = MakeLora(c);
  Device device(MakeBackend());
  const auto got = RunLora(device, c, v);
  int kept = 0;
  for (int r = 0; r < c.num_rows; ++r) {
    const int slot = v.slots[static_cast<size_t>(r)];
    if (slot >= 0 && v.ranks[static_cast<size_t>(slot)] > 0) continue;
    ++kept;
    for (int o = 0; o < c.stride; ++o) {
      const auto at = static_cast<size_t>(r * c.stride + o);
      EXPECT_EQ(std::bit_cast<uint32_t>(got[at]),
                std::bit_cast<uint32_t>(v.out[at]));
    }
  }
  EXPECT_GT(kept, 2);
}

// Each row alone, all together, and in the other order.
TEST(LoraTest, BitsDoNotDependOnBatchThreadsOrIsa) {
  for (const LoraCase& c : LoraCases()) {
    const LoraValues v = MakeLora(c);
    Device reference(MakeBackend("avx2", 1));
    const auto expected = RunLora(reference, c, v);
    for (const Config& config : AllConfigs()) {
      auto backend = MakeBackend(config.isa, config.threads);
      if (backend == nullptr) continue;
      Device device(std::move(backend));
      EXPECT_TRUE(SameBits(RunLora(device, c, v), expected));
    }
    for (const bool alone : {true, false}) {
      LoraCase part = c;
      LoraValues rows = v;
      if (alone) part.num_rows = 1;
      for (int r = 0; r < c.num_rows; ++r) {
        const int from = alone ? r : c.num_rows - 1 - r;
        const int to = alone ? 0 : r;
        std::copy_n(v.x.begin() + from * c.cols, c.cols,
                    rows.x.begin() + to * c.cols);
        std::copy_n(v.out.begin() + from * c.stride, c.stride,
                    rows.out.begin() + to * c.stride);
        rows.slots[static_cast<size_t>(to)] =
            v.slots[static_cast<size_t>(from)];
        if (!alone && r + 1 < c.num_rows) continue;
        const auto got = RunLora(reference, part, rows);
        for (int i = 0; i < part.num_rows; ++i) {
          const int whole = alone ? r : c.num_rows - 1 - i;
          for (int o = 0; o < c.stride; ++o) {
            ASSERT_EQ(got[static_cast<size_t>(i * c.stride + o)],
                      expected[static_cast<size_t>(whole * c.stride + o)]);
          }
        }
      }
    }
  }
}

TEST(LoraTest, HalvesAreGatedAsTheProductDoesItAtOnce) {
  for (const int dim : {8, 13, 100}) {
    const int rows = 5;
    const int cols = 48;
    const auto count = static_cast<size_t>(rows * dim);
    Device device(MakeBackend("auto", 2));
    const float* const x =
        device.Upload(RandomFloats(static_cast<size_t>(rows * cols), 61));
    const Matrix& w =
        device.PackGated(RandomFloats(static_cast<size_t>(2 * dim * cols), 62),
                         2 * dim, cols, DType::kBF16);
    float* const halves =
        device.New<float>(static_cast<size_t>(rows * (2 * dim + 14)));
    float* const out = device.New<float>(count);
    device->GatedMatMul(device.queue(), rows, x, w, nullptr, Activation::kSilu,
                        out);
    const auto expected = device.Download(out, count);
    float* const again = device.New<float>(count);
    device->MatMulHalves(device.queue(), rows, x, w, halves);
    device->GateHalves(device.queue(), rows, dim, Activation::kSilu, halves,
                       again);
    EXPECT_TRUE(SameBits(device.Download(again, count), expected));
  }
}

}  // namespace
}  // namespace tandem::kernels
