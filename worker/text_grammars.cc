// SPDX-License-Identifier: Apache-2.0
#include "worker/text_grammars.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "kernels/types.h"
#include "text/grammar_source.h"
#include "text/tokenizer.h"

namespace tandem::worker {
namespace {

constexpr size_t kMaxSourceBytes = size_t{4} << 20;
// Followed at once: a few microseconds each.
constexpr size_t kFewTokens = 32;
// Followed by the compiler: some 10 ms, for which others wait.
constexpr size_t kManyTokens = 2048;
// Before it is looked whether they are still wanted.
constexpr size_t kPiece = 64;

absl::Status Failed(const absl::Status& why) {
  return MakeError(absl::StatusCode::kInvalidArgument, kStructuredReason,
                   absl::StrCat("structured: ", std::string(why.message())),
                   {{"field", "structured"}});
}

// Routers have had it compiled: what does not compile here, or comes to too
// much, would not elsewhere. Time, and room for more, are others' matter.
absl::Status NotCompiled(const absl::Status& why) {
  if (absl::IsInvalidArgument(why)) return Failed(why);
  return absl::IsInternal(why) ? why : GrammarOverdue();
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

// Where the text begins that must match: behind the first token `after`. None
// while that has not come.
std::optional<size_t> BeginOf(absl::Span<const int32_t> output,
                              std::optional<int32_t> after) {
  if (!after) return 0;
  const auto* const mark = std::find(output.begin(), output.end(), *after);
  if (mark == output.end()) return std::nullopt;
  return static_cast<size_t>(mark - output.begin()) + 1;
}

// Goes on by all of `tokens`, the first of which is the output's `position`th.
absl::Status FollowAll(absl::Span<const int32_t> tokens, size_t position,
                       text::Grammar* grammar) {
  const absl::StatusOr<int> taken =
      grammar->Consume(std::span<const int32_t>(tokens.data(), tokens.size()));
  if (!taken.ok()) return Failed(taken.status());
  const auto count = static_cast<size_t>(*taken);
  return count == tokens.size() ? absl::OkStatus()
                                : Failed(Impossible(position + count));
}

// The same, but not to the end where they turn out to be `unwanted`.
absl::Status FollowWhileWanted(absl::Span<const int32_t> tokens,
                               size_t position,
                               const std::atomic<bool>& unwanted,
                               text::Grammar* grammar) {
  absl::Status status;
  for (size_t at = 0; at < tokens.size() && status.ok() && !unwanted;
       at += kPiece) {
    status = FollowAll(tokens.subspan(at, kPiece), position + at, grammar);
  }
  return status;
}

// A grammar on its way behind an output: the replayer's until `done`.
struct Replay {
  std::shared_ptr<const text::Grammar> from;
  std::optional<text::Grammar> grammar;
  std::vector<int32_t> tokens;
  size_t position = 0;  // of the first of them
  absl::Status status;
  std::atomic<bool> done = false;
  std::atomic<bool> unwanted = false;
  std::function<void()> ready;  // the loop's

  void Run() {
    absl::StatusOr<text::Grammar> copy = from->Copy();
    if (copy.ok()) {
      grammar = *std::move(copy);
      status = FollowWhileWanted(tokens, position, unwanted, &*grammar);
    } else {
      status = Failed(copy.status());
    }
    done.store(true, std::memory_order_release);
  }
};

class Constraint final : public engine::TokenConstraint {
 public:
  // `after`: the grammar waits for that token, before which all is allowed.
  Constraint(text::Grammar grammar, const Ends* ends, size_t words,
             std::optional<int32_t> after = std::nullopt)
      : grammar_(std::move(grammar)),
        ends_(*ends),
        words_(words),
        after_(after) {}
  Constraint(std::shared_ptr<Replay> replay, const Ends* ends, size_t words)
      : ends_(*ends), words_(words), replay_(std::move(replay)) {}
  explicit Constraint(absl::Status status)
      : words_(0), status_(std::move(status)) {}
  ~Constraint() override {
    if (replay_ == nullptr) return;
    replay_->unwanted = true;
    replay_->ready = nullptr;
  }

  bool ready() const override {
    return replay_ == nullptr || replay_->done.load(std::memory_order_acquire);
  }
  void OnReady(std::function<void()> ready) override {
    if (replay_ != nullptr) replay_->ready = std::move(ready);
  }

  void FillMasks(absl::Span<const int32_t> guesses,
                 absl::Span<uint32_t> masks) override {
    guessed_ = 0;
    TakeReplayed();
    if (!status_.ok()) return;
    const auto mask = [&](size_t i) {
      return masks.subspan(i * words_, words_);
    };
    bool waits = after_.has_value();
    const int32_t after = after_.value_or(-1);
    status_ = waits ? FillFree(mask(0)) : FillMask(mask(0), &*grammar_);
    if (!status_.ok() || guesses.empty()) return;
    // An error ends a state for good, and one behind a guess says nothing about
    // the sequence: the guesses are followed by a copy.
    absl::StatusOr<text::Grammar> copy = grammar_->Copy();
    if (!copy.ok()) return;
    for (size_t i = 0; i < guesses.size(); ++i) {
      if (waits) {
        waits = guesses[i] != after;
      } else {
        if (ends_.Has(guesses[i])) return;
        const absl::StatusOr<int> taken = copy->Consume({&guesses[i], 1});
        if (!taken.ok() || *taken == 0) return;
      }
      const absl::Status filled =
          waits ? FillFree(mask(i + 1)) : FillMask(mask(i + 1), &*copy);
      if (!filled.ok()) return;
      ++guessed_;
    }
  }
  int guessed() const override { return guessed_; }

  bool Append(int32_t token) override {
    TakeReplayed();
    if (!status_.ok()) return false;
    if (after_) {
      if (token == *after_) after_.reset();
      return false;
    }
    if (ends_.Has(token)) return true;
    status_ = FollowAll({&token, 1}, 0, &*grammar_);
    return status_.ok() && grammar_->ended();
  }

  absl::Status status() const override { return status_; }

 private:
  // REQUIRES: ready().
  void TakeReplayed() {
    if (replay_ == nullptr || std::exchange(taken_, true)) return;
    grammar_ = std::move(replay_->grammar);
    status_ = replay_->status;
  }

  static absl::Status FillFree(absl::Span<uint32_t> mask) {
    std::fill(mask.begin(), mask.end(), ~0u);
    return absl::OkStatus();
  }

  absl::Status FillMask(absl::Span<uint32_t> mask, text::Grammar* grammar) {
    const absl::StatusOr<bool> may_end =
        grammar->Mask(std::span<uint32_t>(mask.data(), mask.size()));
    if (!may_end.ok()) return Failed(may_end.status());
    for (const int32_t id : ends_.ids) {
      uint32_t& word = mask[static_cast<size_t>(id / 32)];
      const uint32_t bit = 1u << (id % 32);
      word = *may_end && !ends_.ignored ? word | bit : word & ~bit;
    }
    return absl::OkStatus();
  }

  std::optional<text::Grammar> grammar_;  // none while it is replayed
  const Ends ends_;
  const size_t words_;
  std::optional<int32_t> after_;
  // Stays, since the loop asks whether it is ready while masks are being made.
  const std::shared_ptr<Replay> replay_;
  bool taken_ = false;  // what it came to
  absl::Status status_;
  int guessed_ = 0;
};

class TextCallGrammar final : public CallGrammar {
 public:
  // `start` has no token; `base` is behind `output`, all of which it took.
  // Both begin behind the first token `after` of a call's output.
  TextCallGrammar(std::shared_ptr<const text::Grammar> start,
                  std::shared_ptr<const text::Grammar> base,
                  std::vector<int32_t> output, std::optional<int32_t> after,
                  Ends ends, size_t words, TextGrammars* grammars)
      : start_(std::move(start)),
        base_(std::move(base)),
        output_(std::move(output)),
        after_(after),
        ends_(std::move(ends)),
        words_(words),
        grammars_(grammars) {}

  std::unique_ptr<engine::TokenConstraint> Follow(
      absl::Span<const int32_t> output) const override {
    const std::optional<size_t> begin = BeginOf(output, after_);
    if (!begin) {
      absl::StatusOr<text::Grammar> grammar = start_->Copy();
      if (!grammar.ok()) {
        return std::make_unique<Constraint>(Failed(grammar.status()));
      }
      return std::make_unique<Constraint>(*std::move(grammar), &ends_, words_,
                                          after_);
    }
    output.remove_prefix(*begin);
    // Its length tells: an output is never taken back, but for a new attempt
    // that knows less of it.
    const bool goes_on =
        output.size() >= output_.size() &&
        std::equal(output_.begin(), output_.end(), output.begin());
    const auto& from = goes_on ? base_ : start_;
    const size_t known = goes_on ? output_.size() : 0;
    const absl::Span<const int32_t> rest = output.subspan(known);
    if (rest.size() <= kFewTokens) {
      absl::StatusOr<text::Grammar> grammar = from->Copy();
      const absl::Status status = grammar.ok()
                                      ? FollowAll(rest, known, &*grammar)
                                      : Failed(grammar.status());
      if (!status.ok()) return std::make_unique<Constraint>(status);
      return std::make_unique<Constraint>(*std::move(grammar), &ends_, words_);
    }
    auto replay = std::make_shared<Replay>();
    replay->from = from;
    replay->tokens.assign(rest.begin(), rest.end());
    replay->position = known;
    grammars_->Replay([replay] { replay->Run(); },
                      [replay] {
                        if (replay->ready) replay->ready();
                      });
    return std::make_unique<Constraint>(std::move(replay), &ends_, words_);
  }

  bool IsWhole() const override { return !output_.empty() && base_->ended(); }

 private:
  const std::shared_ptr<const text::Grammar> start_;
  const std::shared_ptr<const text::Grammar> base_;
  const std::vector<int32_t> output_;
  const std::optional<int32_t> after_;
  const Ends ends_;
  const size_t words_;
  TextGrammars* const grammars_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TextGrammars>> TextGrammars::Load(
    const std::string& model_dir, int vocab_size, size_t cache_bytes,
    Loop* loop) {
  absl::StatusOr<text::Tokenizer> tokenizer = text::Tokenizer::Load(model_dir);
  if (!tokenizer.ok()) return tokenizer.status();
  absl::StatusOr<text::GrammarVocabulary> vocabulary =
      text::GrammarVocabulary::Create(*tokenizer, vocab_size);
  if (!vocabulary.ok()) return vocabulary.status();
  return std::unique_ptr<TextGrammars>(
      new TextGrammars(*std::move(vocabulary), cache_bytes, loop));
}

TextGrammars::TextGrammars(text::GrammarVocabulary vocabulary,
                           size_t cache_bytes, Loop* loop)
    : vocabulary_(std::move(vocabulary)),
      loop_(loop),
      cache_(cache_bytes),
      compiler_([this] { RunCompiler(); }),
      replayer_([this] { RunReplays(); }) {}

TextGrammars::~TextGrammars() {
  {
    const MutexLock lock(&mutex_);
    stopping_ = true;
    unwanted_ = true;
  }
  wake_.NotifyAll();
  compiler_.join();
  replayer_.join();
}

uint64_t TextGrammars::Compile(GrammarOrder order, Done done) {
  const uint64_t number = ++last_number_;
  {
    const MutexLock lock(&mutex_);
    jobs_.push_back({number, std::move(order), std::move(done)});
  }
  wake_.NotifyAll();
  return number;
}

void TextGrammars::Cancel(uint64_t number) {
  std::optional<Job> dropped;  // not under the lock
  const MutexLock lock(&mutex_);
  const auto job = std::find_if(jobs_.begin(), jobs_.end(), [&](const Job& j) {
    return j.number == number;
  });
  if (job == jobs_.end()) {
    if (number == at_work_) unwanted_ = true;
    return;
  }
  dropped = std::move(*job);
  jobs_.erase(job);
}

void TextGrammars::Replay(Loop::Task replay, Loop::Task done) {
  {
    const MutexLock lock(&mutex_);
    replays_.push_back({std::move(replay), std::move(done)});
  }
  wake_.NotifyAll();
}

// The oldest, but none of the party whose turn it was last if others wait.
TextGrammars::Job TextGrammars::NextJob() {
  const std::string served = served_;  // lambdas hold no lock, to the compiler
  auto next = std::find_if(jobs_.begin(), jobs_.end(), [&](const Job& job) {
    return job.order.party != served;
  });
  if (next == jobs_.end()) next = jobs_.begin();
  Job job = std::move(*next);
  jobs_.erase(next);
  served_ = job.order.party;
  return job;
}

void TextGrammars::RunCompiler() {
  while (true) {
    Job job;
    {
      const MutexLock lock(&mutex_);
      while (jobs_.empty() && !stopping_) wake_.Wait(&mutex_);
      if (stopping_) return;
      job = NextJob();
      at_work_ = job.number;
      unwanted_ = false;
    }
    TANDEM_FAILPOINT("worker.grammar", "crash stall");
    auto made = CompileNow(job.order);
    if (unwanted_) continue;
    loop_->Post([done = std::move(job.done), made = std::move(made)]() mutable {
      done(std::move(made));
    });
  }
  // The task owns what was made.
  // NOLINTNEXTLINE(clang-analyzer-cplusplus.NewDeleteLeaks)
}

void TextGrammars::RunReplays() {
  while (true) {
    Replayed next;
    {
      const MutexLock lock(&mutex_);
      while (replays_.empty() && !stopping_) wake_.Wait(&mutex_);
      if (stopping_) return;
      next = std::move(replays_.front());
      replays_.pop_front();
    }
    next.replay();
    loop_->Post(std::move(next.done));
  }
}

absl::StatusOr<text::Grammar> TextGrammars::Compiled(
    const text::GrammarSource& source, const std::string& party) {
  if (const text::Grammar* known = cache_.Find(source)) return known->Copy();
  absl::StatusOr<text::Grammar> grammar =
      vocabulary_.Compile(source.kind, source.text, kGrammarLimit);
  if (!grammar.ok()) return grammar;
  absl::StatusOr<text::Grammar> copy = grammar->Copy();
  if (copy.ok()) cache_.Keep(source, party, *std::move(copy));
  return grammar;
}

absl::StatusOr<std::unique_ptr<CallGrammar>> TextGrammars::CompileNow(
    const GrammarOrder& order) {
  const text::GrammarSource source = text::SourceOf(order.params.options());
  const auto refuse = [&](auto... parts) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.structured.", parts...));
  };
  if (source.text.size() > kMaxSourceBytes) {
    return refuse("options.", source.field, " has ", source.text.size(),
                  " bytes, expected at most ", kMaxSourceBytes);
  }
  Ends ends;
  ends.ignored = order.params.ignore_end();
  for (const int32_t id : order.params.end_token_ids()) {
    if (id < 0 || id >= vocabulary_.vocab_size()) {
      return refuse("end_token_ids holds ", id, ", expected 0 to ",
                    vocabulary_.vocab_size() - 1);
    }
    ends.ids.push_back(id);
  }
  absl::StatusOr<text::Grammar> compiled = Compiled(source, order.party);
  if (!compiled.ok()) return NotCompiled(compiled.status());
  const auto start =
      std::make_shared<const text::Grammar>(*std::move(compiled));
  auto base = start;
  std::vector<int32_t> known;
  std::optional<int32_t> after;
  if (order.params.has_after_token_id()) after = order.params.after_token_id();
  const std::optional<size_t> begin = BeginOf(order.output, after);
  const std::vector<int32_t> output(
      order.output.begin() +
          static_cast<ptrdiff_t>(begin.value_or(order.output.size())),
      order.output.end());
  // A long output is the replayer's, which others do not wait for, but where
  // no end token could say that it was whole already.
  if (output.size() <= kManyTokens || ends.ids.empty() || ends.ignored) {
    absl::StatusOr<text::Grammar> behind = start->Copy();
    if (!behind.ok()) return behind.status();
    known = output;
    const absl::Status followed =
        FollowWhileWanted(known, 0, unwanted_, &*behind);
    if (!followed.ok()) return followed;
    base = std::make_shared<const text::Grammar>(*std::move(behind));
  }
  return std::make_unique<TextCallGrammar>(
      start, std::move(base), std::move(known), after, std::move(ends),
      static_cast<size_t>(vocabulary_.mask_words()), this);
}

}  // namespace tandem::worker
