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

#include "kernels/cuda/device/codes.h"
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

// A row: vectors are K of each head in range, then V.
struct KvRow {
  int heads;
  int head_dim;

  TANDEM_HOST_DEVICE int vectors() const { return 2 * heads; }
  TANDEM_HOST_DEVICE int elements() const { return vectors() * head_dim; }
};
TANDEM_HOST_DEVICE inline KvRow RowOf(const KvSliceParams& p) {
  return {p.head_end - p.head_begin, p.kv.head_dim};
}
TANDEM_HOST_DEVICE inline int RowBytesOf(const KvSliceParams& p) {
  return static_cast<int>(
      KvRowBytes(p.wire, p.head_end - p.head_begin, p.kv.head_dim));
}
// The pieces of a row.
TANDEM_HOST_DEVICE inline int PiecesOf(const KvSliceParams& p) {
  return (RowBytesOf(p) / 4 + kDigestPieceWords - 1) / kDigestPieceWords;
}

// A vector in the cache. C: its elements.
template <typename C>
struct CachedVector {
  C* elements;
  float* scale;  // of Code8 alone
  DType type;

  TANDEM_DEVICE float operator[](int i) const {
    if constexpr (std::is_same_v<C, Code8>) {
      return Mul(FloatFromCode(type, elements[i].bits), *scale);
    } else {
      return ToFloat(elements[i]);
    }
  }
};

template <typename C>
TANDEM_DEVICE CachedVector<C> CachedAt(const KvSliceParams& p, int layer,
                                       int position, int vector) {
  const int heads = RowOf(p).heads;
  const int side = vector / heads;
  const int head = p.head_begin + vector % heads;
  const int block =
      p.blocks[position / p.kv.block_size - p.position_begin / p.kv.block_size];
  const int slot = position % p.kv.block_size;
  return {reinterpret_cast<C*>(p.kv.data) +
              p.kv.Offset(layer, block, side, head, slot),
          reinterpret_cast<float*>(
              p.kv.data + p.kv.ScaleOffset(layer, block, side, head, slot)),
          p.kv.dtype};
}

// A vector on the wire. W: its elements.
template <typename W>
struct WireVector {
  const W* elements;
  const float* scale;
  DType type;

  TANDEM_DEVICE float operator[](int i) const {
    if constexpr (std::is_same_v<W, Code8>) {
      return Mul(FloatFromCode(type, elements[i].bits), *scale);
    } else {
      return ToFloat(elements[i]);
    }
  }
};

