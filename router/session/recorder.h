// SPDX-License-Identifier: Apache-2.0
// Records what goes into a core and what comes out of it, at the interfaces
// that it has to the world: streams, timers, the clock, randomness, text. All
// that a core does follows from these, so that a replay (replay.h) does the
// same, one input after another.
//
// An input is on its way to the file before the core takes it, and in the
// kernel's hands before the next one: a process that crashes leaves the input
// that it crashed in. One write(2) for each input; nothing waits for the disk.
//
// Lives on the core's loop.

#ifndef TANDEM_ROUTER_SESSION_RECORDER_H_
#define TANDEM_ROUTER_SESSION_RECORDER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "common/loop.h"
#include "common/random.h"
#include "common/stream.h"
#include "router/core/dialer.h"
#include "router/text/text_codec.h"
#include "tandem/v1/session.pb.h"

namespace tandem::router::session {

// Of the file: SessionStart.format.
inline constexpr uint32_t kFormat = 1;

struct RecorderOptions {
  std::string version;  // of this program
  int64_t max_bytes = int64_t{1} << 30;
  // Hears once why no more is recorded before the end: RESOURCE_EXHAUSTED at
  // `max_bytes`, DATA_LOSS where the stream took no more.
  std::function<void(const absl::Status&)> on_end = [](const absl::Status&) {};
};

// FNV-1a of what was sent: the same for equal messages.
uint64_t Digest(const google::protobuf::MessageLite& message);
uint64_t Digest(const absl::Status& status);
uint64_t Digest(const v1::WorkerRef& worker, absl::Duration deadline,
                const TraceContext& trace);

class Recorder {
 public:
  // All outlive it; `codec` may be null. Begins with `start`, whose end the
  // caller tells.
  Recorder(const RecorderOptions& options, std::ostream* out, Loop* loop,
           Random* random, Dialer* dialer, TextCodec* codec,
           const v1::SessionEntry& start);
  ~Recorder();

  // What the core is given instead.
  Loop* loop() const { return loop_.get(); }
  Random* random() const { return random_.get(); }
  Dialer* dialer() const { return dialer_.get(); }
  TextCodec* codec() const { return codec_.get(); }

  // One that the core got rather than opened.
  template <typename Out, typename In>
  std::unique_ptr<Stream<Out, In>> Wrap(std::unique_ptr<Stream<Out, In>> inner);
  // The number of the next stream.
  uint64_t next_stream() const { return streams_ + 1; }

  // An input while it lives.
  class Turn {
   public:
    Turn(Recorder* recorder, const v1::SessionEntry& entry)
        : recorder_(recorder) {
      recorder_->Begin(entry);
    }
    ~Turn() { recorder_->End(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Recorder* const recorder_;
  };

  // What Turn does at its ends, for inputs that are no scope.
  void Begin(const v1::SessionEntry& entry);
  void End();
  // Records nothing from here on.
  void Finish();

 private:
  template <typename Out, typename In>
  class RecordedStream;
  class RecordedLoop;
  class RecordedRandom;
  class RecordedDialer;
  class RecordedText;
  class RecordedCodec;

  bool recording() const { return depth_ == 1 && out_ != nullptr; }
  void Act(v1::SessionActKind kind, uint64_t stream, uint64_t digest = 0);
  absl::Time Clock(absl::Time now);
  uint64_t Number(uint64_t value);
  size_t Unsent(size_t count);
  std::string Text(std::string text);
  void Write(const v1::SessionEntry& entry);
  void Stop(const absl::Status& why);

  const RecorderOptions options_;
  std::ostream* out_;  // null: the end
  int64_t written_ = 0;
  int depth_ = 0;  // of inputs; an input does not come within another
  int64_t clock_ = 0;
  uint64_t streams_ = 0;
  v1::SessionEntry outcome_;
  const std::unique_ptr<Loop> loop_;
  const std::unique_ptr<Random> random_;
  const std::unique_ptr<Dialer> dialer_;
  const std::unique_ptr<TextCodec> codec_;
};

}  // namespace tandem::router::session

#endif  // TANDEM_ROUTER_SESSION_RECORDER_H_
