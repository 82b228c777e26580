// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/safetensors.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/failpoint.h"
#include "engine/checkpoint/json.h"

namespace tandem::engine {
namespace {

absl::Status InvalidFile(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
}

// A plain file name: it cannot leave the model directory.
bool IsPlainName(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.size() <= 255 &&
         name.find('/') == name.npos && name.find('\0') == name.npos;
}

constexpr absl::string_view kSuffix = ".safetensors";

// Files of all weights under names of their own, as AutoGPTQ wrote them; no
// shards of an index that is missing, no adapters, and not Mistral's own
// format.
std::vector<std::string> OtherWeights(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator file(directory, error), end;
       !error && file != end; file.increment(error)) {
    std::string name = file->path().filename().string();
    if (absl::EndsWith(name, kSuffix) && !absl::StrContains(name, "-of-") &&
        !absl::StartsWith(name, "adapter_") &&
        !absl::StartsWith(name, "consolidated")) {
      names.push_back(std::move(name));
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

// What a model that sees has beside its text part.
constexpr absl::string_view kOtherParts[] = {
    "vision_tower.", "multi_modal_projector.", "visual.",
    "audio_tower.",  "embed_vision.",          "embed_audio."};

// Of an adapter's tensors.
constexpr absl::string_view kPeft = "base_model.model.";

bool ByName(const TensorInfo& a, const TensorInfo& b) {
  return a.name < b.name;
}

}  // namespace

std::string TextName(std::string_view name) {
  static constexpr std::pair<absl::string_view, absl::string_view> kNames[] = {
      {"language_model.model.", "model."},
      {"language_model.lm_head.", "lm_head."},
      {"model.language_model.", "model."},
      {"language_model.", "model."}};
  const absl::string_view all(name.data(), name.size());
  const absl::string_view own = absl::StripPrefix(all, kPeft);
  for (const auto& [whole, text] : kNames) {
    if (absl::StartsWith(own, whole)) {
      return absl::StrCat(all.substr(0, all.size() - own.size()), text,
                          absl::StripPrefix(own, whole));
    }
  }
  return std::string(name);
}

absl::StatusOr<std::string> Checkpoint::MainPath(const std::string& directory) {
  for (const char* name :
       {"/model.safetensors", "/model.safetensors.index.json"}) {
    if (FileExists(directory + name)) return directory + name;
  }
  const std::vector<std::string> others = OtherWeights(directory);
  if (others.size() == 1) return absl::StrCat(directory, "/", others.front());
  std::string why =
      ": neither model.safetensors nor model.safetensors.index.json is there";
  if (others.empty()) {
    absl::StrAppend(&why, "; other checkpoint formats are not read");
  } else {
    absl::StrAppend(&why, ", and ", others.size(),
                    " other files might be the model: ", Quote(others[0]), ", ",
                    Quote(others[1]), others.size() > 2 ? ", ..." : "");
  }
  return absl::NotFoundError(directory + why);
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& directory) {
  absl::StatusOr<std::string> main_path = MainPath(directory);
  if (!main_path.ok()) return main_path.status();
  Checkpoint checkpoint;
  checkpoint.main_path_ = *std::move(main_path);
  const absl::Status status =
      absl::EndsWith(checkpoint.main_path_, kSuffix)
          ? checkpoint.AddFile(MappedFile::Open(checkpoint.main_path_))
          : checkpoint.OpenShards(directory);
  if (!status.ok()) return status;
  const absl::Status indexed = checkpoint.Index();
  if (!indexed.ok()) return indexed;
  return checkpoint;
}

absl::StatusOr<Checkpoint> Checkpoint::CopyFile(const std::string& path,
                                                uint64_t max_bytes) {
  Checkpoint checkpoint;
  checkpoint.main_path_ = path;
  const absl::Status status =
      checkpoint.AddFile(MappedFile::Copy(path, max_bytes));
  if (!status.ok()) return status;
  const absl::Status indexed = checkpoint.Index();
  if (!indexed.ok()) return indexed;
  return checkpoint;
}

absl::Status Checkpoint::Index() {
  KeepText();
  std::sort(tensors_.begin(), tensors_.end(), ByName);
  const auto twice =
      std::adjacent_find(tensors_.begin(), tensors_.end(),
                         [](const TensorInfo& a, const TensorInfo& b) {
                           return a.name == b.name;
                         });
  if (twice != tensors_.end()) {
    return InvalidFile(path(*twice), absl::StrCat("tensor ", Quote(twice->name),
                                                  " is there twice"));
  }
  for (const TensorInfo& tensor : tensors_) {
    total_bytes_ += tensor.end - tensor.begin;
  }
  return absl::OkStatus();
}

void Checkpoint::KeepText() {
  for (TensorInfo& tensor : tensors_) tensor.name = TextName(tensor.name);
  std::erase_if(tensors_, [](const TensorInfo& tensor) {
    const absl::string_view own =
        absl::StripPrefix(absl::StripPrefix(tensor.name, kPeft), "model.");
    return std::any_of(
        std::begin(kOtherParts), std::end(kOtherParts),
        [&](absl::string_view part) { return absl::StartsWith(own, part); });
  });
}

absl::Status Checkpoint::AddFile(absl::StatusOr<MappedFile> file) {
  if (!file.ok()) return file.status();
  absl::Span<const std::byte> bytes(file->data(), file->size());
  const failpoint::Hit hit = TANDEM_FAILPOINT("load.header", "fail truncate");
  if (hit == failpoint::kFail) return failpoint::Error();
  if (hit == failpoint::kTruncate) bytes = bytes.first(bytes.size() / 2);
  absl::StatusOr<std::vector<TensorInfo>> tensors =
      ParseSafetensors(file->path(), bytes);
  if (!tensors.ok()) return tensors.status();
  for (TensorInfo& tensor : *tensors) {
    tensor.shard = static_cast<int>(files_.size());
    tensors_.push_back(std::move(tensor));
  }
  files_.push_back(*std::move(file));
  return absl::OkStatus();
}

absl::Status Checkpoint::OpenShards(const std::string& directory) {
  if (TANDEM_FAILPOINT("load.index", "fail")) return failpoint::Error();
  const absl::StatusOr<std::string> text = ReadFile(main_path_, kMaxIndexBytes);
  if (!text.ok()) return text.status();
  const absl::StatusOr<nlohmann::json> index = ParseJson(main_path_, *text);
  if (!index.ok()) return index.status();
  const auto map =
      index->is_object() ? index->find("weight_map") : index->end();
  if (!index->is_object() || map == index->end() || !map->is_object() ||
      map->empty()) {
    return InvalidFile(main_path_,
                       "weight_map: must be an object of tensor names and file "
                       "names");
  }
  // Shards in the order of their names; each must hold what it is said to.
  absl::flat_hash_map<std::string, std::string> wanted;
  std::vector<std::string> shards;
  for (const auto& [tensor, value] : map->items()) {
    const std::string* shard = value.get_ptr<const std::string*>();
    if (shard == nullptr || !IsPlainName(*shard)) {
      return InvalidFile(
          main_path_,
          absl::StrCat("weight_map: tensor ", Quote(tensor), ": ",
                       shard == nullptr ? "the value" : Quote(*shard),
                       " must be the name of a file in the same "
                       "directory"));
    }
    wanted.emplace(tensor, *shard);
    shards.push_back(*shard);
  }
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());
  if (shards.size() > kMaxShards) {
    return InvalidFile(main_path_,
                       absl::StrCat("weight_map: ", shards.size(),
                                    " files; at most ", kMaxShards));
  }
  for (const std::string& shard : shards) {
    const absl::Status status =
        AddFile(MappedFile::Open(absl::StrCat(directory, "/", shard)));
    if (!status.ok()) return status;
  }
  size_t found = 0;
  for (const TensorInfo& tensor : tensors_) {
    const auto entry = wanted.find(tensor.name);
    if (entry == wanted.end() || entry->second != shards[tensor.shard]) {
      return InvalidFile(path(tensor),
                         absl::StrCat("tensor ", Quote(tensor.name),
                                      " is not in this file by ", main_path_));
    }
    ++found;
  }
  if (found == wanted.size()) return absl::OkStatus();
  for (const TensorInfo& tensor : tensors_) wanted.erase(tensor.name);
  return InvalidFile(
      main_path_,
      absl::StrCat("weight_map: tensor ",
                   Quote(std::min_element(wanted.begin(), wanted.end())->first),
                   " is not in the file named for it"));
}

const TensorInfo* Checkpoint::Find(std::string_view name) const {
  const auto tensor = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const TensorInfo& a, std::string_view b) { return a.name < b; });
  return tensor != tensors_.end() && tensor->name == name ? &*tensor : nullptr;
}

