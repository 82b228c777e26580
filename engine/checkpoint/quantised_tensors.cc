// SPDX-License-Identifier: Apache-2.0
// Tensors of quantised checkpoints to codes (quantisation.h has the formats).
// Files are untrusted: each tensor's type and shape is checked before a byte
// of it is read.

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/checkpoint/quantisation.h"
#include "engine/checkpoint/widen.h"
#include "kernels/quantise.h"

namespace tandem::engine {
namespace {

using kernels::DType;
using Method = Quantisation::Method;

// Position of each of eight outputs in AWQ's words.
constexpr int kAwqPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Reads one product's tensors; the first error is kept.
class Reader {
 public:
  Reader(const Checkpoint& checkpoint, const Quantisation& quantisation,
         const std::string& name, int64_t rows, int64_t cols)
      : checkpoint_(checkpoint), quantisation_(quantisation), name_(name) {
    result_.rows = rows;
    result_.cols = cols;
    result_.group = quantisation.group == 0 ? cols : quantisation.group;
  }

  absl::StatusOr<CodeRows> Read();

 private:
  const TensorInfo* Find(std::string_view suffix) const {
    return checkpoint_.Find(absl::StrCat(name_, ".", std::string(suffix)));
  }
  void Fail(const TensorInfo* tensor, std::string_view suffix,
            const std::string& what) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat(
        tensor == nullptr ? checkpoint_.main_path() : checkpoint_.path(*tensor),
        ": tensor '", name_, ".", std::string(suffix), "': ", what));
  }
  // The bytes of a tensor of this type and shape; empty after an error.
  absl::Span<const std::byte> Bytes(std::string_view suffix,
                                    std::string_view dtype,
                                    const std::vector<int64_t>& shape);
  std::vector<uint32_t> Words(std::string_view suffix,
                              const std::vector<int64_t>& shape);
  std::vector<float> Floats(std::string_view suffix,
                            const std::vector<int64_t>& shape);

  int bits() const { return quantisation_.bits; }
  int per_word() const { return 32 / quantisation_.bits; }
  uint8_t Field(uint32_t word, int64_t place) const {
    return static_cast<uint8_t>(word >> (place * bits()) &
                                ((1u << bits()) - 1));
  }
  bool Divides(int64_t count, std::string_view what);
  void ReadByInputs();  // GPTQ and AWQ
  void ReadPacked();
  void ReadPlain();
  void ReadFp4();
  void ReadRowScales();  // compressed-tensors and fp8
  void ReadInputGroups(std::string_view suffix);
  void PutInputsInOrder();
  // Codes and zeros of 8 bits become two's complement, and those of 4 bits
  // lose zeros that are all 8.
  void Finish();

  const Checkpoint& checkpoint_;
  const Quantisation& quantisation_;
  const std::string& name_;
  CodeRows result_;
  absl::Status status_;
};

absl::Span<const std::byte> Reader::Bytes(std::string_view suffix,
                                          std::string_view dtype,
                                          const std::vector<int64_t>& shape) {
  const TensorInfo* const tensor = Find(suffix);
  if (tensor == nullptr) {
    Fail(nullptr, suffix, "is missing");
    return {};
  }
  if (tensor->dtype != dtype || tensor->shape != shape) {
    Fail(tensor, suffix,
         absl::StrCat("is ", std::string(tensor->dtype), " [",
                      absl::StrJoin(tensor->shape, ", "),
                      "], but config.json asks for ", std::string(dtype), " [",
                      absl::StrJoin(shape, ", "), "]"));
    return {};
  }
  result_.names.push_back(tensor->name);
  return checkpoint_.bytes(*tensor);
}

std::vector<uint32_t> Reader::Words(std::string_view suffix,
                                    const std::vector<int64_t>& shape) {
  const absl::Span<const std::byte> bytes = Bytes(suffix, "I32", shape);
  std::vector<uint32_t> words(bytes.size() / 4);
  if (!words.empty()) memcpy(words.data(), bytes.data(), words.size() * 4);
  return words;
}

std::vector<float> Reader::Floats(std::string_view suffix,
                                  const std::vector<int64_t>& shape) {
  const TensorInfo* const tensor = Find(suffix);
  if (tensor == nullptr) {
    Fail(nullptr, suffix, "is missing");
    return {};
  }
  const DType dtype = tensor->float_dtype().value_or(DType::kInt8);
  if (kernels::IsQuantised(dtype)) {
    Fail(tensor, suffix,
         absl::StrCat("dtype ", std::string(tensor->dtype),
                      "; scales must be F32, BF16 or F16"));
    return {};
  }
  const absl::Span<const std::byte> bytes = Bytes(suffix, tensor->dtype, shape);
  if (!status_.ok()) return {};
  std::vector<float> values;
  AppendFloats({bytes.data(), dtype, 1,
                static_cast<int64_t>(bytes.size() / kernels::SizeOf(dtype))},
               values);
  return values;
}

