// SPDX-License-Identifier: Apache-2.0
// The C face of text/rust, for the .cc files of this folder only. The same
// types and functions are in rust/src/lib.rs, which states what each borrows
// and who frees: inputs are borrowed for the call, results come through a
// Sink during the call, and handles belong to their C++ classes.

#ifndef TANDEM_TEXT_FFI_H_
#define TANDEM_TEXT_FFI_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tandem::text::ffi {

extern "C" {

struct TextTokenizer;
struct ChatTemplateHandle;
struct GrammarVocabulary;
struct GrammarHandle;

struct Bytes {
  const char* data;
  size_t len;
};

struct Sink {
  void* context;
  void (*put)(void* context, const void* data, size_t len);
};

// Mirrors decode_table::TableView; pointers live as long as the tokenizer.
struct DecodeTable {
  size_t num_ids;
  const char* later_bytes;
  const uint32_t* later_ends;  // [num_ids]
  const char* first_bytes;
  const uint32_t* first_ends;  // [num_ids]
  const uint8_t* flags;        // [num_ids], kSpecial | kPresent
  uint32_t strip;              // code point
  uint32_t strip_count;
  bool one_mark_per_byte;
};

struct TemplateLimits {
  uint64_t fuel;
  uint64_t max_output_bytes;
  uint64_t max_work_bytes;
  uint64_t max_template_bytes;
};

struct NamedTemplate {
  Bytes name;
  Bytes source;
};

struct RenderArguments {
  Bytes messages_json;
  Bytes tools_json;
  Bytes extra_json;
  int64_t now_unix_s;
  bool add_generation_prompt;
  bool continue_final_message;
};

struct FetchArguments {
  Bytes repo;
  Bytes revision;
  Bytes endpoint;
  Bytes cache;
  Bytes token;
  bool offline;
  bool config_only;
};

struct FetchListener {
  void* context;
  // `line` is null where bytes are told of.
  void (*hear)(void* context, const char* line, size_t len, uint64_t done,
               uint64_t total);
};

int32_t tandem_text_hub_fetch(const FetchArguments* arguments,
                              FetchListener listener, Sink path, Sink error);
int32_t tandem_text_tokenizer_new(Bytes json, Bytes config, Bytes special_map,
                                  Bytes added, TextTokenizer** out, Sink error);
void tandem_text_tokenizer_free(TextTokenizer* handle);
DecodeTable tandem_text_tokenizer_table(const TextTokenizer* handle);
int32_t tandem_text_tokenizer_encode(const TextTokenizer* handle, Bytes text,
                                     bool add_special_tokens, Sink ids,
                                     Sink error);
int32_t tandem_text_tokenizer_token_to_id(const TextTokenizer* handle,
                                          Bytes token);
int32_t tandem_text_config_token(Bytes json, Bytes name, Sink token,
                                 Sink error);
int32_t tandem_text_template_new(Bytes config, Bytes special_map, Bytes jinja,
                                 Bytes processor,
                                 const NamedTemplate* additional, size_t count,
                                 TemplateLimits limits,
                                 ChatTemplateHandle** out, Sink error);
void tandem_text_template_free(ChatTemplateHandle* handle);
void tandem_text_template_source(const ChatTemplateHandle* handle,
                                 bool has_tools, Sink source);
int32_t tandem_text_template_render(const ChatTemplateHandle* handle,
                                    const RenderArguments* arguments,
                                    Sink prompt, Sink error);
int32_t tandem_text_vocabulary_new(const TextTokenizer* tokenizer,
                                   size_t vocab_size,
                                   const GrammarVocabulary** out, Sink error);
void tandem_text_vocabulary_free(const GrammarVocabulary* handle);
int32_t tandem_text_grammar_new(const GrammarVocabulary* vocabulary,
                                int32_t source, Bytes text, uint64_t budget_ms,
                                GrammarHandle** out, Sink error);
int32_t tandem_text_grammar_copy(const GrammarHandle* handle,
                                 GrammarHandle** out, Sink error);
void tandem_text_grammar_free(GrammarHandle* handle);
int32_t tandem_text_grammar_mask(GrammarHandle* handle, uint32_t* words,
                                 size_t count, bool* may_end, Sink error);
int32_t tandem_text_grammar_consume(GrammarHandle* handle,
                                    const uint32_t* tokens, size_t count,
                                    size_t* consumed, Sink error);
size_t tandem_text_grammar_new_bytes(const GrammarHandle* handle);
bool tandem_text_grammar_ended(const GrammarHandle* handle);

}  // extern "C"

inline constexpr uint8_t kSpecial = 1;
inline constexpr uint8_t kPresent = 2;

inline Bytes Borrow(std::string_view text) {
  return {text.data(), text.size()};
}

// Appends what is put to `out`.
inline Sink Into(std::string& out) {
  return {&out, [](void* context, const void* data, size_t len) {
            static_cast<std::string*>(context)->append(
                static_cast<const char*>(data), len);
          }};
}

inline Sink Into(std::vector<int32_t>& out) {
  return {&out, [](void* context, const void* data, size_t len) {
            const auto* ids = static_cast<const int32_t*>(data);
            auto* all = static_cast<std::vector<int32_t>*>(context);
            all->insert(all->end(), ids, ids + len);
          }};
}

// The status for a returned kind; `place` (a file) goes before the message.
inline absl::Status ToStatus(int32_t kind, std::string_view place,
                             std::string_view message) {
  std::string text(place);
  if (!text.empty()) text += ": ";
  text += message;
  switch (kind) {
    case 0:
      return absl::OkStatus();
    case 1:
      return absl::InvalidArgumentError(text);
    case 2:
      return absl::ResourceExhaustedError(text);
    case 3:
      return absl::NotFoundError(text);
    case 5:
      return absl::PermissionDeniedError(text);
    case 6:
      return absl::UnavailableError(text);
    case 7:
      return absl::DeadlineExceededError(text);
    default:
      return absl::InternalError(text);
  }
}

}  // namespace tandem::text::ffi

#endif  // TANDEM_TEXT_FFI_H_
