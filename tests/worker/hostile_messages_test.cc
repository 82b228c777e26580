// SPDX-License-Identifier: Apache-2.0
// Workers that are told what no good peer says, one field at a time, on calls
// and links: each ends with a status that is the message's fault, or goes on
// where it makes sense; everybody else is served as ever, and nothing is left.

#include "tests/hostile_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "handoff/wire.h"
#include "tests/simulation/parts.h"
#include "tests/worker/rig.h"

namespace tandem::worker {
namespace {

using absl::StatusCode;
using tandem::testing::HostileField;

template <typename In>
struct Ears final : StreamHandler<In> {
  void OnMessage(In message) override { last = std::move(message); }
  void OnClosed(absl::Status status) override { ended = std::move(status); }
  In last;
  std::optional<absl::Status> ended;
};

// A call or link without a router or worker behind it.
template <typename Out, typename In>
struct Line {
  std::unique_ptr<Ears<In>> ears = std::make_unique<Ears<In>>();
  std::unique_ptr<Stream<Out, In>> stream;

  void Say(Out message) { stream->Send(std::move(message)); }
};
using DecodeLine = Line<v1::DecodeRequest, v1::DecodeResponse>;
using PrefillLine = Line<v1::PrefillRequest, v1::PrefillResponse>;
using HandoffLine = Line<v1::LinkRequest, v1::LinkResponse>;

struct HostileMessagesTest : ::testing::Test {
  template <typename Out, typename In, typename Accept>
  Line<Out, In> Dial(Machine* machine, Accept accept) {
    Line<Out, In> line;
    line.stream = rig.network.Connect<Out, In>(rig.router, machine->host,
                                               /*messy=*/false, accept);
    line.stream->Start(line.ears.get());
    return line;
  }
  DecodeLine CallDecode() {
    return Dial<v1::DecodeRequest, v1::DecodeResponse>(
        decode,
        [this](auto stream) { decode->core->AddCall(std::move(stream)); });
  }
  PrefillLine CallPrefill() {
    return Dial<v1::PrefillRequest, v1::PrefillResponse>(
        prefill,
        [this](auto stream) { prefill->core->AddCall(std::move(stream)); });
  }
  HandoffLine Link() {
    return Dial<v1::LinkRequest, v1::LinkResponse>(decode, [this](auto stream) {
      decode->core->AddLink(std::move(stream));
    });
  }

