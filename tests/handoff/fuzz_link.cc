// SPDX-License-Identifier: Apache-2.0
// A prefill worker that says anything, in any order, on up to three links to a
// receiver on virtual time, with tickets that it was given: nothing is
// committed of which not every row has landed, all sums stay right, and when
// its links are gone and its attempts ended nothing is left of it.
//
// An input is a list of deeds, each a byte and what it takes.

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "handoff/slices.h"
#include "handoff/wire.h"
#include "tests/fuzz.h"
#include "tests/handoff/world.h"

namespace tandem::handoff::testing {
namespace {

constexpr int kAttempts = 4;
constexpr int kPositions = 12;
constexpr int kSteps = 400;  // deeds of one input

// What the receiver said on one link.
struct Ears final : StreamHandler<v1::LinkResponse> {
  explicit Ears(std::map<uint32_t, v1::HandoffAnswer>* grants_in)
      : grants(grants_in) {}
  void OnMessage(v1::LinkResponse message) override {
    for (v1::LinkResponse& one : *message.mutable_batch()) OnMessage(one);
    if (message.has_credit()) credits.push_back(message.credit());
    if (message.answer().verdict() == v1::HandoffAnswer::VERDICT_GRANTED) {
      (*grants)[message.answer().key().attempt()] = message.answer();
    }
  }
  void OnClosed(absl::Status) override {}
  std::vector<v1::SliceCredit> credits;
  std::map<uint32_t, v1::HandoffAnswer>* const grants;  // by attempt
};

class Peer {
 public:
  Peer(World* world, fuzz::Input input) : world_(*world), input_(input) {
    for (int n = 0; n < kAttempts; ++n) Issue(n);
    world_.decode.on_scatter = [this](const Attempt& attempt,
                                      const SliceRange& range) {
      TANDEM_FUZZ_REQUIRE(landed_[attempt.number].Add(range));
    };
  }
  ~Peer() { world_.decode.on_scatter = nullptr; }

  void Run() {
    for (int i = 0; i < kSteps && !input_.empty(); ++i) {
      Do(input_.Below(14));
      Check();
    }
    for (End& end : ends_) end.stream.reset();
    if (world_.decode.scattering.hold) world_.decode.scattering.Release();
    for (const Attempt& attempt : attempts_) {
      world_.receiver->EndAttempt(attempt, absl::CancelledError("over"));
    }
    world_.loop.RunFor(absl::Seconds(40));
    Check();
    TANDEM_FUZZ_REQUIRE(world_.decode.fatal.ok());
    TANDEM_FUZZ_REQUIRE(world_.receiver->links() == 0);
    TANDEM_FUZZ_REQUIRE(world_.receiver->tickets() == 0);
    TANDEM_FUZZ_REQUIRE(world_.receiver->slabs().free ==
                        world_.receiver->slabs().total);
  }

 private:
  struct End {
    std::unique_ptr<Ears> ears;
    std::shared_ptr<Pair> pair;
    std::unique_ptr<SenderStream> stream;
  };

  void Issue(int n) {
    const Attempt attempt = MakeAttempt(++last_);
    tickets_[n] = {attempt,
                   world_.receiver->IssueTicket(attempt, Ref("hostile"),
                                                kPositions, absl::Seconds(60))};
    attempts_.push_back(attempt);
  }

  End* Link() {
    if (ends_.empty()) return nullptr;
    End* const end = &ends_[at_ % ends_.size()];
    return end->stream == nullptr ? nullptr : end;
  }
  void Dial() {
    if (ends_.size() == 3) ends_.erase(ends_.begin());
    End& end = ends_.emplace_back();
    end.ears = std::make_unique<Ears>(&grants_);
    end.pair = std::make_shared<Pair>(&world_.loop, &world_.loop);
    world_.receiver->AddLink(end.pair->Server());
    end.stream = end.pair->Client();
    end.stream->Start(end.ears.get());
    at_ = ends_.size() - 1;
  }
  void Say(v1::LinkRequest message) {
    End* const end = Link();
    if (end == nullptr) return;
    if (to_batch_ == 0) return end->stream->Send(std::move(message));
    *batch_.add_batch() = std::move(message);
    if (--to_batch_ == 0) end->stream->Send(std::exchange(batch_, {}));
  }

