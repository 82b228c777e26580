// SPDX-License-Identifier: Apache-2.0
// The live feed on virtual time: what a watcher hears and how often, and that
// nothing that a client wrote is in it.
#include "router/http/live_feed.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/testing/virtual_loop.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/router/http/fake_exchange.h"

namespace tandem::router {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

// A client that watches.
struct Watcher : ClientEnd {
  // Data of the events of one name.
  std::vector<json> Events(const std::string& name) const {
    std::vector<json> all;
    for (absl::string_view event : absl::StrSplit(body, "\n\n")) {
      if (!absl::ConsumePrefix(&event, "event: " + name + "\ndata: ")) continue;
      all.push_back(json::parse(std::string(event)));
    }
    return all;
  }
};

class CountingObserver final : public RouterObserver {
 public:
  void OnTokens(int tokens, absl::Duration gap) override { count += tokens; }
  void OnEnded(const RequestSummary& summary) override { ++ended; }
  int count = 0;
  int ended = 0;
};

constexpr char kState[] = R"pb(
  model: "tales"
  workers {
    hello {
      worker { worker_id: "decode-0" endpoint: "10.0.0.7:1" }
      role: WORKER_ROLE_DECODE
      block_size: 16
      num_blocks: 40
      max_num_seqs: 8
      kv_bytes_per_token: 1536
    }
    load {
      state: WORKER_STATE_READY
      running: 3
      waiting: 2
      blocks_free: 30
      blocks_live: 6
      blocks_cached: 4
      step_seconds: 0.002
    }
    placeable: true
  }
  in_flight {
    request_id: "a client's own name"
    internal_id: "0a0b"
    phase: "decoding"
    age { nanos: 250000000 }
    prompt_tokens: 5
    output_tokens: 2
    decode_worker_id: "decode-0"
  }
  requests { total: 1 decoding: 1 }
  counters { tokens: 77 }
)pb";

class LiveFeedTest : public testing::Test {
 protected:
  LiveFeedTest()
      : feed_(&loop_, &next_, [this] {
          ++asked_;
          return state_;
        }) {
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(kState, &state_));
  }
  void Watch(ClientEnd* client) {
    feed_.Watch(std::make_unique<FakeExchange>(client));
  }
  static RequestSummary Ended() {
    RequestSummary summary;
    summary.request_id = "a client's own name";
    summary.internal_id = "0a0b";
    summary.finish_reason = v1::FINISH_REASON_LENGTH;
    summary.done.mutable_timings()->mutable_prefill()->set_nanos(4000000);
    summary.done.mutable_work()->set_kv_rows(99);
    return summary;
  }

  VirtualLoop loop_;
  CountingObserver next_;
  v1::GetClusterStateResponse state_;
  int asked_ = 0;
  LiveFeed feed_;
  Watcher client_;
};

TEST_F(LiveFeedTest, AStateHasLoadsAndPhasesAndNoNames) {
  Watch(&client_);
  EXPECT_EQ(client_.code, 200);
  ASSERT_EQ(client_.Events("state").size(), 1u) << client_.body;
  const json state = client_.Events("state")[0];
  const json& worker = state["workers"][0];
  EXPECT_EQ(worker["id"], "decode-0");
  EXPECT_EQ(worker["role"], "decode");
  EXPECT_EQ(worker["state"], "ready");
  EXPECT_EQ(worker["running"], 3);
  EXPECT_EQ(worker["waiting"], 2);
  EXPECT_EQ(worker["blocks"], json({{"total", 40},
                                    {"free", 30},
                                    {"reserved", 0},
                                    {"live", 6},
                                    {"cached", 4}}));
  EXPECT_EQ(worker["step_ms"], 2);
  const json& request = state["requests"][0];
  EXPECT_EQ(request["phase"], "decoding");
  EXPECT_EQ(request["age_ms"], 250);
  EXPECT_EQ(request["output_tokens"], 2);
  EXPECT_EQ(request["label"], RequestLabel("a client's own name"));
  EXPECT_EQ(state["phases"]["decoding"], 1);
  EXPECT_EQ(state["counters"]["tokens"], 77);
  EXPECT_THAT(client_.body, Not(HasSubstr("own name")));
  EXPECT_THAT(client_.body, Not(HasSubstr("10.0.0.7")));
}

TEST(RequestLabelTest, IsFnv1aOf64Bits) {
  // Of the authors' test vectors.
  EXPECT_EQ(RequestLabel(""), "cbf29ce484222325");
  EXPECT_EQ(RequestLabel("foobar"), "85944171f73967e8");
}

