// SPDX-License-Identifier: Apache-2.0
// A router's core with two workers, and the ways on which tests bring a
// request.

#ifndef TANDEM_TESTS_ROUTER_CORE_CORE_FIXTURE_H_
#define TANDEM_TESTS_ROUTER_CORE_CORE_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "tests/router/world.h"

namespace tandem::router {

// One prefill and one decode worker unless a test adds more.
struct CoreTest : ::testing::Test {
  CoreTest() {
    prefill_lease = w.Prefill("p0");
    decode_lease = w.Decode("d0");
  }
  // A split request whose prefill worker has given token 1.
  ClientPipe* HandingOver() {
    ClientPipe* client = w.Submit(World::Ask());
    w.decodes.back().Say(World::Opened(1, "ticket"));
    w.prefills.back().Say(World::Computing());
    w.prefills.back().Say(World::First(kPrompt, 1));
    return client;
  }
  ClientPipe* Decoding() {
    ClientPipe* client = w.Submit(World::Ask());
    w.PrefillAndCommit(1, kPrompt, 1);
    w.decodes.back().Say(World::Tokens(kPrompt, {1, 2, 3}));
    return client;
  }
  void Crash(LeasePipe* lease) {
    lease->Break(absl::UnavailableError("reset"));
  }
  static absl::Status Gone() { return absl::UnavailableError("reset"); }
  // A request over which a decode worker and then p0 break off, call and lease.
  ClientPipe* LosingTwo() {
    w.Decode("d1");
    AdmittedRequest ask = World::Ask();
    ask.effective.placement = v1::PLACEMENT_LOCAL;
    ClientPipe* client = w.Submit(std::move(ask));
    w.decodes[0].Say(World::Opened(1, ""));
    Crash(w.decode_ids[0] == "d0" ? decode_lease : &w.leases.back());
    w.decodes[0].Break(Gone());
    EXPECT_FALSE(client->dropped);
    w.Settle();
    // On a prefill worker, so that a poison takes no batch along.
    EXPECT_TRUE(w.decodes[1].sent[0].open().has_prefill_worker());
    w.decodes[1].Say(World::Opened(1, "t"));
    w.prefills.back().Say(World::Computing());
    Crash(prefill_lease);
    w.prefills.back().Break(Gone());
    return client;
  }
  // d0 finishes what `Decoding` began, on the newest decode call.
  void FinishTo8(int from, std::vector<int32_t> rest) {
    w.decodes.back().Say(World::Tokens(from, std::move(rest)));
    w.decodes.back().Say(World::Finished(v1::FINISH_REASON_LENGTH));
  }

  World w;
  LeasePipe* prefill_lease;
  LeasePipe* decode_lease;
};

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_CORE_CORE_FIXTURE_H_
