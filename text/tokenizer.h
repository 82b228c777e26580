// SPDX-License-Identifier: Apache-2.0
// Text to token ids and back, for Hugging Face tokenizers.
//
//   auto tokenizer = Tokenizer::Load("models/tales");
//   auto ids = tokenizer->Encode("Once upon a time", true);
//   StreamDecoder decoder(&*tokenizer, *ids);      // the prompt: context
//   for (int32_t id : generated) Emit(decoder.Push(id).value());
//   Emit(decoder.Finish());
//
// Encoding is that of the `tokenizers` package. Decoding is ours (a table, see
// rust/src/decode_table.rs), and differs from that package in one thing: bytes
// that never become a character are replaced one by one, never together with
// good characters beside them, so that a stream can be exact.

#ifndef TANDEM_TEXT_TOKENIZER_H_
#define TANDEM_TEXT_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::text {

namespace ffi {
struct TextTokenizer;
struct DecodeTable;
}  // namespace ffi

// Largest files that Load reads, and the longest text that Encode takes (a
// million tokens are about 5 MB; encoding needs some 100 times the text).
inline constexpr size_t kMaxTokenizerBytes = 128 << 20;
inline constexpr size_t kMaxConfigBytes = 16 << 20;
inline constexpr size_t kMaxTextBytes = 8 << 20;

// Const methods may be called from many threads at once.
class Tokenizer {
 public:
  // Reads tokenizer.json, and the special tokens from tokenizer_config.json or
  // else special_tokens_map.json where these exist. Tokens are also those of
  // `added_tokens_decoder` in tokenizer_config.json or else added_tokens.json,
  // by the ids that these state. A file that is too large, malformed,
  // contradictory or of a kind not supported is INVALID_ARGUMENT, with the file
  // and the field; a missing tokenizer.json is NOT_FOUND.
  static absl::StatusOr<Tokenizer> Load(const std::string& model_dir);

  // `tokenizer_json` alone: no special tokens are known by role.
  static absl::StatusOr<Tokenizer> FromJson(std::string_view tokenizer_json);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // INVALID_ARGUMENT where `text` is not UTF-8 or longer than kMaxTextBytes.
  // `add_special_tokens` adds what the tokenizer's template adds (BOS); text
  // of added tokens within `text` becomes these tokens either way.
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              bool add_special_tokens) const;

  // Always valid UTF-8; broken bytes become U+FFFD. INVALID_ARGUMENT for an id
  // outside [0, vocab_size()). Ids in gaps of the vocabulary decode to nothing.
  absl::StatusOr<std::string> Decode(std::span<const int32_t> ids,
                                     bool skip_special_tokens) const;

  // What `id` adds to a text when it is not the first token: raw bytes, maybe
  // a part of a character. Empty for an id without a token.
  std::string TokenBytes(int32_t id) const;

  // Whether decoding without special tokens leaves `id` out.
  bool IsSpecial(int32_t id) const;

  // One more than the highest id. The model's own may be larger (padding).
  int32_t vocab_size() const;

  std::optional<int32_t> bos_id() const { return bos_id_; }
  std::optional<int32_t> eos_id() const { return eos_id_; }

  // The id of exactly this token, as the vocabulary spells it.
  std::optional<int32_t> TokenToId(std::string_view token) const;

 private:
  friend class StreamDecoder;
  friend class GrammarVocabulary;
  struct Free {
    void operator()(ffi::TextTokenizer* handle) const;
  };

  explicit Tokenizer(ffi::TextTokenizer* handle);

  std::unique_ptr<ffi::TextTokenizer, Free> handle_;
  std::unique_ptr<const ffi::DecodeTable> table_;  // borrows from handle_
  std::optional<int32_t> bos_id_;
  std::optional<int32_t> eos_id_;
};

// Decodes one sequence token by token. Each piece is whole characters, and
// all pieces with Finish() join to exactly what Decode makes of context and
// pushed ids together, less what it makes of the context. O(1) for each token.
// Not thread-safe.
class StreamDecoder {
 public:
  struct Options {
    bool skip_special_tokens = true;
  };

  // `tokenizer` must outlive this. `context` is what comes before the stream
  // (the prompt's ids): whether a leading space is dropped depends on it, and
  // it may end within a character. Ids out of range in it count for nothing.
  StreamDecoder(const Tokenizer* tokenizer, std::span<const int32_t> context,
                Options options);
  StreamDecoder(const Tokenizer* tokenizer, std::span<const int32_t> context)
      : StreamDecoder(tokenizer, context, Options()) {}

  // The characters that `id` completes, often none. INVALID_ARGUMENT for an
  // id outside [0, vocab_size()); the stream is then as before.
  absl::StatusOr<std::string> Push(int32_t id);

  // What is left: U+FFFD for bytes that can no longer become a character. The
  // stream then stands as at a start behind some text.
  std::string Finish();

 private:
  friend class Tokenizer;  // Decode appends to one string

  absl::Status Append(int32_t id, std::string& out);
  void Drain(bool is_end, std::string& out);
  void Emit(std::string_view character, std::string& out);

  const ffi::DecodeTable* table_;
  bool skip_special_tokens_;
  bool is_first_ = true;
  uint32_t strip_left_;
  std::string strip_;    // the character, as UTF-8
  std::string pending_;  // at most 3 bytes between calls
};

}  // namespace tandem::text

#endif  // TANDEM_TEXT_TOKENIZER_H_
