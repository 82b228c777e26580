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

template <typename C>
TANDEM_DEVICE KvVector<C> CachedAt(const KvSliceParams& p, int layer,
                                   int position, int vector) {
  const int heads = RowOf(p).heads;
  const int side = vector / heads;
  const int head = p.head_begin + vector % heads;
  const int block =
      p.blocks[position / p.kv.block_size - p.position_begin / p.kv.block_size];
  const int slot = position % p.kv.block_size;
  return {reinterpret_cast<C*>(p.kv.data) +
              p.kv.Offset(layer, block, side, head, slot),
          p.kv.data + p.kv.ScaleOffset(layer, block, side, head, slot),
          p.kv.scale_stride(), p.kv.dtype};
}

// Of the vector, or of the group of int4's that element i is in.
template <typename Vector>
TANDEM_DEVICE VectorQuantiser QuantiserOf(const Vector& vector, int i,
                                          int head_dim, DType type) {
  const int begin = type == DType::kInt4 ? i / kCodeGroup * kCodeGroup : 0;
  const int end =
      type == DType::kInt4 ? Smaller(begin + kCodeGroup, head_dim) : head_dim;
  uint32_t most = 0;
  for (int j = begin; j < end; ++j) {
    const uint32_t key = MagnitudeKey(vector[j]);
    most = key > most ? key : most;
  }
  return VectorQuantiser(type, most);
}

