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
