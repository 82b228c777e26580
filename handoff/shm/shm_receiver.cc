// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "handoff/alive.h"
#include "handoff/shm/arena.h"
#include "handoff/shm/doorman.h"
#include "handoff/shm/shm_way.h"

namespace tandem::handoff {
namespace {

// Arenas are never used twice: a peer that was let in keeps its mapping for
// as long as it likes. One spare is mapped ahead, so that giving an arena up
// does not depend on memory that may be short just then.
class Spares {
 public:
  absl::StatusOr<std::unique_ptr<SharedArena>> Take(size_t bytes) {
    if (spare_ == nullptr || spare_->size() != bytes) {
      return SharedArena::Create(bytes);
    }
    std::unique_ptr<SharedArena> taken = std::move(spare_);
    return taken;
  }
  absl::Status Refill(size_t bytes) {
    if (spare_ != nullptr && spare_->size() == bytes) return absl::OkStatus();
    absl::StatusOr<std::unique_ptr<SharedArena>> arena =
        SharedArena::Create(bytes);
    if (!arena.ok()) return arena.status();
    spare_ = *std::move(arena);
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<SharedArena> spare_;
};

class ShmReceiverChannel final : public ReceiverChannel {
 public:
  ShmReceiverChannel(std::unique_ptr<SharedArena> arena, int64_t slab_bytes,
                     uint64_t id, Doorman* doorman, Spares* spares)
      : arena_(std::move(arena)),
        arena_bytes_(arena_->size()),
        slab_bytes_(slab_bytes),
        id_(id),
        doorman_(doorman),
        spares_(spares) {}
  ~ShmReceiverChannel() override { doorman_->Forget(id_); }

  // What the doorman calls, on the loop.
  Doorman::Notify Listener(Loop* loop) {
    // The flag is set by the doorman's own thread: an offer that the peer
    // makes with the descriptor in hand may overtake a task of ours.
    auto heard = alive_.Guard([this](Doorman::Event event) { OnEvent(event); });
    return [loop, heard, connected = connected_](Doorman::Event event) {
      if (event == Doorman::Event::kConnected) {
        connected->store(true);
        return;
      }
      loop->Post([heard, event]() mutable { heard(event); });
    };
  }

  bool ready() const override {
    return connected_->load() && arena_ != nullptr;
  }

  void Receive(uint32_t slab, v1::Slice* slice, int64_t,
               absl::AnyInvocable<void(absl::StatusOr<const std::byte*>)>
                   landed) override {
    if (!slice->payload().empty() || arena_ == nullptr) {
      landed(absl::InvalidArgumentError(
          "a slice in shared memory came with a payload"));
      return;
    }
    landed(arena_->data() + int64_t{slab} * slab_bytes_);
  }
  void Release(uint32_t) override {}
  bool may_wait() const override { return true; }

  void LinkLost(absl::AnyInvocable<void()> quiet) override {
    if (quiet_ || doorman_->Withdraw(id_)) {
      quiet();
      return;
    }
    on_quiet_ = std::move(quiet);
  }

  absl::Status Drop() override {
    doorman_->Forget(id_);
    on_quiet_ = nullptr;
    arena_.reset();
    return spares_->Refill(arena_bytes_);
  }

 private:
  void OnEvent(Doorman::Event event) {
    quiet_ = event == Doorman::Event::kQuiet;
    // The last thing done here: the link may end this channel.
    if (on_quiet_) std::exchange(on_quiet_, nullptr)();
  }

  std::unique_ptr<SharedArena> arena_;
  const size_t arena_bytes_;
  const int64_t slab_bytes_;
  const uint64_t id_;
  Doorman* const doorman_;
  Spares* const spares_;
  const std::shared_ptr<std::atomic<bool>> connected_ =
      std::make_shared<std::atomic<bool>>(false);
  bool quiet_ = false;
  absl::AnyInvocable<void()> on_quiet_;
  Alive alive_;
};

class ShmReceiverWay final : public ReceiverWay {
 public:
  ShmReceiverWay(Loop* loop, Random* random, HostMemory* memory,
                 std::string socket_name, std::unique_ptr<Doorman> doorman)
      : loop_(loop),
        random_(random),
        memory_(memory),
        socket_name_(std::move(socket_name)),
        doorman_(std::move(doorman)) {}
  std::string_view name() const override { return "shm"; }

  absl::StatusOr<std::unique_ptr<ReceiverChannel>> NewChannel(
      const v1::LinkHello&, int slabs, int64_t slab_bytes,
      v1::LinkWelcome* welcome) override {
    const size_t bytes =
        static_cast<size_t>(slabs) * static_cast<size_t>(slab_bytes);
    absl::StatusOr<std::unique_ptr<SharedArena>> arena = spares_.Take(bytes);
    if (!arena.ok()) return arena.status();
    // Best effort: a missing spare is made when one is needed.
    spares_.Refill(bytes).IgnoreError();
    Fd fd(dup((*arena)->fd().get()));
    if (!fd.open()) return absl::ErrnoToStatus(errno, "dup of the slabs");
    // The spare is registered when it is taken: until then it costs nothing.
    (*arena)->Register(memory_);
    const std::string secret = random_->Bytes(shm::kSecretBytes);
    const uint64_t id = next_id_++;
    auto channel = std::make_unique<ShmReceiverChannel>(
        *std::move(arena), slab_bytes, id, doorman_.get(), &spares_);
    doorman_->Expect(id, secret, std::move(fd), channel->Listener(loop_));
    welcome->set_shm_socket(socket_name_);
    welcome->set_shm_secret(secret);
    return channel;
  }

 private:
  Loop* const loop_;
  Random* const random_;
  HostMemory* const memory_;
  const std::string socket_name_;
  Spares spares_;
  const std::unique_ptr<Doorman> doorman_;
  uint64_t next_id_ = 1;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ReceiverWay>> NewShmReceiverWay(
    Loop* loop, Random* random, HostMemory* memory) {
  const std::string name =
      absl::StrCat("tandem-", absl::BytesToHexString(random->Bytes(16)));
  absl::StatusOr<std::unique_ptr<Doorman>> doorman = Doorman::Listen(name);
  if (!doorman.ok()) return doorman.status();
  return std::make_unique<ShmReceiverWay>(loop, random, memory, name,
                                          *std::move(doorman));
}

}  // namespace tandem::handoff
