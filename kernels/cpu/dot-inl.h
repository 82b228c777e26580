// SPDX-License-Identifier: Apache-2.0
// The inner loop of products with int8, int4 and W8A8 weights (code_matrix.h):
// R rows against U units of 16 outputs. Dot products of a group are exact
// integers however they are taken; f32 chains run over groups in ascending
// order (kernels/quantise.h), so all of this gives the same bits. For W8A8 a
// chain is the integer sum itself until the last input.

#if defined(TANDEM_KERNELS_CPU_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_DOT_INL_H_
#undef TANDEM_KERNELS_CPU_DOT_INL_H_
#else
#define TANDEM_KERNELS_CPU_DOT_INL_H_
#endif

#include "kernels/cpu/code_matrix.h"
#include "kernels/cpu/tile-inl.h"
#include "kernels/quantise.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

using VecI = hn::Vec<I32>;

HWY_INLINE VecI LoadI(const std::byte* p) {
  return hn::LoadU(I32(), reinterpret_cast<const int32_t*>(p));
}
HWY_INLINE VecI FourOf(const int8_t* a) {
  int32_t four;
  std::memcpy(&four, a, 4);
  return hn::Set(I32(), four);
}

// sum + codes * a, four to a lane. Codes are two's complement (int8, e2m1), or
// 0 .. 15 (int4).
struct MultiplyAdd {
  static constexpr int kBias = 0;  // of int8 codes as Dot takes them
  // Whether int4 is summed in 16 bits, two products to a lane, for a group.
  static constexpr bool kPairs = true;
  static HWY_INLINE VecI Bias(VecI codes) { return codes; }
  // Pairs of products fit 16 bits: 2 * 128 * 127.
  static HWY_INLINE VecI Dot(VecI sum, VecI codes, VecI x) {
#if HWY_TARGET == HWY_AVX3
    const __mmask64 negative = _mm512_movepi8_mask(codes.raw);
    const __m512i pairs = _mm512_maddubs_epi16(
        _mm512_abs_epi8(codes.raw),
        _mm512_mask_sub_epi8(x.raw, negative, _mm512_setzero_si512(), x.raw));
#else
    const __m256i pairs = _mm256_maddubs_epi16(
        _mm256_abs_epi8(codes.raw), _mm256_sign_epi8(x.raw, codes.raw));
#endif
    return InOrder(hn::Add(sum, Widen(VecI{pairs})));
  }
  // Those of a group do too: 8 * 2 * 15 * 127.
  static HWY_INLINE VecI AddPairs(VecI pairs, VecI codes, VecI x) {
#if HWY_TARGET == HWY_AVX3
    return InOrder(VecI{
        _mm512_add_epi16(pairs.raw, _mm512_maddubs_epi16(codes.raw, x.raw))});
#else
    return InOrder(VecI{
        _mm256_add_epi16(pairs.raw, _mm256_maddubs_epi16(codes.raw, x.raw))});
#endif
  }
  static HWY_INLINE VecI Widen(VecI pairs) {
#if HWY_TARGET == HWY_AVX3
    return VecI{_mm512_madd_epi16(pairs.raw, _mm512_set1_epi16(1))};
#else
    return VecI{_mm256_madd_epi16(pairs.raw, _mm256_set1_epi16(1))};
#endif
  }

 private:
  // Compilers that add up in an order of their own keep all summands first, for
  // which there are no registers.
  static HWY_INLINE VecI InOrder(VecI sum) {
    asm("" : "+v"(sum.raw));
    return sum;
  }
};

// vpdpbusd takes codes without sign: those of int8 with 128 added. Of 256 bits
// it is AVX-VNNI's, which CPUs have that lack AVX-512.
struct Vnni {
  static constexpr int kBias = 128;
  static constexpr bool kPairs = false;
  static HWY_INLINE VecI Bias(VecI codes) {
    return hn::Xor(codes, hn::Set(I32(), static_cast<int32_t>(0x80808080u)));
  }
  static HWY_INLINE VecI Dot(VecI sum, VecI codes, VecI x) {
#if HWY_TARGET == HWY_AVX3
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(codes.raw), "v"(x.raw));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0"
        : "+x"(sum.raw)
        : "x"(codes.raw), "x"(x.raw));
#endif
    return sum;
  }
};