  const std::pair<Attempt, std::string>& Known() {
    return tickets_[input_.Below(kAttempts)];
  }
  SliceRange Range() {
    const int layer = input_.Below(5), position = input_.Below(kPositions + 1);
    return {layer, layer + input_.Below(3), position,
            position + input_.Below(5)};
  }

  void Do(int deed) {
    v1::LinkRequest out;
    switch (deed) {
      case 0: {  // any bytes
        if (!out.ParsePartialFromString(std::string(input_.Piece()))) return;
        return Say(std::move(out));
      }
      case 1:
        Dial();
        [[fallthrough]];
      case 2: {
        v1::LinkHello& hello = *out.mutable_hello();
        *hello.mutable_sender() = Ref("hostile");
        hello.set_receiver_incarnation(world_.options.self.incarnation());
        hello.set_protocol_min(kProtocolMin);
        hello.set_protocol_max(kProtocolMax);
        hello.mutable_fingerprint()->insert(world_.options.fingerprint.begin(),
                                            world_.options.fingerprint.end());
        hello.set_host_id("host");
        hello.add_ways(input_.Below(2) == 0 ? "direct" : "grpc");
        hello.add_ways("grpc");
        hello.set_kv_dtype("f32");
        Say(std::move(out));
        world_.loop.RunFor(absl::ZeroDuration());
        // Its end of shared memory, or none.
        for (auto& [secret, arena] : world_.host.arenas) {
          arena->connected |= input_.Below(2) == 0;
        }
        return;
      }
      case 3: {
        const auto& [attempt, ticket] = Known();
        ToKey(attempt, out.mutable_offer()->mutable_key());
        out.mutable_offer()->set_ticket(ticket);
        out.mutable_offer()->set_way(input_.Below(2) == 0 ? "grpc" : "direct");
        out.mutable_offer()->set_positions(input_.Below(kPositions + 2));
        out.mutable_offer()->set_cached_positions(input_.Below(3));
        return Say(std::move(out));
      }
      case 4: {
        v1::SliceReady& ready = *out.mutable_slice_ready();
        ToKey(Known().first, ready.mutable_key());
        ready.set_slice(static_cast<uint32_t>(input_.Below(32)));
        const SliceRange range = Range();
        ready.set_layer_begin(range.layer_begin);
        ready.set_layer_end(range.layer_end);
        ready.set_position_begin(range.position_begin);
        ready.set_position_end(range.position_end);
        ready.set_bytes(Rows(range) * kRowBytes + input_.Below(2));
        return Say(std::move(out));
      }
      case 5: {  // to a credit that it was given
        End* const end = Link();
        if (end == nullptr || end->ears->credits.empty()) return;
        const v1::SliceCredit& credit =
            end->ears->credits[input_.Byte() % end->ears->credits.size()];
        *out.mutable_slice()->mutable_key() = credit.key();
        out.mutable_slice()->set_slice(credit.slice());
        out.mutable_slice()->set_slab(credit.slab());
        out.mutable_slice()->set_generation(credit.generation());
        out.mutable_slice()->set_payload(
            std::string(static_cast<size_t>(input_.Below(5)) * kRowBytes, 'v'));
        return Say(std::move(out));
      }
      case 6: {
        End* const end = Link();
        if (end == nullptr || end->ears->credits.empty()) return;
        const v1::SliceCredit& credit =
            end->ears->credits[input_.Byte() % end->ears->credits.size()];
        out.mutable_credit_return()->set_slab(credit.slab());
        out.mutable_credit_return()->set_generation(credit.generation());
        return Say(std::move(out));
      }
      case 7:
        return Commit();
      case 8:
        ToKey(Known().first, out.mutable_withdraw()->mutable_key());
        return Say(std::move(out));
      case 9:
        return world_.loop.RunFor(
            absl::Milliseconds(int64_t{1} << input_.Below(14)));
      case 10: {  // the link ends, or another one is used
        at_ = input_.Byte();
        End* const end = Link();
        if (end != nullptr && input_.Below(2) == 0) end->pair->Cut();
        return;
      }
      case 11: {
        const int n = input_.Below(kAttempts);
        world_.receiver->EndAttempt(tickets_[n].first,
                                    absl::AbortedError("ended"));
        return Issue(n);
      }
      case 13:  // what is said next goes together
        to_batch_ = input_.Below(8);
        return;
      default:
        Grant(input_.Below(8));
        world_.decode.cached = input_.Below(3);
        world_.decode.windowed_begin = 2 * world_.decode.cached;
        world_.decode.verdict =
            static_cast<ReceiverDelegate::Verdict>(input_.Below(3));
        if (world_.decode.scattering.hold) {
          world_.decode.scattering.Release();
        } else {
          world_.decode.scattering.hold = input_.Below(4) == 0;
        }
        return;
    }
  }

