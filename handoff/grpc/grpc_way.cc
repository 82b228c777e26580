// SPDX-License-Identifier: Apache-2.0
#include "handoff/grpc/grpc_way.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace tandem::handoff {
namespace {

class GrpcSenderChannel final : public SenderChannel {
 public:
  std::byte* Staging(uint32_t) override { return nullptr; }

  void Send(
      v1::Slice slice, const std::byte* staging, size_t bytes,
      absl::AnyInvocable<void(absl::StatusOr<v1::Slice>)> ready) override {
    slice.set_payload(staging, bytes);
    ready(std::move(slice));
  }
};

class GrpcSenderWay final : public SenderWay {
 public:
  std::string_view name() const override { return "grpc"; }
  void Connect(
      const v1::LinkWelcome&, absl::Duration,
      absl::AnyInvocable<void(absl::StatusOr<std::unique_ptr<SenderChannel>>)>
          done) override {
    done(std::make_unique<GrpcSenderChannel>());
  }
};

// Where payloads are read by a device: as many as are landing at one time, or
// a little fewer.
class Pads {
 public:
  explicit Pads(std::unique_ptr<HostSlabs> slabs) : slabs_(std::move(slabs)) {
    for (int pad = 0; pad < kCount; ++pad) free_.push_back((*slabs_)[pad]);
  }
  // Null: none is left, or it is too large for them.
  std::byte* Take(int64_t bytes) {
    if (free_.empty() || bytes > slabs_->slab_bytes()) return nullptr;
    std::byte* const pad = free_.back();
    free_.pop_back();
    return pad;
  }
  void Return(std::byte* pad) { free_.push_back(pad); }

  static constexpr int kCount = 16;
  static constexpr int64_t kMaxBytes = int64_t{4} << 20;  // of a message

 private:
  const std::unique_ptr<HostSlabs> slabs_;
  std::vector<std::byte*> free_;
};

class GrpcReceiverChannel final : public ReceiverChannel {
 public:
  GrpcReceiverChannel(int slabs, Pads* pads)
      : slabs_(static_cast<size_t>(slabs)), pads_(pads) {}
  ~GrpcReceiverChannel() override {
    for (uint32_t slab = 0; slab < slabs_.size(); ++slab) Release(slab);
  }

  bool ready() const override { return true; }

  void Receive(uint32_t slab, v1::Slice* slice, int64_t bytes,
               absl::AnyInvocable<void(absl::StatusOr<const std::byte*>)>
                   landed) override {
    if (static_cast<int64_t>(slice->payload().size()) != bytes) {
      landed(absl::InvalidArgumentError(
          absl::StrCat("slice has ", slice->payload().size(),
                       " bytes of payload, announced were ", bytes)));
      return;
    }
    Slab& at = slabs_[slab];
    at.pad = pads_ == nullptr ? nullptr : pads_->Take(bytes);
    if (at.pad != nullptr) {
      std::memcpy(at.pad, slice->payload().data(), slice->payload().size());
      landed(at.pad);
      return;
    }
    at.payload = std::move(*slice->mutable_payload());
    landed(reinterpret_cast<const std::byte*>(at.payload.data()));
  }
  void Release(uint32_t slab) override {
    Slab& at = slabs_[slab];
    if (at.pad != nullptr) pads_->Return(std::exchange(at.pad, nullptr));
    std::string().swap(at.payload);
  }

  void LinkLost(absl::AnyInvocable<void()> quiet) override { quiet(); }
  absl::Status Drop() override { return absl::OkStatus(); }

 private:
  struct Slab {
    std::string payload;  // unless it is on a pad
    std::byte* pad = nullptr;
  };
  std::vector<Slab> slabs_;
  Pads* const pads_;  // may be null
};

class GrpcReceiverWay final : public ReceiverWay {
 public:
  explicit GrpcReceiverWay(std::unique_ptr<Pads> pads)
      : pads_(std::move(pads)) {}
  std::string_view name() const override { return "grpc"; }
  absl::StatusOr<std::unique_ptr<ReceiverChannel>> NewChannel(
      const v1::LinkHello&, int slabs, int64_t, v1::LinkWelcome*) override {
    return std::make_unique<GrpcReceiverChannel>(slabs, pads_.get());
  }

 private:
  const std::unique_ptr<Pads> pads_;  // null: payloads are read where they are
};

}  // namespace

std::unique_ptr<SenderWay> NewGrpcSenderWay() {
  return std::make_unique<GrpcSenderWay>();
}
std::unique_ptr<ReceiverWay> NewGrpcReceiverWay(HostMemory* memory,
                                                int64_t slab_bytes) {
  std::unique_ptr<Pads> pads;
  if (memory != nullptr) {
    auto slabs = HostSlabs::Map(memory, Pads::kCount,
                                std::min(slab_bytes, Pads::kMaxBytes));
    if (slabs.ok()) pads = std::make_unique<Pads>(*std::move(slabs));
  }
  return std::make_unique<GrpcReceiverWay>(std::move(pads));
}

}  // namespace tandem::handoff
