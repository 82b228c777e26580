// SPDX-License-Identifier: Apache-2.0
#include "router/core/adapters_away.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace tandem::router {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

v1::WorkerHello Having(const std::string& id, const std::string& adapter) {
  v1::WorkerHello hello;
  hello.mutable_worker()->set_worker_id(id);
  hello.mutable_worker()->set_incarnation("one");
  if (!adapter.empty()) hello.add_adapters()->set_name(adapter);
  return hello;
}

TEST(AdaptersAwayTest, AWorkerOwesWhatItMayHave) {
  AdaptersAway away;
  away.OnLost(Having("d", "verse"));
  away.OnLost(Having("e", ""));
  away.MayHave("e", "prose");
  for (const char* name : {"verse", "prose", "rhyme"}) away.OweAll(name);
  away.Owe("e", "rhyme");
  EXPECT_THAT(away.Return(Having("d", "").worker()), ElementsAre("verse"));
  EXPECT_THAT(away.Return(Having("d", "").worker()), IsEmpty());
  EXPECT_THAT(away.Return(Having("e", "").worker()),
              ElementsAre("prose", "rhyme"));
  EXPECT_THAT(away.Return(Having("unknown", "").worker()), IsEmpty());
}

TEST(AdaptersAwayTest, ANewProcessOwesNothing) {
  AdaptersAway away;
  away.OnLost(Having("d", "verse"));
  away.OweAll("verse");
  v1::WorkerRef restarted = Having("d", "").worker();
  restarted.set_incarnation("two");
  EXPECT_THAT(away.Return(restarted), IsEmpty());
  EXPECT_THAT(away.Return(Having("d", "").worker()), IsEmpty());
}

TEST(AdaptersAwayTest, TheOldestIsForgottenBeyond1024) {
  AdaptersAway away;
  for (int i = 0; i < 1025; ++i) {
    away.OnLost(Having(absl::StrCat("d", i), "verse"));
  }
  away.OweAll("verse");
  EXPECT_THAT(away.Return(Having("d0", "").worker()), IsEmpty());
  EXPECT_THAT(away.Return(Having("d1", "").worker()), ElementsAre("verse"));
  EXPECT_THAT(away.Return(Having("d1024", "").worker()), ElementsAre("verse"));
}

}  // namespace
}  // namespace tandem::router
