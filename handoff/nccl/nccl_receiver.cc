// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "handoff/nccl/nccl_way.h"
#include "handoff/nccl/pair.h"

namespace tandem::handoff {
namespace {

using nccl::Pair;
using nccl::Station;

class NcclReceiverChannel final : public ReceiverChannel, public Pair::Owner {
 public:
  NcclReceiverChannel(Station* station, const std::string& peer, int slabs)
      : station_(station),
        landed_(static_cast<size_t>(slabs)),
        pair_(std::make_unique<Pair>(station, this, Pair::Role::kReceiver,
                                     peer)) {}
  ~NcclReceiverChannel() override {
    for (std::byte* buffer : landed_) {  // at the end of the process
      if (buffer != nullptr) station_->ReturnBuffer(buffer);
    }
    station_->Bury(std::move(pair_));
  }

  void Attach(ChannelHost* host) override { host_ = host; }
  void Hear(const v1::NcclControl& message) override { pair_->Hear(message); }
  bool ready() const override { return pair_->up(); }

  void Receive(uint32_t slab, v1::Slice* slice, int64_t bytes,
               absl::AnyInvocable<void(absl::StatusOr<const std::byte*>)>
                   landed) override {
    const absl::Status fits = Check(*slice, bytes);
    if (!fits.ok()) {
      landed(fits);
      return;
    }
    pair_->Receive(slice->nccl_operation(), static_cast<size_t>(bytes),
                   [this, slab, landed = std::move(landed)](
                       absl::StatusOr<std::byte*> buffer) mutable {
                     if (!buffer.ok()) {  // this channel may be gone
                       landed(buffer.status());
                       return;
                     }
                     landed_[slab] = *buffer;
                     landed(*buffer);
                   });
  }
  void Release(uint32_t slab) override {
    station_->ReturnBuffer(std::exchange(landed_[slab], nullptr));
  }

  void LinkLost(absl::AnyInvocable<void()> quiet) override {
    lost_ = true;
    pair_->LinkLost();
    if (pair_->gone()) {
      quiet();
    } else {
      on_quiet_ = std::move(quiet);
    }
  }

  absl::Status Drop() override {
    on_quiet_ = nullptr;
    if (pair_->gone()) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(
        "the communicator of ", pair_->name(),
        " still holds slabs: only the end of this process frees them"));
  }

  // ---- Pair::Owner
  void Say(v1::NcclControl message) override {
    if (host_ != nullptr && !lost_) host_->Say(std::move(message));
  }
  void OnBroken(const absl::Status& status) override {
    station_->loop()->Post(alive_.Guard([this, status] {
      if (!lost_) host_->OnBroken(status);
    }));
  }
  void OnQuiet() override {
    // The last thing done here: the link may end this channel.
    if (!lost_) {
      host_->OnQuiet();
    } else if (on_quiet_) {
      std::exchange(on_quiet_, nullptr)();
    }
  }

 private:
  absl::Status Check(const v1::Slice& slice, int64_t bytes) const {
    if (!slice.payload().empty()) {
      return absl::InvalidArgumentError(
          "a slice that travels by NCCL came with a payload");
    }
    if (!pair_->up() || slice.nccl_life() != pair_->life()) {
      return absl::UnavailableError(
          absl::StrCat("the communicator of ", pair_->name(),
                       " has ended since the slice was announced"));
    }
    if (slice.nccl_operation() <= pair_->last_operation() ||
        bytes > station_->options().slab_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "operation ", slice.nccl_operation(), " of ", bytes,
          " bytes after operation ", pair_->last_operation(), ", in slabs of ",
          station_->options().slab_bytes, " bytes"));
    }
    return absl::OkStatus();
  }

  Station* const station_;
  ChannelHost* host_ = nullptr;
  bool lost_ = false;
  std::vector<std::byte*> landed_;  // [slabs], until released
  absl::AnyInvocable<void()> on_quiet_;
  std::unique_ptr<Pair> pair_;
  Alive alive_;
};

class NcclReceiverWay final : public ReceiverWay {
 public:
  explicit NcclReceiverWay(Station* station) : station_(station) {}
  std::string_view name() const override { return "nccl"; }

  absl::StatusOr<std::unique_ptr<ReceiverChannel>> NewChannel(
      const v1::LinkHello& hello, int slabs, int64_t slab_bytes,
      v1::LinkWelcome*) override {
    if (slab_bytes != station_->options().slab_bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("slabs of ", slab_bytes, " bytes, buffers of ",
                       station_->options().slab_bytes));
    }
    const nccl::Library& library = *station_->library();
    if (hello.gpu() == library.device() && !library.shares_device()) {
      const absl::Status status = absl::FailedPreconditionError(absl::StrCat(
          "both workers are on GPU ", library.device(),
          ": that takes NCCL 2.30 or newer (here: ", library.version(),
          ") and NCCL_MULTI_RANK_GPU_ENABLE=1 on both"));
      station_->watcher()->OnRefused(
          absl::StrCat(hello.sender().worker_id(), ">",
                       station_->options().self),
          status);
      return status;
    }
    return std::make_unique<NcclReceiverChannel>(
        station_, hello.sender().worker_id(), slabs);
  }

 private:
  Station* const station_;
};

}  // namespace

std::unique_ptr<ReceiverWay> NewNcclReceiverWay(nccl::Station* station) {
  return std::make_unique<NcclReceiverWay>(station);
}

}  // namespace tandem::handoff