  void Grant(int positions) {
    world_.receiver->GrantLater(Known().first, world_.decode.Wanted(positions));
  }

  // As it was granted, with the digest of what lies there.
  void Commit() {
    const Attempt attempt = Known().first;
    v1::LinkRequest out;
    v1::HandoffCommit& commit = *out.mutable_commit();
    ToKey(attempt, commit.mutable_key());
    commit.set_slices(static_cast<uint32_t>(input_.Below(33)));
    commit.set_layers(world_.setting.shape.layers);
    if (grants_.contains(attempt.number)) {
      const v1::HandoffAnswer& answer = grants_[attempt.number];
      handoff::Grant grant = Granted(answer);
      grant.head_end = answer.head_end();
      grant.digest_key = answer.digest_key();
      const kernels::KvDigest digest = world_.decode.DigestOf(attempt, grant);
      commit.set_position_begin(answer.position_begin());
      commit.set_position_end(answer.position_end());
      commit.set_bytes(WantedRows(grant, world_.options.layers) * kRowBytes);
      commit.set_digest_low(digest.low);
      commit.set_digest_high(digest.high);
    }
    Say(std::move(out));
  }

  static handoff::Grant Granted(const v1::HandoffAnswer& answer) {
    return {.position_begin = answer.position_begin(),
            .position_end = answer.position_end(),
            .windowed_begin = answer.windowed_begin()};
  }

  void Check() {
    TANDEM_FUZZ_REQUIRE(world_.receiver->CheckInvariants().ok());
    for (const auto& [number, seen] : world_.decode.seen) {
      if (seen.committed == 0) continue;
      TANDEM_FUZZ_REQUIRE(
          grants_.contains(number) &&
          landed_[number].rows() ==
              WantedRows(Granted(grants_[number]), world_.options.layers));
    }
  }

  static constexpr int64_t kRowBytes = 2 * 2 * 8 * 4;  // of the usual shape

  World& world_;
  fuzz::Input input_;
  std::pair<Attempt, std::string> tickets_[kAttempts];
  std::vector<Attempt> attempts_;  // all that there were
  int last_ = 0;
  std::vector<End> ends_;
  size_t at_ = 0;
  v1::LinkRequest batch_;
  int to_batch_ = 0;
  std::map<uint32_t, Coverage> landed_;
  std::map<uint32_t, v1::HandoffAnswer> grants_;
};

}  // namespace
}  // namespace tandem::handoff::testing

TANDEM_FUZZ_TARGET(fuzz_link)(const uint8_t* data, size_t size) {
  using namespace tandem::handoff::
      testing;  // NOLINT(google-build-using-namespace)
  // What the world's delegates expect is a promise, too.
  ::testing::GTEST_FLAG(break_on_failure) = true;
  Setting setting;
  setting.shape.windows = {false, true, true, false};
  World world(setting);
  Peer(&world, {data, size}).Run();
  return 0;
}
