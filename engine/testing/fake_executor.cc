// SPDX-License-Identifier: Apache-2.0

#include "engine/testing/fake_executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace tandem::engine {
namespace {

constexpr size_t kMaxViolations = 16;

kernels::KvDigest RowDigest(uint64_t key, uint64_t word, int layer,
                            int position) {
  const uint64_t place =
      static_cast<uint64_t>(layer) << 32 | static_cast<uint32_t>(position);
  const uint64_t low = Mix64(key ^ Mix64(word ^ Mix64(place)));
  return {low, Mix64(low ^ key)};
}

}  // namespace

FakeExecutor::FakeExecutor(const FakeExecutorOptions& options, Loop* loop)
    : options_(options),
      random_(options.seed),
      moving_(static_cast<size_t>(options.num_blocks) *
              static_cast<size_t>(options.model.num_layers)),
      writers_(static_cast<size_t>(num_ids())),
      step_timer_(loop),
      copy_timer_(loop) {
  shape_.num_layers = options.model.num_layers;
  shape_.kv_heads = 1;
  shape_.head_dim = static_cast<int>(4 / kernels::SizeOf(options.dtype));
  shape_.block_size = options.block_size;
  shape_.num_blocks = options.num_blocks;
  shape_.dtype = options.dtype;
  words_.resize(static_cast<size_t>(options.model.num_layers) *
                static_cast<size_t>(options.num_blocks) *
                static_cast<size_t>(options.block_size));
}

int32_t FakeExecutor::CellOf(int32_t block, int layer) const {
  return options_.cells == nullptr ? layer * shape_.num_blocks + block
                                   : options_.cells->at(block, layer);
}

std::vector<int32_t> FakeExecutor::CellsOf(int32_t block) const {
  std::vector<int32_t> cells;
  cells.reserve(static_cast<size_t>(shape_.num_layers));
  for (int layer = 0; layer < shape_.num_layers; ++layer) {
    cells.push_back(CellOf(block, layer));
  }
  return cells;
}

int FakeExecutor::num_ids() const {
  return options_.cells == nullptr ? options_.num_blocks
                                   : options_.cells->num_blocks();
}

uint64_t& FakeExecutor::WordAt(absl::Span<const int32_t> block_table,
                               int position, int layer) {
  const size_t size = static_cast<size_t>(shape_.block_size);
  const size_t at = static_cast<size_t>(position);
  const int32_t block = block_table[at / size];
  const int32_t cell = CellOf(block, layer);
  if (cell >= 0) return words_[static_cast<size_t>(cell) * size + at % size];
  Violation(absl::StrCat("block ", block, " has let go of layer ", layer,
                         ", and position ", position, " of it is used"));
  return nowhere_;
}

void FakeExecutor::Violation(std::string what) {
  if (violations_.size() < kMaxViolations) {
    violations_.push_back(std::move(what));
  }
}

// ---- Steps

void FakeExecutor::Submit(const Step* step, StepListener* listener) {
  for (const StepEntry& entry : step->entries) {
    if (entry.fed >= 0 && submitted_.empty()) {
      Violation(absl::StrCat("sequence ", entry.sequence,
                             ": is fed by a step that was reported"));
    }
  }
  submitted_.push_back({step, listener});
  if (submitted_.size() == 1) StartStep();
}