// How a unit's block is read. kReady is int8 with the bias added, as
// CodeKind::kInt8Raised is and what scratch has; kW8A8Ready likewise.
enum class Read { kInt8, kW8A8, kInt4, kInt4Zeros, kE2m1, kReady, kW8A8Ready };
template <Read read>
inline constexpr bool kIsW8A8 = read == Read::kW8A8 || read == Read::kW8A8Ready;
template <Read read>
inline constexpr CodeKind kKindOf =
    kIsW8A8<read>              ? CodeKind::kW8A8
    : read == Read::kInt4      ? CodeKind::kInt4
    : read == Read::kInt4Zeros ? CodeKind::kInt4Zeros
    : read == Read::kE2m1      ? CodeKind::kE2m1
                               : CodeKind::kInt8;
// What makes e2m1 positive, where that is wanted.
inline constexpr int kE2m1Offset = 12;
// What codes are raised by, which `minus` makes up for; 1: by a group's own
// zero, 0: by nothing.
template <typename D, Read read>
inline constexpr int kOffset = read == Read::kInt4        ? 8
                               : read == Read::kInt4Zeros ? 1
                               : read != Read::kE2m1      ? D::kBias
                               : D::kBias != 0            ? kE2m1Offset
                                                          : 0;

struct CodeTile {
  const RowPiece* a;              // R of them
  const std::byte* w[kMaxUnits];  // units' first blocks
  int64_t w_stride;               // to their next ones
  int blocks;
  float* c;
  int64_t c_stride;
  bool first;
  TileEnd finish;
  // With block b the bytes from b * fetch + fetch_begin to b * fetch +
  // fetch_end of each stream are fetched for later.
  int64_t fetch;
  int64_t fetch_begin;
  int64_t fetch_end;
  int streams;
  const std::byte* next[kMaxStreams];
  // Of streams: where panels end, and how far on those that come next begin.
  int64_t end;
  int64_t jump;
  bool far;  // Fetching's

  // Of a row's pieces; every matrix of codes has scales.
  bool last() const { return finish.scales != nullptr; }
};

// Passes over a panel share what is to be fetched beside them.
inline void SharePass(CodeTile& t, int pass, int passes) {
  const auto begin = [&](int i) {
    return i == passes ? t.fetch : t.fetch * i / passes / 64 * 64;
  };
  t.fetch_begin = begin(pass);
  t.fetch_end = begin(pass + 1);
}

// Beside a block, or (`part` of `parts`) beside each part of its work.
HWY_INLINE void FetchNext(const CodeTile& t, int block, int part = 0,
                          int parts = 1) {
  const int end = t.streams * (part + 1) / parts;
  for (int i = t.streams * part / parts; i < end; ++i) {
    const std::byte* const at = t.next[i] + block * t.fetch;
    for (int64_t line = t.fetch_begin; line < t.fetch_end; line += 64) {
      PrefetchFar(at + line);
    }
  }
}

// Where a group's part of the first row is; those of the others follow at
// sizeof(RowPiece). One register, whatever the compiler thinks of it.
struct GroupRows {
  const std::byte* codes;
  const std::byte* numbers;  // of this group: its scale, and its minus behind

  HWY_INLINE explicit GroupRows(const RowPiece* a)
      : codes(reinterpret_cast<const std::byte*>(a->codes)),
        numbers(reinterpret_cast<const std::byte*>(a->scales)) {}
  HWY_INLINE void Next() {
    codes += kCodeGroup;
    numbers += sizeof(float);
    asm("" : "+r"(codes), "+r"(numbers));
  }
  HWY_INLINE const int8_t* Codes(int r, int input) const {
    return reinterpret_cast<const int8_t*>(codes) +
           r * static_cast<int>(sizeof(RowPiece)) + input;
  }
  HWY_INLINE float Scale(int r) const {
    return *reinterpret_cast<const float*>(
        numbers + r * static_cast<int>(sizeof(RowPiece)));
  }
  HWY_INLINE int32_t Minus(int r) const {
    return *reinterpret_cast<const int32_t*>(
        numbers + r * static_cast<int>(sizeof(RowPiece)) +
        sizeof(RowPiece::scales));
  }
};

