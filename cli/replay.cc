// SPDX-License-Identifier: Apache-2.0
#include "cli/replay.h"

#include <cerrno>
#include <fstream>
#include <iostream>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/build_info.h"
#include "common/error.h"
#include "common/version.h"
#include "router/session/replay.h"

namespace tandem::cli {
namespace {

using router::ClusterEvent;

std::string_view KindName(ClusterEvent::Kind kind) {
  switch (kind) {
    case ClusterEvent::Kind::kRegistered:
      return "registered";
    case ClusterEvent::Kind::kLost:
      return "lost";
    case ClusterEvent::Kind::kRefused:
      return "refused";
    case ClusterEvent::Kind::kWorkerAvoided:
      return "avoided";
    case ClusterEvent::Kind::kPairAvoided:
      return "pair avoided";
  }
  return "";
}

// What the core tells of, each line with the time since the session began.
class Story final : public router::RouterObserver {
 public:
  void set_replay(const router::session::Replay* replay) { replay_ = replay; }
  // What is heard from here on was never recorded: a core that is taken down
  // ends what is in flight.
  void End() { over_ = true; }

  void OnClusterEvent(const ClusterEvent& event) override {
    std::string line = absl::StrCat("worker ", event.worker);
    if (!event.decode_worker.empty()) {
      absl::StrAppend(&line, " > ", event.decode_worker);
    }
    absl::StrAppend(&line, " ", std::string(KindName(event.kind)));
    for (const std::string_view detail :
         {event.cause, std::string_view(event.why)}) {
      if (!detail.empty()) absl::StrAppend(&line, ": ", std::string(detail));
    }
    Say(line);
  }
  void OnRetry(const router::AttemptLoss& loss) override {
    Say(absl::StrCat("request ", std::string(loss.internal_id), " ",
                     std::string(loss.cause), " in ", std::string(loss.stage),
                     " on ", std::string(loss.prefill_worker), " > ",
                     std::string(loss.decode_worker), ": ",
                     loss.status.ToString()));
  }
  void OnSuspect(std::string_view internal_id, const std::string& first,
                 const std::string& second) override {
    Say(absl::StrCat("request ", std::string(internal_id), " suspect: ", first,
                     " and ", second, " crashed over it"));
  }
  void OnEnded(const router::RequestSummary& summary) override {
    Say(absl::StrCat("request ", summary.internal_id, " ended ",
                     summary.client_gone
                         ? "without its client"
                         : absl::StatusCodeToString(summary.status.code()),
                     ", ", summary.done.usage().completion_tokens(),
                     " tokens, ", summary.failures, " failures"));
  }
  void OnAdapter(const std::string& name, std::string_view what,
                 const absl::Status& status) override {
    Say(absl::StrCat("adapter ", name, " ", std::string(what)));
  }

 private:
  void Say(const std::string& line) const {
    if (over_) return;
    std::cout << absl::StrFormat(
                     "%12.6f ", replay_ == nullptr
                                    ? 0.0
                                    : absl::ToDoubleSeconds(replay_->elapsed()))
              << line << "\n";
  }

  const router::session::Replay* replay_ = nullptr;  // null: it begins
  bool over_ = false;
};

// Behind the summary: where the recording ends, as far as it is known.
std::string Ending(const router::session::Replay& replay) {
  std::string text;
  if (replay.ended_within()) {
    text = "; the recording ends within the last input";
  } else if (replay.torn_bytes() > 0) {
    text = absl::StrCat("; its last ", replay.torn_bytes(),
                        " bytes are of an input that was not written whole");
  }
  if (!replay.why_ended().empty()) {
    absl::StrAppend(&text, "; recorded no further: ", replay.why_ended());
  }
  return text;
}

}  // namespace

void ReplayCommand::AddTo(CommandLine* line) {
  line->Example("tandem replay tandem-router-20300101T000000Z-7.session");
  line->AddPositional("FILE", &path_,
                      "What a router with --record-session-dir has written",
                      true);
}

absl::Status ReplayCommand::Run() {
  std::ifstream file(path_, std::ios::binary);
  if (!file) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path_));
  }
  Story story;
  const auto replay = router::session::Replay::Create(&file, &story);
  if (!replay.ok()) return Annotate(replay.status(), path_);
  story.set_replay(replay->get());
  const std::string mine = absl::StrCat(kVersion, " ", Commit());
  if ((*replay)->version() != mine) {
    std::cerr << "recorded by " << (*replay)->version() << ", replayed by "
              << mine << ": they may decide otherwise\n";
  }
  const absl::Status status = (*replay)->Run();
  story.End();
  if (absl::IsDataLoss(status)) return Annotate(status, path_);
  if (!status.ok()) return Annotate(status, "not as it was recorded");
  std::cout << absl::StrFormat(
      "replayed %d inputs of %.3f s: the same %d acts%s\n", (*replay)->inputs(),
      absl::ToDoubleSeconds((*replay)->elapsed()), (*replay)->acts(),
      Ending(**replay));
  return absl::OkStatus();
}

}  // namespace tandem::cli
