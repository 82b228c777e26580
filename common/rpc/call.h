// SPDX-License-Identifier: Apache-2.0
// The state machine between a Stream (common/stream.h), which lives on a Loop,
// and one gRPC call, whose reactions come on gRPC's threads. client_stream.h
// and server_stream.h bind it to gRPC's reactors.
//
// Who may touch what:
//   - `handler_`, `paused_`: the loop only.
//   - `in_`: gRPC while `reading_`, else the loop. `out_`: gRPC while
//     `writing_`, else whoever sets `writing_`.
//   - all else: under `mutex_`. No operation of gRPC runs under it, since its
//     reactions may come before the operation returns; Loop::Post does, so
//     that nothing is posted once Close or the destructor returned.
//
// Invariants:
//   - one read and one write in flight; the next read starts only when the
//     loop has handled the message before it: a fast peer fills its own
//     flow-control window, not our loop;
//   - at most one task per call waits on the loop (`pump_posted_`);
//   - End() (server: Finish; client: the hold's release) is called exactly
//     once, and no operation is started after it;
//   - the object dies when gRPC (OnDone), the handle and the posted task have
//     all let go.

#ifndef TANDEM_COMMON_RPC_CALL_H_
#define TANDEM_COMMON_RPC_CALL_H_

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/loop.h"
#include "common/mutex.h"
#include "common/stream.h"

namespace tandem::rpc {

// Counts references to a Call; the last one deletes it.
template <typename T>
class Ref {
 public:
  explicit Ref(T* object) : object_(object) { object_->AddRef(); }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&&) = delete;
  ~Ref() {
    if (object_ != nullptr) object_->DropRef();
  }
  T* operator->() const { return object_; }

 private:
  T* object_;
};

enum class Side { kClient, kServer };

template <typename Out, typename In>
class Call {
 public:
  Call(Side side, Loop* loop) : side_(side), loop_(loop) {}
  virtual ~Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void AddRef() { references_.fetch_add(1, std::memory_order_relaxed); }
  void DropRef() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // What the handle calls, on the loop.
  void Start(StreamHandler<In>* handler) {
    handler_ = handler;
    Bind();
    bool deliver;
    {
      MutexLock lock(&mutex_);
      deliver = has_message_ || closed_;
      if (deliver) Notify();
    }
    if (!deliver) ReadNext();
  }

  void Send(Out message) {
    {
      MutexLock lock(&mutex_);
      if (dead_ || detached_ || no_more_writes_) return;
      if (writing_) {
        queue_.push_back(std::move(message));
        return;
      }
      writing_ = true;
    }
    out_ = std::move(message);
    WriteOp(&out_);
  }

  size_t unsent() {
    MutexLock lock(&mutex_);
    return queue_.size() + (writing_ ? 1 : 0);
  }

  void PauseReading(bool paused) {
    if (paused_ == paused) return;
    paused_ = paused;
    if (paused_ || handler_ == nullptr) return;
    bool deliver;
    {
      MutexLock lock(&mutex_);
      deliver = has_message_ || closed_;
      // Not delivered from here: the caller may be in its own callback.
      if (deliver) Notify();
    }
    if (!deliver) ReadNext();
  }

  // The end from this side. `flush`: write first what is queued (server).
  void Close(absl::Status status, bool flush) {
    handler_ = nullptr;
    if (side_ == Side::kClient) flush = false;
    bool end, cancel, cancel_later;
    std::deque<Out> dropped;
    {
      MutexLock lock(&mutex_);
      if (detached_) return;
      detached_ = true;
      if (!flush) dropped.swap(queue_);
      if (!dead_) {
        final_status_ = std::move(status);
        closing_ = true;
        dead_ = queue_.empty();
      }
      end = TakeEnd();
      // A server's Finish says it all; a client must break off the call.
      const bool open = side_ == Side::kClient ? !closed_ : !end && !ended_;
      cancel = open && !flush;
      // Nor wait for ever on a reader that stopped.
      cancel_later = open && flush;
    }
    if (cancel) Cancel();
    if (cancel_later) CancelLater();
    if (end) End();
  }

 protected:
  // The gRPC operations. Each may be called from any thread, not under
  // `mutex_`.
  virtual void Bind() {}  // on the loop, once, from Start
  virtual void ReadOp(In* message) = 0;
  virtual void WriteOp(const Out* message) = 0;
  virtual void End() = 0;
  virtual void Cancel() = 0;       // makes what is in flight fail soon
  virtual void CancelLater() = 0;  // the same, if it is still there by then

  // gRPC's reactions, on its threads.
  void ReadDone(bool ok) {
    bool end;
    {
      MutexLock lock(&mutex_);
      reading_ = false;
      if (!ok) {
        no_more_reads_ = true;
        // A server's peer may only have ended its half; a broken call comes
        // as OnCancel.
        if (side_ == Side::kClient) dead_ = true;
      } else if (!detached_) {
        has_message_ = true;
        Notify();
      }
      end = TakeEnd();
    }
    if (end) End();
  }

