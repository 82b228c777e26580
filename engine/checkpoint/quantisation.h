// SPDX-License-Identifier: Apache-2.0
// Checkpoints whose matrices were quantised before: what config.json says
// (quantization_config), or where that says nothing AutoGPTQ's
// quantize_config.json or Model Optimizer's hf_quant_config.json, and their
// tensors as codes, scales and zeros. For a product X of
// `rows` outputs and `cols` inputs, bits b, groups of g inputs:
//
//   GPTQ     X.qweight I32 [cols * b / 32, rows], inputs from the low bits up;
//            X.scales [groups, rows]; X.qzeros I32 [groups, rows * b / 32],
//            words of zeros, less a word of ones (a zero of 0 borrows from the
//            next) unless checkpoint_format is gptq_v2; X.g_idx I32 [cols],
//            each input's group: input / g but for act-order
//   AWQ      X.qweight I32 [cols, rows / 8]: the outputs 0 2 4 6 1 3 5 7 of
//            eight from the low bits up; X.qzeros like it; X.scales as above
//   compressed-tensors
//            pack-quantized   X.weight_packed I32 [rows, cols * b / 32], codes
//                             plus 2^(b-1) from the low bits up;
//                             X.weight_zero_point I32 [rows * b / 32, groups]
//            int-quantized    X.weight I8; float-quantized: F8_E4M3
//                             X.weight_scale [rows, groups], [rows, 1] or [1];
//                             of blocks of r rows and c inputs
//                             [ceil(rows / r), ceil(cols / c)]
//   fp8      X.weight F8_E4M3; X.weight_scale_inv, of blocks as above (it is
//            multiplied by, whatever its name says), or X.weight_scale [1]
//   Model Optimizer's FP8
//            X.weight F8_E4M3; X.weight_scale, of all or [rows]
//   NVFP4    two e2m1 to a byte, low half first; X.weight_scale F8_E4M3 [rows,
//            cols / 16], and of the whole tensor an F32:
//            of compressed-tensors  X.weight_packed U8 [rows, cols / 2];
//                                   X.weight_global_scale, which divides
//            of Model Optimizer     X.weight U8 [rows, cols / 2];
//                                   X.weight_scale_2, which multiplies
//   MXFP4    of compressed-tensors (mxfp4-pack-quantized): X.weight_packed U8
//            [rows, cols / 2], two e2m1 to a byte, low half first;
//            X.weight_scale U8 [rows, cols / 32], exponents of two plus 127
//            of stacked experts (families.h): X_blocks U8 [experts, rows,
//            cols / 32, 16] and X_scales U8 [experts, rows, cols / 32] like
//            them
//
// A product that has only X.weight in a float type was not quantised. What the
// config says of activations decides how int8 of rows is multiplied: int8 with
// a scale for each token, or one for all of them, is W8A8, and anything else
// (none, zeros, groups) meets activations in groups. Scales of activations that
// were found before (input_scale, input_global_scale) are not used: they are
// found on the fly, of each token. Nor are those of a KV cache
// (kv_cache_scheme: k_scale, v_scale): ours has one for each vector.

#ifndef TANDEM_ENGINE_CHECKPOINT_QUANTISATION_H_
#define TANDEM_ENGINE_CHECKPOINT_QUANTISATION_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/safetensors.h"
#include "kernels/types.h"

namespace tandem::engine {

class ConfigFields;

// What either config says.
struct Quantisation {
  enum class Method {
    kNone,
    kGptq,
    kAwq,
    kPacked,
    kPlain,
    kMxfp4,
    kPackedMxfp4,
    kNvfp4
  };
  Method method = Method::kNone;
  int bits = 0;                 // of kGptq, kAwq, kPacked: 4 or 8
  int group = 0;                // inputs that share a scale; 0: all of a row
  bool zeros_less_one = false;  // kGptq
  int block_rows = 0;           // kPlain: rows that share scales; 0: none do
  // As the config says; tensors have the last word.
  bool e4m3 = false;       // kPlain, which fp8 is too: else int8
  bool w8a8 = false;       // kPlain, int8 of rows: products are kW8A8's
  bool zeros = false;      // of 4 bits: other zeros than 8
  bool kv_scales = false;  // there may be such tensors, which are not used