template <typename Vector>
TANDEM_DEVICE VectorQuantiser QuantiserOf(const Vector& vector, int head_dim,
                                          DType type) {
  uint32_t most = 0;
  for (int i = 0; i < head_dim; ++i) {
    const uint32_t magnitude = MagnitudeBits(vector[i]);
    most = magnitude > most ? magnitude : most;
  }
  return VectorQuantiser(type, most);
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
    const int row_bytes = RowBytesOf(p);
    const int pieces = PiecesOf(p);
    uint64_t* const low = reinterpret_cast<uint64_t*>(g.shared());
    uint64_t* const high = low + kKvPositions * pieces * kKvWarps;
    const ThreadKeys keys(p.digest_key, g.thread());
    for (int position = first; position < end; ++position) {
      for (int piece = 0; piece < pieces; ++piece) {
        const int offset = (piece * kThreads + g.thread()) * 16;
        uint64_t low_sum = 0;
        uint64_t high_sum = 0;
        if (offset < row_bytes) {
          const Vector16 v = Load(layer, position, offset);
          if (p.staging != nullptr) {
            Store16(WireAt(p, layer, position, row_bytes, offset), v);
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
  TANDEM_DEVICE Vector16 Load(int layer, int position, int offset) const {
    Vector16 v;
    if constexpr (std::is_same_v<W, Code8>) {
      const int codes = RowOf(p).elements();
      for (int half = 0; half < 2; ++half) {
        // Eight codes are of one vector.
        EightCodes part;
        if (offset < codes) {
          part = LoadCodes(layer, position, offset + 8 * half);
        } else {
          const int first = (offset - codes) / 4 + 2 * half;
          part.word[0] = LoadScale(layer, position, first);
          part.word[1] = LoadScale(layer, position, first + 1);
        }
        v.word[2 * half] = part.word[0];
        v.word[2 * half + 1] = part.word[1];
      }
    } else {
      const int element = offset / static_cast<int>(sizeof(W));
      const CachedVector<C> from =
          CachedAt<C>(p, layer, position, element / p.kv.head_dim);
      const int begin = element % p.kv.head_dim;
      if constexpr (std::is_same_v<C, W>) {
        v = Load16(from.elements + begin);
      } else if constexpr (sizeof(W) == 4) {
        for (int i = 0; i < 4; ++i) v.word[i] = FloatToBits(from[begin + i]);
      } else {
        for (int i = 0; i < 4; ++i) {
          v.word[i] =
              Converted(from, begin + 2 * i).bits |
              static_cast<uint32_t>(Converted(from, begin + 2 * i + 1).bits)
                  << 16;
        }
      }
    }
    return v;
  }

  TANDEM_DEVICE W Converted(const CachedVector<C>& from, int i) const {
    if constexpr (std::is_same_v<C, Code8>) {
      return ConvertKv<W>(from[i]);
    } else {
      return ConvertKv<W>(from.elements[i]);
    }
  }

  TANDEM_DEVICE EightCodes LoadCodes(int layer, int position,
                                     int element) const {
    const CachedVector<C> from =
        CachedAt<C>(p, layer, position, element / p.kv.head_dim);
    const int begin = element % p.kv.head_dim;
    if constexpr (std::is_same_v<C, Code8>) {
      if (p.kv.dtype == p.wire) {
        return *reinterpret_cast<const EightCodes*>(from.elements + begin);
      }
    }
    EightCodes codes = {};
    const VectorQuantiser quantiser = QuantiserOf(from, p.kv.head_dim, p.wire);
    for (int i = 0; i < 8; ++i) {
      codes.word[i / 4] |= static_cast<uint32_t>(quantiser(from[begin + i]))
                           << (i % 4 * 8);
    }
    return codes;
  }

  // Zero behind the last one: padding.
  TANDEM_DEVICE uint32_t LoadScale(int layer, int position, int vector) const {
    if (vector >= RowOf(p).vectors()) return 0;
    const CachedVector<C> from = CachedAt<C>(p, layer, position, vector);
    if constexpr (std::is_same_v<C, Code8>) {
      if (p.kv.dtype == p.wire) return FloatToBits(*from.scale);
    }
    return FloatToBits(QuantiserOf(from, p.kv.head_dim, p.wire).scale);
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
  // What a thread takes at a time: 16 bytes, or 8 codes, of one vector.
  static constexpr int kElements =
      std::is_same_v<W, Code8> ? 8 : 16 / static_cast<int>(sizeof(W));
  KvSliceParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int layer = p.layer_begin + g.block_y();
    const int first = p.position_begin + g.block_x() * kKvPositions;
    const int end = Smaller(first + kKvPositions, p.position_end);
    const KvRow row = RowOf(p);
    for (int position = first; position < end; ++position) {
      for (int element = g.thread() * kElements; element < row.elements();
           element += kThreads * kElements) {
        const int vector = element / row.head_dim;
        StoreElements(VectorOf(layer, position, vector),
                      CachedAt<C>(p, layer, position, vector),
                      element % row.head_dim);
      }
      if constexpr (std::is_same_v<C, Code8>) {
        for (int vector = g.thread(); vector < row.vectors();
             vector += kThreads) {
          const WireVector<W> from = VectorOf(layer, position, vector);
          *CachedAt<C>(p, layer, position, vector).scale =
              Same() ? *from.scale
                     : QuantiserOf(from, row.head_dim, p.kv.dtype).scale;
        }
      }
    }
  }

 private:
  TANDEM_DEVICE bool Same() const {
    return std::is_same_v<C, W> && p.kv.dtype == p.wire;
  }

  TANDEM_DEVICE WireVector<W> VectorOf(int layer, int position,
                                       int vector) const {
    const KvRow row = RowOf(p);
    const std::byte* const bytes = WireAt(p, layer, position, RowBytesOf(p), 0);
    const W* const elements = reinterpret_cast<const W*>(bytes);
    return {elements + vector * row.head_dim,
            reinterpret_cast<const float*>(elements + row.elements()) + vector,
            p.wire};
  }

  // Elements [begin, begin + kElements) of a vector.
  TANDEM_DEVICE void StoreElements(const WireVector<W>& from,
                                   const CachedVector<C>& to, int begin) const {
    if constexpr (std::is_same_v<C, W> && !std::is_same_v<C, Code8>) {
      Store16(to.elements + begin, Load16(from.elements + begin));
    } else if constexpr (std::is_same_v<C, Code8>) {
      if constexpr (std::is_same_v<W, Code8>) {
        if (Same()) {
          *reinterpret_cast<EightCodes*>(to.elements + begin) =
              *reinterpret_cast<const EightCodes*>(from.elements + begin);
          return;
        }
      }
      const VectorQuantiser quantiser =
          QuantiserOf(from, p.kv.head_dim, p.kv.dtype);
      for (int i = begin; i < begin + kElements; ++i) {
        to.elements[i] = {quantiser(from[i])};
      }
    } else {
      for (int i = begin; i < begin + kElements; ++i) {
        if constexpr (std::is_same_v<W, Code8>) {
          to.elements[i] = ConvertKv<C>(from[i]);
        } else {
          to.elements[i] = ConvertKv<C>(from.elements[i]);
        }
      }
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
