// SPDX-License-Identifier: Apache-2.0
#include "engine/model/fingerprint.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/checkpoint/file.h"

namespace tandem::engine {
namespace {

constexpr uint64_t kPieceBytes = 16 << 20;
constexpr uint64_t kMaxTokenizerBytes = uint64_t{256} << 20;

using Digest = std::array<unsigned char, 32>;

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    EVP_DigestInit_ex(context_, EVP_sha256(), nullptr);
  }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(const void* data, size_t size) {
    EVP_DigestUpdate(context_, data, size);
  }
  // Length first: no two sequences of strings look alike.
  void UpdateString(std::string_view text) {
    const std::string length = absl::StrCat(text.size(), ":");
    Update(length.data(), length.size());
    Update(text.data(), text.size());
  }
  Digest Finish() {
    Digest digest;
    EVP_DigestFinal_ex(context_, digest.data(), nullptr);
    return digest;
  }

 private:
  EVP_MD_CTX* const context_;
};

std::string Hex(const Digest& digest) {
  return absl::BytesToHexString(
      {reinterpret_cast<const char*>(digest.data()), digest.size()});
}

// A piece of a tensor, and where its digest goes.
struct Piece {
  absl::Span<const std::byte> bytes;
  Digest digest;
};

std::vector<Piece> CutPieces(const Checkpoint& checkpoint) {
  std::vector<Piece> pieces;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    const absl::Span<const std::byte> bytes = checkpoint.bytes(tensor);
    for (uint64_t at = 0; at < bytes.size(); at += kPieceBytes) {
      pieces.push_back({bytes.subspan(at, kPieceBytes), {}});
    }
  }
  return pieces;
}

void HashPieces(std::vector<Piece>& pieces, int threads, uint64_t total,
                LoadProgress progress) {
  std::atomic<size_t> next = 0;
  std::atomic<uint64_t> done = 0;
  const auto work = [&](bool report) {
    for (size_t i; (i = next.fetch_add(1)) < pieces.size();) {
      Sha256 hash;
      hash.Update(pieces[i].bytes.data(), pieces[i].bytes.size());
      pieces[i].digest = hash.Finish();
      done += pieces[i].bytes.size();
      if (report) progress(done, total);
    }
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back(work, false);
  work(true);
  for (std::thread& helper : helpers) helper.join();
  progress(total, total);
}

}  // namespace

std::string HashStrings(absl::Span<const std::string> strings) {
  Sha256 hash;
  for (const std::string& text : strings) hash.UpdateString(text);
  return Hex(hash.Finish());
}

std::string HashWeights(const Checkpoint& checkpoint, int threads,
                        LoadProgress progress) {
  std::vector<Piece> pieces = CutPieces(checkpoint);
  HashPieces(pieces, threads, checkpoint.total_bytes(), progress);
  Sha256 whole;
  size_t piece = 0;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    whole.UpdateString(tensor.name);
    whole.UpdateString(tensor.dtype);
    whole.UpdateString(absl::StrJoin(tensor.shape, ","));
    Sha256 digest;
    for (uint64_t at = 0; at < tensor.end - tensor.begin; at += kPieceBytes) {
      digest.Update(pieces[piece].digest.data(), sizeof(Digest));
      ++piece;
    }
    const Digest bytes = digest.Finish();
    whole.Update(bytes.data(), bytes.size());
  }
  return Hex(whole.Finish());
}

absl::StatusOr<std::string> HashTokenizer(const std::string& directory) {
  Sha256 hash;
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "added_tokens.json",
        "chat_template.jinja", "chat_template.json",
        "additional_chat_templates/tool_use.jinja"}) {
    const std::string path = absl::StrCat(directory, "/", name);
    if (!FileExists(path)) continue;
    const absl::StatusOr<std::string> content =
        ReadFile(path, kMaxTokenizerBytes);
    if (!content.ok()) return content.status();
    hash.UpdateString(name);
    hash.UpdateString(*content);
  }
  return Hex(hash.Finish());
}

std::string Numerics(const kernels::Backend& backend, const Model& model,
                     kernels::DType kv_dtype) {
  return absl::StrCat(backend.numerics(), " weights=", model.weight_format(),
                      " kv=", std::string(kernels::Name(kv_dtype)));
}

absl::StatusOr<FingerprintParts> Fingerprint(
    const std::string& directory, const Checkpoint& checkpoint,
    const Model& model, const kernels::Backend& backend,
    kernels::DType kv_dtype, int threads, LoadProgress progress) {
  const absl::StatusOr<std::string> tokenizer = HashTokenizer(directory);
  if (!tokenizer.ok()) return tokenizer.status();
  return FingerprintParts{
      {"weights", HashWeights(checkpoint, threads, progress)},
      {"config", model.spec().Canonical()},
      {"tokenizer", *tokenizer},
      {"numerics", Numerics(backend, model, kv_dtype)}};
}

}  // namespace tandem::engine
