// SPDX-License-Identifier: Apache-2.0
// Replays a recorded session: a core of this program takes the same inputs at
// the same times, with the same randomness and text, and must do what the
// recorded one did. Nothing goes out and no time passes: minutes take moments,
// under a debugger too. Where it does something else (another version, another
// build, or a decision that depends on what is not an input) the replay says at
// which input, and ends.

#ifndef TANDEM_ROUTER_SESSION_REPLAY_H_
#define TANDEM_ROUTER_SESSION_REPLAY_H_

#include <cstdint>
#include <istream>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/core/core.h"
#include "tandem/v1/session.pb.h"

namespace tandem::router::session {

class Replay {
 public:
  // Reads the start, and makes the core as it was made then. Both outlive the
  // replay. INVALID_ARGUMENT: no recorded session, or another version's.
  static absl::StatusOr<std::unique_ptr<Replay>> Create(
      std::istream* in, RouterObserver* observer);
  ~Replay();

  // One input. False: that was the end. ABORTED: the core did not do what it
  // did then. INVALID_ARGUMENT: that cannot have been recorded. DATA_LOSS: what
  // follows cannot be read, and is more than a last write that was cut short.
  absl::StatusOr<bool> Step();
  // To the end.
  absl::Status Run();

  // As it is behind the last input.
  const RouterCore& core() const { return *core_; }
  // Of the recorded program.
  const std::string& version() const { return version_; }
  int64_t inputs() const { return inputs_; }
  int64_t acts() const { return acts_; }
  // Of its clock, in the last input.
  absl::Duration elapsed() const { return now_ - began_; }
  // The recording ends in the last input: what was done there is not known.
  bool ended_within() const { return ended_within_; }
  // At the end, of an entry that was not written whole.
  int64_t torn_bytes() const { return torn_bytes_; }
  // Why the recorder ended before the session did; empty: it did not say so.
  const std::string& why_ended() const { return why_ended_; }

 private:
  class Inbox;
  template <typename Out, typename In>
  class ReplayStream;
  class ReplayLoop;
  class ReplayRandom;
  class ReplayText;
  class ReplayCodec;
  class ReplayDialer;
  class DropSpans;

  explicit Replay(std::istream* in);
  absl::Status Start(RouterObserver* observer);
  // False: there is none.
  absl::StatusOr<bool> Read(v1::SessionEntry* entry);
  // Reads what the core did in the input under way.
  absl::Status ReadOutcome();
  absl::Status CheckOutcome();
  absl::Status Take(v1::SessionEntry* entry);
  absl::Status Take(const v1::SessionCommand& command);
  absl::StatusOr<Inbox*> Find(uint64_t stream);

  // What the core asks for and does.
  void Act(v1::SessionActKind kind, uint64_t stream, uint64_t digest = 0);
  absl::Time Clock();
  template <typename Values>
  typename Values::value_type Next(const Values& values, int* next,
                                   const char* what);
  void Diverge(std::string how);
  template <typename Out, typename In>
  std::unique_ptr<Stream<Out, In>> NewStream(std::string name);
  std::string NameOf(const v1::SessionAct& act) const;
  std::string NameOf(const v1::SessionEntry& entry) const;

  std::istream* const in_;
  int64_t offset_ = 0;  // of what was read
  std::string version_;
  int64_t inputs_ = 0;
  int64_t acts_ = 0;
  absl::Time began_;
  absl::Time now_;
  bool ended_within_ = false;
  int64_t torn_bytes_ = 0;
  std::string why_ended_;
  std::string diverged_;  // empty: not yet

  // Of the input under way, and how much of it the core has asked for.
  v1::SessionOutcome outcome_;
  int clock_ = 0, random_next_ = 0, unsent_ = 0, text_ = 0, acts_next_ = 0;

  uint64_t streams_ = 0;
  std::map<uint64_t, Inbox*> inboxes_;     // by stream, while it lives
  std::map<uint64_t, std::string> names_;  // of streams
  const std::unique_ptr<ReplayLoop> loop_;
  const std::unique_ptr<Random> random_;
  const std::unique_ptr<TextCodec> codec_;
  const std::unique_ptr<Dialer> dialer_;
  const std::unique_ptr<SpanSink> spans_;
  std::unique_ptr<RouterCore> core_;
};

}  // namespace tandem::router::session

#endif  // TANDEM_ROUTER_SESSION_REPLAY_H_
