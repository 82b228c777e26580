// SPDX-License-Identifier: Apache-2.0
// What the backend does beside computing, over the device in host memory:
// which devices it refuses, what becomes of one that breaks, and its memory.

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_queue.h"
#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/testing/host_device.h"
#include "tests/kernels/other_heads.h"

namespace tandem::kernels::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::NewEmulatedBackend;
using testing::NewHostDevice;

// As the step loop does: it has put a step and a callback on the queue, and
// calls nothing before that has run.
TEST(CudaBackendDeathTest, AFaultEndsTheProcessThoughNobodyCallsTheDevice) {
  EXPECT_EXIT(
      {
        std::atomic<bool> broken{false};
        const auto backend = NewEmulatedBackend({}, {.broken = &broken});
        const auto queue = (*backend)->NewQueue("compute");
        std::promise<void> submitted;
        queue->Callback([&] {
          submitted.get_future().wait();
          broken = true;
        });
        queue->Callback([] { std::_Exit(1); });  // never runs
        submitted.set_value();
        std::this_thread::sleep_for(std::chrono::seconds(30));
        std::_Exit(2);
      },
      ::testing::ExitedWithCode(70),
      "^fatal: GPU: work on the device: error 700");
}

TEST(CudaBackend, ADeviceWithTooLittleSharedMemoryIsRefused) {
  // Compute capability 8.6, 8.9 and 12.x.
  const auto refused = NewEmulatedBackend({}, {.shared_bytes = 99 * 1024});
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("emulated (sm_90) has 99 KiB of shared memory"),
                    HasSubstr("expected 163 or more")));
  EXPECT_TRUE(NewEmulatedBackend({}, {.shared_bytes = 163 * 1024}).ok());
}

TEST(CudaBackend, ACacheTakesHeadsOfLatentAttentionAndNoWiderOnes) {
  const auto backend = NewEmulatedBackend({}, {});
  KvShape shape{.num_layers = 1,
                .kv_heads = 1,
                .head_dim = 576,
                .block_size = 16,
                .num_blocks = 2,
                .dtype = (*backend)->activation_type()};
  EXPECT_TRUE((*backend)->NewKvCache(shape).ok());
  shape.dtype = DType::kW8A8;  // of weights alone
  EXPECT_FALSE((*backend)->NewKvCache(shape).ok());
  shape.dtype = (*backend)->activation_type();
  shape.head_dim = 584;
  const auto refused = (*backend)->NewKvCache(shape);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("head_dim is 584, expected a multiple of 8 from 8 to "
                        "576"));
}

TEST(CudaBackend, LayersWithOtherHeadsShareACache) {
  const auto backend = *NewEmulatedBackend({}, {});
  kernels::testing::OtherHeads heads(*backend);
  for (const DType type :
       {backend->activation_type(), DType::kFp8, DType::kInt8, DType::kInt4}) {
    for (const KvShape& shape : kernels::testing::MixedShapes(type)) {
      SCOPED_TRACE(Name(type));
      heads.Check(shape);
    }
  }
}

// Rows and tokens whose largest number is 127 have scale 1, so that all sums
// are what integers give; and a step within what was reserved allocates
// nothing.
TEST(CudaBackend, ProductsOfWholeRowsWorkInWhatWasReserved) {
  constexpr int kRows = 5, kTokens = 11, kCols = 200;
  const auto value = [](int row, int col) {
    return col == row ? 127 : (row * 31 + col * 17) % 200 - 100;
  };
  std::vector<float> w, x;
  std::vector<uint8_t> codes;
  const std::vector<float> scales(kRows, 1.0f);
  for (int i = 0; i < kRows * kCols; ++i) {
    w.push_back(static_cast<float>(value(i / kCols, i % kCols)));
    codes.push_back(static_cast<uint8_t>(value(i / kCols, i % kCols)));
  }
  for (int i = 0; i < kTokens * kCols; ++i) {
    x.push_back(static_cast<float>(value(i / kCols + 40, i % kCols)));
  }
  const auto backend = *NewEmulatedBackend({.activation = DType::kF32});
  const auto quantised = *backend->PackMatrix(
      {reinterpret_cast<const std::byte*>(w.data()), DType::kF32, kRows, kCols},
      DType::kW8A8);
  const auto given = *backend->PackCodes(
      {DType::kW8A8, kRows, kCols, codes.data(), kCols, scales.data()});
  ASSERT_TRUE(backend->Reserve({.rows = kTokens}).ok());
  const auto queue = backend->NewQueue("compute");
  const auto device_x = *backend->Allocate(x.size() * sizeof(float));
  std::vector<float> out(size_t{kTokens} * kRows);
  const auto device_out = *backend->Allocate(out.size() * sizeof(float));
  backend->CopyToDevice(*queue, device_x->data(), x.data(),
                        x.size() * sizeof(float));
  const size_t used = backend->memory().used_bytes;
  for (const auto* matrix : {quantised.get(), given.get()}) {
    EXPECT_EQ(matrix->dtype(), DType::kW8A8);
    backend->MatMul(*queue, kTokens, device_x->data(), *matrix, nullptr,
                    device_out->data());
    backend->CopyToHost(*queue, out.data(), device_out->data(),
                        out.size() * sizeof(float));
    queue->Synchronize();
    for (int i = 0; i < kTokens * kRows; ++i) {
      int sum = 0;
      for (int c = 0; c < kCols; ++c) {
        sum += value(i % kRows, c) * value(i / kRows + 40, c);
      }
      EXPECT_EQ(out[static_cast<size_t>(i)], static_cast<float>(sum)) << i;
    }
  }
  EXPECT_EQ(backend->memory().used_bytes, used);
}