// What the sums of a group start with.
template <typename D, Read read, int R, int U>
HWY_INLINE void StartGroup(VecI (&sums)[R][U * kParts],
                           const std::byte* const (&unit)[U], int group,
                           const GroupRows& a) {
  if constexpr (read == Read::kInt4Zeros) {
#pragma GCC unroll 8
    for (int i = 0; i < U * kParts; ++i) {
      const VecI zeros = hn::PromoteTo(
          I32(),
          hn::LoadU(hn::Rebind<int16_t, I32>(),
                    reinterpret_cast<const int16_t*>(unit[i / kParts] + 64) +
                        group * 16 + i % kParts * kLanes));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        sums[r][i] = hn::Mul(zeros, hn::Set(I32(), a.Minus(r) / 128));
      }
    }
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      VecI start = hn::Zero(I32());
      if constexpr (kOffset<D, read> == 128) {
        start = hn::Set(I32(), a.Minus(r));
      } else if constexpr (kOffset<D, read> == 8) {
        start = hn::ShiftRight<4>(hn::Set(I32(), a.Minus(r)));
      } else if constexpr (kOffset<D, read> == kE2m1Offset) {
        start = hn::Set(I32(), a.Minus(r) / 128 * kE2m1Offset);
      }
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) sums[r][i] = start;
    }
  }
}

template <Read read>
inline constexpr bool kReadsBytes = IsEightBit(kKindOf<read>);

// The numbers of nibbles 0 .. 15, a byte each, raised by `kRaised`.
template <int kRaised>
HWY_INLINE VecI TwiceE2m1(VecI nibbles) {
  struct Table {
    alignas(16) int8_t numbers[16];
    constexpr Table() : numbers() {
      for (int i = 0; i < 16; ++i) {
        numbers[i] = static_cast<int8_t>(kTwiceE2m1[i] + kRaised);
      }
    }
  };
  static constexpr Table kTable;
  const hn::Repartition<int8_t, I32> d8;
  return hn::BitCast(I32(),
                     hn::TableLookupBytes(hn::LoadDup128(d8, kTable.numbers),
                                          hn::BitCast(d8, nibbles)));
}

// Codes as dot products take them; of four bits the low or the high half.
template <typename D, Read read>
HWY_INLINE VecI CodesOf(VecI line, int half) {
  if constexpr (kReadsBytes<read>) {
    constexpr bool kReady = read == Read::kReady || read == Read::kW8A8Ready;
    return kReady ? line : D::Bias(line);
  } else {
    const VecI low = hn::Set(I32(), 0x0f0f0f0f);
    const VecI nibbles =
        hn::And(half == 0 ? line : hn::ShiftRight<4>(line), low);
    if constexpr (read == Read::kE2m1) {
      return TwiceE2m1<kOffset<D, read>>(nibbles);
    } else {
      return nibbles;
    }
  }
}

// Whether DotGroup's sums are pairs, and begin at zero.
template <typename D, Read read>
inline constexpr bool kInPairs =
    D::kPairs && !kReadsBytes<read> && read != Read::kE2m1;

// The dot products of one group of codes at unit[u] + begin.
template <typename D, Read read, int R, int U>
HWY_INLINE void DotRows(VecI (&sums)[R][U * kParts],
                        const std::byte* const (&unit)[U], int64_t begin,
                        const GroupRows& a) {
  constexpr bool kBytes = kReadsBytes<read>;
#pragma GCC unroll 8
  for (int quad = 0; quad < (kBytes ? 8 : 4); ++quad) {
    VecI lines[U * kParts];
#pragma GCC unroll 8
    for (int i = 0; i < U * kParts; ++i) {
      lines[i] =
          LoadI(unit[i / kParts] + begin + quad * 64 + i % kParts * 4 * kLanes);
      // Loaded once: compilers would use it from memory twice.
      if constexpr (kInPairs<D, read>) asm("" : "+v"(lines[i].raw));
    }
#pragma GCC unroll 2
    for (int half = 0; half < (kBytes ? 1 : 2); ++half) {
      VecI codes[U * kParts];
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) {
        codes[i] = CodesOf<D, read>(lines[i], half);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const VecI x = FourOf(a.Codes(r, half * 16 + quad * 4));
#pragma GCC unroll 8
        for (int i = 0; i < U * kParts; ++i) {
          if constexpr (kInPairs<D, read>) {
            sums[r][i] = D::AddPairs(sums[r][i], codes[i], x);
          } else {
            sums[r][i] = D::Dot(sums[r][i], codes[i], x);
          }
        }
      }
    }
  }
}

