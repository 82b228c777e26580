// SPDX-License-Identifier: Apache-2.0
// What a way of moving slabs must do on each side. A way is one folder beside
// this file (handoff/grpc, handoff/shm): the state machines of sender.cc and
// receiver.cc know only these interfaces. A Way belongs to a process, a
// Channel to one link; all methods are called, and all callbacks run, on the
// worker's loop. Blocking work is a way's own business, on its own thread.
//
// The order of a slice's events, whatever the way:
//   credit (receiver's slab granted) -> gather into Staging or an own slab ->
//   SenderChannel::Send -> Slice message -> ReceiverChannel::Receive ->
//   scatter -> ReceiverChannel::Release.
//
// A way whose transport may come, break and come back while its link lives
// (handoff/nccl) talks to its other end and tells of it through a ChannelHost.

#ifndef TANDEM_HANDOFF_WAY_H_
#define TANDEM_HANDOFF_WAY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tandem/v1/handoff.pb.h"

namespace tandem::handoff {

// What a channel may ask of the link that it belongs to. Called on the loop;
// OnBroken and OnQuiet never from inside a call into the channel.
class ChannelHost {
 public:
  virtual ~ChannelHost() = default;
  // To the channel of this way at the other end, in order with all else that
  // the link carries. No-op once the link is lost.
  virtual void Say(v1::NcclControl message) = 0;
  // The way does not work for now. Its attempts end with `status` and name it;
  // the link and its other ways go on.
  virtual void OnBroken(const absl::Status& status) = 0;
  // After OnBroken, at a receiver: it is proved that nothing writes into
  // memory of the way any more that was not received before.
  virtual void OnQuiet() = 0;
};

// ---- The prefill worker's side.

// Outlives its link while gathers into its memory run. Its destruction tells
// the receiver, if it can still be told, that no store is outstanding.
class SenderChannel {
 public:
  virtual ~SenderChannel() = default;

  // Called once, when the channel is in its place. `host` outlives it.
  virtual void Attach(ChannelHost* host) {}
  virtual void Hear(const v1::NcclControl& message) {}
  // New attempts may use it. Asked for each: a sign that it is wanted.
  virtual bool Usable() { return true; }
  // The link is lost; running gathers still end.
  virtual void LinkLost() {}

  // Memory that a gather fills for the receiver's slab `slab`; null if the
  // way wants the bytes in one of the sender's own slabs. Asked only of a
  // channel that was usable.
  virtual std::byte* Staging(uint32_t slab) = 0;

  // Calls `ready`, at once or later, when Staging(slab) may be filled again;
  // never if the channel breaks first.
  virtual void Prepare(uint32_t slab, absl::AnyInvocable<void()> ready) {
    ready();
  }

  // A Slice message may wait for a few others and go with them: it carries no
  // bytes and begins nothing that takes time.
  virtual bool may_wait() const { return false; }

  // `staging` holds the slice. Completes `slice` (whose names are filled in)
  // and calls `ready` when the message may be sent: at once or later; an
  // error fails the attempt and names the way as broken. `staging` is not
  // read any more once `ready` ran.
  virtual void Send(
      v1::Slice slice, const std::byte* staging, size_t bytes,
      absl::AnyInvocable<void(absl::StatusOr<v1::Slice>)> ready) = 0;
};

class SenderWay {
 public:
  virtual ~SenderWay() = default;
  virtual std::string_view name() const = 0;
  // The receiver of a new link offers this way. `done` runs once, within
  // `timeout`, or never if the way is destroyed first.
  virtual void Connect(
      const v1::LinkWelcome& welcome, absl::Duration timeout,
      absl::AnyInvocable<void(absl::StatusOr<std::unique_ptr<SenderChannel>>)>
          done) = 0;
};

// ---- The decode worker's side.

class ReceiverChannel {
 public:
  // REQUIRES: every slab received was released.
  virtual ~ReceiverChannel() = default;

  // Called once, when the channel is in its place. `host` outlives it.
  virtual void Attach(ChannelHost* host) {}
  virtual void Hear(const v1::NcclControl& message) {}

  // The sender has all it needs to use this way.
  virtual bool ready() const = 0;

  // A Slice message fits a live grant and its credit. Checks what it carries
  // against `bytes` and calls `landed` with the slab's memory, at once or
  // later; that memory stays until Release. With an error nothing was or will
  // be written. Of what had not landed when the channel broke, nothing lands.
  virtual void Receive(
      uint32_t slab, v1::Slice* slice, int64_t bytes,
      absl::AnyInvocable<void(absl::StatusOr<const std::byte*>)> landed) = 0;
  virtual void Release(uint32_t slab) = 0;

  // Credits may wait for a few others and go with them, while slabs are being
  // emptied.
  virtual bool may_wait() const { return false; }

  // The link is lost. Calls `quiet` (at once or later, at most once) when it
  // is proved that the peer has no store outstanding and will begin none.
  virtual void LinkLost(absl::AnyInvocable<void()> quiet) = 0;

  // No proof came in time: gives the memory up and replaces it. An error
  // means that it cannot be replaced. `quiet` is not called any more.
  virtual absl::Status Drop() = 0;
};

class ReceiverWay {
 public:
  virtual ~ReceiverWay() = default;
  virtual std::string_view name() const = 0;
  // For a new link: what `welcome` says of this way is filled in. An error
  // leaves the way out of this link.
  virtual absl::StatusOr<std::unique_ptr<ReceiverChannel>> NewChannel(
      const v1::LinkHello& hello, int slabs, int64_t slab_bytes,
      v1::LinkWelcome* welcome) = 0;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_WAY_H_
