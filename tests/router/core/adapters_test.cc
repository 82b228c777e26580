// SPDX-License-Identifier: Apache-2.0
// Requests for an adapter: served where it is, with the same content.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/error.h"
#include "tests/router/core/core_fixture.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using AdaptersTest = CoreTest;

v1::WorkerHello Having(const std::string& id, v1::WorkerRole role,
                       const std::string& adapter, char content) {
  v1::WorkerHello hello = World::Hello(id, role);
  v1::AdapterRef* const ref = hello.add_adapters();
  ref->set_name(adapter);
  ref->set_digest(std::string(64, content));
  return hello;
}

AdmittedRequest AskFor(const std::string& adapter) {
  AdmittedRequest admitted = World::Ask();
  admitted.effective.adapter = adapter;
  admitted.effective.placement = v1::PLACEMENT_SPLIT;
  return admitted;
}

// p0 and d0 have none.
TEST_F(AdaptersTest, AnAdapterIsServedWhereItIsWithTheSameContent) {
  w.Register(Having("p1", v1::WORKER_ROLE_PREFILL, "verse", 'b'));
  w.Register(Having("d1", v1::WORKER_ROLE_DECODE, "verse", 'a'));
  ClientPipe* const client = w.Submit(AskFor("verse"));
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_EQ(w.decode_ids[0], "d1");
  const v1::DecodeOpen& open = w.decodes[0].sent[0].open();
  EXPECT_EQ(open.adapter().name(), "verse");
  EXPECT_EQ(open.adapter().digest(), std::string(64, 'a'));
  EXPECT_FALSE(open.has_prefill_worker());  // p1's is another one
  EXPECT_EQ(w.core->adapters(), std::vector<std::string>{"verse"});
  client->Break(absl::CancelledError("gone"));

  w.Register(Having("p2", v1::WORKER_ROLE_PREFILL, "verse", 'a'));
  w.Submit(AskFor("verse"));
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decodes[1].sent[0].open().prefill_worker().worker_id(), "p2");
  w.decodes[1].Say(World::Opened(1, "ticket"));
  ASSERT_EQ(w.prefills.size(), 1u);
  EXPECT_EQ(w.prefills[0].sent[0].open().adapter().digest(),
            std::string(64, 'a'));
}

TEST_F(AdaptersTest, ASequenceGoesOnWithTheSameContentAlone) {
  w.Register(Having("p1", v1::WORKER_ROLE_PREFILL, "verse", 'a'));
  LeasePipe* const lease =
      w.Register(Having("d1", v1::WORKER_ROLE_DECODE, "verse", 'a'));
  w.Submit(AskFor("verse"));
  w.PrefillAndCommit(1, kPrompt, 1);
  w.decodes.back().Say(World::Tokens(kPrompt, {1, 2, 3}));
  w.Register(Having("d2", v1::WORKER_ROLE_DECODE, "verse", 'b'));
  Crash(lease);
  w.decodes[0].Break(Gone());
  w.RunFor(absl::Seconds(2));
  EXPECT_EQ(w.decodes.size(), 1u);  // waits
  w.Register(Having("d3", v1::WORKER_ROLE_DECODE, "verse", 'a'));
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decode_ids[1], "d3");
  EXPECT_EQ(w.decodes[1].sent[0].open().adapter().name(), "verse");
}

TEST_F(AdaptersTest, AnAdapterThatIsNowhereIsWaitedForABoundedTime) {
  ClientPipe* const client = w.Submit(AskFor("verse"));
  w.RunFor(absl::Seconds(12));
  EXPECT_EQ(ErrorReason(client->status), "NO_WORKERS");
  EXPECT_THAT(std::string(client->status.message()),
              ::testing::HasSubstr("no decode worker with adapter verse"));
}

TEST_F(AdaptersTest, AWorkerSaysWhichAdaptersItHasNow) {
  v1::RegisterRequest message;
  v1::AdapterRef* const ref = message.mutable_adapters()->add_adapters();
  ref->set_name("verse");
  ref->set_digest(std::string(64, 'a'));
  w.Submit(AskFor("verse"));
  EXPECT_TRUE(w.decodes.empty());
  decode_lease->Say(message);
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_EQ(w.decode_ids[0], "d0");
  ref->set_digest("short");
  decode_lease->Say(message);
  EXPECT_EQ(w.core->adapters(), std::vector<std::string>{});  // lease ended
}

}  // namespace
}  // namespace tandem::router