absl::Span<const std::byte> Checkpoint::bytes(const TensorInfo& tensor) const {
  return {files_[tensor.shard].data() + tensor.begin,
          static_cast<size_t>(tensor.end - tensor.begin)};
}

const std::string& Checkpoint::path(const TensorInfo& tensor) const {
  return files_[tensor.shard].path();
}

absl::StatusOr<kernels::HostTensor> Checkpoint::Typed(
    std::string_view name, absl::Span<const int64_t> shape) const {
  const TensorInfo* tensor = Find(name);
  if (tensor == nullptr) {
    return InvalidFile(main_path_, absl::StrCat("tensor ", Quote(name),
                                                " is missing; config.json asks "
                                                "for it"));
  }
  const std::optional<kernels::DType> dtype = tensor->float_dtype();
  if (!dtype) {
    return InvalidFile(path(*tensor),
                       absl::StrCat("tensor ", Quote(name), ": dtype ",
                                    std::string(tensor->dtype),
                                    "; weights must be F32, BF16 or F16"));
  }
  if (absl::MakeConstSpan(tensor->shape) != shape) {
    return InvalidFile(path(*tensor),
                       absl::StrCat("tensor ", Quote(name), ": shape [",
                                    absl::StrJoin(tensor->shape, ", "),
                                    "], but config.json asks for [",
                                    absl::StrJoin(shape, ", "), "]"));
  }
  int64_t rows = 1;
  for (const int64_t length : shape.first(shape.size() - 1)) rows *= length;
  return kernels::HostTensor{bytes(*tensor).data(), *dtype, rows, shape.back()};
}

absl::StatusOr<kernels::HostTensor> Checkpoint::Matrix(std::string_view name,
                                                       int64_t rows,
                                                       int64_t cols) const {
  return Typed(name, {rows, cols});
}

absl::StatusOr<kernels::HostTensor> Checkpoint::Vector(std::string_view name,
                                                       int64_t cols) const {
  return Typed(name, {cols});
}

absl::StatusOr<kernels::HostTensor> Checkpoint::Stack(std::string_view name,
                                                      int64_t count,
                                                      int64_t rows,
                                                      int64_t cols) const {
  return Typed(name, {count, rows, cols});
}

}  // namespace tandem::engine