// As caches and the wire have it.
TANDEM_DEVICE uint32_t ScaleBits(const VectorQuantiser& quantiser) {
  const uint32_t bits = FloatToBits(quantiser.scale);
  return quantiser.type == DType::kInt4 ? bits >> 16 : bits;
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
    if constexpr (std::is_same_v<W, Code>) {
      const int codes =
          static_cast<int>(KvElementBytes(p.wire, RowOf(p).elements()));
      for (int i = 0; i < 4; ++i) {
        const int at = offset + 4 * i;
        if (at < codes) {
          v.word[i] = LoadCodes(layer, position, at);
        } else if (p.wire == DType::kInt4) {
          v.word[i] = LoadScale(layer, position, (at - codes) / 2) |
                      LoadScale(layer, position, (at - codes) / 2 + 1) << 16;
        } else {
          v.word[i] = LoadScale(layer, position, (at - codes) / 4);
        }
      }
    } else {
      const int element = offset / static_cast<int>(sizeof(W));
      const KvVector<C> from =
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

  TANDEM_DEVICE W Converted(const KvVector<C>& from, int i) const {
    if constexpr (std::is_same_v<C, Code>) {
      return ConvertKv<W>(from[i]);
    } else {
      return ConvertKv<W>(from.elements[i]);
    }
  }

  // Four bytes of codes, which are of one vector and one group, `offset` behind
  // the row's beginning.
  TANDEM_DEVICE uint32_t LoadCodes(int layer, int position, int offset) const {
    const int bytes = static_cast<int>(KvElementBytes(p.wire, p.kv.head_dim));
    const KvVector<C> from = CachedAt<C>(p, layer, position, offset / bytes);
    const int begin = offset % bytes;
    if constexpr (std::is_same_v<C, Code>) {
      if (p.kv.dtype == p.wire) {
        return *reinterpret_cast<const uint32_t*>(from.elements + begin);
      }
    }
    const int bits = p.wire == DType::kInt4 ? 4 : 8;
    const int first = begin * 8 / bits;
    const VectorQuantiser quantiser =
        QuantiserOf(from, first, p.kv.head_dim, p.wire);
    uint32_t codes = 0;
    for (int i = 0; i < 32 / bits; ++i) {
      codes |= static_cast<uint32_t>(quantiser(from[first + i])) << (i * bits);
    }
    return codes;
  }

  // Scale `i` of the row; zero behind the last one: padding.
  TANDEM_DEVICE uint32_t LoadScale(int layer, int position, int i) const {
    const int groups = KvScales(p.wire, p.kv.head_dim);
    if (i >= RowOf(p).vectors() * groups) return 0;
    const KvVector<C> from = CachedAt<C>(p, layer, position, i / groups);
    const int element = i % groups * kCodeGroup;
    if constexpr (std::is_same_v<C, Code>) {
      if (p.kv.dtype == p.wire) {
        const uint32_t bits = FloatToBits(from.ScaleOf(element));
        return p.wire == DType::kInt4 ? bits >> 16 : bits;
      }
    }
    return ScaleBits(QuantiserOf(from, element, p.kv.head_dim, p.wire));
  }

  // Adds the rows [first, end) to the digest. One warp.
  TANDEM_DEVICE void Finish(Grid& g, int layer, int first, int end, int pieces,
                            const uint64_t* low, const uint64_t* high) const {
    layer += p.layer_shift;
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
      std::is_same_v<W, Code> ? 8 : 16 / static_cast<int>(sizeof(W));
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
      if constexpr (std::is_same_v<C, Code>) {
        const int groups = KvScales(p.kv.dtype, row.head_dim);
        for (int i = g.thread(); i < row.vectors() * groups; i += kThreads) {
          StoreScale(VectorOf(layer, position, i / groups),
                     CachedAt<C>(p, layer, position, i / groups), i % groups);
        }
      }
    }
  }

 private:
  TANDEM_DEVICE bool Same() const {
    return std::is_same_v<C, W> && p.kv.dtype == p.wire;
  }

  TANDEM_DEVICE KvVector<const W> VectorOf(int layer, int position,
                                           int vector) const {
    const KvRow row = RowOf(p);
    const std::byte* const bytes = WireAt(p, layer, position, RowBytesOf(p), 0);
    const int64_t scale = KvScaleBytes(p.wire);
    return {reinterpret_cast<const W*>(
                bytes + vector * KvElementBytes(p.wire, row.head_dim)),
            bytes + KvElementBytes(p.wire, row.elements()) +
                vector * KvScales(p.wire, row.head_dim) * scale,
            scale, p.wire};
  }

  TANDEM_DEVICE void StoreScale(const KvVector<const W>& from,
                                const KvVector<C>& to, int group) const {
    const int element = group * kCodeGroup;
    const uint32_t bits =
        Same()
            ? FloatToBits(from.ScaleOf(element)) >>
                  (p.kv.dtype == DType::kInt4 ? 16 : 0)
            : ScaleBits(QuantiserOf(from, element, p.kv.head_dim, p.kv.dtype));
    std::byte* const at = to.scales + group * to.scale_stride;
    if (p.kv.dtype == DType::kInt4) {
      *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(bits);
    } else {
      *reinterpret_cast<uint32_t*>(at) = bits;
    }
  }

  // Elements [begin, begin + kElements) of a vector.
  TANDEM_DEVICE void StoreElements(const KvVector<const W>& from,
                                   const KvVector<C>& to, int begin) const {
    if constexpr (std::is_same_v<C, W> && !std::is_same_v<C, Code>) {
      Store16(to.elements + begin, Load16(from.elements + begin));
    } else if constexpr (std::is_same_v<C, Code>) {
      StoreCodes(from, to, begin);
    } else {
      for (int i = begin; i < begin + kElements; ++i) {
        if constexpr (std::is_same_v<W, Code>) {
          to.elements[i] = ConvertKv<C>(from[i]);
        } else {
          to.elements[i] = ConvertKv<C>(from.elements[i]);
        }
      }
    }
  }

  TANDEM_DEVICE void StoreCodes(const KvVector<const W>& from,
                                const KvVector<C>& to, int begin) const {
    const bool int4 = p.kv.dtype == DType::kInt4;
    if constexpr (std::is_same_v<W, Code>) {
      if (Same() && int4) {
        *reinterpret_cast<uint32_t*>(to.elements + begin / 2) =
            *reinterpret_cast<const uint32_t*>(from.elements + begin / 2);
        return;
      }
      if (Same()) {
        *reinterpret_cast<EightCodes*>(to.elements + begin) =
            *reinterpret_cast<const EightCodes*>(from.elements + begin);
        return;
      }
    }
    const VectorQuantiser quantiser =
        QuantiserOf(from, begin, p.kv.head_dim, p.kv.dtype);
    for (int i = begin; i < begin + kElements; i += 2) {
      const uint8_t low = quantiser(from[i]);
      const uint8_t high = quantiser(from[i + 1]);
      if (int4) {
        to.elements[i / 2] = {static_cast<uint8_t>(low | high << 4)};
      } else {
        to.elements[i] = {low};
        to.elements[i + 1] = {high};
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