bool Reader::Divides(int64_t count, std::string_view what) {
  if (count % per_word() == 0) return true;
  Fail(nullptr, "weight",
       absl::StrCat(count, " ", std::string(what), " of ", bits(),
                    " bits do not fill words of 32"));
  return false;
}

void Reader::ReadInputGroups(std::string_view suffix) {
  if (Find(suffix) == nullptr) return;
  const std::vector<uint32_t> groups = Words(suffix, {result_.cols});
  // What compressed-tensors leaves where there is no order.
  if (std::all_of(groups.begin(), groups.end(),
                  [](uint32_t group) { return group == ~0u; })) {
    return;
  }
  bool neighbours = true;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i] >= static_cast<uint64_t>(result_.groups())) {
      Fail(Find(suffix), suffix,
           absl::StrCat("input ", i, " is of group ", groups[i], " of ",
                        result_.groups()));
      return;
    }
    neighbours =
        neighbours && groups[i] == i / static_cast<size_t>(result_.group);
  }
  if (!neighbours) result_.group_of.assign(groups.begin(), groups.end());
}

// Columns in the order of their groups, if all groups are whole then.
void Reader::PutInputsInOrder() {
  if (result_.group_of.empty()) return;
  std::vector<int32_t> order(result_.group_of.size());
  std::iota(order.begin(), order.end(), 0);
  const auto group_of = [&](int32_t input) {
    return result_.group_of[static_cast<size_t>(input)];
  };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return group_of(a) < group_of(b);
  });
  for (size_t i = 0; i < order.size(); ++i) {
    if (group_of(order[i]) != static_cast<int64_t>(i) / result_.group) return;
  }
  std::vector<uint8_t> moved(order.size());
  for (int64_t row = 0; row < result_.rows; ++row) {
    const auto begin = result_.codes.begin() + row * result_.cols;
    std::transform(order.begin(), order.end(), moved.begin(),
                   [&](int32_t input) { return begin[input]; });
    std::copy(moved.begin(), moved.end(), begin);
  }
  result_.order = std::move(order);
  result_.group_of.clear();
}

void Reader::ReadByInputs() {
  const bool awq = quantisation_.method == Method::kAwq;
  const int64_t rows = result_.rows;
  const int64_t cols = result_.cols;
  const int64_t groups = result_.groups();
  const int64_t each = per_word();
  if (!Divides(rows, "outputs") || !Divides(cols, "inputs")) return;
  const auto words = awq ? Words("qweight", {cols, rows / each})
                         : Words("qweight", {cols / each, rows});
  auto zeros = Words("qzeros", {groups, rows / each});
  const auto scales = Floats("scales", {groups, rows});
  if (!awq) ReadInputGroups("g_idx");
  if (!status_.ok()) return;
  result_.codes.resize(static_cast<size_t>(rows * cols));
  result_.scales.resize(static_cast<size_t>(rows * groups));
  result_.zeros.resize(static_cast<size_t>(rows * groups));
  if (quantisation_.zeros_less_one) {
    for (uint32_t& word : zeros) word += bits() == 4 ? 0x11111111 : 0x01010101;
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = awq ? kAwqPlace[row % 8] : row % each;
    for (int64_t col = 0; col < cols; ++col) {
      result_.codes[static_cast<size_t>(row * cols + col)] =
          awq ? Field(words[static_cast<size_t>(col * (rows / each) +
                                                row / each)],
                      place)
              : Field(words[static_cast<size_t>(col / each * rows + row)],
                      col % each);
    }
    for (int64_t group = 0; group < groups; ++group) {
      const auto to = static_cast<size_t>(row * groups + group);
      result_.scales[to] = scales[static_cast<size_t>(group * rows + row)];
      result_.zeros[to] =
          Field(zeros[static_cast<size_t>(group * (rows / each) + row / each)],
                place);
    }
  }
}

void Reader::ReadRowScales() {
  const int64_t rows = result_.rows;
  const int64_t groups = result_.groups();
  const std::string_view name =
      Find("weight_scale_inv") != nullptr ? "weight_scale_inv" : "weight_scale";
  const TensorInfo* const tensor = Find(name);
  const bool one =
      tensor != nullptr &&
      (tensor->shape.empty() || tensor->shape == std::vector<int64_t>{1});
  if (one && groups == 1 &&
      quantisation_.block_rows == 0) {  // a scale for the whole tensor
    const auto scale = Floats(name, tensor->shape);
    if (scale.size() == 1) {
      result_.scales.assign(static_cast<size_t>(rows), scale[0]);
    }
    return;
  }
  const int64_t each = std::max(1, quantisation_.block_rows);
  const bool flat = tensor != nullptr && tensor->shape.size() == 1 &&
                    groups == 1 && each == 1;
  const auto scales = flat ? Floats(name, {rows})
                           : Floats(name, {(rows + each - 1) / each, groups});
  if (!status_.ok()) return;
  result_.scales.reserve(static_cast<size_t>(rows * groups));
  for (int64_t row = 0; row < rows; ++row) {
    const auto first = scales.begin() + row / each * groups;
    result_.scales.insert(result_.scales.end(), first, first + groups);
  }
}

