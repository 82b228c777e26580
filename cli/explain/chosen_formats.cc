// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/chosen_formats.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/config_file.h"
#include "engine/checkpoint/file.h"
#include "engine/checkpoint/safetensors.h"

namespace tandem::explain {
namespace {

using kernels::DType;

std::string DtypeIn(const nlohmann::json& object) {
  if (!object.is_object()) return "";
  for (const char* const key : {"torch_dtype", "dtype"}) {
    const auto found = object.find(key);
    if (found != object.end() && found->is_string()) {
      return found->get<std::string>();
    }
  }
  return "";
}

// Models that have more than text may say it of their text alone.
std::string DtypeOf(std::string_view config) {
  const auto object = nlohmann::json::parse(config, nullptr, false);
  const std::string type = DtypeIn(object);
  if (!type.empty() || !object.is_object()) return type;
  const auto text = object.find("text_config");
  return text == object.end() ? "" : DtypeIn(*text);
}

// Of most of the checkpoint's numbers, as workers keep it; codes are none.
std::string DtypeOfFile(const std::string& directory) {
  const auto checkpoint =
      engine::Checkpoint::Open(directory.empty() ? "." : directory);
  if (!checkpoint.ok()) return "";  // perhaps not downloaded
  std::map<std::string_view, uint64_t> bytes;
  for (const engine::TensorInfo& tensor : checkpoint->tensors()) {
    if (tensor.float_dtype()) {
      bytes[kernels::Name(*tensor.float_dtype())] += tensor.end - tensor.begin;
    }
  }
  const auto most = std::max_element(
      bytes.begin(), bytes.end(),
      [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == bytes.end() ? "" : std::string(most->first);
}

}  // namespace

std::optional<DType> NamedType(std::string_view name) {
  if (name == "f32" || name == "float32") return DType::kF32;
  if (name == "bf16" || name == "bfloat16") return DType::kBF16;
  if (name == "f16" || name == "float16") return DType::kF16;
  if (name == "fp8" || name == "fp8_e4m3") return DType::kFp8;
  if (name == "int8") return DType::kInt8;
  if (name == "int4") return DType::kInt4;
  if (name == "w8a8") return DType::kW8A8;
  return std::nullopt;
}

absl::StatusOr<std::string> CheckpointType(const std::string& model) {
  const std::string path =
      cli::IsConfigFile(model) ? model : model + "/config.json";
  const auto config = engine::ReadFile(path, engine::kMaxConfigBytes);
  if (!config.ok()) return config.status();
  const std::string type =
      DtypeOfFile(std::filesystem::path(path).parent_path().string());
  return type.empty() ? DtypeOf(*config) : type;
}

Formats ChooseFormats(const engine::ModelSpec& spec,
                      std::string_view checkpoint_type,
                      const FormatFlags& flags, bool gpu) {
  // What transformers takes where nothing says it; gpt-oss's own files do not.
  using Method = engine::Quantisation::Method;
  const DType silent =
      spec.quantisation.method == Method::kMxfp4 ? DType::kBF16 : DType::kF32;
  const DType given = NamedType(checkpoint_type).value_or(silent);
  // CPUs widen f16 to f32.
  const DType kept = gpu || given == DType::kBF16 ? given : DType::kF32;
  Formats formats;
  formats.weights = NamedType(flags.dtype).value_or(kept);
  formats.layers = NamedType(flags.quantization).value_or(formats.weights);
  const DType kv = gpu                               ? formats.weights
                   : formats.weights == DType::kBF16 ? DType::kBF16
                                                     : DType::kF32;
  formats.kv = NamedType(flags.kv_cache_dtype).value_or(kv);
  return formats;
}

}  // namespace tandem::explain
