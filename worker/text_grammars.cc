// SPDX-License-Identifier: Apache-2.0
#include "worker/text_grammars.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "kernels/types.h"
#include "text/grammar_source.h"
#include "text/tokenizer.h"

namespace tandem::worker {
namespace {

// Routers have checked it, within less.
constexpr absl::Duration kCompileBudget = absl::Seconds(10);
constexpr size_t kMaxRecent = 16;
constexpr size_t kMaxSourceBytes = size_t{4} << 20;

absl::Status Failed(const absl::Status& why) {
  return MakeError(absl::StatusCode::kInvalidArgument, kStructuredReason,
                   absl::StrCat("structured: ", std::string(why.message())),
                   {{"field", "structured"}});
}

absl::Status Impossible(size_t position) {
  return absl::InvalidArgumentError(
      absl::StrCat("token ", position,
                   " of the output does not follow the "
                   "grammar"));
}

struct Ends {
  std::vector<int32_t> ids;
  bool ignored = false;  // they are never drawn

  bool Has(int32_t id) const {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  }
};

class Constraint final : public engine::TokenConstraint {
 public:
  Constraint(text::Grammar grammar, const Ends* ends, size_t words,
             absl::Status status)
      : grammar_(std::move(grammar)),
        ends_(*ends),
        words_(words),
        status_(std::move(status)) {}

  void FillMasks(absl::Span<const int32_t> guesses,
                 absl::Span<uint32_t> masks) override {
    int guessed = 0;
    for (size_t i = 0; i <= guesses.size() && status_.ok(); ++i) {
      FillMask(masks.subspan(i * words_, words_));
      if (i == guesses.size() || !status_.ok()) break;
      if (ends_.Has(guesses[i])) break;
      const absl::StatusOr<int> taken = grammar_.Consume({&guesses[i], 1});
      if (!taken.ok()) status_ = Failed(taken.status());
      if (!taken.ok() || *taken == 0) break;
      ++guessed;
    }
    if (guessed == 0 || !status_.ok()) return;
    const absl::Status back = grammar_.Rollback(guessed);
    if (!back.ok()) status_ = Failed(back);
  }

  bool Append(int32_t token) override {
    if (!status_.ok()) return false;
    if (ends_.Has(token)) return true;
    const absl::StatusOr<int> taken = grammar_.Consume({&token, 1});
    if (!taken.ok()) {
      status_ = Failed(taken.status());
    } else if (*taken == 0) {
      status_ = Failed(Impossible(0));
    }
    return status_.ok() && grammar_.ended();
  }

  absl::Status status() const override { return status_; }

 private:
  void FillMask(absl::Span<uint32_t> mask) {
    const absl::StatusOr<bool> may_end =
        grammar_.Mask(std::span<uint32_t>(mask.data(), mask.size()));
    if (!may_end.ok()) {
      status_ = Failed(may_end.status());
      return;
    }
    for (const int32_t id : ends_.ids) {
      uint32_t& word = mask[static_cast<size_t>(id / 32)];
      const uint32_t bit = 1u << (id % 32);
      word = *may_end && !ends_.ignored ? word | bit : word & ~bit;
    }
  }

  text::Grammar grammar_;
  const Ends ends_;
  const size_t words_;
  absl::Status status_;
};

class TextCallGrammar final : public CallGrammar {
 public:
  TextCallGrammar(text::Grammar start, Ends ends, size_t words)
      : start_(std::move(start)), ends_(std::move(ends)), words_(words) {}

  std::unique_ptr<engine::TokenConstraint> Follow(
      absl::Span<const int32_t> output) const override {
    text::Grammar grammar = start_.Copy();
    absl::Status status;
    const absl::StatusOr<int> taken =
        grammar.Consume(std::span<const int32_t>(output.data(), output.size()));
    if (!taken.ok()) {
      status = Failed(taken.status());
    } else if (static_cast<size_t>(*taken) < output.size()) {
      status = Failed(Impossible(static_cast<size_t>(*taken)));
    }
    return std::make_unique<Constraint>(std::move(grammar), &ends_, words_,
                                        std::move(status));
  }

