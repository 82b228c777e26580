// SPDX-License-Identifier: Apache-2.0
// A third way, for tests on virtual time: gathers store straight into the
// receiver's memory, as with shared memory, and whether the peer is quiet is
// the test's to say.

#ifndef TANDEM_TESTS_HANDOFF_DIRECT_WAY_H_
#define TANDEM_TESTS_HANDOFF_DIRECT_WAY_H_

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "handoff/way.h"

namespace tandem::handoff::testing {

// The "host" that both ends share: arenas by the secret in the welcome.
struct DirectHost {
  struct Arena {
    std::vector<std::byte> memory;
    int64_t slab_bytes = 0;
    bool connected = false;
    bool sender_gone = false;
    bool dropped = false;
    absl::AnyInvocable<void()> quiet;
    void Quiet() {
      if (quiet) std::exchange(quiet, nullptr)();
    }
  };
  std::map<std::string, std::shared_ptr<Arena>> arenas;
  bool fail_connect = false;
  // A sender that goes away says so, as a live process does.
  bool sender_speaks = true;
  int drops = 0;
  absl::Status drop_status;
  // Of the newest link: what may say that the way broke.
  ChannelHost* sender = nullptr;
  ChannelHost* receiver = nullptr;
};

class DirectSenderChannel final : public SenderChannel {
 public:
  DirectSenderChannel(DirectHost* host,
                      std::shared_ptr<DirectHost::Arena> arena)
      : host_(host), arena_(std::move(arena)) {}
  ~DirectSenderChannel() override {
    arena_->sender_gone = true;
    if (host_->sender_speaks) arena_->Quiet();
  }
  void Attach(ChannelHost* host) override { host_->sender = host; }
  std::byte* Staging(uint32_t slab) override {
    return arena_->memory.data() + slab * arena_->slab_bytes;
  }
  bool may_wait() const override { return true; }
  void Send(
      v1::Slice slice, const std::byte*, size_t,
      absl::AnyInvocable<void(absl::StatusOr<v1::Slice>)> ready) override {
    ready(std::move(slice));
  }

 private:
  DirectHost* const host_;
  const std::shared_ptr<DirectHost::Arena> arena_;
};

class DirectSenderWay final : public SenderWay {
 public:
  explicit DirectSenderWay(DirectHost* host) : host_(host) {}
  std::string_view name() const override { return "direct"; }
  void Connect(
      const v1::LinkWelcome& welcome, absl::Duration,
      absl::AnyInvocable<void(absl::StatusOr<std::unique_ptr<SenderChannel>>)>
          done) override {
    if (host_->fail_connect) {
      done(absl::UnavailableError("no"));
      return;
    }
    auto arena = host_->arenas.at(welcome.shm_secret());
    arena->connected = true;
    done(std::make_unique<DirectSenderChannel>(host_, arena));
  }

 private:
  DirectHost* const host_;
};

class DirectReceiverChannel final : public ReceiverChannel {
 public:
  DirectReceiverChannel(DirectHost* host,
                        std::shared_ptr<DirectHost::Arena> arena)
      : host_(host), arena_(std::move(arena)) {}
  ~DirectReceiverChannel() override { arena_->quiet = nullptr; }
  void Attach(ChannelHost* host) override { host_->receiver = host; }
  bool ready() const override { return arena_->connected; }
  void Receive(uint32_t slab, v1::Slice* slice, int64_t,
               absl::AnyInvocable<void(absl::StatusOr<const std::byte*>)>
                   landed) override {
    if (!slice->payload().empty()) {
      landed(absl::InvalidArgumentError("payload where none belongs"));
      return;
    }
    landed(arena_->memory.data() + slab * arena_->slab_bytes);
  }
  void Release(uint32_t) override {}
  bool may_wait() const override { return true; }
  void LinkLost(absl::AnyInvocable<void()> quiet) override {
    if (!arena_->connected || (arena_->sender_gone && host_->sender_speaks)) {
      quiet();
      return;
    }
    arena_->quiet = std::move(quiet);
  }
  absl::Status Drop() override {
    ++host_->drops;
    arena_->dropped = true;
    arena_->quiet = nullptr;
    return host_->drop_status;
  }

 private:
  DirectHost* const host_;
  const std::shared_ptr<DirectHost::Arena> arena_;
};

class DirectReceiverWay final : public ReceiverWay {
 public:
  explicit DirectReceiverWay(DirectHost* host) : host_(host) {}
  std::string_view name() const override { return "direct"; }
  absl::StatusOr<std::unique_ptr<ReceiverChannel>> NewChannel(
      const v1::LinkHello&, int slabs, int64_t slab_bytes,
      v1::LinkWelcome* welcome) override {
    auto arena = std::make_shared<DirectHost::Arena>();
    arena->slab_bytes = slab_bytes;
    arena->memory.resize(slabs * slab_bytes);
    const std::string secret = "arena " + std::to_string(host_->arenas.size());
    host_->arenas[secret] = arena;
    welcome->set_shm_secret(secret);
    return std::make_unique<DirectReceiverChannel>(host_, arena);
  }

 private:
  DirectHost* const host_;
};

}  // namespace tandem::handoff::testing

#endif  // TANDEM_TESTS_HANDOFF_DIRECT_WAY_H_
