// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <map>
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

// Buffers that return to the station with their last user: the channel, while
// gathers may fill them, or the pair in its grave, while a send may read them.
class NcclSenderChannel final : public SenderChannel, public Pair::Owner {
 public:
  NcclSenderChannel(Station* station, const std::string& peer, int slabs)
      : station_(station),
        slabs_(static_cast<size_t>(slabs)),
        pair_(
            std::make_unique<Pair>(station, this, Pair::Role::kSender, peer)) {}
  ~NcclSenderChannel() override {
    pair_->Keep(std::move(staging_));
    station_->Bury(std::move(pair_));
  }

  void Attach(ChannelHost* host) override {
    host_ = host;
    ShowInterest();
  }
  void Hear(const v1::NcclControl& message) override { pair_->Hear(message); }
  void LinkLost() override {
    host_ = nullptr;
    pair_->LinkLost();
  }

  bool Usable() override {
    ShowInterest();
    return pair_->up();
  }
  std::byte* Staging(uint32_t slab) override { return staging_[slab]; }
  void Prepare(uint32_t slab, absl::AnyInvocable<void()> ready) override {
    // The receiver may have given the slab out again before this end has
    // seen its send end.
    if (pair_->Sending(staging_[slab])) {
      waiting_[staging_[slab]] = std::move(ready);
    } else {
      ready();
    }
  }

  void Send(
      v1::Slice slice, const std::byte* staging, size_t bytes,
      absl::AnyInvocable<void(absl::StatusOr<v1::Slice>)> ready) override {
    if (!pair_->up()) {
      ready(absl::UnavailableError(
          absl::StrCat("the communicator of ", pair_->name(), " is gone")));
      return;
    }
    slice.set_nccl_life(pair_->life());
    slice.set_nccl_operation(pair_->Announce(staging, bytes));
    ready(std::move(slice));
  }

  // ---- Pair::Owner
  void Say(v1::NcclControl message) override {
    if (host_ != nullptr) host_->Say(std::move(message));
  }
  void OnSent(const std::byte* from) override {
    auto found = waiting_.find(from);
    if (found == waiting_.end()) return;
    absl::AnyInvocable<void()> ready = std::move(found->second);
    waiting_.erase(found);
    ready();
  }
  void OnBroken(const absl::Status& status) override {
    waiting_.clear();
    station_->loop()->Post(alive_.Guard([this, status] {
      if (host_ != nullptr) host_->OnBroken(status);
    }));
  }
  void OnQuiet() override {}

 private:
  // Buffers come first: without them a pair would take the place of one that
  // has them, be up, and never be used.
  void ShowInterest() {
    if (staging_.empty()) {
      if (station_->free_buffers() < static_cast<int>(slabs_)) return;
      for (size_t i = 0; i < slabs_; ++i) {
        staging_.push_back(station_->TakeBuffer());
      }
    }
    pair_->Interest();
  }

  Station* const station_;
  const size_t slabs_;
  ChannelHost* host_ = nullptr;
  std::vector<std::byte*> staging_;  // [slabs_], once it was wanted
  // Gathers that wait for a send from their buffer to end.
  std::map<const std::byte*, absl::AnyInvocable<void()>> waiting_;
  std::unique_ptr<Pair> pair_;
  Alive alive_;
};

class NcclSenderWay final : public SenderWay {
 public:
  explicit NcclSenderWay(Station* station) : station_(station) {}
  std::string_view name() const override { return "nccl"; }

  void Connect(
      const v1::LinkWelcome& welcome, absl::Duration,
      absl::AnyInvocable<void(absl::StatusOr<std::unique_ptr<SenderChannel>>)>
          done) override {
    if (welcome.slab_bytes() != station_->options().slab_bytes) {
      const absl::Status status = absl::FailedPreconditionError(absl::StrCat(
          "the peer has slabs of ", welcome.slab_bytes(),
          " bytes, this worker of ", station_->options().slab_bytes,
          ": --handoff-slab-bytes must be equal"));
      station_->watcher()->OnRefused(
          absl::StrCat(station_->options().self, ">", welcome.worker_id()),
          status);
      done(status);
      return;
    }
    done(std::make_unique<NcclSenderChannel>(station_, welcome.worker_id(),
                                             welcome.num_slabs()));
  }

 private:
  Station* const station_;
};

}  // namespace

std::unique_ptr<SenderWay> NewNcclSenderWay(nccl::Station* station) {
  return std::make_unique<NcclSenderWay>(station);
}

}  // namespace tandem::handoff