  void WriteDone(bool ok) {
    bool next = false, end;
    std::deque<Out> dropped;
    {
      MutexLock lock(&mutex_);
      writing_ = false;
      if (!ok) {
        dropped.swap(queue_);
        no_more_writes_ = true;
        // A client's fails too where the server has ended the call: what it
        // said before is still to be read, and the status comes behind it.
        if (side_ == Side::kServer) {
          dead_ = true;
          SetClosed(absl::CancelledError("the peer went away"));
        }
      } else if (!queue_.empty() && !dead_) {
        out_ = std::move(queue_.front());
        queue_.pop_front();
        next = writing_ = true;
      } else if (closing_) {
        dead_ = true;
      } else if (!detached_) {
        drained_ = true;
        Notify();
      }
      end = TakeEnd();
    }
    if (next) WriteOp(&out_);
    if (end) End();
  }

  // The call is over, whatever is still queued.
  void Broken(absl::Status status) {
    bool end;
    std::deque<Out> dropped;
    {
      MutexLock lock(&mutex_);
      dead_ = true;
      dropped.swap(queue_);
      SetClosed(std::move(status));
      end = TakeEnd();
    }
    if (end) End();
  }

  // The call's only message, where gRPC hands it over itself (server
  // streaming: before Start; unary: with the status).
  void Receive(In message) {
    MutexLock lock(&mutex_);
    if (detached_) return;
    in_ = std::move(message);
    has_message_ = no_more_reads_ = true;
    Notify();
  }

  absl::Status TakeFinalStatus() {
    MutexLock lock(&mutex_);
    return final_status_;
  }

 private:
  struct PumpTask {
    Ref<Call> call;
    void operator()() { call->Pump(); }
  };

  void Notify() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (pump_posted_ || detached_) return;
    pump_posted_ = true;
    loop_->Post(PumpTask{Ref<Call>(this)});
  }

  void SetClosed(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (closed_) return;
    closed_ = true;
    if (!closing_) final_status_ = status;
    closed_status_ = std::move(status);
    Notify();
  }

  bool TakeEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!dead_ || writing_ || starting_read_ || ended_) return false;
    // A server may finish under an open read; a client's hold must outlive
    // it, for the read's reaction is what tells the end.
    if (side_ == Side::kClient && reading_) return false;
    return ended_ = true;
  }

  void ReadNext() {
    {
      MutexLock lock(&mutex_);
      if (dead_ || detached_ || no_more_reads_ || reading_ || has_message_) {
        return;
      }
      reading_ = starting_read_ = true;
    }
    ReadOp(&in_);
    bool end;
    {
      MutexLock lock(&mutex_);
      starting_read_ = false;
      end = TakeEnd();
    }
    if (end) End();
  }

  // On the loop: tells the handler all there is to tell. Any of its callbacks
  // may destroy the handle; the running task holds a reference.
  void Pump() {
    bool drained, message;
    {
      MutexLock lock(&mutex_);
      pump_posted_ = false;
      drained = std::exchange(drained_, false) && !writing_;
      message = has_message_;
    }
    if (drained && handler_ != nullptr) handler_->OnDrained();
    if (message && handler_ != nullptr && !paused_) {
      In received = std::move(in_);
      {
        MutexLock lock(&mutex_);
        has_message_ = false;
      }
      handler_->OnMessage(std::move(received));
      if (handler_ != nullptr && !paused_) ReadNext();
    }
    DeliverClosed();
  }

  void DeliverClosed() {
    if (handler_ == nullptr) return;
    absl::Status status;
    {
      MutexLock lock(&mutex_);
      if (!closed_) return;
      // A good end comes after all that was said. A bad one overtakes a
      // message that pausing held back, or a paused stream would never hear.
      if (has_message_ && closed_status_.ok()) return;
      detached_ = true;
      status = closed_status_;
    }
    std::exchange(handler_, nullptr)->OnClosed(std::move(status));
  }

  const Side side_;
  Loop* const loop_;
  std::atomic<int> references_ = 0;

  StreamHandler<In>* handler_ = nullptr;
  bool paused_ = false;
  In in_;
  Out out_;

  Mutex mutex_;
  std::deque<Out> queue_ ABSL_GUARDED_BY(mutex_);
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool starting_read_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_message_ ABSL_GUARDED_BY(mutex_) = false;
  bool no_more_reads_ ABSL_GUARDED_BY(mutex_) = false;
  bool no_more_writes_ ABSL_GUARDED_BY(mutex_) = false;
  bool drained_ ABSL_GUARDED_BY(mutex_) = false;
  bool pump_posted_ ABSL_GUARDED_BY(mutex_) = false;
  // Closed by this side, or its handler has heard the end.
  bool detached_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) =
      false;                                     // dead when the queue is empty
  bool dead_ ABSL_GUARDED_BY(mutex_) = false;    // start nothing more
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;   // End() was called
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;  // the peer's end is known
  absl::Status closed_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status final_status_ ABSL_GUARDED_BY(mutex_);
};

// The handle that a core owns.
template <typename Out, typename In>
class CallStream final : public Stream<Out, In> {
 public:
  CallStream(Call<Out, In>* call, std::string peer)
      : call_(call), peer_(std::move(peer)) {}
  ~CallStream() override {
    call_->Close(absl::CancelledError("stream dropped"), /*flush=*/false);
  }

  void Start(StreamHandler<In>* handler) override { call_->Start(handler); }
  void Send(Out message) override { call_->Send(std::move(message)); }
  size_t unsent() const override { return call_->unsent(); }
  void PauseReading(bool paused) override { call_->PauseReading(paused); }
  void Close(absl::Status status) override {
    call_->Close(std::move(status), /*flush=*/true);
  }
  std::string peer() const override { return peer_; }

 private:
  const Ref<Call<Out, In>> call_;
  const std::string peer_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALL_H_
