// SPDX-License-Identifier: Apache-2.0
#include "worker/draft_model.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/progress.h"
#include "engine/checkpoint/file.h"
#include "engine/checkpoint/model_config.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/model/forward.h"
#include "engine/model/model_work.h"
#include "nlohmann/json.hpp"
#include "worker/speculation.h"

namespace tandem::worker {
namespace {

using nlohmann::json;
using Vocabulary = std::map<int64_t, std::string>;

constexpr uint64_t kMaxTokenizerBytes = uint64_t{256} << 20;
// Of a step that catches up, at least.
constexpr int kCatchUpRows = 256;

void AddToken(const json& id, const json& token, Vocabulary* vocabulary) {
  if (!id.is_number_integer() || !token.is_string()) return;
  (*vocabulary)[id.get<int64_t>()] = token.get<std::string>();
}

// Text by id: model.vocab, an object (BPE, WordPiece) or a list of tokens with
// their scores (Unigram), and added_tokens.
Vocabulary VocabularyOf(const json& tokenizer) {
  Vocabulary vocabulary;
  const auto model = tokenizer.find("model");
  if (model != tokenizer.end() && model->is_object() &&
      model->contains("vocab")) {
    const json& vocab = (*model)["vocab"];
    if (vocab.is_object()) {
      for (const auto& [token, id] : vocab.items()) {
        AddToken(id, token, &vocabulary);
      }
    } else if (vocab.is_array()) {
      for (size_t id = 0; id < vocab.size(); ++id) {
        const json& entry = vocab[id];
        if (entry.is_array() && !entry.empty()) {
          AddToken(id, entry[0], &vocabulary);
        }
      }
    }
  }
  const auto added = tokenizer.find("added_tokens");
  if (added != tokenizer.end() && added->is_array()) {
    for (const json& token : *added) {
      if (!token.is_object()) continue;
      AddToken(token.value("id", json()), token.value("content", json()),
               &vocabulary);
    }
  }
  return vocabulary;
}

// Empty where there is no such file.
absl::StatusOr<std::string> ReadTokenizer(const std::string& directory) {
  const std::string path = directory + "/tokenizer.json";
  if (!engine::FileExists(path)) return std::string();
  return engine::ReadFile(path, kMaxTokenizerBytes);
}

std::string TextOf(const Vocabulary& vocabulary, int64_t id) {
  const auto it = vocabulary.find(id);
  return it == vocabulary.end() ? "nothing" : engine::Quote(it->second);
}

std::optional<int64_t> FirstDifference(const Vocabulary& a,
                                       const Vocabulary& b) {
  for (const auto* one : {&a, &b}) {
    const Vocabulary& other = one == &a ? b : a;
    for (const auto& [id, token] : *one) {
      const auto it = other.find(id);
      if (it == other.end() || it->second != token) return id;
    }
  }
  return std::nullopt;
}

}  // namespace

absl::Status CheckSameVocabulary(const std::string& model_dir, int vocab_size,
                                 const std::string& draft_dir,
                                 int draft_vocab_size) {
  if (vocab_size != draft_vocab_size) {
    return InvalidSpeculation("the draft model ", draft_dir, " has ",
                              draft_vocab_size, " ids, the model ", model_dir,
                              " has ", vocab_size,
                              ": both must have one vocabulary");
  }
  const absl::StatusOr<std::string> own = ReadTokenizer(model_dir);
  if (!own.ok()) return own.status();
  const absl::StatusOr<std::string> draft = ReadTokenizer(draft_dir);
  if (!draft.ok()) return draft.status();
  if (*own == *draft) return absl::OkStatus();
  if (own->empty() || draft->empty()) {
    return InvalidSpeculation(
        own->empty() ? model_dir : draft_dir,
        " has no tokenizer.json to compare with that of ",
        own->empty() ? draft_dir : model_dir,
        ": a draft model must have the model's vocabulary");
  }
  const json parsed = json::parse(*own, nullptr, /*allow_exceptions=*/false);
  const json drafted = json::parse(*draft, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object() || !drafted.is_object()) {
    return InvalidSpeculation(parsed.is_object() ? draft_dir : model_dir,
                              "/tokenizer.json is not a JSON object");
  }
  const Vocabulary vocabulary = VocabularyOf(parsed);
  const Vocabulary other = VocabularyOf(drafted);
  const std::optional<int64_t> id = FirstDifference(vocabulary, other);
  if (!id.has_value() && !vocabulary.empty()) return absl::OkStatus();
  const int64_t first = id.value_or(0);
  return InvalidSpeculation("the draft model ", draft_dir,
                            " has another vocabulary than ", model_dir, ": id ",
                            first, " is ", TextOf(other, first), " there and ",
                            TextOf(vocabulary, first), " here");
}

absl::StatusOr<std::unique_ptr<engine::Model>> LoadDraftModel(
    const DraftLoad& draft, kernels::Backend* backend) {
  absl::StatusOr<engine::ModelSpec> spec =
      engine::LoadModelSpec(draft.directory);
  if (!spec.ok()) return spec.status();
  const absl::Status same =
      CheckSameVocabulary(draft.target_directory, draft.target_vocab_size,
                          draft.directory, spec->vocab_size);
  if (!same.ok()) return same;
  absl::StatusOr<engine::Checkpoint> checkpoint =
      engine::Checkpoint::Open(draft.directory);
  if (!checkpoint.ok()) return checkpoint.status();
  engine::LoadOptions load = draft.load;
  load.max_positions = std::min(load.max_positions, spec->max_positions);
  Progress loading(
      {.what = "loading the draft model's weights",
       .total_bytes = static_cast<int64_t>(checkpoint->total_bytes()),
       .tty = IsTerminal(stderr)});
  return engine::Model::Load(*spec, *checkpoint, load, backend,
                             [&](uint64_t done, uint64_t /*total*/) {
                               loading.Update(static_cast<int64_t>(done));
                             });
}

engine::DeviceExecutorOptions DraftExecutorOptions(
    const engine::DeviceExecutorOptions& target) {
  engine::DeviceExecutorOptions options;
  options.max_sequences = target.max_sequences;
  // Behind a step whose guesses were all right each sequence lacks two.
  options.max_rows = std::max(kCatchUpRows, 2 * target.max_sequences);
  options.block_size = target.block_size;
  options.kv_dtype = target.kv_dtype;
  return options;
}

int64_t DraftWorkspaceBytes(const engine::Model& model,
                            const engine::DeviceExecutorOptions& target,
                            const kernels::Backend& backend) {
  const engine::DeviceExecutorOptions options = DraftExecutorOptions(target);
  return static_cast<int64_t>(
      engine::Workspace::Bytes(model.spec(), options.max_rows, options.draws(),
                               nullptr, backend.activation_type()));
}

absl::StatusOr<engine::DraftModelOptions> StartDraftModel(
    const engine::DeviceExecutorOptions& target, int num_blocks,
    int max_model_len, double tenant_share,
    const engine::WorkShape& target_work, bool gpu, kernels::Backend* backend,
    Loop* loop, DraftParts* parts) {
  engine::DeviceExecutorOptions options = DraftExecutorOptions(target);
  options.num_blocks = num_blocks;
  auto executor = engine::DeviceExecutor::Create(options, parts->model.get(),
                                                 backend, loop);
  if (!executor.ok()) return executor.status();
  parts->executor = *std::move(executor);
  parts->pool = std::make_unique<engine::KvPool>(num_blocks, target.block_size,
                                                 tenant_share);
  parts->work = engine::MakeWorkShape(*parts->model, target.kv_dtype, gpu);
  engine::DraftModelOptions draft;
  draft.executor = parts->executor.get();
  draft.pool = parts->pool.get();
  // A sequence that the cache can never hold goes on without guesses.
  const int64_t holds = int64_t{num_blocks} * target.block_size;
  draft.max_positions = static_cast<int>(
      std::min<int64_t>({parts->model->max_positions(), max_model_len, holds}));
  if (draft.max_positions < max_model_len) {
    LogWarning("the draft model guesses for shorter sequences only",
               {{"its_max_model_len", draft.max_positions},
                {"max_model_len", max_model_len},
                {"its_positions", parts->model->max_positions()},
                {"its_kv_tokens", holds}});
  }
  draft.max_rows = options.max_rows;
  draft.max_sequences = options.max_sequences;
  // A decode reads weights and does little else.
  draft.step_cost = static_cast<double>(parts->work.StepWeightBytes(1, 1)) /
                    static_cast<double>(std::max<int64_t>(
                        1, target_work.StepWeightBytes(1, 1)));
  LogInfo("draft model",
          {{"weights", parts->model->weight_format()},
           {"kv_tokens", int64_t{num_blocks} * target.block_size},
           {"max_model_len", draft.max_positions},
           {"share_of_weights", draft.step_cost}});
  return draft;
}

}  // namespace tandem::worker