void Reader::ReadPacked() {
  const int64_t rows = result_.rows;
  const int64_t cols = result_.cols;
  const int64_t groups = result_.groups();
  const int64_t each = per_word();
  if (!Divides(cols, "inputs")) return;
  const auto words = Words("weight_packed", {rows, cols / each});
  ReadRowScales();
  ReadInputGroups("weight_g_idx");
  const bool zeroed = Find("weight_zero_point") != nullptr;
  if (zeroed && !Divides(rows, "outputs")) return;
  const auto zeros = zeroed ? Words("weight_zero_point", {rows / each, groups})
                            : std::vector<uint32_t>();
  if (Find("weight_shape") != nullptr) {
    const auto shape = Bytes("weight_shape", "I64", {2});
    const int64_t expected[2] = {rows, cols};
    if (!shape.empty() && memcmp(shape.data(), expected, 16) != 0) {
      Fail(Find("weight_shape"), "weight_shape",
           absl::StrCat("is not [", rows, ", ", cols, "]"));
    }
  }
  if (!status_.ok()) return;
  result_.codes.resize(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows * cols; ++i) {
    result_.codes[static_cast<size_t>(i)] =
        Field(words[static_cast<size_t>(i / each)], i % each);
  }
  const auto middle = static_cast<uint8_t>(1u << (bits() - 1));
  result_.zeros.assign(static_cast<size_t>(rows * groups), middle);
  for (int64_t i = 0; zeroed && i < rows * groups; ++i) {
    const int64_t row = i / groups;
    result_.zeros[static_cast<size_t>(i)] =
        Field(zeros[static_cast<size_t>(row / each * groups + i % groups)],
              row % each);
  }
}

void Reader::ReadPlain() {
  const TensorInfo* const tensor = Find("weight");
  const bool fp8 = tensor != nullptr && tensor->dtype == "F8_E4M3";
  const auto bytes =
      Bytes("weight", fp8 ? "F8_E4M3" : "I8", {result_.rows, result_.cols});
  ReadRowScales();
  if (const TensorInfo* const zeros = Find("weight_zero_point")) {
    Fail(zeros, "weight_zero_point", "8-bit codes must be symmetric");
  }
  if (!status_.ok()) return;
  const bool w8a8 = quantisation_.w8a8 && result_.group == result_.cols &&
                    result_.cols <= kernels::kMaxW8A8Inputs;
  result_.dtype = fp8 ? DType::kFp8 : w8a8 ? DType::kW8A8 : DType::kInt8;
  result_.codes.resize(bytes.size());
  memcpy(result_.codes.data(), bytes.data(), bytes.size());
}

void Reader::ReadFp4() {
  absl::StatusOr<CodeRows> read =
      quantisation_.method == Method::kNvfp4
          ? ReadNvfp4(checkpoint_, name_, result_.rows, result_.cols)
          : ReadPackedMxfp4(checkpoint_, name_, result_.rows, result_.cols);
  status_ = read.status();
  if (read.ok()) result_ = *std::move(read);
}

void Reader::Finish() {
  if (quantisation_.method == Method::kPlain || result_.e2m1) return;
  const auto middle = static_cast<uint8_t>(1u << (bits() - 1));
  const bool symmetric =
      std::all_of(result_.zeros.begin(), result_.zeros.end(),
                  [&](uint8_t zero) { return zero == middle; });
  if (symmetric) result_.zeros.clear();
  if (bits() == 4) {
    result_.dtype = DType::kInt4;
    return;
  }
  if (!symmetric) {
    Fail(nullptr, "qzeros", "8-bit codes must be symmetric, with zero 128");
    return;
  }
  result_.dtype = DType::kInt8;
  for (uint8_t& code : result_.codes) code ^= 0x80;
}

