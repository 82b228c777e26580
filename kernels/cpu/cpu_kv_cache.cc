// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/cpu_kv_cache.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_queue.h"
#include "kernels/kv_digest.h"

namespace tandem::kernels::cpu {
namespace {

absl::Status CheckShape(const KvShape& shape) {
  if (shape.other_layers > 0) {
    if (absl::Status other = CheckShape(shape.Other()); !other.ok()) {
      return other;
    }
  }
  if (shape.num_layers < 1 || shape.kv_heads < 1 || shape.num_blocks < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "KV cache of ", shape.num_layers, " layers, ", shape.kv_heads,
        " heads, ", shape.num_blocks, " blocks: each must be at least 1"));
  }
  if (shape.head_dim < 8 || shape.head_dim > kMaxHeadDim ||
      shape.head_dim % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim is ", shape.head_dim,
                     ", expected a multiple of 8 from 8 to ", kMaxHeadDim));
  }
  if (shape.block_size < 8 || shape.block_size > kMaxBlockSize ||
      shape.block_size % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_size is ", shape.block_size,
                     ", expected a multiple of 8 from 8 to 256"));
  }
  if (shape.dtype == DType::kF16 || shape.dtype == DType::kW8A8) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV cache type is ", std::string(Name(shape.dtype)),
                     ", expected f32, bf16, fp8, int8 or int4 on a CPU"));
  }
  if (int64_t{2} * shape.kv_heads * shape.head_dim * 4 >
      static_cast<int64_t>(CpuQueue::kScratchBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV of ", shape.kv_heads, " heads of ", shape.head_dim,
                     " dimensions is larger than 1 MiB a position"));
  }
  return absl::OkStatus();
}

int64_t RowBytes(const KvLayout& layout, const KvRange& range, DType wire) {
  return KvRowBytes(wire, range.head_end - range.head_begin, layout.head_dim);
}

// run(layer, first position, piece without `row`) over a range's rows in the
// order of the wire, at most `most` at once.
template <typename Run>
void ForKvRows(const CpuKvCache& kv, const KvRange& range, DType wire, int most,
               const Run& run) {
  const KvLayout& layout = kv.layout();
  KvRowsPiece piece{};
  piece.layout = &layout;
  piece.head_begin = range.head_begin;
  piece.head_end = range.head_end;
  piece.wire = wire;
  piece.row_bytes = RowBytes(layout, range, wire);
  for (int layer = range.layer_begin; layer < range.layer_end; ++layer) {
    for (int position = range.position_begin; position < range.position_end;
         position += piece.rows) {
      piece.block =
          kv.Block(layer, range.block_table[position / layout.block_size]);
      piece.slot = position % layout.block_size;
      piece.rows = std::min({most, layout.block_size - piece.slot,
                             range.position_end - position});
      run(layer, position, piece);
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvCache>> NewCpuKvCache(
    DeviceAllocator& allocator, const KvShape& shape) {
  if (absl::Status status = CheckShape(shape); !status.ok()) return status;
  const KvLayout layout(shape);
  absl::StatusOr<DeviceMemory> memory = DeviceMemory::Make(
      allocator, static_cast<size_t>(layout.layer_bytes * shape.num_layers));
  if (!memory.ok()) return memory.status();
  return std::unique_ptr<KvCache>(
      std::make_unique<CpuKvCache>(shape, *std::move(memory)));
}

KvDigest ReadKv(const KernelTable& table, const CpuKvCache& cache,
                const KvRange& range, DType wire, uint64_t digest_key,
                std::byte* staging, std::byte* scratch) {
  const DigestKeys keys(digest_key);
  KvDigest sum;
  std::byte* row = staging != nullptr ? staging : scratch;
  const int most =
      staging != nullptr
          ? std::numeric_limits<int>::max()
          : static_cast<int>(static_cast<int64_t>(CpuQueue::kScratchBytes) /
                             RowBytes(cache.layout(), range, wire));
  ForKvRows(cache, range, wire, most,
            [&](int layer, int position, KvRowsPiece& piece) {
              piece.row = row;
              table.read_kv_rows(piece);
              for (int i = 0; i < piece.rows; ++i) {
                sum += table.digest_row(
                    reinterpret_cast<const uint32_t*>(piece.row +
                                                      i * piece.row_bytes),
                    static_cast<int>(piece.row_bytes / 4), keys.low, keys.high,
                    digest_key, layer + range.layer_shift, position + i);
              }
              if (staging != nullptr) row += piece.rows * piece.row_bytes;
            });
  return sum;
}

void WriteKv(const KernelTable& table, const CpuKvCache& cache,
             const KvRange& range, DType wire, const std::byte* staging) {
  auto* row = const_cast<std::byte*>(staging);  // is read alone
  ForKvRows(cache, range, wire, std::numeric_limits<int>::max(),
            [&](int, int, KvRowsPiece& piece) {
              piece.row = row;
              table.write_kv_rows(piece);
              row += piece.rows * piece.row_bytes;
            });
}

}  // namespace tandem::kernels::cpu