bool FakeExecutor::CheckEntry(const StepEntry& entry) {
  const int end = entry.position + static_cast<int>(entry.tokens.size());
  const int64_t covered =
      static_cast<int64_t>(entry.block_table.size()) * shape_.block_size;
  if (entry.fed >= 0 &&
      (entry.tokens.size() != 1 ||
       static_cast<size_t>(entry.fed) >= drawn_.tokens.size())) {
    Violation(absl::StrCat("sequence ", entry.sequence, ": is fed with draw ",
                           entry.fed, " of ", drawn_.tokens.size()));
    return false;
  }
  if (entry.draws.size() > entry.tokens.size()) {
    Violation(absl::StrCat("sequence ", entry.sequence, ": ",
                           entry.draws.size(), " draws of ",
                           entry.tokens.size(), " rows"));
    return false;
  }
  if (entry.position < 0 || entry.tokens.empty() || end > covered) {
    Violation(absl::StrCat("sequence ", entry.sequence, ": positions [",
                           entry.position, ", ", end, ") but blocks for ",
                           covered));
    return false;
  }
  const int seen = options_.model.windowed(0)
                       ? entry.position - options_.model.window + 1
                       : 0;
  for (size_t b = 0; b < entry.block_table.size(); ++b) {
    const int32_t block = entry.block_table[b];
    if (block >= 0 && block < num_ids()) continue;
    const int block_end = static_cast<int>(b + 1) * shape_.block_size;
    if (block == -1 && block_end <= seen) continue;  // behind the window
    Violation(absl::StrCat("sequence ", entry.sequence, ": no block ", block));
    return false;
  }
  return true;
}

int32_t FakeExecutor::TokenOf(const StepEntry& entry, size_t index) const {
  if (entry.fed < 0) return entry.tokens[index];
  return drawn_.tokens[static_cast<size_t>(entry.fed)].token_id;
}

bool FakeExecutor::CheckStep(const Step& step) {
  for (const StepEntry& entry : step.entries) {
    if (!CheckEntry(entry)) return false;
  }
  for (const BlockCopy& copy : step.copies) {
    for (const int32_t block : {copy.from, copy.to}) {
      if (block >= 0 && block < num_ids()) continue;
      Violation(absl::StrCat("a copy of no block: ", block));
      return false;
    }
  }
  const size_t size = static_cast<size_t>(shape_.block_size);
  for (size_t i = 0; i < step.entries.size(); ++i) {
    const StepEntry& entry = step.entries[i];
    const size_t begin = static_cast<size_t>(entry.position) / size;
    const size_t end =
        (static_cast<size_t>(entry.position) + entry.tokens.size() - 1) / size;
    for (size_t b = begin; b <= end; ++b) {
      Writer& writer = writers_[static_cast<size_t>(entry.block_table[b])];
      if (writer.step == step.id) {
        Violation(absl::StrCat("block ", entry.block_table[b],
                               " is written twice in step ", step.id));
      }
      writer = {step.id, i};
    }
  }
  for (size_t i = 0; i < step.entries.size(); ++i) {
    for (const int32_t block : step.entries[i].block_table) {
      if (block < 0) continue;
      const Writer& writer = writers_[static_cast<size_t>(block)];
      if (writer.step != step.id || writer.entry == i) continue;
      Violation(absl::StrCat("block ", block, " is read and written by two ",
                             "sequences in step ", step.id));
    }
  }
  return true;
}

bool FakeExecutor::WaitsForMoves(const Step& step) const {
  const auto moves = [this](int32_t block) {
    if (block < 0 || block >= num_ids()) return false;
    const std::vector<int32_t> cells = CellsOf(block);
    return std::any_of(cells.begin(), cells.end(), [this](int32_t cell) {
      return cell >= 0 && moving_[static_cast<size_t>(cell)] > 0;
    });
  };
  for (const BlockCopy& copy : step.copies) {
    if (moves(copy.from) || moves(copy.to)) return true;
  }
  for (const StepEntry& entry : step.entries) {
    for (const int32_t block : entry.block_table) {
      if (moves(block)) return true;
    }
  }
  return false;
}

void FakeExecutor::StartStep() {
  const Step& step = *submitted_.front().step;
  step_waits_ = WaitsForMoves(step);
  if (step_waits_) return;
  TANDEM_CHECK(CheckStep(step), violations_.back().c_str());
  for (const BlockCopy& copy : step.copies) CopyBlock(copy);
  int64_t rows = 0;
  for (const StepEntry& entry : step.entries) {
    rows += static_cast<int64_t>(entry.tokens.size());
    Scramble(entry);
  }
  rows_ += rows;
  layers_done_ = 0;
  per_layer_ = (options_.step_base + rows * options_.step_per_row +
                std::exchange(held_up_, absl::ZeroDuration()) +
                options_.step_jitter * random_.Uniform()) /
               shape_.num_layers;
  step_timer_.Start(per_layer_, [this] { RunLayer(); });
}

