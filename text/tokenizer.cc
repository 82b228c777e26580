// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "text/ffi.h"
#include "text/files.h"

namespace tandem::text {
namespace {

// Empty where there is none.
struct Files {
  std::string_view tokenizer;
  std::string_view config = {};
  std::string_view special_map = {};
  std::string_view added = {};
};

// `folder` goes before the names of files in messages.
absl::StatusOr<ffi::TextTokenizer*> Parse(const Files& files,
                                          std::string_view folder) {
  ffi::TextTokenizer* handle = nullptr;
  std::string error;
  const int32_t kind = ffi::tandem_text_tokenizer_new(
      ffi::Borrow(files.tokenizer), ffi::Borrow(files.config),
      ffi::Borrow(files.special_map), ffi::Borrow(files.added), &handle,
      ffi::Into(error));
  if (kind != 0) {
    // Whatever made the loader fail, the file is what the caller can change.
    return ffi::ToStatus(1, "", std::string(folder) + error);
  }
  return handle;
}

// The id of special token `role` by the first of two files that names it.
absl::StatusOr<std::optional<int32_t>> SpecialId(
    const Tokenizer& tokenizer, std::string_view role,
    std::span<const std::pair<std::string, std::string>> files) {
  for (const auto& [path, json] : files) {
    if (json.empty()) continue;
    std::string token;
    std::string error;
    const int32_t kind =
        ffi::tandem_text_config_token(ffi::Borrow(json), ffi::Borrow(role),
                                      ffi::Into(token), ffi::Into(error));
    if (kind != 0) return ffi::ToStatus(1, path, error);
    if (token.empty()) continue;
    const std::optional<int32_t> id = tokenizer.TokenToId(token);
    if (!id) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": ", std::string(role), ": \"", token,
                       "\" is not a token of tokenizer.json"));
    }
    return id;
  }
  return std::nullopt;
}

}  // namespace

void Tokenizer::Free::operator()(ffi::TextTokenizer* handle) const {
  ffi::tandem_text_tokenizer_free(handle);
}

Tokenizer::Tokenizer(ffi::TextTokenizer* handle)
    : handle_(handle),
      table_(std::make_unique<ffi::DecodeTable>(
          ffi::tandem_text_tokenizer_table(handle))) {}

Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

absl::StatusOr<Tokenizer> Tokenizer::FromJson(std::string_view tokenizer_json) {
  auto handle = Parse({.tokenizer = tokenizer_json}, "");
  if (!handle.ok()) return handle.status();
  return Tokenizer(*handle);
}

absl::StatusOr<Tokenizer> Tokenizer::Load(const std::string& model_dir) {
  if (TANDEM_FAILPOINT("load.tokenizer", "fail")) return failpoint::Error();
  const std::string path = model_dir + "/tokenizer.json";
  auto json = ReadModelFile(path, kMaxTokenizerBytes);
  if (!json.ok()) return json.status();
  std::vector<std::pair<std::string, std::string>> files;
  for (const char* name :
       {"tokenizer_config.json", "special_tokens_map.json"}) {
    const std::string file = absl::StrCat(model_dir, "/", name);
    auto bytes = ReadOptionalModelFile(file, kMaxConfigBytes);
    if (!bytes.ok()) return bytes.status();
    files.emplace_back(file, *std::move(bytes));
  }
  auto added =
      ReadOptionalModelFile(model_dir + "/added_tokens.json", kMaxConfigBytes);
  if (!added.ok()) return added.status();
  auto handle = Parse({.tokenizer = *json,
                       .config = files[0].second,
                       .special_map = files[1].second,
                       .added = *added},
                      model_dir + "/");
  if (!handle.ok()) return handle.status();
  Tokenizer tokenizer(*handle);
  auto bos = SpecialId(tokenizer, "bos_token", files);
  if (!bos.ok()) return bos.status();
  auto eos = SpecialId(tokenizer, "eos_token", files);
  if (!eos.ok()) return eos.status();
  tokenizer.bos_id_ = *bos;
  tokenizer.eos_id_ = *eos;
  return tokenizer;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(
    std::string_view text, bool add_special_tokens) const {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the text to encode has ", text.size(),
                     " bytes, the limit is ", kMaxTextBytes));
  }
  std::vector<int32_t> ids;
  std::string error;
  const int32_t kind = ffi::tandem_text_tokenizer_encode(
      handle_.get(), ffi::Borrow(text), add_special_tokens, ffi::Into(ids),
      ffi::Into(error));
  if (kind != 0) return ffi::ToStatus(kind, "", error);
  return ids;
}

absl::StatusOr<std::string> Tokenizer::Decode(std::span<const int32_t> ids,
                                              bool skip_special_tokens) const {
  StreamDecoder decoder(this, {}, {.skip_special_tokens = skip_special_tokens});
  std::string text;
  for (const int32_t id : ids) {
    if (absl::Status status = decoder.Append(id, text); !status.ok()) {
      return status;
    }
  }
  text += decoder.Finish();
  return text;
}

std::string Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  const uint32_t begin = id == 0 ? 0 : table_->later_ends[id - 1];
  return {table_->later_bytes + begin, table_->later_ends[id] - begin};
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return id >= 0 && id < vocab_size() &&
         (table_->flags[id] & ffi::kSpecial) != 0;
}

int32_t Tokenizer::vocab_size() const {
  return static_cast<int32_t>(table_->num_ids);
}

std::optional<int32_t> Tokenizer::TokenToId(std::string_view token) const {
  const int32_t id =
      ffi::tandem_text_tokenizer_token_to_id(handle_.get(), ffi::Borrow(token));
  if (id < 0) return std::nullopt;
  return id;
}

}  // namespace tandem::text
