// SPDX-License-Identifier: Apache-2.0
// Workers that say anything, on leases and on calls, to a router with clients:
// no request is answered wrong in form, each ends once, and the router ends
// with nothing in flight.
//
// An input is a list of deeds, each a byte and what it takes.

#include <map>
#include <string>
#include <utility>

#include "tests/fuzz.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

constexpr int kSteps = 200;  // deeds of one input

class Workers {
 public:
  explicit Workers(fuzz::Input input) : input_(input) {}

  void Run() {
    for (int i = 0; i < kSteps && !input_.empty(); ++i) {
      Do(input_.Below(9));
      world_.Settle();
      world_.core->State(/*include_requests=*/true);
    }
    for (LeasePipe& lease : world_.leases) {
      lease.Break(absl::UnavailableError("gone"));
    }
    Break(&world_.decodes);
    Break(&world_.prefills);
    // Queues, leases and the longest deadline.
    world_.loop.RunFor(absl::Minutes(15));
    TANDEM_FUZZ_REQUIRE(world_.core->idle());
    TANDEM_FUZZ_REQUIRE(world_.ended.size() == world_.clients.size());
    for (const ClientPipe& client : world_.clients) CheckAnswer(client);
  }

 private:
  template <typename Pipes>
  void Break(Pipes* pipes) {
    for (size_t i = 0; i < pipes->size(); ++i) {  // more may be dialled
      (*pipes)[i].Break(absl::UnavailableError("gone"));
      world_.Settle();
    }
  }
  // One of the newest four.
  template <typename Pipes>
  auto* One(Pipes* pipes) {
    const size_t back = static_cast<size_t>(input_.Below(4));
    return back < pipes->size() ? &(*pipes)[pipes->size() - 1 - back] : nullptr;
  }
  template <typename Message, typename Pipes>
  void SayAnything(Pipes* pipes) {
    auto* const pipe = One(pipes);
    Message message;
    if (!message.ParsePartialFromString(std::string(input_.Piece()))) return;
    if (pipe != nullptr && pipe->open) pipe->Say(std::move(message));
  }

  void Do(int deed) {
    switch (deed) {
      case 0: {
        const bool decode = input_.Below(2) == 0;
        v1::WorkerHello hello = World::Hello(
            decode ? "d" : "p",
            decode ? v1::WORKER_ROLE_DECODE : v1::WORKER_ROLE_PREFILL,
            static_cast<char>('1' + input_.Below(3)));
        // What the input has over it.
        v1::WorkerHello over;
        if (over.ParsePartialFromString(std::string(input_.Piece()))) {
          hello.MergeFrom(over);
        }
        world_.Register(hello);
        return;
      }
      case 1: {
        LeasePipe* const lease = &world_.leases.emplace_back();
        world_.core->AddRegistration(
            std::make_unique<
                FakeStream<v1::RegisterResponse, v1::RegisterRequest>>(lease));
        return SayAnything<v1::RegisterRequest>(&world_.leases);
      }
      case 2:
        return SayAnything<v1::RegisterRequest>(&world_.leases);
      case 3:
        return SayAnything<v1::DecodeResponse>(&world_.decodes);
      case 4:
        return SayAnything<v1::PrefillResponse>(&world_.prefills);
      case 5:
        if (world_.clients.size() < 8) world_.Submit(World::Ask());
        return;
      case 6:  // workers that are not broken go on
        return world_.RunFor(
            absl::Milliseconds(int64_t{16} << input_.Below(9)));
      case 7:
        if (input_.Below(2) == 0) {
          if (auto* const pipe = One(&world_.decodes)) {
            pipe->Break(absl::Status(
                static_cast<absl::StatusCode>(input_.Below(17)), "it ends"));
          }
        } else if (auto* const pipe = One(&world_.prefills)) {
          pipe->Break(absl::Status(
              static_cast<absl::StatusCode>(input_.Below(17)), "it ends"));
        }
        return;
      default:
        Answer();
    }
  }

  // What a good worker would say next.
  void Answer() {
    const uint32_t attempt = 1 + static_cast<uint32_t>(input_.Below(2));
    const int position = 40 + input_.Below(9);
    const int32_t id = 1 + input_.Below(26);
    const int what = input_.Below(5);
    auto* const decode = One(&world_.decodes);
    auto* const prefill = One(&world_.prefills);
    if (prefill != nullptr && prefill->open) {
      if (what == 0) prefill->Say(World::Computing());
      if (what == 1) prefill->Say(World::First(position, id));
    }
    if (decode == nullptr || !decode->open) return;
    if (what == 0) decode->Say(World::Opened(attempt, "t"));
    if (what == 1) decode->Say(World::Started(attempt));
    if (what == 2) decode->Say(World::Tokens(position, {id}));
    if (what == 3) decode->Say(World::Dead(attempt, id % 2 == 0));
    if (what == 4) decode->Say(World::Finished(v1::FINISH_REASON_LENGTH));
  }

  // One `started`, one `finished` and `done` where it ends well, no token of
  // an id that the model has not, and no more of them than were asked for.
  void CheckAnswer(const ClientPipe& client) {
    TANDEM_FUZZ_REQUIRE(!client.open);
    int started = 0, finished = 0, done = 0;
    for (const v1::GenerateResponse& event : client.sent) {
      started += event.has_started() ? 1 : 0;
      finished += event.has_finished() ? 1 : 0;
      done += event.has_done() ? 1 : 0;
    }
    TANDEM_FUZZ_REQUIRE(started <= 1 && finished <= 1 && done <= 1);
    TANDEM_FUZZ_REQUIRE(World::Ids(client).size() <= 8);
    if (client.status.ok()) {
      TANDEM_FUZZ_REQUIRE(started == 1 && finished == 1 && done == 1);
    }
  }

  World world_;
  fuzz::Input input_;
};

}  // namespace
}  // namespace tandem::router

TANDEM_FUZZ_TARGET(fuzz_registration)(const uint8_t* data, size_t size) {
  tandem::router::Workers({data, size}).Run();
  return 0;
}
