// SPDX-License-Identifier: Apache-2.0
// The header of one safetensors file. JSON events go straight into a table of
// tensors: no document is built, so a hostile header costs no more memory
// than its own length times a small constant.

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/lfs_pointer.h"
#include "engine/checkpoint/json.h"
#include "engine/checkpoint/safetensors.h"

namespace tandem::engine {
namespace {

using nlohmann::json;

struct DTypeInfo {
  std::string_view name;
  int bytes;
};

// Types of less than a byte are not in it: no weight of ours has them.
constexpr std::array<DTypeInfo, 16> kDTypes = {{{"F32", 4},
                                                {"BF16", 2},
                                                {"F16", 2},
                                                {"F64", 8},
                                                {"I64", 8},
                                                {"I32", 4},
                                                {"I16", 2},
                                                {"I8", 1},
                                                {"U64", 8},
                                                {"U32", 4},
                                                {"U16", 2},
                                                {"U8", 1},
                                                {"BOOL", 1},
                                                {"F8_E4M3", 1},
                                                {"F8_E5M2", 1},
                                                {"C64", 8}}};

const DTypeInfo* FindDType(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == name) return &info;
  }
  return nullptr;
}

// Events of nlohmann's parser to tensors. Every method returns false to stop;
// `complaint` then says why.
class HeaderReader {
 public:
  explicit HeaderReader(uint64_t data_bytes) : data_bytes_(data_bytes) {}

  bool null() { return Unexpected("null"); }
  bool boolean(bool) { return Unexpected("a boolean"); }
  bool number_integer(json::number_integer_t value) {
    return Unexpected(absl::StrCat("the negative number ", value));
  }
  bool number_unsigned(json::number_unsigned_t value) { return Number(value); }
  bool number_float(json::number_float_t, const std::string& text) {
    return Unexpected(absl::StrCat("the number ", Quote(text)));
  }
  bool binary(json::binary_t&) { return Unexpected("binary data"); }
  bool string(std::string& value);
  bool key(std::string& name);
  bool start_object(size_t);
  bool end_object();
  bool start_array(size_t);
  bool end_array();
  bool parse_error(size_t, const std::string&, const json::exception& error) {
    complaint_ = absl::StrCat("not valid JSON: ", JsonErrorText(error.what()));
    return false;
  }

  const std::string& complaint() const { return complaint_; }
  std::vector<TensorInfo>& tensors() { return tensors_; }

 private:
  enum class In { kNothing, kTop, kMetadata, kTensor, kShape, kOffsets, kEnd };
  enum class Field { kNone, kDType, kShape, kOffsets };

  bool Fail(std::string_view what) {
    complaint_ = absl::StrCat(
        current_.empty() ? std::string()
                         : absl::StrCat("tensor ", Quote(current_), ": "),
        std::string(what));
    return false;
  }
  bool Unexpected(std::string_view what) {
    return Fail(absl::StrCat("unexpected ", std::string(what), " in ",
                             std::string(Where())));
  }
  std::string_view Where() const;
  bool Number(uint64_t value);
  bool FinishTensor();

  const uint64_t data_bytes_;
  In in_ = In::kNothing;
  Field field_ = Field::kNone;
  std::string current_;  // tensor being read
  const DTypeInfo* dtype_ = nullptr;
  bool has_shape_ = false;
  std::vector<int64_t> shape_;
  std::vector<uint64_t> offsets_;
  absl::flat_hash_set<std::string> names_;
  std::vector<TensorInfo> tensors_;
  std::string complaint_;
};

std::string_view HeaderReader::Where() const {
  switch (in_) {
    case In::kNothing:
    case In::kEnd:
      return "place of the header's object";
    case In::kTop:
      return "place of a tensor's object";
    case In::kMetadata:
      return "__metadata__, whose values are strings";
    case In::kShape:
      return "shape, an array of whole numbers";
    case In::kOffsets:
      return "data_offsets, two whole numbers";
    case In::kTensor:
      return field_ == Field::kDType   ? "dtype, a string"
             : field_ == Field::kShape ? "shape, an array of whole numbers"
                                       : "data_offsets, two whole numbers";
  }
  return "";
}

