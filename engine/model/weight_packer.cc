// SPDX-License-Identifier: Apache-2.0
#include "engine/model/weight_packer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/failpoint.h"
#include "engine/checkpoint/widen.h"
#include "engine/model/leftovers.h"

namespace tandem::engine {

using kernels::DType;
using kernels::HostTensor;

namespace {

const char* WhyDequantised(const std::vector<std::optional<CodeRows>>& codes) {
  for (const std::optional<CodeRows>& part : codes) {
    if (!part.has_value()) continue;
    if (!part->order.empty() || !part->group_of.empty()) return "act-order";
    if (part->e2m1) {
      return part->group < kernels::kCodeGroup ? "nvfp4" : "scales far apart";
    }
    if (part->dtype == DType::kFp8 && part->group != part->cols) {
      return "fp8 in groups";
    }
  }
  return "rows of several forms";
}

}  // namespace

void WeightPacker::Take(const std::string& name) {
  taken_.insert(name);
  const TensorInfo* const tensor = checkpoint_.Find(name);
  if (tensor != nullptr) done_bytes_ += tensor->end - tensor->begin;
  progress_(done_bytes_, checkpoint_.total_bytes());
}

void WeightPacker::Finish() {
  progress_(checkpoint_.total_bytes(), checkpoint_.total_bytes());
}

std::string WeightPacker::format() const {
  return absl::StrJoin(formats_, "+");
}

DType WeightPacker::KeptAs(DType given, MatrixUse use) const {
  if (options_.quantisation.has_value() && use != MatrixUse::kExact) {
    if (use != MatrixUse::kTokens) return *options_.quantisation;
    if (*options_.quantisation != DType::kFp8) return DType::kInt8;
  }
  return options_.weight_dtype.value_or(given == DType::kBF16 ? DType::kBF16
                                                              : DType::kF32);
}

absl::StatusOr<std::optional<CodeRows>> WeightPacker::CodesOf(
    const TensorPart& part, int cols) {
  const std::string product(absl::StripSuffix(part.name, ".weight"));
  if (!HasCodes(checkpoint_, product)) return std::nullopt;
  absl::StatusOr<CodeRows> read =
      ReadCodes(checkpoint_, spec_.quantisation, product, part.rows, cols);
  if (!read.ok()) return read.status();
  for (const std::string& name : read->names) Take(name);
  PutRowsInOrder(part.order, *read);
  return *std::move(read);
}

absl::Status WeightPacker::PackQuantised(
    const std::vector<TensorPart>& parts, int cols, MatrixUse use,
    std::unique_ptr<kernels::Matrix>& matrix) {
  std::vector<std::optional<CodeRows>> codes;  // by part; none: a float type
  bool same = true;
  for (const TensorPart& part : parts) {
    absl::StatusOr<std::optional<CodeRows>> read = CodesOf(part, cols);
    if (!read.ok()) return read.status();
    const auto& rows = codes.emplace_back(*std::move(read));
    same = same && rows.has_value() && SameForm(*codes[0], *rows) &&
           (!rows->e2m1 || ScalesAreNear(*rows)) &&
           (rows->order.empty() || use != MatrixUse::kTokens);
  }
  if (!same) return PackDequantised(parts, codes, cols, use, matrix);
  CodeRows& whole = *codes[0];
  for (size_t i = 1; i < codes.size(); ++i) AppendRows(*codes[i], whole);
  return PackCodes(whole, use, matrix);
}

absl::Status WeightPacker::PackCodes(const CodeRows& codes, MatrixUse use,
                                     std::unique_ptr<kernels::Matrix>& matrix) {
  return Keep(use == MatrixUse::kGated ? backend_->PackGatedCodes(codes.View())
                                       : backend_->PackCodes(codes.View()),
              matrix);
}

absl::Status WeightPacker::PackMxfp4(const StackedPart& part, MatrixUse use,
                                     std::unique_ptr<kernels::Matrix>& matrix) {
  absl::StatusOr<CodeRows> codes = ReadMxfp4(checkpoint_, part.name, part.count,
                                             part.index, part.rows, part.cols);
  if (!codes.ok()) return codes.status();
  PutRowsInOrder(part.order, *codes);
  if (ScalesAreNear(*codes)) return PackCodes(*codes, use, matrix);
  dequantised_.push_back(absl::StrCat(part.name, " of expert ", part.index,
                                      " (scales far apart)"));
  std::vector<float> values;
  Dequantise(*codes, values);
  return PackAs({reinterpret_cast<const std::byte*>(values.data()), DType::kF32,
                 part.rows, part.cols},
                KeptAs(DType::kBF16, use), use, matrix);
}

absl::Status WeightPacker::PackStacked(
    const StackedPart& part, MatrixUse use,
    std::unique_ptr<kernels::Matrix>& matrix) {
  if (IsMxfp4(checkpoint_, part.name)) return PackMxfp4(part, use, matrix);
  const TensorInfo* const tensor = checkpoint_.Find(part.name);
  const bool by_outputs =
      spec_.names.stack == ExpertStack::kHalves && tensor != nullptr &&
      tensor->shape == std::vector<int64_t>{part.count, part.rows, part.cols};
  const int64_t rows = by_outputs ? part.rows : part.cols;
  const int64_t cols = by_outputs ? part.cols : part.rows;
  const absl::StatusOr<HostTensor> all =
      checkpoint_.Stack(part.name, part.count, rows, cols);
  if (!all.ok()) return all.status();
  const size_t bytes = static_cast<size_t>(rows) * static_cast<size_t>(cols) *
                       kernels::SizeOf(all->dtype);
  const HostTensor one{all->data + static_cast<size_t>(part.index) * bytes,
                       all->dtype, rows, cols};
  std::vector<std::byte> turned, ordered;
  return PackAs(RowsInOrder(by_outputs ? one : Transpose(one, turned),
                            part.order, ordered),
                KeptAs(all->dtype, use), use, matrix);
}

absl::Status WeightPacker::AppendPart(const TensorPart& part,
                                      const std::optional<CodeRows>& codes,
                                      int cols, Numbers& numbers) {
  // bf16 has twice the digits of e4m3, and more than e2m1 times that; other
  // codes' numbers need more.
  if (codes.has_value()) {
    numbers.bf16 = numbers.bf16 && (codes->dtype == DType::kFp8 || codes->e2m1);
    Dequantise(*codes, numbers.values);
    return absl::OkStatus();
  }
  const absl::StatusOr<HostTensor> tensor =
      checkpoint_.Matrix(part.name, part.rows, cols);
  if (!tensor.ok()) return tensor.status();
  numbers.bf16 = numbers.bf16 && tensor->dtype == DType::kBF16;
  std::vector<std::byte> moved;
  AppendFloats(RowsInOrder(*tensor, part.order, moved), numbers.values);
  Take(part.name);
  return absl::OkStatus();
}

absl::Status WeightPacker::PackDequantised(
    const std::vector<TensorPart>& parts,
    const std::vector<std::optional<CodeRows>>& codes, int cols, MatrixUse use,
    std::unique_ptr<kernels::Matrix>& matrix) {
  Numbers numbers;
  for (size_t i = 0; i < parts.size(); ++i) {
    const absl::Status status = AppendPart(parts[i], codes[i], cols, numbers);
    if (!status.ok()) return status;
  }
  dequantised_.push_back(
      absl::StrCat(parts[0].name, " (", WhyDequantised(codes), ")"));
  return PackNumbers(numbers, cols, use, matrix);
}

absl::Status WeightPacker::PackNumbers(
    const Numbers& numbers, int cols, MatrixUse use,
    std::unique_ptr<kernels::Matrix>& matrix) {
  const HostTensor whole{
      reinterpret_cast<const std::byte*>(numbers.values.data()), DType::kF32,
      static_cast<int64_t>(numbers.values.size()) / cols, cols};
  return PackAs(whole, KeptAs(numbers.bf16 ? DType::kBF16 : DType::kF32, use),
                use, matrix);
}

absl::StatusOr<Numbers> WeightPacker::ReadNumbers(const TensorPart& part,
                                                  int cols) {
  const auto codes = CodesOf(part, cols);
  if (!codes.ok()) return codes.status();
  Numbers numbers;
  const absl::Status status = AppendPart(part, *codes, cols, numbers);
  if (!status.ok()) return status;
  if (codes->has_value()) {
    dequantised_.push_back(absl::StrCat(part.name, " (latent attention)"));
  }
  return numbers;
}

absl::Status WeightPacker::PackAs(const HostTensor& whole, DType kept,
                                  MatrixUse use,
                                  std::unique_ptr<kernels::Matrix>& matrix) {
  if (kept == DType::kW8A8 && whole.cols > kernels::kMaxW8A8Inputs) {
    kept = DType::kInt8;
  }
  return Keep(use == MatrixUse::kGated ? backend_->PackGatedMatrix(whole, kept)
                                       : backend_->PackMatrix(whole, kept),
              matrix);
}

absl::Status WeightPacker::Keep(
    absl::StatusOr<std::unique_ptr<kernels::Matrix>> packed,
    std::unique_ptr<kernels::Matrix>& matrix) {
  if (!packed.ok()) return packed.status();
  matrix = *std::move(packed);
  formats_.insert(std::string(kernels::Name(matrix->dtype())));
  return absl::OkStatus();
}

absl::Status WeightPacker::Pack(const std::vector<TensorPart>& parts, int cols,
                                MatrixUse use,
                                std::unique_ptr<kernels::Matrix>& matrix) {
  if (TANDEM_FAILPOINT("load.pack", "crash fail")) return failpoint::Error();
  for (const TensorPart& part : parts) {
    if (HasCodes(checkpoint_,
                 std::string(absl::StripSuffix(part.name, ".weight")))) {
      return PackQuantised(parts, cols, use, matrix);
    }
  }
  std::vector<HostTensor> tensors;
  HostTensor whole{nullptr, DType::kF32, 0, cols};
  bool same = true;
  bool moved = false;
  const bool turned = use != MatrixUse::kTokens && spec_.names.transposed;
  for (const TensorPart& part : parts) {
    const absl::StatusOr<HostTensor> tensor =
        turned ? checkpoint_.Matrix(part.name, cols, part.rows)
               : checkpoint_.Matrix(part.name, part.rows, cols);
    if (!tensor.ok()) return tensor.status();
    tensors.push_back(*tensor);
    whole.rows += part.rows;
    same = same && tensor->dtype == tensors[0].dtype;
    moved = moved || !part.order.empty();
  }
  std::vector<std::byte> stacked;
  whole.data = tensors[0].data;
  whole.dtype = same ? tensors[0].dtype : DType::kF32;
  if (tensors.size() > 1 || turned || moved) {
    std::vector<std::byte> values, ordered;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const HostTensor& tensor = tensors[i];
      Append(RowsInOrder(turned ? Transpose(tensor, values) : tensor,
                         parts[i].order, ordered),
             whole.dtype, stacked);
    }
    whole.data = stacked.data();
  }
  const DType kept = KeptAs(whole.dtype, use);
  for (const TensorPart& part : parts) Take(part.name);
  return PackAs(whole, kept, use, matrix);
}