void FakeExecutor::CopyBlock(const BlockCopy& copy) {
  for (int layer = 0; layer < shape_.num_layers; ++layer) {
    for (int offset = 0; offset < shape_.block_size; ++offset) {
      WordAt({&copy.to, 1}, offset, layer) =
          WordAt({&copy.from, 1}, offset, layer);
    }
  }
}

void FakeExecutor::RunLayer() {
  const Submitted running = submitted_.front();
  const int layer = layers_done_++;
  for (const StepEntry& entry : running.step->entries) {
    uint64_t word = entry.position == 0
                        ? options_.model.RootWord(layer)
                        : WordAt(entry.block_table, entry.position - 1, layer);
    int position = entry.position;
    for (size_t i = 0; i < entry.tokens.size(); ++i) {
      word = options_.model.Word(word, TokenOf(entry, i), position, layer);
      WordAt(entry.block_table, position++, layer) = word;
    }
  }
  if (layers_done_ < shape_.num_layers) {
    step_timer_.Start(per_layer_, [this] { RunLayer(); });
  } else {
    step_timer_.Start(absl::ZeroDuration(), [this] { EndStep(); });
  }
  running.listener->OnLayersDone(running.step->id, layers_done_);
}

void FakeExecutor::EndStep() {
  const Submitted ended = submitted_.front();
  StepResult result;
  for (const StepEntry& entry : ended.step->entries) {
    int position = entry.position + static_cast<int>(entry.tokens.size()) -
                   static_cast<int>(entry.draws.size());
    const auto words =
        static_cast<size_t>(kernels::MaskWords(options_.model.vocab_size));
    std::vector<uint32_t> masks(
        static_cast<size_t>(entry.constrained()) * words, 0);
    if (!masks.empty()) entry.FillMasks(absl::MakeSpan(masks));
    size_t mask = 0;
    for (const RowDraw& draw : entry.draws) {
      const auto own = absl::MakeConstSpan(masks).subspan(
          mask, draw.constrained ? words : 0);
      mask += own.size();
      result.tokens.push_back(DrawToken(entry, ++position, draw, own));
    }
    if (entry.attention != nullptr) {
      result.tokens.back().attention =
          FakeModel::Attention(*entry.attention, position);
    }
  }
  const absl::Status failure = std::exchange(failure_, absl::OkStatus());
  if (!failure.ok()) Spoil(*ended.step, &result);
  drawn_ = result;
  ++steps_;
  submitted_.pop_front();
  if (!submitted_.empty()) StartStep();
  if (failure.ok()) {
    ended.listener->OnStepDone(ended.step->id, std::move(result));
  } else {
    ended.listener->OnStepDone(ended.step->id, failure);
  }
}

// What a failed step leaves: rubbish.
void FakeExecutor::Spoil(const Step& step, StepResult* result) {
  for (const StepEntry& entry : step.entries) Scramble(entry);
  for (SampledToken& token : result->tokens) {
    token.token_id = static_cast<int32_t>(
        random_.Below(static_cast<uint64_t>(options_.model.vocab_size)));
  }
}

void FakeExecutor::Scramble(const StepEntry& entry) {
  for (int layer = 0; layer < shape_.num_layers; ++layer) {
    for (size_t i = 0; i < entry.tokens.size(); ++i) {
      WordAt(entry.block_table, entry.position + static_cast<int>(i), layer) =
          random_.Next();
    }
  }
}