TEST_F(LiveFeedTest, NothingIsAskedWhileNobodyWatches) {
  feed_.OnEnded(Ended());
  feed_.OnTokens(5, absl::ZeroDuration());
  loop_.RunFor(absl::Seconds(5));
  EXPECT_EQ(asked_, 0);
  EXPECT_EQ(next_.ended, 1);
  EXPECT_EQ(next_.count, 5);
  Watch(&client_);
  EXPECT_TRUE(client_.Events("ended").empty());
  client_.gone();
  loop_.RunFor(absl::Seconds(1));
  const int before = asked_;
  loop_.RunFor(absl::Seconds(5));
  EXPECT_EQ(asked_, before);
  EXPECT_EQ(feed_.watchers(), 0);
}

TEST_F(LiveFeedTest, StatesComeWhenTheyChangeAndOnceASecondElse) {
  Watch(&client_);
  for (int i = 0; i < 50; ++i) {
    client_.TakeAll();
    loop_.RunFor(absl::Milliseconds(100));
  }
  EXPECT_EQ(client_.Events("state").size(), 6u);
  for (int i = 0; i < 20; ++i) {
    state_.mutable_counters()->set_tokens(100 + i);
    client_.TakeAll();
    loop_.RunFor(absl::Milliseconds(100));
  }
  EXPECT_EQ(client_.Events("state").size(), 26u);
}

TEST_F(LiveFeedTest, AnEndHasTimingsAndWork) {
  Watch(&client_);
  client_.TakeAll();
  loop_.RunFor(absl::Milliseconds(10));
  feed_.OnEnded(Ended());
  EXPECT_EQ(next_.ended, 1);
  loop_.RunFor(absl::Milliseconds(100));
  ASSERT_EQ(client_.Events("ended").size(), 1u);
  const json ended = client_.Events("ended")[0];
  EXPECT_EQ(ended["id"], "0a0b");
  EXPECT_EQ(ended["ok"], true);
  EXPECT_EQ(ended["finish_reason"], "length");
  EXPECT_EQ(ended["timings"]["prefill_ms"], 4);
  EXPECT_EQ(ended["work"]["kv_rows"], 99);
  EXPECT_THAT(client_.body, Not(HasSubstr("own name")));
}

TEST_F(LiveFeedTest, WhoDoesNotReadGetsNoMoreThanOneWrite) {
  Watch(&client_);
  for (int i = 0; i < 1000; ++i) {
    feed_.OnEnded(Ended());
    state_.mutable_counters()->set_tokens(i);
    if (i % 10 == 0) loop_.RunFor(absl::Milliseconds(100));
  }
  EXPECT_EQ(client_.writes.size(), 1u);
  const size_t before = client_.body.size();
  client_.TakeAll();
  for (int i = 0; i < 1000; ++i) feed_.OnEnded(Ended());
  loop_.RunFor(absl::Milliseconds(100));
  EXPECT_GT(client_.Events("ended").size(), size_t{kMaxShownRequests});
  EXPECT_LT(client_.body.size() - before, kMaxMissedBytes + 4096);
}

TEST_F(LiveFeedTest, WhoReadsSlowlyHearsOfEveryEnd) {
  Watch(&client_);
  for (int i = 0; i < 5; ++i) {
    feed_.OnEnded(Ended());
    loop_.RunFor(absl::Milliseconds(300));
  }
  EXPECT_LE(client_.Events("ended").size(), 1u);  // one write is under way
  client_.TakeAll();
  loop_.RunFor(absl::Milliseconds(100));
  EXPECT_EQ(client_.Events("ended").size(), 5u);
}

TEST_F(LiveFeedTest, WatchersAreBoundedAndEndWithTheFeed) {
  std::vector<ClientEnd> clients(kMaxWatchers + 1);
  for (ClientEnd& client : clients) Watch(&client);
  EXPECT_EQ(clients[kMaxWatchers - 1].code, 200);
  EXPECT_EQ(clients[kMaxWatchers].code, 503);
  feed_.Close();
  EXPECT_TRUE(clients[0].ended);
  ClientEnd late;
  Watch(&late);
  EXPECT_EQ(late.code, 503);
}

TEST_F(LiveFeedTest, OfManyRequestsAFewAreShown) {
  const v1::RequestStatus request = state_.in_flight(0);
  for (int i = 0; i < 200; ++i) *state_.add_in_flight() = request;
  EXPECT_EQ(json::parse(StateJson(state_))["requests"].size(),
            size_t{kMaxShownRequests});
}

}  // namespace
}  // namespace tandem::router
