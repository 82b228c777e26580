// SPDX-License-Identifier: Apache-2.0
// Grammars over the tokens of the worker's own model (text/grammar.h).

#ifndef TANDEM_WORKER_TEXT_GRAMMARS_H_
#define TANDEM_WORKER_TEXT_GRAMMARS_H_

#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "common/loop.h"
#include "common/mutex.h"
#include "text/grammar.h"
#include "text/grammar_source.h"
#include "worker/grammars.h"

namespace tandem::worker {

class TextGrammars final : public Grammars {
 public:
  // Reads the model's tokenizer; `vocab_size` is the model's. `loop` outlives
  // this, or runs nothing any more.
  static absl::StatusOr<std::unique_ptr<TextGrammars>> Load(
      const std::string& model_dir, int vocab_size, Loop* loop);
  ~TextGrammars() override;

  // One after the other, on a thread of its own.
  void Compile(const v1::StructuredParams& params, Done done) override;

 private:
  struct Job {
    v1::StructuredParams params;
    Done done;
  };

  TextGrammars(text::GrammarVocabulary vocabulary, Loop* loop);
  void Run();
  absl::StatusOr<std::unique_ptr<CallGrammar>> CompileNow(
      const v1::StructuredParams& params);
  // Sequences of one request, and requests of one program, have the same.
  absl::StatusOr<text::Grammar> Compiled(const text::GrammarSource& source);

  struct Recent {
    text::GrammarSource source;
    text::Grammar grammar;
  };

  const text::GrammarVocabulary vocabulary_;
  Loop* const loop_;
  Mutex mutex_;
  CondVar wake_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mutex_);  // at most one per call
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Recent> recent_;  // the thread's own, the newest last
  std::thread thread_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_TEXT_GRAMMARS_H_