TEST(CudaBackend, RowsThatCannotBeSummedAreRefused) {
  const auto backend = *NewEmulatedBackend({});
  constexpr int kWide = kMaxW8A8Inputs + 1;
  const std::vector<uint8_t> codes(kWide);
  const std::vector<float> scales(2, 1.0f);
  const auto refusal = [](const auto& packed) {
    EXPECT_EQ(packed.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(packed.status().message());
  };
  HostCodes given{DType::kW8A8, 1, kWide, codes.data(), kWide, scales.data()};
  EXPECT_THAT(refusal(backend->PackCodes(given)),
              HasSubstr("131073 inputs of w8a8, expected at most 131072"));
  const std::vector<float> values(kWide);
  const HostTensor source{reinterpret_cast<const std::byte*>(values.data()),
                          DType::kF32, 1, kWide};
  EXPECT_THAT(refusal(backend->PackMatrix(source, DType::kW8A8)),
              HasSubstr("131073 inputs of w8a8, expected at most 131072"));
  EXPECT_TRUE(backend->PackMatrix(source, DType::kInt8).ok());
  EXPECT_THAT(refusal(backend->PackGatedCodes(
                  {DType::kW8A8, 2, 64, codes.data(), 32, scales.data()})),
              HasSubstr("a scale for every 32 inputs of w8a8, expected one for "
                        "each row"));
  given.cols = given.group = 128;
  EXPECT_TRUE(backend->PackCodes(given).ok());
  given.zeros = codes.data();
  refusal(backend->PackCodes(given));
  given.zeros = nullptr;
  given.e2m1 = true;
  refusal(backend->PackCodes(given));
}

// Small integers, of which bf16 holds all sums.
TEST(CudaBackend, RecordedProductsOfHeadsTakeWhatIsThereWhenTheyRun) {
  constexpr int kRows = 3, kHeads = 2, kOutputs = 24, kCols = 72;
  constexpr int kHeadRows = HeadRows(kOutputs);
  const auto value = [](int i) { return static_cast<float>(i * 7 % 5 - 2); };
  std::vector<float> w(size_t{kHeads} * kHeadRows * kCols);
  for (size_t i = 0; i < w.size(); ++i) w[i] = value(static_cast<int>(i / 3));
  const auto backend = *NewEmulatedBackend({});
  const auto matrix =
      *backend->PackMatrix({reinterpret_cast<const std::byte*>(w.data()),
                            DType::kF32, kHeads * kHeadRows, kCols},
                           DType::kBF16);
  std::vector<BFloat16> x(size_t{kRows} * kHeads * kCols);
  std::vector<BFloat16> out(size_t{kRows} * kHeads * kOutputs);
  const auto device_x = *backend->Allocate(x.size() * sizeof(BFloat16));
  const auto device_out = *backend->Allocate(out.size() * sizeof(BFloat16));
  const auto queue = backend->NewQueue("compute");
  for (const int round : {0, 1}) {
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = FromFloat<BFloat16>(value(static_cast<int>(i) + round));
    }
    backend->CopyToDevice(*queue, device_x->data(), x.data(),
                          x.size() * sizeof(BFloat16));
    if (round == 0) {
      ASSERT_TRUE(backend
                      ->Record(*queue, 5,
                               [&] {
                                 backend->MatMulHeads(*queue, kRows, kHeads,
                                                      kOutputs,
                                                      device_x->data(), *matrix,
                                                      device_out->data());
                               })
                      .ok());
    } else {
      ASSERT_TRUE(backend->Replay(*queue, 5));
    }
    backend->CopyToHost(*queue, out.data(), device_out->data(),
                        out.size() * sizeof(BFloat16));
    queue->Synchronize();
    for (int i = 0; i < kRows * kHeads * kOutputs; ++i) {
      const int head = i / kOutputs % kHeads;
      const int row = head * kHeadRows + i % kOutputs;
      float sum = 0;
      for (int c = 0; c < kCols; ++c) {
        sum += w[static_cast<size_t>(row * kCols + c)] *
               ToFloat(x[static_cast<size_t>(i / kOutputs * kCols + c)]);
      }
      EXPECT_EQ(ToFloat(out[static_cast<size_t>(i)]), sum) << round << " " << i;
    }
  }
}

// Freeing it might wait for the whole device.
TEST(CudaQueue, WorkingMemoryThatWasOutgrownIsKept) {
  const auto device = NewHostDevice();
  {
    CudaQueue queue(*device, false);
    const size_t used = device->UsedBytes();
    std::byte* const first = queue.scratch(CudaQueue::kStaging, 1000);
    EXPECT_EQ(queue.scratch(CudaQueue::kStaging, 1024), first);
    EXPECT_EQ(device->UsedBytes(), used + 1024);
    EXPECT_NE(queue.scratch(CudaQueue::kStaging, 3000), first);
    EXPECT_EQ(device->UsedBytes(), used + 1024 + 4096);
    EXPECT_TRUE(device->Reaches(first));
  }
  EXPECT_EQ(device->UsedBytes(), 0u);
}

}  // namespace
}  // namespace tandem::kernels::cuda
