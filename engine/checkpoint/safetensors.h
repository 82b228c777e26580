// SPDX-License-Identifier: Apache-2.0
// Reads checkpoints in the safetensors format, mapped into memory:
//
//   u64 LE  N, the header's length (2 .. 16 MiB here)
//   N bytes a JSON object, may be padded with spaces:
//           {"name": {"dtype": "BF16", "shape": [2, 3],
//                     "data_offsets": [begin, end]}, ...,
//            "__metadata__": {"key": "value"}}
//   rest    the data; offsets count from its start. Tensors cover it all,
//           without holes or overlaps.
//
// A sharded checkpoint is several such files and model.safetensors.index.json
// with {"weight_map": {"name": "file in the same directory"}}.
//
// Files are untrusted: whatever they claim is checked against the length of
// the mapped file before use, and memory stays proportional to the header.

#ifndef TANDEM_ENGINE_CHECKPOINT_SAFETENSORS_H_
#define TANDEM_ENGINE_CHECKPOINT_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/checkpoint/file.h"
#include "kernels/types.h"

namespace tandem::engine {

inline constexpr uint64_t kMaxSafetensorsHeader = 16 << 20;
inline constexpr uint64_t kMaxIndexBytes = 16 << 20;
inline constexpr int kMaxTensorRank = 8;
inline constexpr int kMaxShards = 4096;

// One entry of a header, checked.
struct TensorInfo {
  std::string name;
  std::string_view dtype;  // as the format names it, e.g. "BF16"
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // bytes from the start of the file
  uint64_t end = 0;
  int shard = 0;

  // What kernels can read; nullopt for integers and the like.
  std::optional<kernels::DType> float_dtype() const;
};

// Parses the file's bytes. `path` is for messages only. By ascending `begin`.
absl::StatusOr<std::vector<TensorInfo>> ParseSafetensors(
    const std::string& path, absl::Span<const std::byte> file);

// What a text model calls what a model that sees too, or an adapter of one, has
// under this name: "language_model.model.X", or "model.language_model.X" as
// transformers has called it since 4.52, or the end of that, is "model.X".
std::string TextName(std::string_view name);

// A checkpoint whose files stay mapped while it lives. Of a model that sees
// too, only the part that reads and writes text, by TextName.
class Checkpoint {
 public:
  // What MainPath finds, with the shards that an index names.
  static absl::StatusOr<Checkpoint> Open(const std::string& directory);
  // model.safetensors, or else model.safetensors.index.json, or else the only
  // *.safetensors that is no adapter and no shard. NOT_FOUND: none, or several.
  static absl::StatusOr<std::string> MainPath(const std::string& directory);
  // One file by its own name, of at most `max_bytes`, copied to memory: it may
  // be written to later.
  static absl::StatusOr<Checkpoint> CopyFile(const std::string& path,
                                             uint64_t max_bytes);

  Checkpoint(Checkpoint&&) = default;
  Checkpoint& operator=(Checkpoint&&) = default;

  const std::vector<TensorInfo>& tensors() const {
    return tensors_;
  }                                                     // by name
  const TensorInfo* Find(std::string_view name) const;  // null if absent
  absl::Span<const std::byte> bytes(const TensorInfo& tensor) const;
  const std::string& path(const TensorInfo& tensor) const;  // of its file
  // The file that lists all tensors: the only one, or the index.
  const std::string& main_path() const { return main_path_; }
  uint64_t total_bytes() const { return total_bytes_; }

  // The tensor as a matrix of the shape [rows, cols] (a vector has rows = 1
  // and shape [cols]), or an error that names file, tensor and both shapes.
  absl::StatusOr<kernels::HostTensor> Matrix(std::string_view name,
                                             int64_t rows, int64_t cols) const;
  absl::StatusOr<kernels::HostTensor> Vector(std::string_view name,
                                             int64_t cols) const;
  // Matrices of the shape [count, rows, cols], one under the other.
  absl::StatusOr<kernels::HostTensor> Stack(std::string_view name,
                                            int64_t count, int64_t rows,
                                            int64_t cols) const;

 private:
  Checkpoint() = default;
  absl::Status AddFile(absl::StatusOr<MappedFile> file);
  absl::Status Index();
  void KeepText();
  absl::Status OpenShards(const std::string& directory);
  absl::StatusOr<kernels::HostTensor> Typed(
      std::string_view name, absl::Span<const int64_t> shape) const;

  std::string main_path_;
  std::vector<MappedFile> files_;
  std::vector<TensorInfo> tensors_;
  uint64_t total_bytes_ = 0;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_SAFETENSORS_H_
