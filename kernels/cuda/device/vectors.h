// SPDX-License-Identifier: Apache-2.0
// Rows of activations in global memory, by chunks of eight elements, in f32
// while in registers. Chunks of aligned rows are read and written 16 bytes at
// a time.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_VECTORS_H_
#define TANDEM_KERNELS_CUDA_DEVICE_VECTORS_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/device/grid.h"

namespace tandem::kernels::cuda {

struct alignas(16) Vector16 {
  uint32_t word[4];
};

#ifdef __CUDACC__
TANDEM_DEVICE Vector16 Load16(const void* p) {
  const uint4 v = *static_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
TANDEM_DEVICE void Store16(void* p, const Vector16& v) {
  *static_cast<uint4*>(p) =
      make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}
#else
inline Vector16 Load16(const void* p) {
  Vector16 v;
  std::memcpy(&v, p, 16);
  return v;
}
inline void Store16(void* p, const Vector16& v) { std::memcpy(p, &v, 16); }
#endif

inline constexpr int kChunk = 8;

TANDEM_HOST_DEVICE constexpr int Chunks(int size) {
  return (size + kChunk - 1) / kChunk;
}

// Whether every chunk of rows of `size` elements starts at 16 bytes.
TANDEM_DEVICE bool Aligned(int size) { return size % kChunk == 0; }

// Elements [0, 8) from p; zeros from `count` on. `aligned`: all eight are
// there, at a multiple of 16 bytes.
template <typename T>
TANDEM_DEVICE void LoadChunk(const T* p, int count, bool aligned,
                             float (&v)[kChunk]) {
  if (!aligned) {
    for (int i = 0; i < kChunk; ++i) v[i] = i < count ? ToFloat(p[i]) : 0.0f;
    return;
  }
  if constexpr (std::is_same_v<T, float>) {
    const Vector16 a = Load16(p);
    const Vector16 b = Load16(p + 4);
    for (int i = 0; i < 4; ++i) {
      v[i] = BitsToFloat(a.word[i]);
      v[i + 4] = BitsToFloat(b.word[i]);
    }
  } else {
    const Vector16 a = Load16(p);
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = ToFloat(T{static_cast<uint16_t>(a.word[i] & 0xffffu)});
      v[2 * i + 1] = ToFloat(T{static_cast<uint16_t>(a.word[i] >> 16)});
    }
  }
}

// Rounds to T.
template <typename T>
TANDEM_DEVICE void StoreChunk(T* p, int count, bool aligned,
                              const float (&v)[kChunk]) {
  if (!aligned) {
    for (int i = 0; i < kChunk && i < count; ++i) p[i] = FromFloat<T>(v[i]);
    return;
  }
  if constexpr (std::is_same_v<T, float>) {
    Vector16 a;
    Vector16 b;
    for (int i = 0; i < 4; ++i) {
      a.word[i] = FloatToBits(v[i]);
      b.word[i] = FloatToBits(v[i + 4]);
    }
    Store16(p, a);
    Store16(p + 4, b);
  } else {
    Vector16 a;
    for (int i = 0; i < 4; ++i) {
      a.word[i] = FromFloat<T>(v[2 * i]).bits |
                  static_cast<uint32_t>(FromFloat<T>(v[2 * i + 1]).bits) << 16;
    }
    Store16(p, a);
  }
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_VECTORS_H_
