// SPDX-License-Identifier: Apache-2.0
// A bidirectional message stream as the cores see it. Every call between
// processes is one (Generate: one message in, many out). common/rpc puts gRPC
// behind it, the simulation a network that delays, cuts and reorders; the
// cores cannot tell which.
//
// All of it happens on the core's Loop: methods are called there, and the
// handler is called there.

#ifndef TANDEM_COMMON_STREAM_H_
#define TANDEM_COMMON_STREAM_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"

namespace tandem {

template <typename In>
class StreamHandler {
 public:
  virtual ~StreamHandler() = default;
  virtual void OnMessage(In message) = 0;
  // Everything sent so far is written: unsent() came back to 0.
  virtual void OnDrained() {}
  // The stream ended: OK (the peer ended it well), the peer's error, or
  // UNAVAILABLE/CANCELLED for a broken connection. Last call, at most once;
  // never called after Close() or destruction.
  virtual void OnClosed(absl::Status status) = 0;
};

template <typename Out, typename In>
class Stream {
 public:
  // Destroying a stream that was not closed cancels it. Allowed inside the
  // handler's own callbacks.
  virtual ~Stream() = default;

  // Begins delivery to `handler`, which must outlive the stream. REQUIRES:
  // called once, before anything else.
  virtual void Start(StreamHandler<In>* handler) = 0;

  // Queues `message`; one write is in flight at a time, order is kept. The
  // caller bounds the queue by looking at unsent(). No-op once closed.
  virtual void Send(Out message) = 0;

  // Messages accepted by Send and not yet taken by the transport.
  virtual size_t unsent() const = 0;

  // While paused no OnMessage is delivered, and the peer feels it through
  // flow control.
  virtual void PauseReading(bool paused) = 0;

  // Server side: after what is queued was written, ends the call with
  // `status`. Client side: cancels the call, whatever the status. The handler
  // hears nothing more, and the stream may be destroyed at once.
  virtual void Close(absl::Status status) = 0;

  // The other end, for logs.
  virtual std::string peer() const = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_STREAM_H_
