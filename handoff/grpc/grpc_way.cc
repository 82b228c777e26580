// SPDX-License-Identifier: Apache-2.0
#include "handoff/grpc/grpc_way.h"

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

class GrpcReceiverChannel final : public ReceiverChannel {
 public:
  explicit GrpcReceiverChannel(int slabs)
      : payloads_(static_cast<size_t>(slabs)) {}

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
    payloads_[slab] = std::move(*slice->mutable_payload());
    landed(reinterpret_cast<const std::byte*>(payloads_[slab].data()));
  }
  void Release(uint32_t slab) override { std::string().swap(payloads_[slab]); }

  void LinkLost(absl::AnyInvocable<void()> quiet) override { quiet(); }
  absl::Status Drop() override { return absl::OkStatus(); }

 private:
  std::vector<std::string> payloads_;  // [slabs]
};

class GrpcReceiverWay final : public ReceiverWay {
 public:
  std::string_view name() const override { return "grpc"; }
  absl::StatusOr<std::unique_ptr<ReceiverChannel>> NewChannel(
      const v1::LinkHello&, int slabs, int64_t, v1::LinkWelcome*) override {
    return std::make_unique<GrpcReceiverChannel>(slabs);
  }
};

}  // namespace

std::unique_ptr<SenderWay> NewGrpcSenderWay() {
  return std::make_unique<GrpcSenderWay>();
}
std::unique_ptr<ReceiverWay> NewGrpcReceiverWay() {
  return std::make_unique<GrpcReceiverWay>();
}

}  // namespace tandem::handoff
