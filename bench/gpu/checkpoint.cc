// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/checkpoint.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

namespace tandem::bench {
namespace {

namespace fs = std::filesystem;

struct Tensor {
  std::string name;
  int64_t rows;  // 0: a vector
  int64_t cols;
  int64_t elements() const { return std::max<int64_t>(rows, 1) * cols; }
};

std::vector<Tensor> TensorsOf(const Shape& s) {
  const int64_t query = int64_t{s.heads} * s.head_dim;
  const int64_t key = int64_t{s.kv_heads} * s.head_dim;
  std::vector<Tensor> tensors = {
      {"model.embed_tokens.weight", s.vocab, s.hidden}};
  for (int i = 0; i < s.layers; ++i) {
    const std::string layer = absl::StrCat("model.layers.", i, ".");
    const auto add = [&](const char* name, int64_t rows, int64_t cols) {
      tensors.push_back({absl::StrCat(layer, name, ".weight"), rows, cols});
    };
    add("input_layernorm", 0, s.hidden);
    add("self_attn.q_proj", query, s.hidden);
    add("self_attn.k_proj", key, s.hidden);
    add("self_attn.v_proj", key, s.hidden);
    add("self_attn.o_proj", s.hidden, query);
    add("post_attention_layernorm", 0, s.hidden);
    add("mlp.gate_proj", s.intermediate, s.hidden);
    add("mlp.up_proj", s.intermediate, s.hidden);
    add("mlp.down_proj", s.hidden, s.intermediate);
  }
  tensors.push_back({"model.norm.weight", 0, s.hidden});
  tensors.push_back({"lm_head.weight", s.vocab, s.hidden});
  return tensors;
}

std::string ConfigOf(const Shape& s, int max_positions) {
  return absl::StrCat(
      "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", "
      "\"hidden_act\": \"silu\", \"hidden_size\": ",
      s.hidden, ", \"intermediate_size\": ", s.intermediate,
      ", \"num_hidden_layers\": ", s.layers,
      ", \"num_attention_heads\": ", s.heads,
      ", \"num_key_value_heads\": ", s.kv_heads, ", \"head_dim\": ", s.head_dim,
      ", \"vocab_size\": ", s.vocab,
      ", \"max_position_embeddings\": ", max_positions,
      ", \"rms_norm_eps\": 1e-5, \"rope_theta\": 500000.0, "
      "\"tie_word_embeddings\": false, \"bos_token_id\": 0, "
      "\"eos_token_id\": 1}\n");
}

// Of a deviation that keeps activations of order one.
std::vector<uint16_t> RandomBlock(size_t count, int hidden) {
  std::mt19937_64 random(1);
  const float scale = 2.0f / std::sqrt(static_cast<float>(hidden));
  std::vector<uint16_t> block(count);
  for (size_t i = 0; i < count; i += 2) {
    const uint64_t draw = random();
    for (size_t j = 0; j < 2 && i + j < count; ++j) {
      // Uniform, which is quick: its deviation is scale / sqrt(12).
      const auto part = static_cast<int32_t>(draw >> (32 * j));
      const float value = static_cast<float>(part) * 0x1p-32f * scale;
      block[i + j] =
          static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
    }
  }
  return block;
}

bool WriteAll(int file, const void* data, size_t bytes, int64_t at) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t wrote = pwrite(file, from, bytes, at);
    if (wrote <= 0) return false;
    from += wrote;
    at += wrote;
    bytes -= static_cast<size_t>(wrote);
  }
  return true;
}

std::string ReadFile(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

absl::Status WriteRandomCheckpoint(const Shape& shape, int max_positions,
                                   const std::string& directory) {
  const fs::path folder(directory);
  std::error_code error;
  fs::create_directories(folder, error);
  const std::string config = ConfigOf(shape, max_positions);
  if (ReadFile(folder / "config.json") == config) return absl::OkStatus();

  const std::vector<Tensor> tensors = TensorsOf(shape);
  std::string header = "{";
  int64_t bytes = 0;
  std::vector<int64_t> offsets;
  for (const Tensor& tensor : tensors) {
    const int64_t size = tensor.elements() * 2;
    offsets.push_back(bytes);
    const std::string dims = tensor.rows == 0
                                 ? absl::StrCat(tensor.cols)
                                 : absl::StrCat(tensor.rows, ",", tensor.cols);
    absl::StrAppend(&header, header.size() > 1 ? "," : "", "\"", tensor.name,
                    "\":{\"dtype\":\"BF16\",\"shape\":[", dims,
                    "],\"data_offsets\":[", bytes, ",", bytes + size, "]}");
    bytes += size;
  }
  header += "}";
  header.resize((header.size() + 63) / 64 * 64, ' ');

  const fs::path path = folder / "model.safetensors";
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (file < 0)
    return absl::InternalError(absl::StrCat(path.string(), ": open"));
  const uint64_t length = header.size();
  const int64_t data = 8 + static_cast<int64_t>(length);
  std::atomic<bool> good =
      WriteAll(file, &length, 8, 0) && WriteAll(file, header.data(), length, 8);

  // Two copies, so that every place in the first has a whole block after it.
  const size_t block =
      std::min<size_t>(size_t{16} << 20, static_cast<size_t>(bytes) / 2 + 64);
  std::vector<uint16_t> random = RandomBlock(block, shape.hidden);
  random.insert(random.end(), random.begin(), random.begin() + block);
  const std::vector<uint16_t> ones(static_cast<size_t>(shape.hidden), 0x3f80);
  std::atomic<size_t> next{0};
  const auto write = [&] {
    for (size_t i = next++; i < tensors.size(); i = next++) {
      const Tensor& tensor = tensors[i];
      int64_t at = data + offsets[i];
      auto left = static_cast<size_t>(tensor.elements());
      if (tensor.rows == 0) {
        if (!WriteAll(file, ones.data(), left * 2, at)) good = false;
        continue;
      }
      size_t from = i * 7919 % block;
      while (left > 0) {
        const size_t take = std::min(left, block);
        if (!WriteAll(file, random.data() + from, take * 2, at)) good = false;
        at += static_cast<int64_t>(take) * 2;
        left -= take;
        from = (from + 104729) % block;
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
    threads.emplace_back(write);
  }
  for (std::thread& thread : threads) thread.join();
  if (close(file) != 0 || !good) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path.string(), ": no room for ", bytes >> 20, " MiB"));
  }
  std::ofstream(folder / "config.json") << config;  // last: all is there
  return absl::OkStatus();
}

absl::StatusOr<std::string> CheckpointFolder(const Shape& shape) {
  double needed = 0;
  for (const Tensor& tensor : TensorsOf(shape)) {
    needed += 2 * static_cast<double>(tensor.elements());
  }
  const char* const temporary = std::getenv("TMPDIR");
  for (const char* folder : {temporary, static_cast<const char*>("/dev/shm"),
                             static_cast<const char*>("/tmp")}) {
    if (folder == nullptr) continue;
    const std::string own =
        absl::StrCat(folder, "/tandem-bench-", shape.layers, "x", shape.hidden);
    std::error_code error;
    if (fs::exists(own + "/config.json", error)) return own;
    struct statvfs room {};
    if (statvfs(folder, &room) != 0) continue;
    if (static_cast<double>(room.f_bavail) *
            static_cast<double>(room.f_frsize) >
        1.05 * needed) {
      return own;
    }
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("no room for ", static_cast<int64_t>(needed) >> 20,
                   " MiB in TMPDIR, /dev/shm or /tmp"));
}

}  // namespace tandem::bench