// The same of a row or two, whose inputs stay in registers while lines come.
template <typename D, Read read, int R, int U>
HWY_INLINE void DotLines(VecI (&sums)[R][U * kParts],
                         const std::byte* const (&unit)[U], int64_t begin,
                         const GroupRows& a) {
  constexpr int kHalves = kReadsBytes<read> ? 1 : 2;
#pragma GCC unroll 8
  for (int quad = 0; quad < 8 / kHalves; ++quad) {
    VecI x[R][kHalves];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
        x[r][half] = FourOf(a.Codes(r, half * 16 + quad * 4));
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < U * kParts; ++i) {
      VecI line =
          LoadI(unit[i / kParts] + begin + quad * 64 + i % kParts * 4 * kLanes);
      asm("" : "+v"(line.raw));  // as above
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
        const VecI codes = CodesOf<D, read>(line, half);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          if constexpr (kInPairs<D, read>) {
            sums[r][i] = D::AddPairs(sums[r][i], codes, x[r][half]);
          } else {
            sums[r][i] = D::Dot(sums[r][i], codes, x[r][half]);
          }
        }
      }
    }
  }
}

template <typename D, Read read, int R, int U>
HWY_INLINE void DotGroup(VecI (&sums)[R][U * kParts],
                         const std::byte* const (&unit)[U], int64_t begin,
                         const GroupRows& a) {
  if constexpr (R == 1 || (kParts == 2 && U > 1)) {
    DotLines<D, read, R, U>(sums, unit, begin, a);
  } else {
    DotRows<D, read, R, U>(sums, unit, begin, a);
  }
}

template <Read read>
inline constexpr int64_t kGroupBytes = (kReadsBytes<read> ? 8 : 4) * 64;
template <Read read>
inline constexpr int64_t kCodesBegin = CodesBegin(kKindOf<read>);

// Integer sums go on by a block, in the chains' registers.
template <typename D, Read read, int R, int U>
HWY_INLINE void SumBlock(Chains<R, U>& chains,
                         const std::byte* const (&unit)[U], GroupRows& rows) {
  VecI sums[R][U * kParts];
  const auto for_sums = [&](const auto& body) HWY_ATTR {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) body(chains.v[r][i], sums[r][i]);
    }
  };
  for_sums([](Vec& chain, VecI& sum)
               HWY_ATTR { sum = hn::BitCast(I32(), chain); });
#pragma GCC unroll 2
  for (int group = 0; group < 2; ++group, rows.Next()) {
    DotGroup<D, read, R, U>(
        sums, unit, kCodesBegin<read> + group * kGroupBytes<read>, rows);
  }
  for_sums([](Vec& chain, VecI& sum)
               HWY_ATTR { chain = hn::BitCast(F32(), sum); });
}

// What is left to do for a piece of a W8A8 row: what raised codes added is
// taken off, and with the row's last piece sums become numbers.
template <typename D, Read read, int R, int U>
HWY_INLINE void EndPiece(Chains<R, U>& chains, const RowPiece* a, bool last) {
  if constexpr (kIsW8A8<read>) {
    const GroupRows rows(a);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) {
        VecI sum = hn::BitCast(I32(), chains.v[r][i]);
        if constexpr (kOffset<D, read> != 0) {
          sum = hn::Add(sum, hn::Set(I32(), rows.Minus(r)));
        }
        chains.v[r][i] = last ? hn::Mul(hn::ConvertTo(F32(), sum),
                                        hn::Set(F32(), rows.Scale(r)))
                              : hn::BitCast(F32(), sum);
      }
    }
  }
}

// Chains go on by two groups.
template <typename D, Read read, int R, int U>
HWY_INLINE void ChainBlock(Chains<R, U>& chains,
                           const std::byte* const (&unit)[U], GroupRows& rows) {
#pragma GCC unroll 2
  for (int group = 0; group < 2; ++group, rows.Next()) {
    const int64_t begin = kCodesBegin<read> + group * kGroupBytes<read>;
    VecI sums[R][U * kParts];
    if constexpr (kInPairs<D, read>) {
      VecI pairs[R][U * kParts];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < U * kParts; ++i) pairs[r][i] = hn::Zero(I32());
      }
      DotGroup<D, read, R, U>(pairs, unit, begin, rows);
      StartGroup<D, read, R, U>(sums, unit, group, rows);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < U * kParts; ++i) {
          sums[r][i] = hn::Add(sums[r][i], D::Widen(pairs[r][i]));
        }
      }
    } else {
      StartGroup<D, read, R, U>(sums, unit, group, rows);
      DotGroup<D, read, R, U>(sums, unit, begin, rows);
    }