bool HeaderReader::start_object(size_t) {
  if (in_ == In::kNothing) {
    in_ = In::kTop;
    return true;
  }
  if (in_ != In::kTop) return Unexpected("an object");
  if (current_ == "__metadata__") {
    in_ = In::kMetadata;
    return true;
  }
  in_ = In::kTensor;
  field_ = Field::kNone;
  dtype_ = nullptr;
  has_shape_ = false;
  shape_.clear();
  offsets_.clear();
  return true;
}

bool HeaderReader::end_object() {
  switch (in_) {
    case In::kTop:
      in_ = In::kEnd;
      return true;
    case In::kMetadata:
      in_ = In::kTop;
      return true;
    default:
      in_ = In::kTop;
      return FinishTensor();
  }
}

bool HeaderReader::key(std::string& name) {
  if (in_ == In::kMetadata) return true;
  if (in_ == In::kTop) {
    current_ = std::move(name);
    return names_.insert(current_).second || Fail("named twice");
  }
  if (name == "dtype" && dtype_ == nullptr) {
    field_ = Field::kDType;
  } else if (name == "shape" && !has_shape_) {
    field_ = Field::kShape;
  } else if (name == "data_offsets" && offsets_.empty()) {
    field_ = Field::kOffsets;
  } else if (name == "dtype" || name == "shape" || name == "data_offsets") {
    return Fail(absl::StrCat(name, " is given twice"));
  } else {
    return Fail(absl::StrCat("unknown field ", Quote(name)));
  }
  return true;
}

bool HeaderReader::string(std::string& value) {
  if (in_ == In::kMetadata) return true;
  if (in_ != In::kTensor || field_ != Field::kDType) {
    return Unexpected("a string");
  }
  dtype_ = FindDType(value);
  return dtype_ != nullptr ||
         Fail(absl::StrCat("dtype ", Quote(value), " is not known"));
}

bool HeaderReader::start_array(size_t) {
  if (in_ != In::kTensor || field_ == Field::kDType) {
    return Unexpected("an array");
  }
  in_ = field_ == Field::kShape ? In::kShape : In::kOffsets;
  has_shape_ |= field_ == Field::kShape;
  return true;
}

bool HeaderReader::end_array() {
  if (in_ == In::kOffsets && offsets_.size() != 2) {
    return Fail("data_offsets must be two numbers");
  }
  in_ = In::kTensor;
  return true;
}

bool HeaderReader::Number(uint64_t value) {
  if (in_ == In::kShape) {
    if (shape_.size() == kMaxTensorRank) {
      return Fail(
          absl::StrCat("shape has more than ", kMaxTensorRank, " dimensions"));
    }
    if (value > uint64_t{INT64_MAX}) {
      return Fail(absl::StrCat("dimension ", value, " is too large"));
    }
    shape_.push_back(static_cast<int64_t>(value));
    return true;
  }
  if (in_ == In::kOffsets) {
    if (offsets_.size() == 2) return Fail("data_offsets must be two numbers");
    offsets_.push_back(value);
    return true;
  }
  return Unexpected(absl::StrCat("the number ", value));
}

