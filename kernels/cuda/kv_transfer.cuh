// SPDX-License-Identifier: Apache-2.0
// KV between the paged cache and the wire, and its digest (kv_digest.h).
//
// A block takes one layer and kKvPositions positions. A row (layer, position)
// is cut into pieces of 1024 words, of which a thread owns four neighbouring
// ones, 16 bytes: its words of the key tables are worked out once and serve
// all rows. Sums of a piece are exact, so any order gives the same digest.

#ifndef TANDEM_KERNELS_CUDA_KV_TRANSFER_CUH_
#define TANDEM_KERNELS_CUDA_KV_TRANSFER_CUH_

#include <type_traits>

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"
#include "kernels/cuda/launch.h"
#include "kernels/kv_digest.h"

namespace tandem::kernels::cuda {

inline constexpr int kKvThreads = 256;
inline constexpr int kKvWarps = kKvThreads / 32;
inline constexpr int kKvPositions = 8;
inline constexpr int kWordsPerThread = 4;
static_assert(kKvThreads * kWordsPerThread == kDigestPieceWords);

// Between cache and wire. f32 becomes bf16 in integers, as on a CPU: NaNs
// keep their sign and upper payload.
template <typename To, typename From>
TANDEM_DEVICE To ConvertKv(From from) {
  if constexpr (std::is_same_v<To, From>) {
    return from;
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    const uint32_t bits = FloatToBits(ToFloat(from));
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
      return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
    }
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
  } else {
    return FromFloat<To>(ToFloat(from));
  }
}

// How the elements of a row lie in the cache.
struct KvRow {
  int heads;
  int head_dim;

  TANDEM_HOST_DEVICE int elements() const { return 2 * heads * head_dim; }
};
TANDEM_HOST_DEVICE inline KvRow RowOf(const KvSliceParams& p) {
  return {p.head_end - p.head_begin, p.kv.head_dim};
}
// The pieces of a row.
TANDEM_HOST_DEVICE inline int PiecesOf(const KvSliceParams& p) {
  const int words = RowOf(p).elements() * (p.wire == DType::kF32 ? 4 : 2) / 4;
  return (words + kDigestPieceWords - 1) / kDigestPieceWords;
}

// Where element `element` of the row is in the cache.
TANDEM_DEVICE int64_t CacheOffset(const KvSliceParams& p, int layer,
                                  int position, int element) {
  const KvRow row = RowOf(p);
  const int side_elements = row.heads * row.head_dim;
  const int side = element / side_elements;
  const int rest = element % side_elements;
  const int block =
      p.blocks[position / p.kv.block_size - p.position_begin / p.kv.block_size];
  return p.kv.Offset(layer, block, side, p.head_begin + rest / row.head_dim,
                     position % p.kv.block_size) +
         rest % row.head_dim;
}

TANDEM_DEVICE std::byte* WireAt(const KvSliceParams& p, int layer, int position,
                                int64_t row_bytes, int offset) {
  return p.staging + (layer - p.layer_begin) * p.layer_stride +
         (position - p.position_begin) * row_bytes + offset;
}

// The words of a thread in both key tables.
struct ThreadKeys {
  uint32_t low[kWordsPerThread];
  uint32_t high[kWordsPerThread];

  TANDEM_DEVICE ThreadKeys(uint64_t key, int thread) {
    constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;
    for (int i = 0; i < kWordsPerThread; ++i) {
      const uint64_t n =
          static_cast<uint64_t>(thread * kWordsPerThread + i + 1);
      low[i] = static_cast<uint32_t>(DigestMix(key + n * kStep) >> 32);
      high[i] = static_cast<uint32_t>(
          DigestMix(DigestHighKey(key) + n * kStep) >> 32);
    }
  }
};

TANDEM_DEVICE uint64_t PairProducts(const Vector16& v,
                                    const uint32_t (&key)[kWordsPerThread]) {
  return static_cast<uint64_t>(v.word[0] + key[0]) * (v.word[1] + key[1]) +
         static_cast<uint64_t>(v.word[2] + key[2]) * (v.word[3] + key[3]);
}

// C: the cache's elements; W: the wire's. Without staging, the digest alone.
template <typename C, typename W>
struct KvGatherKernel {
  static constexpr int kThreads = kKvThreads;
  static constexpr int kPerVector = 16 / static_cast<int>(sizeof(W));
  KvSliceParams p;

