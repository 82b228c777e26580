// SPDX-License-Identifier: Apache-2.0
// A request for several sequences of one prompt (n, best_of): each of them is
// a Request of its own with another sequence index, and a group makes one
// answer of theirs.
//
// The first sequence goes ahead until its second token is there: by then both
// workers hold the prompt's KV, and the others find it in their prefix caches.
// Where all are returned
// (best_of equals n) events pass as they come, with their index; otherwise
// they are kept until all have ended, and the n of the greatest cumulative log
// probability are sent, the best first. A sequence that fails fails them all.
// All are computed with the same weights; see binding.h.

#ifndef TANDEM_ROUTER_CORE_SEQUENCE_GROUP_H_
#define TANDEM_ROUTER_CORE_SEQUENCE_GROUP_H_

#include <memory>
#include <vector>

#include "common/loop.h"
#include "router/core/dialer.h"
#include "router/core/request.h"

namespace tandem::router {

class SequenceGroup;

// What a group needs of the core.
class GroupHost {
 public:
  virtual ~GroupHost() = default;
  virtual void StartSequence(AdmittedRequest admitted,
                             std::unique_ptr<ClientStream> client) = 0;
  // It has closed its client; to be destroyed after the callback.
  virtual void OnGroupEnded(SequenceGroup* group) = 0;
};

class SequenceGroup final : private StreamHandler<v1::GenerateRequest> {
 public:
  // Both outlive the group.
  SequenceGroup(Loop* loop, GroupHost* host, AdmittedRequest admitted,
                std::unique_ptr<ClientStream> client);
  ~SequenceGroup() override;
  void Start();
  const EffectiveRequest& effective() const { return admitted_.effective; }
  // Sequences that it will start.
  int unstarted() const {
    return spread_ ? 0 : static_cast<int>(parts_.size()) - 1;
  }

 private:
  class Member;  // a sequence's client stream
  // What became of a sequence.
  struct Part {
    Member* stream = nullptr;        // null: not started, or gone
    v1::GeneratedSequence sequence;  // unless it was passed on
    double logprob = 0;              // sum, of so many tokens
    int tokens = 0;
    int reasoning_tokens = 0;
    int deltas = 0;
    v1::GenerateDone done;
    bool finished = false;
    bool closed = false;
  };

  // StreamHandler: the client.
  void OnMessage(v1::GenerateRequest) override {}
  void OnDrained() override;
  void OnClosed(absl::Status status) override;

  void StartPart(int index);
  void StartOthers();
  // Of a member.
  void OnEvent(int index, v1::GenerateResponse event);
  void OnDelta(int index, v1::GenerateDelta* delta);
  void OnFinished(int index, v1::GenerateFinished* finished);
  void OnMemberClosed(int index, const absl::Status& status);
  void OnMemberGone(int index);

  // Text that may be a tool call is held back, maybe to the end: the first
  // sequence then tells of its tokens by their ids, for us alone.
  bool counts_ids(int index) const {
    return index == 0 && streams() && admitted_.effective.tool_calls &&
           !admitted_.effective.output.return_token_ids();
  }
  bool streams() const { return returned_ == static_cast<int>(parts_.size()); }
  void SendDelta(v1::GenerateDelta delta);
  void SendFinished(v1::GenerateFinished finished);
  void SendBest();
  v1::GenerateDone MergedDone() const;
  void End(const absl::Status& status);

  Loop* const loop_;
  GroupHost* const host_;
  const AdmittedRequest admitted_;
  const std::shared_ptr<Binding> binding_ = std::make_shared<Binding>();
  const absl::Time begun_;
  const int returned_;                    // n
  std::unique_ptr<ClientStream> client_;  // null: it is gone
  std::vector<Part> parts_;               // [best_of]
  bool spread_ = false;                   // the others were started
  bool started_ = false;                  // the client was told
  bool ended_ = false;
  Timer spread_timer_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_SEQUENCE_GROUP_H_