#pragma GCC unroll 8
    for (int i = 0; i < U * kParts; ++i) {
      const Vec scale = hn::PromoteTo(
          F32(),
          hn::LoadU(hn::Rebind<hwy::float16_t, F32>(),
                    reinterpret_cast<const hwy::float16_t*>(unit[i / kParts]) +
                        group * 16 + i % kParts * kLanes));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Vec both = hn::Mul(scale, hn::Set(F32(), rows.Scale(r)));
        chains.v[r][i] =
            hn::MulAdd(hn::ConvertTo(F32(), sums[r][i]), both, chains.v[r][i]);
      }
    }
  }
}

// Both groups of a block of each unit.
template <typename D, Read read, int R, int U>
HWY_INLINE void DotBlock(Chains<R, U>& chains,
                         const std::byte* const (&unit)[U], GroupRows& rows) {
  if constexpr (kIsW8A8<read>) {
    SumBlock<D, read, R, U>(chains, unit, rows);
  } else {
    ChainBlock<D, read, R, U>(chains, unit, rows);
  }
}

template <typename D, Read read, int R, int U>
void DotTile(const CodeTile& t) {
  Chains<R, U> chains;
  if (t.first) {
    chains.Clear();
  } else {
    chains.Load(t.c, t.c_stride);
  }
  GroupRows rows(t.a);
  int64_t offset = 0;
  for (int block = 0; block < t.blocks; ++block, offset += t.w_stride) {
    const std::byte* unit[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) unit[u] = t.w[u] + offset;
    FetchNext(t, block);
    DotBlock<D, read, R, U>(chains, unit, rows);
  }
  EndPiece<D, read, R, U>(chains, t.a, t.last());
  t.finish.Apply(chains);
  chains.Store(t.c, t.c_stride);
}

// R rows against kPanels panels, whose first blocks are t.w and whose outputs
// follow each other. Of each panel unit after unit is read, line after line as
// they lie in memory, for hardware's prefetchers to follow: two units at once
// are no stream for AMD's (Zen 3 takes 0.7 of the time with two threads, Zen 4
// 0.4 to 0.6). Several panels of AMD's are fetched by hardware alone, which is
// faster there; each of Intel's is fetched ahead, at its end of the panel that
// comes next.
template <typename D, Read read, int R, int kPanels>
void StreamTile(const CodeTile& t) {
  constexpr int64_t kUnitBytes = CodeUnitBytes(kKindOf<read>);
  const bool fetch = kPanels == 1 || !t.far;
  const int64_t ahead =
      ((t.far ? 2048 : 1024) + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  Chains<R, 2 * kPanels> outputs;
  if (t.first) {
    outputs.Clear();
  } else {
    outputs.Load(t.c, t.c_stride);
  }
  Chains<R, kPanels> chains[2];  // of first units, and of second ones
  const auto for_chains = [&](const auto& body) {
    for (int u = 0; u < 2; ++u) {
      for (int i = 0; i < kPanels * kParts; ++i) {
        const int unit = 2 * (i / kParts) + u;
        for (int r = 0; r < R; ++r) {
          body(chains[u].v[r][i], outputs.v[r][unit * kParts + i % kParts]);
        }
      }
    }
  };
  for_chains([](Vec& chain, const Vec& output) { chain = output; });
  GroupRows rows(t.a);
  int64_t offset = 0;
  for (int block = 0; block < t.blocks; ++block) {
    GroupRows after = rows;
#pragma GCC unroll 2
    for (int u = 0; u < 2; ++u, offset += kUnitBytes) {
      const std::byte* unit[kPanels];
#pragma GCC unroll 4
      for (int i = 0; i < kPanels; ++i) unit[i] = t.w[i] + offset;
      if (fetch) {
        const int64_t next = offset + ahead < t.end ? ahead : ahead + t.jump;
#pragma GCC unroll 17
        for (int64_t line = 0; line < kUnitBytes; line += 64) {
          PrefetchLines(unit, next + line, t.far);
        }
      }
      after = rows;
      DotBlock<D, read, R, kPanels>(chains[u], unit, after);
    }
    rows = after;
  }
  for_chains([](const Vec& chain, Vec& output) { output = chain; });
  EndPiece<D, read, R, 2 * kPanels>(outputs, t.a, t.last());
  t.finish.Apply(outputs);
  outputs.Store(t.c, t.c_stride);
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
