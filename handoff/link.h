// SPDX-License-Identifier: Apache-2.0
// What both ends of a link do alike: say something every second, notice
// silence, put small messages together, bound what is queued, and end once.
// sender.cc and receiver.cc derive their own Link from it.

#ifndef TANDEM_HANDOFF_LINK_H_
#define TANDEM_HANDOFF_LINK_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/stream.h"

namespace tandem::handoff {

inline constexpr absl::Duration kBeat = absl::Seconds(1);

// Queued messages beyond which a peer that does not read loses its link. Far
// above what credits and repeats let a well-behaved pair queue.
inline constexpr size_t kMaxUnsent = 4096;

// Since when a transfer stands still that advanced last at `own`, and its link,
// with any, at `link`. To wait behind slices of others is no stall, but not for
// ever: what was lost would be waited for as long as the link is busy.
inline absl::Time StandsSince(absl::Time own, absl::Time link,
                              absl::Duration transfer_timeout) {
  return std::max(own, std::min(link, own + 5 * transfer_timeout));
}

template <typename Out, typename In>
class LinkBase : public StreamHandler<In> {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void OnLinkMessage(LinkBase* link, In message) = 0;
    // All that came at once was told.
    virtual void OnLinkHandled(LinkBase* link) = 0;
    virtual void OnLinkDrained(LinkBase* link) = 0;
    // About once a second.
    virtual void OnLinkTick(LinkBase* link) = 0;
    // The transport ended, the peer went silent, or the queue overflowed.
    // The owner calls End.
    virtual void OnLinkBroken(LinkBase* link, absl::Status status) = 0;
  };

  // The peer's first word may take `first`, later ones `silence`.
  LinkBase(Owner* owner, Loop* loop, absl::Duration first,
           absl::Duration silence, std::unique_ptr<Stream<Out, In>> stream)
      : owner_(owner),
        loop_(loop),
        silence_(silence),
        stream_(std::move(stream)),
        last_heard_(loop->Now() + first - silence),
        tick_(loop) {}

  void Start() {
    stream_->Start(this);
    Tick();
  }

  // The peer knows batches.
  void set_batches(bool batches) { batches_ = batches; }

  // For small messages: keeps `message` back until the next Flush or Send,
  // before which it goes in order. On loopback a message costs some 40 us of
  // two cores, as much as copying half a MiB.
  void Hold(Out message) {
    if (!ended_) held_.push_back(std::move(message));
  }
  size_t held() const { return held_.size(); }

  void Flush() {
    std::vector<Out> held = std::exchange(held_, {});
    if (batches_ && held.size() > 1) {
      Out all;
      for (Out& message : held) *all.add_batch() = std::move(message);
      Write(std::move(all));
      return;
    }
    for (Out& message : held) Write(std::move(message));
  }

  // No-op once ended.
  void Send(Out message) {
    Flush();
    Write(std::move(message));
  }

  // Nothing is heard or told from here on. The object may be destroyed once
  // no call into it is on the stack.
  void End(absl::Status status) {
    if (std::exchange(ended_, true)) return;
    held_.clear();
    tick_.Stop();
    stream_->Close(std::move(status));
  }

  bool ended() const { return ended_; }
  std::string peer() const { return stream_->peer(); }
  size_t unsent() const { return ended_ ? 0 : stream_->unsent(); }
  // Messages queued, and those that the transport took; not those held.
  uint64_t sent() const { return sent_; }
  uint64_t taken() const { return sent_ - unsent(); }

  void OnMessage(In message) override {
    if (ended_) return;
    last_heard_ = loop_->Now();
    if (message.batch().empty()) {
      owner_->OnLinkMessage(this, std::move(message));
    } else {
      for (In& one : *message.mutable_batch()) {
        if (ended_) return;
        owner_->OnLinkMessage(this, std::move(one));
      }
    }
    if (!ended_) owner_->OnLinkHandled(this);
  }
  void OnDrained() override {
    if (!ended_) owner_->OnLinkDrained(this);
  }
  void OnClosed(absl::Status status) override {
    if (ended_) return;
    if (status.ok()) status = absl::UnavailableError("the peer ended the link");
    owner_->OnLinkBroken(this, std::move(status));
  }

 private:
  void Write(Out message) {
    if (ended_) return;
    said_ = true;
    ++sent_;
    stream_->Send(std::move(message));
    if (stream_->unsent() <= kMaxUnsent || overflowing_) return;
    // Not from here: the caller is in the middle of something.
    overflowing_ = true;
    tick_.Start(absl::ZeroDuration(), [this] {
      owner_->OnLinkBroken(this,
                           absl::ResourceExhaustedError(absl::StrCat(
                               stream_->unsent(), " messages are waiting for ",
                               stream_->peer(), " to read")));
    });
  }

  void Tick() {
    if (overflowing_) return;  // the timer is taken
    tick_.Start(std::min(kBeat, silence_ / 4), [this] { OnTick(); });
  }
  void OnTick() {
    const absl::Duration quiet = loop_->Now() - last_heard_;
    if (quiet >= silence_) {
      owner_->OnLinkBroken(this, absl::UnavailableError(absl::StrCat(
                                     stream_->peer(), " said nothing for ",
                                     absl::ToInt64Milliseconds(quiet), " ms")));
      return;
    }
    // What is queued will be heard anyway once the peer reads.
    if (!said_ && stream_->unsent() == 0) {
      Out beat;
      beat.mutable_beat();
      Send(std::move(beat));
    }
    said_ = false;
    Tick();
    owner_->OnLinkTick(this);
  }

  Owner* const owner_;
  Loop* const loop_;
  const absl::Duration silence_;
  std::unique_ptr<Stream<Out, In>> stream_;
  absl::Time last_heard_;
  Timer tick_;
  std::vector<Out> held_;
  uint64_t sent_ = 0;
  bool batches_ = false;
  bool said_ = false;
  bool overflowing_ = false;
  bool ended_ = false;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_LINK_H_