  v1::DecodeRequest Open(bool remote) {
    v1::DecodeRequest message;
    v1::DecodeOpen& open = *message.mutable_open();
    const Job job = {.prompt = Prompt(20)};
    open.set_request_id(rig.random.Bytes(16));
    open.set_decode_incarnation(decode->incarnation);
    open.mutable_prompt_token_ids()->Add(job.prompt.begin(), job.prompt.end());
    *open.mutable_sampling() = job.Sampling();
    *open.mutable_stopping() = job.Stopping();
    open.set_deadline_ms(10'000);
    if (remote) *open.mutable_prefill_worker() = prefill->ref();
    return message;
  }
  v1::PrefillRequest OpenPrefill(const v1::AttemptOpened& opened,
                                 const v1::DecodeOpen& decode_open) {
    v1::PrefillRequest message;
    v1::PrefillOpen& open = *message.mutable_open();
    open.set_request_id(decode_open.request_id());
    open.set_prefill_incarnation(prefill->incarnation);
    open.set_attempt(opened.attempt());
    open.set_ticket(opened.ticket());
    *open.mutable_decode_worker() = decode->ref();
    *open.mutable_prompt_token_ids() = decode_open.prompt_token_ids();
    *open.mutable_sampling() = decode_open.sampling();
    *open.mutable_stopping() = decode_open.stopping();
    open.set_deadline_ms(10'000);
    return message;
  }

  // What a worker may end a call with because of what it was told.
  void ExpectTheirFault(const std::optional<absl::Status>& ended,
                        const std::string& what) {
    ++told;
    if (!ended.has_value() || ended->ok()) return;
    ++refused;
    static const std::set<StatusCode> kTheirs = {
        StatusCode::kInvalidArgument,    StatusCode::kNotFound,
        StatusCode::kUnavailable,        StatusCode::kResourceExhausted,
        StatusCode::kFailedPrecondition, StatusCode::kAborted,
        StatusCode::kDeadlineExceeded,   StatusCode::kCancelled,
        StatusCode::kPermissionDenied};
    EXPECT_TRUE(kTheirs.contains(ended->code())) << what << ": " << *ended;
  }
  // Everybody else is served, and nothing stays.
  void Finish(int least) {
    EXPECT_GE(told, least);
    EXPECT_GT(refused, 0);
    Request* const local = rig.Local({.prompt = Prompt(20)}, decode);
    Request* const split = rig.Split({.prompt = Prompt(33)}, decode, prefill);
    rig.RunUntilEnded();
    local->ExpectAllRight();
    split->ExpectAllRight();
    RecordProperty("told", told);
    RecordProperty("refused", refused);
    rig.ExpectNothingLeft();
  }

  Rig rig;
  DecodeMachine* decode = rig.AddDecode();
  PrefillMachine* prefill = rig.AddPrefill();
  int told = 0;
  int refused = 0;
};

TEST_F(HostileMessagesTest, OpensOfADecodeWorker) {
  for (const bool remote : {false, true}) {
    HostileField::ForEach(
        Open(remote), [&](const auto& message, const std::string& what) {
          // A bystander shares its steps.
          Request* const other = rig.Local({.prompt = Prompt(7)}, decode);
          DecodeLine line = CallDecode();
          line.Say(static_cast<const v1::DecodeRequest&>(message));
          rig.Run(absl::Milliseconds(20));
          ExpectTheirFault(line.ears->ended, what);
          line.stream.reset();
          rig.RunUntilEnded();
          other->ExpectAllRight();
          rig.ExpectInvariants();
        });
    if (HasFailure()) return;
  }
  Finish(800);
}

TEST_F(HostileMessagesTest, RetriesOfADecodeWorker) {
  v1::DecodeRequest good;
  good.mutable_retry()->set_attempt(1);
  good.mutable_retry()->add_output_token_ids(7);
  *good.mutable_retry()->mutable_prefill_worker() = prefill->ref();
  HostileField::ForEach(good, [&](const auto& message,
                                  const std::string& what) {
    DecodeLine line = CallDecode();
    line.Say(Open(/*remote=*/true));
    rig.Run(absl::Milliseconds(5));
    v1::DecodeRequest hostile;
    hostile.CopyFrom(message);
    if (hostile.retry().attempt() == 1) {
      hostile.mutable_retry()->set_attempt(line.ears->last.opened().attempt());
    }
    line.Say(hostile);
    rig.Run(absl::Milliseconds(20));
    ExpectTheirFault(line.ears->ended, what);
    line.stream.reset();
    rig.Run(absl::Milliseconds(5));
    rig.ExpectInvariants();
  });
  Finish(100);
}

TEST_F(HostileMessagesTest, OpensOfAPrefillWorker) {
  const v1::DecodeRequest open = Open(/*remote=*/true);
  HostileField::ForEach(
      OpenPrefill({}, open.open()),
      [&](const auto& message, const std::string& what) {
        DecodeLine call = CallDecode();
        v1::DecodeRequest mine = Open(/*remote=*/true);
        mine.mutable_open()->set_request_id(open.open().request_id());
        call.Say(mine);
        rig.Run(absl::Milliseconds(5));
        v1::PrefillRequest hostile;
        hostile.CopyFrom(message);
        // What is still empty is as it was told.
        const v1::AttemptOpened& opened = call.ears->last.opened();
        v1::PrefillOpen* const theirs = hostile.mutable_open();
        if (theirs->ticket().empty()) theirs->set_ticket(opened.ticket());
        if (theirs->attempt() == 0) theirs->set_attempt(opened.attempt());
        // The rig dials known workers only.
        if (theirs->has_decode_worker()) {
          theirs->mutable_decode_worker()->set_worker_id(decode->name());
        }
        PrefillLine line = CallPrefill();
        line.Say(hostile);
        rig.Run(absl::Milliseconds(40));
        ExpectTheirFault(line.ears->ended, what);
        line.stream.reset();
        call.stream.reset();
        rig.Run(absl::Milliseconds(5));
        rig.ExpectInvariants();
      });
  Finish(400);
}

TEST_F(HostileMessagesTest, MessagesOfALink) {
  v1::WorkerRef stranger = prefill->ref();
  stranger.set_worker_id("stranger");
  const auto hello = [&] {
    v1::LinkRequest message;
    v1::LinkHello& say = *message.mutable_hello();
    const v1::WorkerHello known = simulation::MakeHello(
        "stranger", v1::WORKER_ROLE_PREFILL, stranger.incarnation(),
        prefill->device->kv_shape());
    *say.mutable_sender() = stranger;
    say.set_receiver_incarnation(decode->incarnation);
    say.set_protocol_min(handoff::kProtocolMin);
    say.set_protocol_max(handoff::kProtocolMax);
    *say.mutable_fingerprint() = known.fingerprint();
    say.set_kv_dtype(known.kv_dtype());
    say.add_ways("grpc");
    return message;
  };
  v1::AttemptKey key;
  std::vector<v1::LinkRequest> good(8);
  good[0] = hello();
  v1::HandoffOffer& offer = *good[1].mutable_offer();
  offer.set_way("grpc");
  offer.set_positions(20);
  v1::SliceReady& ready = *good[2].mutable_slice_ready();
  ready.set_layer_end(1);
  ready.set_position_end(1);
  ready.set_bytes(decode->device->kv_shape().kv_heads *
                  decode->device->kv_shape().head_dim * 2 * 4);
  good[3].mutable_slice()->set_payload("x");
  good[4].mutable_credit_return()->set_generation(1);
  v1::HandoffCommit& commit = *good[5].mutable_commit();
  commit.set_slices(1);
  commit.set_position_end(20);
  good[6].mutable_withdraw()->set_reason("no");
  good[7].mutable_nccl()->mutable_want();
  for (const v1::LinkRequest& one : good) {
    HostileField::ForEach(
        one, [&](const auto& message, const std::string& what) {
          DecodeLine call = CallDecode();
          v1::DecodeRequest open = Open(/*remote=*/true);
          *open.mutable_open()->mutable_prefill_worker() = stranger;
          call.Say(open);
          HandoffLine line = Link();
          if (!one.has_hello()) line.Say(hello());
          rig.Run(absl::Milliseconds(10));
          const v1::AttemptOpened opened = call.ears->last.opened();
          handoff::ToKey({open.open().request_id(), 0, opened.attempt()}, &key);
          if (!one.has_hello() && !one.has_offer()) {
            v1::LinkRequest first = good[1];
            *first.mutable_offer()->mutable_key() = key;
            first.mutable_offer()->set_ticket(opened.ticket());
            line.Say(first);
            rig.Run(absl::Milliseconds(10));
          }
          v1::LinkRequest hostile;
          hostile.CopyFrom(message);
          const auto know = [&](auto* part) {
            if (!part->has_key()) *part->mutable_key() = key;
          };
          if (hostile.has_offer()) {
            know(hostile.mutable_offer());
            if (hostile.offer().ticket().empty()) {
              hostile.mutable_offer()->set_ticket(opened.ticket());
            }
          }
          if (hostile.has_slice_ready()) know(hostile.mutable_slice_ready());
          if (hostile.has_slice()) know(hostile.mutable_slice());
          if (hostile.has_commit()) know(hostile.mutable_commit());
          if (hostile.has_withdraw()) know(hostile.mutable_withdraw());
          line.Say(hostile);
          rig.Run(absl::Milliseconds(20));
          ExpectTheirFault(line.ears->ended, what);
          EXPECT_FALSE(call.ears->last.has_tokens()) << what;
          line.stream.reset();
          call.stream.reset();
          rig.Run(absl::Milliseconds(5));
          rig.ExpectInvariants();
        });
  }
  Finish(400);
}

}  // namespace
}  // namespace tandem::worker