SampledToken FakeExecutor::DrawToken(const StepEntry& entry, int position,
                                     const RowDraw& draw,
                                     absl::Span<const uint32_t> mask) {
  uint64_t fold = 0;
  for (int layer = 0; layer < shape_.num_layers; ++layer) {
    const int seen = options_.model.windowed(layer)
                         ? std::max(0, position - options_.model.window)
                         : 0;
    for (int before = seen; before < position; ++before) {
      fold ^= FakeModel::Fold(WordAt(entry.block_table, before, layer), before,
                              layer);
    }
  }
  if (draw.given >= 0) {
    return options_.model.Score(fold, draw.given, draw.given_logprobs);
  }
  SampledToken token;
  if (entry.sampling.edited_logprobs) {
    token.top = options_.model.Candidates(
        fold, position, entry.sampling.logprobs, draw.edits, entry.only_edited);
    token.token_id = token.top[0].token_id;
    token.logprob = token.top[0].logprob;
    token.rank = 1;
    return token;
  }
  token.token_id = options_.model.Draw(fold, entry.sampling, position,
                                       draw.edits, entry.only_edited, mask);
  token.logprob = -static_cast<float>(Mix64(fold) % 1024) / 256;
  token.rank = 1;
  for (int i = 0; i < entry.sampling.logprobs; ++i) {
    token.top.push_back({(token.token_id + i) % options_.model.vocab_size,
                         token.logprob - static_cast<float>(i)});
  }
  return token;
}

// ---- KV for handoffs

bool FakeExecutor::CheckPart(const KvPart& part, kernels::DType wire) {
  const int64_t covered =
      static_cast<int64_t>(part.block_table.size()) * shape_.block_size;
  bool right = part.position_begin >= 0 &&
               part.position_begin <= part.position_end &&
               part.position_end <= covered && part.layer_begin >= 0 &&
               part.layer_begin <= part.layer_end &&
               part.layer_end <= shape_.num_layers && part.head_begin == 0 &&
               part.head_end == 1 && wire == shape_.dtype;
  for (int p = part.position_begin; right && p < part.position_end; ++p) {
    const int32_t block =
        part.block_table[static_cast<size_t>(p / shape_.block_size)];
    right = block >= 0 && block < num_ids();
  }
  if (!right) Violation("a part of the KV that is not there");
  return right;
}

template <typename Visit>
void FakeExecutor::ForEachRow(const KvPart& part, Visit visit) {
  for (int layer = part.layer_begin; layer < part.layer_end; ++layer) {
    const bool windowed =
        options_.cells != nullptr && layer >= options_.cells->parts().full;
    const int begin = windowed
                          ? std::max(part.position_begin, part.windowed_begin)
                          : part.position_begin;
    for (int p = begin; p < part.position_end; ++p) {
      visit(WordAt(part.block_table, p, layer), layer, p);
    }
  }
}

void FakeExecutor::Enqueue(const KvPart& part, absl::AnyInvocable<void()> run) {
  const int64_t rows = int64_t{part.layer_end - part.layer_begin} *
                       (part.position_end - part.position_begin);
  copies_.push_back({rows, std::move(run)});
  if (copies_.size() == 1) StartCopy();
}

void FakeExecutor::StartCopy() {
  copy_timer_.Start(
      options_.copy_base + copies_.front().rows * options_.copy_per_row,
      [this] {
        Copy copy = std::move(copies_.front());
        copies_.pop_front();
        if (!copies_.empty()) StartCopy();
        copy.run();
      });
}

void FakeExecutor::Gather(const KvPart& part, kernels::DType wire,
                          uint64_t digest_key, std::byte* staging,
                          absl::AnyInvocable<void(kernels::KvDigest)> done) {
  TANDEM_CHECK(CheckPart(part, wire), "Gather");
  Enqueue(part,
          [this, part, digest_key, staging, done = std::move(done)]() mutable {
            kernels::KvDigest digest;
            std::byte* out = staging;
            ForEachRow(part, [&](uint64_t& word, int layer, int position) {
              std::memcpy(out, &word, sizeof(word));
              out += sizeof(word);
              digest += RowDigest(digest_key, word, layer, position);
            });
            done(digest);
          });
}

