// SPDX-License-Identifier: Apache-2.0
// What must be equal on both ends of a handoff, as named parts, so that a
// mismatch can be told field by field:
//
//   weights    SHA-256 over every tensor's name, type, shape and bytes; how
//              they are spread over files does not matter
//   config     ModelSpec::Canonical(), in words
//   tokenizer  SHA-256 of the files that turn text into ids
//   numerics   what the bits of results depend on: backend, formats of
//              weights and of the KV cache
//
// A tensor's digest is the SHA-256 of the SHA-256s of its 16 MiB pieces, so
// that many threads can share one tensor. Every byte is read: a sample would
// miss the one changed layer that gives plausible wrong answers.

#ifndef TANDEM_ENGINE_MODEL_FINGERPRINT_H_
#define TANDEM_ENGINE_MODEL_FINGERPRINT_H_

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/model/model.h"
#include "kernels/backend.h"

namespace tandem::engine {

using FingerprintParts = std::map<std::string, std::string>;

// Hex, each with its length.
std::string HashStrings(absl::Span<const std::string> strings);

// Hex. `progress` is called on the calling thread, which works too.
std::string HashWeights(const Checkpoint& checkpoint, int threads,
                        LoadProgress progress);

// Hex, over tokenizer.json, tokenizer_config.json, added_tokens.json,
// chat_template.jinja, chat_template.json and tool_use.jinja of
// additional_chat_templates, those that are there.
absl::StatusOr<std::string> HashTokenizer(const std::string& directory);

std::string Numerics(const kernels::Backend& backend, const Model& model,
                     kernels::DType kv_dtype);

absl::StatusOr<FingerprintParts> Fingerprint(
    const std::string& directory, const Checkpoint& checkpoint,
    const Model& model, const kernels::Backend& backend,
    kernels::DType kv_dtype, int threads, LoadProgress progress);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_FINGERPRINT_H_