absl::StatusOr<CodeRows> Reader::Read() {
  switch (quantisation_.method) {
    case Method::kNone:
      Fail(nullptr, "weight", "is quantised, but config.json does not say how");
      break;
    case Method::kMxfp4:  // ReadMxfp4 has those
      Fail(nullptr, "weight", "is quantised, but no expert's, as mxfp4 is");
      break;
    case Method::kGptq:
    case Method::kAwq:
      ReadByInputs();
      break;
    case Method::kPacked:
      ReadPacked();
      break;
    case Method::kPlain:
      ReadPlain();
      break;
    case Method::kPackedMxfp4:
    case Method::kNvfp4:
      ReadFp4();
      break;
  }
  // Found on the fly instead.
  for (const char* suffix : {"input_scale", "input_global_scale",
                             "input_zero_point", "activation_scale"}) {
    if (const TensorInfo* const tensor = Find(suffix)) {
      result_.names.push_back(tensor->name);
    }
  }
  if (status_.ok()) Finish();
  if (status_.ok()) PutInputsInOrder();
  if (!status_.ok()) return status_;
  return std::move(result_);
}

}  // namespace

bool HasCodes(const Checkpoint& checkpoint, const std::string& name) {
  for (const char* suffix :
       {".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv"}) {
    if (checkpoint.Find(name + suffix) != nullptr) return true;
  }
  // Nor are codes numbers where the scales are missing.
  const TensorInfo* const weight = checkpoint.Find(name + ".weight");
  return weight != nullptr && weight->dtype == "F8_E4M3";
}

absl::StatusOr<CodeRows> ReadCodes(const Checkpoint& checkpoint,
                                   const Quantisation& quantisation,
                                   const std::string& name, int64_t rows,
                                   int64_t cols) {
  return Reader(checkpoint, quantisation, name, rows, cols).Read();
}

bool SameForm(const CodeRows& codes, const CodeRows& more) {
  return codes.dtype == more.dtype && codes.e2m1 == more.e2m1 &&
         codes.cols == more.cols && codes.group == more.group &&
         codes.order == more.order && codes.group_of.empty() &&
         more.group_of.empty() &&
         (codes.group == codes.cols ||
          (codes.dtype != DType::kFp8 &&
           codes.group % kernels::kCodeGroup == 0));
}

void AppendRows(const CodeRows& more, CodeRows& codes) {
  if (more.zeros.empty() != codes.zeros.empty()) {
    const auto fill = [](const CodeRows& rows) {
      return rows.zeros.empty() ? std::vector<uint8_t>(rows.scales.size(), 8)
                                : rows.zeros;
    };
    codes.zeros = fill(codes);
    const std::vector<uint8_t> zeros = fill(more);
    codes.zeros.insert(codes.zeros.end(), zeros.begin(), zeros.end());
  } else {
    codes.zeros.insert(codes.zeros.end(), more.zeros.begin(), more.zeros.end());
  }
  codes.rows += more.rows;
  codes.codes.insert(codes.codes.end(), more.codes.begin(), more.codes.end());
  codes.scales.insert(codes.scales.end(), more.scales.begin(),
                      more.scales.end());
  codes.names.insert(codes.names.end(), more.names.begin(), more.names.end());
}

void PutRowsInOrder(const std::vector<int>& order, CodeRows& codes) {
  const auto put = [&](auto& values, int64_t width) {
    if (values.empty()) return;
    const auto old = values;
    for (size_t i = 0; i < order.size(); ++i) {
      std::copy_n(old.begin() + order[i] * width, width,
                  values.begin() + static_cast<int64_t>(i) * width);
    }
  };
  put(codes.codes, codes.cols);
  put(codes.scales, codes.groups());
  put(codes.zeros, codes.groups());
}

void Dequantise(const CodeRows& codes, std::vector<float>& out) {
  std::array<float, 256> numbers;  // of each code, before its zero
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    numbers[static_cast<size_t>(code)] =
        codes.e2m1 ? static_cast<float>(kernels::kTwiceE2m1[code % 16])
        : codes.dtype == DType::kInt4
            ? static_cast<float>(code)
            : kernels::FloatFromCode(codes.dtype, byte);
  }
  std::vector<int32_t> groups = codes.group_of;
  for (int64_t col = 0; groups.size() < static_cast<size_t>(codes.cols);) {
    groups.push_back(static_cast<int32_t>(col++ / codes.group));
  }
  const size_t begin = out.size();
  out.resize(begin + codes.codes.size());
  for (int64_t row = 0; row < codes.rows; ++row) {
    const int64_t first_group = row * codes.groups();
    const uint8_t* const from = codes.codes.data() + row * codes.cols;
    float* const to = out.data() + begin + row * codes.cols;
    for (size_t col = 0; col < groups.size(); ++col) {
      const auto group = static_cast<size_t>(first_group + groups[col]);
      const int zero = codes.dtype != DType::kInt4 || codes.e2m1 ? 0
                       : codes.zeros.empty()                     ? 8
                                             : codes.zeros[group];
      to[codes.order.empty() ? static_cast<int64_t>(col) : codes.order[col]] =
          (numbers[from[col]] - static_cast<float>(zero)) * codes.scales[group];
    }
  }
}

}  // namespace tandem::engine
