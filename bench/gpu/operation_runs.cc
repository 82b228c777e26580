// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/operation_runs.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <utility>

#include "absl/status/status.h"

namespace tandem::bench {
namespace {

using kernels::Backend;
using kernels::Buffer;
using kernels::DType;
using kernels::Matrix;
using kernels::Queue;
using kernels::RowSpan;

// Device arrays that live as long as it does. After a failure all are null.
class Arrays {
 public:
  Arrays(Backend& backend, Queue& queue) : backend_(backend), queue_(queue) {}

  std::byte* New(size_t bytes) {
    auto buffer = backend_.Allocate(std::max<size_t>(bytes, 64));
    if (!buffer.ok()) {
      status_ = buffer.status();
      return nullptr;
    }
    buffers_.push_back(*std::move(buffer));
    return buffers_.back()->data();
  }
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    std::byte* const data = New(values.size() * sizeof(T));
    if (data == nullptr) return nullptr;
    backend_.CopyToDevice(queue_, data, values.data(),
                          values.size() * sizeof(T));
    queue_.Synchronize();
    return reinterpret_cast<T*>(data);
  }
  // Of the activations' type: numbers around one.
  std::byte* Random(int64_t count) {
    const DType type = backend_.activation_type();
    std::minstd_rand random(7);
    std::vector<std::byte> bytes(static_cast<size_t>(count) *
                                 kernels::SizeOf(type));
    if (type == DType::kF32) {
      auto* const values = reinterpret_cast<float*>(bytes.data());
      for (int64_t i = 0; i < count; ++i) {
        values[i] = static_cast<float>(random() % 2048) / 1024.0f - 1;
      }
    } else {
      // Signs and fractions at random, exponents of 1/4 to 1.
      const uint32_t exponent = type == DType::kBF16 ? 0x3e80 : 0x3400;
      const uint32_t fraction = type == DType::kBF16 ? 0x80ff : 0x87ff;
      auto* const values = reinterpret_cast<uint16_t*>(bytes.data());
      for (int64_t i = 0; i < count; ++i) {
        const auto draw = static_cast<uint32_t>(random());
        values[i] = static_cast<uint16_t>((draw >> 3 & fraction) + exponent);
      }
    }
    return Upload(bytes);
  }
  const absl::Status& status() const { return status_; }

 private:
  Backend& backend_;
  Queue& queue_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  absl::Status status_;
};

// The median of three runs long enough to time.
double Timed(Queue& queue, const std::function<void(int)>& put) {
  const auto run = [&](int count) {
    queue.Synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) put(i);
    queue.Synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         begin)
               .count() /
           count;
  };
  run(1);
  const double once = run(1);
  const int count = std::clamp(static_cast<int>(0.05 / once), 1, 500);
  double times[3];
  for (double& time : times) time = run(count);
  std::sort(times, times + 3);
  return times[1];
}

}  // namespace

absl::StatusOr<double> TimeMatMul(Backend& backend,
                                  const std::vector<const Matrix*>& w,
                                  int tokens, bool gated) {
  const std::unique_ptr<Queue> queue = backend.NewQueue("compute");
  Arrays arrays(backend, *queue);
  const std::byte* const x = arrays.Random(int64_t{tokens} * w[0]->cols());
  std::byte* const out =
      arrays.New(static_cast<size_t>(tokens) *
                 static_cast<size_t>(w[0]->rows()) * sizeof(float));
  if (!arrays.status().ok()) return arrays.status();
  return Timed(*queue, [&](int i) {
    const Matrix& matrix = *w[static_cast<size_t>(i) % w.size()];
    if (gated) {
      backend.GatedMatMul(*queue, tokens, x, matrix, nullptr,
                          kernels::Activation::kSilu, out);
    } else {
      backend.MatMul(*queue, tokens, x, matrix, nullptr, out);
    }
  });
}

absl::StatusOr<double> TimeAttention(Backend& backend, const Shape& shape,
                                     int sequences, int queries, int context,
                                     DType kv) {
  constexpr int kBlock = 16;
  const int each = (context + kBlock - 1) / kBlock;
  const kernels::KvShape kv_shape{.num_layers = 1,
                                  .kv_heads = shape.kv_heads,
                                  .head_dim = shape.head_dim,
                                  .block_size = kBlock,
                                  .num_blocks = each * sequences,
                                  .dtype = kv};
  auto cache = backend.NewKvCache(kv_shape);
  if (!cache.ok()) return cache.status();
  const std::unique_ptr<Queue> queue = backend.NewQueue("compute");
  Arrays arrays(backend, *queue);

  // Fill: positions one sequence after the other, rotated by nothing.
  const int width = shape.qkv_rows();
  std::byte* const filled = arrays.Random(int64_t{context} * width);
  const int angles = context * shape.head_dim / 2;
  const kernels::RopeTable still{
      arrays.Upload(std::vector<float>(static_cast<size_t>(angles), 1.0f)),
      arrays.Upload(std::vector<float>(static_cast<size_t>(angles), 0.0f)),
      shape.head_dim / 2};
  std::vector<int32_t> table;
  for (int s = 0; s < sequences; ++s) {
    for (int i = 0; i < each; ++i) table.push_back(i * sequences + s);
  }
  std::vector<int32_t> positions;
  for (int p = 0; p < context; ++p) positions.push_back(p);
  const int32_t* const device_positions = arrays.Upload(positions);
  if (!arrays.status().ok()) return arrays.status();
  for (int s = 0; s < sequences; ++s) {
    std::vector<int32_t> slots;
    for (int p = 0; p < context; ++p) {
      slots.push_back(table[static_cast<size_t>(s * each + p / kBlock)] *
                          kBlock +
                      p % kBlock);
    }
    kernels::Rows rows;
    rows.num_rows = context;
    rows.positions = device_positions;
    rows.slots = arrays.Upload(slots);
    if (!arrays.status().ok()) return arrays.status();
    backend.RopeAppend(*queue, rows, shape.heads, still, {}, filled, nullptr,
                       **cache, 0);
  }
  queue->Synchronize();

  std::vector<RowSpan> spans;
  for (int s = 0; s < sequences; ++s) {
    spans.push_back({s * queries, queries, context - queries, s * each});
  }
  const int total = sequences * queries;
  std::vector<int32_t> row_positions;
  for (int i = 0; i < total; ++i) {
    row_positions.push_back(context - queries + i % queries);
  }
  kernels::Rows rows;
  rows.num_rows = total;
  rows.num_spans = sequences;
  rows.positions = arrays.Upload(row_positions);
  rows.spans = arrays.Upload(spans);
  rows.block_tables = arrays.Upload(table);
  rows.host_spans = spans.data();
  const int query = shape.heads * shape.head_dim;
  const std::byte* const q = arrays.Random(int64_t{total} * query);
  std::byte* const out = arrays.New(static_cast<size_t>(total) *
                                    static_cast<size_t>(query) * sizeof(float));
  if (!arrays.status().ok()) return arrays.status();
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  return Timed(*queue, [&](int) {
    backend.Attention(*queue, rows, shape.heads, {scale}, q, query, **cache, 0,
                      out);
  });
}

}  // namespace tandem::bench