int64_t LeastWeightBytes(const Checkpoint& checkpoint, const ModelSpec& spec,
                         const LoadOptions& load) {
  const std::string head =
      absl::StrCat(std::string(spec.names.head), ".weight");
  // Stays in its own type.
  const std::string table =
      absl::StrCat(std::string(spec.names.told_table), ".weight");
  int64_t sixteenths = 0;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (spec.tied_head && tensor.name.ends_with(head)) continue;  // a copy
    if (IsOfDrafts(spec, tensor.name)) continue;
    const auto bytes = static_cast<int64_t>(tensor.end - tensor.begin);
    const std::optional<DType> own = tensor.float_dtype();
    if (!own.has_value() || kernels::IsQuantised(*own)) {
      sixteenths += 15 * bytes;  // codes are kept, their zeros not always
      continue;
    }
    const int64_t numbers = bytes / static_cast<int64_t>(kernels::SizeOf(*own));
    const bool kept_so = spec.told > 0 && tensor.name == table;
    if (load.quantisation.has_value() && !kept_so) {
      sixteenths += numbers * (load.quantisation == DType::kInt4 ? 8 : 16);
    } else {
      const DType kept = load.weight_dtype.value_or(*own);
      sixteenths += numbers * 16 * static_cast<int64_t>(kernels::SizeOf(kept));
    }
  }
  return sixteenths / 16;
}

}  // namespace tandem::engine