  bool IsWhole(absl::Span<const int32_t> output) const override {
    if (output.empty()) return false;
    text::Grammar grammar = start_.Copy();
    const absl::StatusOr<int> taken =
        grammar.Consume(std::span<const int32_t>(output.data(), output.size()));
    return taken.ok() && static_cast<size_t>(*taken) == output.size() &&
           grammar.ended();
  }

 private:
  const text::Grammar start_;
  const Ends ends_;
  const size_t words_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TextGrammars>> TextGrammars::Load(
    const std::string& model_dir, int vocab_size, Loop* loop) {
  absl::StatusOr<text::Tokenizer> tokenizer = text::Tokenizer::Load(model_dir);
  if (!tokenizer.ok()) return tokenizer.status();
  absl::StatusOr<text::GrammarVocabulary> vocabulary =
      text::GrammarVocabulary::Create(*tokenizer, vocab_size);
  if (!vocabulary.ok()) return vocabulary.status();
  return std::unique_ptr<TextGrammars>(
      new TextGrammars(*std::move(vocabulary), loop));
}

TextGrammars::TextGrammars(text::GrammarVocabulary vocabulary, Loop* loop)
    : vocabulary_(std::move(vocabulary)),
      loop_(loop),
      thread_([this] { Run(); }) {}

TextGrammars::~TextGrammars() {
  {
    const MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  thread_.join();
}

void TextGrammars::Compile(const v1::StructuredParams& params, Done done) {
  {
    const MutexLock lock(&mutex_);
    jobs_.push_back({params, std::move(done)});
  }
  wake_.NotifyOne();
}

void TextGrammars::Run() {
  while (true) {
    Job job;
    {
      const MutexLock lock(&mutex_);
      while (jobs_.empty() && !stopping_) wake_.Wait(&mutex_);
      if (stopping_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    loop_->Post(
        [done = std::move(job.done), made = CompileNow(job.params)]() mutable {
          done(std::move(made));
        });
  }
  // The task owns what was made.
  // NOLINTNEXTLINE(clang-analyzer-cplusplus.NewDeleteLeaks)
}

absl::StatusOr<text::Grammar> TextGrammars::Compiled(
    const text::GrammarSource& source) {
  const auto known =
      std::find_if(recent_.begin(), recent_.end(), [&](const Recent& recent) {
        return recent.source.kind == source.kind &&
               recent.source.text == source.text;
      });
  if (known != recent_.end()) return known->grammar.Copy();
  absl::StatusOr<text::Grammar> grammar =
      vocabulary_.Compile(source.kind, source.text, kCompileBudget);
  if (grammar.ok()) {
    recent_.push_back({source, grammar->Copy()});
    if (recent_.size() > kMaxRecent) recent_.pop_front();
  }
  return grammar;
}

absl::StatusOr<std::unique_ptr<CallGrammar>> TextGrammars::CompileNow(
    const v1::StructuredParams& params) {
  const text::GrammarSource source = text::SourceOf(params.options());
  const auto refuse = [&](auto... parts) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.structured.", parts...));
  };
  if (source.text.size() > kMaxSourceBytes) {
    return refuse("options.", source.field, " has ", source.text.size(),
                  " bytes, expected at most ", kMaxSourceBytes);
  }
  Ends ends;
  ends.ignored = params.ignore_end();
  for (const int32_t id : params.end_token_ids()) {
    if (id < 0 || id >= vocabulary_.vocab_size()) {
      return refuse("end_token_ids holds ", id, ", expected 0 to ",
                    vocabulary_.vocab_size() - 1);
    }
    ends.ids.push_back(id);
  }
  absl::StatusOr<text::Grammar> grammar = Compiled(source);
  if (!grammar.ok()) {
    return absl::Status(
        grammar.status().code(),
        absl::StrCat("sampling.structured.options.", source.field, ": ",
                     std::string(grammar.status().message())));
  }
  return std::make_unique<TextCallGrammar>(
      *std::move(grammar), std::move(ends),
      static_cast<size_t>(vocabulary_.mask_words()));
}

}  // namespace tandem::worker
