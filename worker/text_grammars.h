// SPDX-License-Identifier: Apache-2.0
// Grammars over the tokens of the worker's own model (text/grammar.h), on two
// threads of its own: one compiles, and follows each grammar behind the output
// that its order brings; one follows grammars of calls that go on behind a long
// output, so that no step and no compilation waits for a replay, and no replay
// for a compilation.

#ifndef TANDEM_WORKER_TEXT_GRAMMARS_H_
#define TANDEM_WORKER_TEXT_GRAMMARS_H_

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "common/loop.h"
#include "common/mutex.h"
#include "text/grammar.h"
#include "text/grammar_source.h"
#include "worker/grammar_cache.h"
#include "worker/grammars.h"

namespace tandem::worker {

class TextGrammars final : public Grammars {
 public:
  // Reads the model's tokenizer; `vocab_size` is the model's. So many bytes of
  // grammars stay for others. `loop` outlives this, or runs nothing any more.
  static absl::StatusOr<std::unique_ptr<TextGrammars>> Load(
      const std::string& model_dir, int vocab_size, size_t cache_bytes,
      Loop* loop);
  ~TextGrammars() override;

  // On the loop, as all of it.
  uint64_t Compile(GrammarOrder order, Done done) override;
  void Cancel(uint64_t number) override;

  // Runs `replay` on the thread for these, then `done` on the loop.
  void Replay(Loop::Task replay, Loop::Task done);

 private:
  struct Job {
    uint64_t number = 0;
    GrammarOrder order;
    Done done;
  };
  struct Replayed {
    Loop::Task replay;
    Loop::Task done;
  };

  TextGrammars(text::GrammarVocabulary vocabulary, size_t cache_bytes,
               Loop* loop);
  void RunCompiler();
  void RunReplays();
  Job NextJob() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::unique_ptr<CallGrammar>> CompileNow(
      const GrammarOrder& order);
  absl::StatusOr<text::Grammar> Compiled(const text::GrammarSource& source,
                                         const std::string& party);

  const text::GrammarVocabulary vocabulary_;
  Loop* const loop_;
  uint64_t last_number_ = 0;
  Mutex mutex_;
  CondVar wake_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mutex_);  // at most one per call
  // At most one per call that goes on.
  std::deque<Replayed> replays_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t at_work_ ABSL_GUARDED_BY(mutex_) = 0;  // the compiler's order
  std::atomic<bool> unwanted_ = false;            // it is; set under mutex_
  std::string served_ ABSL_GUARDED_BY(mutex_);    // the last one's party
  GrammarCache cache_;                            // the compiler's own
  std::thread compiler_;
  std::thread replayer_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_TEXT_GRAMMARS_H_