  // Why codes are not kept, whatever the tensors say; "" if they are.
  std::string_view DequantisedFor() const;
  // "" for none; part of the model's canonical line.
  std::string Canonical() const;
};

Quantisation ReadQuantisation(ConfigFields& fields);

// The same from the text of a quantize_config.json or hf_quant_config.json. The
// path is for messages.
absl::StatusOr<Quantisation> ParseQuantizeConfig(const std::string& path,
                                                 std::string_view text);

// Whether `name` is that of a KV cache's scale, as any of the formats has it.
bool IsKvScale(std::string_view name);

// Rows of a quantised matrix.
struct CodeRows {
  kernels::DType dtype = kernels::DType::kInt8;
  bool e2m1 = false;  // as kernels::HostCodes has it
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t group = 0;           // cols: a scale for each row
  std::vector<uint8_t> codes;  // as kernels::HostCodes has them
  std::vector<float> scales;
  std::vector<uint8_t> zeros;  // empty: none
  // Empty, or [cols]: column i is of input order[i], each once.
  std::vector<int32_t> order;
  // The group of each column, [cols]; empty: column / group.
  std::vector<int32_t> group_of;
  std::vector<std::string> names;  // of the tensors that were read

  int64_t groups() const { return (cols + group - 1) / group; }
  // REQUIRES: group_of is empty.
  kernels::HostCodes View() const {
    return {dtype,
            rows,
            cols,
            codes.data(),
            group,
            scales.data(),
            zeros.empty() ? nullptr : zeros.data(),
            e2m1,
            order.empty() ? nullptr : order.data()};
  }
};

// Whether product `name` (without ".weight") has codes in the checkpoint.
bool HasCodes(const Checkpoint& checkpoint, const std::string& name);

// The codes of one product. INVALID_ARGUMENT names file and tensor.
absl::StatusOr<CodeRows> ReadCodes(const Checkpoint& checkpoint,
                                   const Quantisation& quantisation,
                                   const std::string& name, int64_t rows,
                                   int64_t cols);

// Whether stack `name` is MXFP4, and matrix `index` of its `count`: errors as
// above.
bool IsMxfp4(const Checkpoint& checkpoint, const std::string& name);
absl::StatusOr<CodeRows> ReadMxfp4(const Checkpoint& checkpoint,
                                   const std::string& name, int64_t count,
                                   int64_t index, int64_t rows, int64_t cols);
// A product in one of these; errors as above.
absl::StatusOr<CodeRows> ReadPackedMxfp4(const Checkpoint& checkpoint,
                                         const std::string& name, int64_t rows,
                                         int64_t cols);
absl::StatusOr<CodeRows> ReadNvfp4(const Checkpoint& checkpoint,
                                   const std::string& name, int64_t rows,
                                   int64_t cols);
// Whether a backend, which keeps a row's scales as f16 and a power of two,
// keeps all of these powers as they are.
bool ScalesAreNear(const CodeRows& codes);

// Whether `more` can follow `codes` as further rows of one matrix that a
// backend keeps: groups are of neighbours, 32 at least, and of e4m3 all of a
// row; and columns are in one order.
bool SameForm(const CodeRows& codes, const CodeRows& more);
void AppendRows(const CodeRows& more, CodeRows& codes);
// Row order[i] becomes row i; rows behind those stay where they are.
void PutRowsInOrder(const std::vector<int>& order, CodeRows& codes);

// Appends the numbers that they stand for, [rows, cols] by inputs, each rounded
// to f32.
void Dequantise(const CodeRows& codes, std::vector<float>& out);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_QUANTISATION_H_