  // For every row and piece, the sums of each warp: low halves, then high.
  static int SharedBytes(const KvSliceParams& p) {
    return kKvPositions * PiecesOf(p) * kKvWarps * 2 *
           static_cast<int>(sizeof(uint64_t));
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int layer = p.layer_begin + g.block_y();
    const int first = p.position_begin + g.block_x() * kKvPositions;
    const int end = Smaller(first + kKvPositions, p.position_end);
    const int elements = RowOf(p).elements();
    const int pieces = PiecesOf(p);
    uint64_t* const low = reinterpret_cast<uint64_t*>(g.shared());
    uint64_t* const high = low + kKvPositions * pieces * kKvWarps;
    const ThreadKeys keys(p.digest_key, g.thread());
    for (int position = first; position < end; ++position) {
      for (int piece = 0; piece < pieces; ++piece) {
        const int element = (piece * kThreads + g.thread()) * kPerVector;
        uint64_t low_sum = 0;
        uint64_t high_sum = 0;
        if (element < elements) {
          const Vector16 v = Load(layer, position, element);
          if (p.staging != nullptr) {
            Store16(WireAt(p, layer, position,
                           int64_t{elements} * static_cast<int>(sizeof(W)),
                           element * static_cast<int>(sizeof(W))),
                    v);
          }
          low_sum = PairProducts(v, keys.low);
          high_sum = PairProducts(v, keys.high);
        }
        if (p.digest == nullptr) continue;
        low_sum = ReduceWarp(g, low_sum, Sum64());
        high_sum = ReduceWarp(g, high_sum, Sum64());
        if (g.lane() == 0) {
          const int at =
              ((position - first) * pieces + piece) * kKvWarps + g.warp();
          low[at] = low_sum;
          high[at] = high_sum;
        }
      }
    }
    if (p.digest == nullptr) return;
    g.Barrier();
    if (g.warp() == 0) Finish(g, layer, first, end, pieces, low, high);
  }

  // 16 bytes of the wire.
  TANDEM_DEVICE Vector16 Load(int layer, int position, int element) const {
    const C* const from = reinterpret_cast<const C*>(p.kv.data) +
                          CacheOffset(p, layer, position, element);
    if constexpr (std::is_same_v<C, W>) {
      return Load16(from);
    } else {
      Vector16 v;
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(W) == 4) {
          v.word[i] = FloatToBits(ConvertKv<float>(from[i]));
        } else {
          v.word[i] = ConvertKv<W>(from[2 * i]).bits |
                      static_cast<uint32_t>(ConvertKv<W>(from[2 * i + 1]).bits)
                          << 16;
        }
      }
      return v;
    }
  }

  // Adds the rows [first, end) to the digest. One warp.
  TANDEM_DEVICE void Finish(Grid& g, int layer, int first, int end, int pieces,
                            const uint64_t* low, const uint64_t* high) const {
    uint64_t low_digest = 0;
    uint64_t high_digest = 0;
    for (int i = g.lane(); i < (end - first) * pieces; i += 32) {
      uint64_t low_sum = 0;
      uint64_t high_sum = 0;
      for (int warp = 0; warp < kKvWarps; ++warp) {
        low_sum += low[i * kKvWarps + warp];
        high_sum += high[i * kKvWarps + warp];
      }
      const int position = first + i / pieces;
      low_digest +=
          DigestFinish(low_sum, p.digest_key, layer, position, i % pieces);
      high_digest += DigestFinish(high_sum, DigestHighKey(p.digest_key), layer,
                                  position, i % pieces);
    }
    low_digest = ReduceWarp(g, low_digest, Sum64());
    high_digest = ReduceWarp(g, high_digest, Sum64());
    if (g.lane() == 0) {
      g.AtomicAdd(&p.digest->low, low_digest);
      g.AtomicAdd(&p.digest->high, high_digest);
    }
  }
};

template <typename C, typename W>
struct KvScatterKernel {
  static constexpr int kThreads = kKvThreads;
  static constexpr int kPerVector = 16 / static_cast<int>(sizeof(W));
  KvSliceParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int layer = p.layer_begin + g.block_y();
    const int first = p.position_begin + g.block_x() * kKvPositions;
    const int end = Smaller(first + kKvPositions, p.position_end);
    const int elements = RowOf(p).elements();
    for (int position = first; position < end; ++position) {
      for (int element = g.thread() * kPerVector; element < elements;
           element += kThreads * kPerVector) {
        const Vector16 v = Load16(WireAt(
            p, layer, position, int64_t{elements} * static_cast<int>(sizeof(W)),
            element * static_cast<int>(sizeof(W))));
        C* const to = reinterpret_cast<C*>(p.kv.data) +
                      CacheOffset(p, layer, position, element);
        if constexpr (std::is_same_v<C, W>) {
          Store16(to, v);
        } else {
          for (int i = 0; i < kPerVector; ++i) to[i] = ConvertKv<C>(Of(v, i));
        }
      }
    }
  }

  TANDEM_DEVICE static W Of(const Vector16& v, int i) {
    if constexpr (sizeof(W) == 4) {
      return BitsToFloat(v.word[i]);
    } else {
      return W{static_cast<uint16_t>(v.word[i / 2] >> (i % 2 * 16) & 0xffffu)};
    }
  }
};

// Whole blocks: K and V of all heads lie together in each layer.
struct KvCopyBlockKernel {
  static constexpr int kThreads = kKvThreads;
  KvCopyBlockParams p;
  int64_t bytes;  // of a block in one layer

  TANDEM_DEVICE void operator()(Grid& g) const {
    std::byte* const layer =
        p.kv.data + g.block_y() * int64_t{p.kv.num_blocks} * bytes;
    const int64_t i = (int64_t{g.block_x()} * kThreads + g.thread()) * 16;
    if (i >= bytes) return;
    Store16(layer + p.to_block * bytes + i,
            Load16(layer + p.from_block * bytes + i));
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_KV_TRANSFER_CUH_