bool HeaderReader::FinishTensor() {
  if (dtype_ == nullptr) return Fail("dtype is missing");
  if (!has_shape_) return Fail("shape is missing");
  if (offsets_.empty()) return Fail("data_offsets is missing");
  const uint64_t begin = offsets_[0];
  const uint64_t end = offsets_[1];
  if (begin > end || end > data_bytes_) {
    return Fail(absl::StrCat("data_offsets [", begin, ", ", end,
                             "] are outside the file's ", data_bytes_,
                             " bytes of data"));
  }
  // The product of the others is checked even if one dimension is 0.
  uint64_t bytes = static_cast<uint64_t>(dtype_->bytes);
  bool empty = false;
  for (const int64_t dimension : shape_) {
    if (dimension == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(dimension),
                                      &bytes)) {
      return Fail(
          absl::StrCat("shape [", absl::StrJoin(shape_, ", "), "] overflows"));
    }
  }
  if (empty) bytes = 0;
  if (bytes != end - begin) {
    return Fail(absl::StrCat("shape [", absl::StrJoin(shape_, ", "), "] of ",
                             std::string(dtype_->name), " takes ", bytes,
                             " bytes, but data_offsets hold ", end - begin));
  }
  tensors_.push_back({current_, dtype_->name, shape_, begin, end, 0});
  current_.clear();
  return true;
}

absl::Status Invalid(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
}

// Sorts by offset; the tensors must then cover the data one after another.
absl::Status CheckCoverage(const std::string& path, uint64_t data_bytes,
                           std::vector<TensorInfo>& tensors) {
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) {
              return std::tie(a.begin, a.end, a.name) <
                     std::tie(b.begin, b.end, b.name);
            });
  uint64_t covered = 0;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.begin != covered) {
      return Invalid(
          path, absl::StrCat("tensor ", Quote(tensor.name), ": data_offsets [",
                             tensor.begin, ", ", tensor.end, "] ",
                             tensor.begin < covered ? "overlap the tensor "
                                                    : "leave a hole after the "
                                                      "tensor ",
                             "before, which ends at ", covered));
    }
    covered = tensor.end;
  }
  if (covered == data_bytes) return absl::OkStatus();
  return Invalid(path, absl::StrCat("data_offsets end at ", covered, ", but ",
                                    data_bytes, " bytes of data follow"));
}

}  // namespace

absl::StatusOr<std::vector<TensorInfo>> ParseSafetensors(
    const std::string& path, absl::Span<const std::byte> file) {
  const char* begin = reinterpret_cast<const char*>(file.data());
  if (IsLfsPointer({begin, file.size()})) return Invalid(path, kIsLfsPointer);
  if (file.size() < 8) {
    return Invalid(path,
                   absl::StrCat("header length: the file has ", file.size(),
                                " bytes; at least 8 are "
                                "needed"));
  }
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) {
    header_bytes = header_bytes << 8 | static_cast<uint8_t>(file[i]);
  }
  if (header_bytes > kMaxSafetensorsHeader) {
    return Invalid(
        path, absl::StrCat("header length ", header_bytes,
                           " is above the limit of ", kMaxSafetensorsHeader));
  }
  if (header_bytes > file.size() - 8) {
    return Invalid(
        path, absl::StrCat("header length ", header_bytes,
                           " goes beyond the file's ", file.size(), " bytes"));
  }
  const char* text = begin + 8;
  if (header_bytes < 2 || text[0] != '{') {
    return Invalid(path, "header: a JSON object must begin at byte 8");
  }
  if (HasNul({text, header_bytes})) {
    return Invalid(path, "header: not valid JSON: a NUL byte");
  }
  const uint64_t data_begin = 8 + header_bytes;
  const uint64_t data_bytes = file.size() - data_begin;
  HeaderReader reader(data_bytes);
  if (!json::sax_parse(text, text + header_bytes, &reader)) {
    return Invalid(path, absl::StrCat("header: ", reader.complaint()));
  }
  std::vector<TensorInfo>& tensors = reader.tensors();
  const absl::Status coverage = CheckCoverage(path, data_bytes, tensors);
  if (!coverage.ok()) return coverage;
  for (TensorInfo& tensor : tensors) {
    tensor.begin += data_begin;
    tensor.end += data_begin;
  }
  return std::move(tensors);
}

std::optional<kernels::DType> TensorInfo::float_dtype() const {
  if (dtype == "F32") return kernels::DType::kF32;
  if (dtype == "BF16") return kernels::DType::kBF16;
  if (dtype == "F16") return kernels::DType::kF16;
  return std::nullopt;
}

}  // namespace tandem::engine