void FakeExecutor::Scatter(const KvPart& part, kernels::DType wire,
                           const std::byte* staging,
                           absl::AnyInvocable<void()> done) {
  TANDEM_CHECK(CheckPart(part, wire), "Scatter");
  Enqueue(part, [this, part, staging, done = std::move(done)]() mutable {
    const std::byte* in = staging;
    ForEachRow(part, [&](uint64_t& word, int layer, int position) {
      std::memcpy(&word, in, sizeof(word));
      in += sizeof(word);
    });
    if (!submitted_.empty()) {
      const int size = shape_.block_size;
      for (int p = part.position_begin; p < part.position_end; ++p) {
        const int32_t block = part.block_table[static_cast<size_t>(p / size)];
        for (const StepEntry& entry : submitted_.front().step->entries) {
          for (const int32_t used : entry.block_table) {
            if (used != block) continue;
            Violation(absl::StrCat("a scatter landed in block ", block,
                                   ", which sequence ", entry.sequence,
                                   " is using"));
          }
        }
      }
    }
    done();
  });
}

void FakeExecutor::Digest(const KvPart& part, kernels::DType wire,
                          uint64_t digest_key,
                          absl::AnyInvocable<void(kernels::KvDigest)> done) {
  TANDEM_CHECK(CheckPart(part, wire), "Digest");
  Enqueue(part, [this, part, digest_key, done = std::move(done)]() mutable {
    kernels::KvDigest digest;
    ForEachRow(part, [&](uint64_t& word, int layer, int position) {
      digest += RowDigest(digest_key, word, layer, position);
    });
    done(digest);
  });
}

// ---- Whole blocks

void FakeExecutor::SaveBlock(int32_t block, std::byte* to,
                             absl::AnyInvocable<void()> done) {
  Move(
      block,
      [out = to](const uint64_t& word) mutable {
        std::memcpy(out, &word, sizeof(word));
        out += sizeof(word);
      },
      std::move(done));
}

void FakeExecutor::RestoreBlock(int32_t block, const std::byte* from,
                                absl::AnyInvocable<void()> done) {
  Move(
      block,
      [in = from](uint64_t& word) mutable {
        std::memcpy(&word, in, sizeof(word));
        in += sizeof(word);
      },
      std::move(done));
}

template <typename Visit>
void FakeExecutor::Move(int32_t block, Visit visit,
                        absl::AnyInvocable<void()> done) {
  TANDEM_CHECK(block >= 0 && block < num_ids(), "no such block");
  std::vector<int32_t> cells = CellsOf(block);
  for (const int32_t cell : cells) {
    TANDEM_CHECK(cell >= 0, "a block that lacks parts is not moved");
    ++moving_[static_cast<size_t>(cell)];
  }
  copies_.push_back({int64_t{shape_.num_layers} * shape_.block_size,
                     [this, cells = std::move(cells), visit = std::move(visit),
                      done = std::move(done)]() mutable {
                       const auto size = static_cast<size_t>(shape_.block_size);
                       for (const int32_t cell : cells) {
                         for (size_t p = 0; p < size; ++p) {
                           visit(words_[static_cast<size_t>(cell) * size + p]);
                         }
                       }
                       EndMove(cells);
                       done();
                     }});
  if (copies_.size() == 1) StartCopy();
}

void FakeExecutor::EndMove(absl::Span<const int32_t> cells) {
  for (const int32_t cell : cells) --moving_[static_cast<size_t>(cell)];
  if (submitted_.empty()) return;
  if (step_waits_) {
    StartStep();
    return;
  }
  for (const StepEntry& entry : submitted_.front().step->entries) {
    for (const int32_t used : entry.block_table) {
      if (used < 0) continue;
      for (const int32_t cell : CellsOf(used)) {
        if (std::find(cells.begin(), cells.end(), cell) == cells.end()) {
          continue;
        }
        Violation(absl::StrCat("block ", used, " was moved while sequence ",
                               entry.sequence, " is using it"));
      }
    }
  }
}

}  // namespace tandem::engine
