// SPDX-License-Identifier: Apache-2.0
// The pure functions: placement, the short way, stop strings.

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/random.h"
#include "router/placement/placement.h"
#include "router/placement/short_way.h"
#include "router/text/stop_strings.h"

namespace tandem::router {
namespace {

WorkerView View(int queued, int running = 0, int cached = 0) {
  WorkerView view;
  view.queued_tokens = queued;
  view.running = running;
  view.max_num_seqs = 10;
  view.num_blocks = view.blocks_available = 100;
  view.cached_tokens = cached;
  return view;
}

Snapshot Cluster(std::vector<WorkerView> prefill,
                 std::vector<WorkerView> decode) {
  Snapshot snapshot;
  snapshot.pair_allowed.assign(prefill.size() * decode.size(), true);
  snapshot.prefill = std::move(prefill);
  snapshot.decode = std::move(decode);
  snapshot.history_tokens = 100;
  return snapshot;
}

TEST(Placement, Tables) {
  struct Case {
    const char* why;
    Policy policy;
    Snapshot snapshot;
    Pair expected;
  };
  for (const Case& c : {
           Case{"nobody", Policy::kPrefixAware, Cluster({}, {}), {-1, -1}},
           Case{"no decode",
                Policy::kLeastLoaded,
                Cluster({View(0)}, {}),
                {-1, -1}},
           Case{"no prefill",
                Policy::kPrefixAware,
                Cluster({}, {View(0)}),
                {-1, 0}},
           Case{"shortest queue",
                Policy::kLeastLoaded,
                Cluster({View(50), View(10)}, {View(0)}),
                {1, 0}},
           Case{"fewest running",
                Policy::kLeastLoaded,
                Cluster({View(0)}, {View(0, 5), View(0, 2), View(0, 3)}),
                {0, 1}},
           Case{"a cached prefix is worth its tokens",
                Policy::kPrefixAware,
                Cluster({View(0), View(60, 0, 80)}, {View(0)}),
                {1, 0}},
           Case{"but not a longer queue",
                Policy::kPrefixAware,
                Cluster({View(0), View(90, 0, 80)}, {View(0)}),
                {0, 0}},
           Case{"least_loaded sees no cache",
                Policy::kLeastLoaded,
                Cluster({View(0), View(60, 0, 80)}, {View(0)}),
                {0, 0}},
           Case{"decode's own prefix",
                Policy::kPrefixAware,
                Cluster({}, {View(0, 1), View(0, 4, 80)}),
                {-1, 1}},
           Case{"not when it is overloaded",
                Policy::kPrefixAware,
                Cluster({}, {View(0, 1), View(0, 9, 80)}),
                {-1, 0}},
       }) {
    SeededRandom random(1);
    EXPECT_EQ(Place(c.policy, c.snapshot, &random), c.expected) << c.why;
  }
}

TEST(Placement, OnlyAllowedPairs) {
  Snapshot snapshot = Cluster({View(0), View(99)}, {View(0, 0), View(0, 9)});
  snapshot.pair_allowed = {false, true, false, false};
  SeededRandom random(1);
  for (Policy policy :
       {Policy::kRoundRobin, Policy::kLeastLoaded, Policy::kPrefixAware}) {
    for (snapshot.turn = 0; snapshot.turn < 8; ++snapshot.turn) {
      EXPECT_EQ(Place(policy, snapshot, &random), (Pair{0, 1}));
    }
  }
  snapshot.pair_allowed.assign(4, false);
  EXPECT_EQ(Place(Policy::kLeastLoaded, snapshot, &random), (Pair{-1, 0}));
  EXPECT_EQ(PlacePrefill(Policy::kPrefixAware, snapshot, 0, &random), -1);
}

// Rates of the prefill workers, and of one decode worker.
std::vector<double> Mended(std::vector<std::pair<double, bool>> prefill,
                           double decode) {
  Snapshot snapshot;
  for (const auto& [rate, old] : prefill) {
    WorkerView& view = snapshot.prefill.emplace_back();
    view.tokens_per_second = rate;
    view.rate_is_old = old;
  }
  snapshot.decode.emplace_back().tokens_per_second = decode;
  snapshot.decode[0].rate_is_old = true;
  MendOldRates(&snapshot);
  EXPECT_EQ(snapshot.decode[0].tokens_per_second, decode);
  std::vector<double> rates;
  for (const WorkerView& view : snapshot.prefill) {
    rates.push_back(view.tokens_per_second);
  }
  return rates;
}

TEST(Placement, WhoWasSlowOnceIsTriedAgain) {
  using Rates = std::vector<double>;
  EXPECT_EQ(Mended({{10, true}, {900, false}, {1100, false}}, 5),
            (Rates{1000, 900, 1100}));
  // What is true still stays; what is fast, old or not, too.
  EXPECT_EQ(Mended({{10, false}, {900, true}}, 5), (Rates{10, 900}));
  // Of others that know nothing, and of nobody.
  EXPECT_EQ(Mended({{10, true}, {0, true}}, 500), (Rates{500, 0}));
  EXPECT_EQ(Mended({{10, true}}, 0), (Rates{10}));
  EXPECT_EQ(Mended({{10, true}, {20, true}}, 500), (Rates{20, 20}));
}

TEST(Placement, TiesAreBrokenAtRandomAndReproducibly) {
  const Snapshot snapshot =
      Cluster({View(0), View(0), View(0)}, {View(0), View(0)});
  std::set<std::pair<int, int>> seen;
  SeededRandom a(7), b(7);
  for (int i = 0; i < 200; ++i) {
    const Pair pair = PrefixAware(snapshot, &a);
    EXPECT_EQ(pair, PrefixAware(snapshot, &b));
    seen.insert({pair.prefill, pair.decode});
  }
  EXPECT_EQ(seen.size(), 6u);
}

TEST(Placement, RoundRobinMeetsEveryPair) {
  Snapshot snapshot = Cluster({View(0), View(9)}, {View(0), View(0, 9)});
  std::set<std::pair<int, int>> seen;
  SeededRandom random(1);
  for (snapshot.turn = 0; snapshot.turn < 4; ++snapshot.turn) {
    const Pair pair = RoundRobin(snapshot, &random);
    seen.insert({pair.prefill, pair.decode});
  }
  EXPECT_EQ(seen.size(), 4u);
}

TEST(Placement, PoliciesHaveNames) {
  for (const char* name : {"round_robin", "least_loaded", "prefix_aware"}) {
    EXPECT_EQ(PolicyName(*ParsePolicy(name)), name);
  }
  EXPECT_FALSE(ParsePolicy("best").ok());
}

TEST(ShortWay, Table) {
  struct Case {
    const char* why;
    v1::Placement placement;
    int history, cached;
    bool available, suspect;
    Way expected;
  };
  constexpr auto kAuto = v1::PLACEMENT_AUTO;
  for (const Case& c : {
           Case{"long", kAuto, 33, 0, true, false, Way::kSplit},
           Case{"short", kAuto, 32, 0, true, false, Way::kLocal},
           Case{"cached", kAuto, 500, 468, true, false, Way::kLocal},
           Case{"one more", kAuto, 500, 467, true, false, Way::kSplit},
           Case{"nobody", kAuto, 500, 0, false, false, Way::kLocal},
           Case{"asked", v1::PLACEMENT_SPLIT, 3, 0, true, false, Way::kSplit},
           Case{"asked, nobody", v1::PLACEMENT_SPLIT, 3, 0, false, false,
                Way::kLocal},
           Case{"asked", v1::PLACEMENT_LOCAL, 500, 0, true, false, Way::kLocal},
           Case{"suspect", v1::PLACEMENT_LOCAL, 3, 0, true, true, Way::kSplit},
           Case{"suspect alone", kAuto, 500, 0, false, true, Way::kLocal},
       }) {
    WorkerView prefill = View(0);
    WorkerView decode = View(0, 0, c.cached);
    const ShortWayInput input{
        c.placement, c.history, c.available ? &prefill : nullptr,
        &decode,     c.suspect, 32};
    EXPECT_EQ(ChooseWay(input), c.expected) << c.why << " " << c.history;
  }
}

TEST(ShortWay, TheSmallerSumOfDelaysDecides) {
  struct Case {
    const char* why;
    double prefill_rate, decode_rate;
    int prefill_queue, decode_queue, running, cached;
    Way expected;
  };
  // 100 tokens; 1000 a second are 0.1 s of work.
  for (const Case& c : {
           Case{"nothing is known", 0, 0, 9999, 0, 0, 0, Way::kSplit},
           Case{"both idle, equally fast", 1000, 1000, 0, 0, 0, 0, Way::kSplit},
           Case{"idle, and slow only in what was measured", 100, 1000, 0, 0, 0,
                0, Way::kSplit},
           Case{"but the prompt is cached here", 100, 1000, 0, 0, 0, 50,
                Way::kLocal},
           Case{"slow, and a queue", 100, 1000, 1, 0, 0, 0, Way::kLocal},
           Case{"a queue", 1000, 1000, 1, 0, 0, 0, Way::kLocal},
           Case{"as long a queue here", 1000, 1000, 500, 500, 0, 0,
                Way::kSplit},
           Case{"a faster prefill worker", 4000, 1000, 299, 0, 0, 0,
                Way::kSplit},
           Case{"but a queue", 4000, 1000, 301, 0, 0, 0, Way::kLocal},
           Case{"a stream would wait", 1000, 1000, 99, 0, 1, 0, Way::kSplit},
           Case{"but less than the prompt", 1000, 1000, 101, 0, 1, 0,
                Way::kLocal},
           Case{"many streams", 1000, 1000, 999, 0, 10, 0, Way::kSplit},
           Case{"half of it is cached here", 1000, 1000, 499, 0, 9, 50,
                Way::kLocal},
           Case{"half as fast, it is assumed", 1000, 0, 99, 0, 0, 0,
                Way::kSplit},
           Case{"half as fast, it is assumed", 1000, 0, 101, 0, 0, 0,
                Way::kLocal},
       }) {
    WorkerView prefill = View(c.prefill_queue);
    WorkerView decode = View(c.decode_queue, c.running, c.cached);
    prefill.tokens_per_second = c.prefill_rate;
    decode.tokens_per_second = c.decode_rate;
    const ShortWayInput input{
        v1::PLACEMENT_AUTO, 100, &prefill, &decode, false, 32};
    EXPECT_EQ(ChooseWay(input), c.expected) << c.why;
  }
}

struct StopCase {
  std::vector<std::string> stops;
  std::string text;
  std::string out, out_included;
  int matched;
};

const std::vector<StopCase>& StopCases() {
  static const auto* const cases = new std::vector<StopCase>{
      {{}, "abc", "abc", "abc", -1},
      {{"x"}, "abc", "abc", "abc", -1},
      {{"b"}, "abc", "a", "ab", 0},
      {{"bc"}, "abcd", "a", "abc", 0},
      {{"bcx"}, "abcd", "abcd", "abcd", -1},
      {{"aab"}, "aaab", "a", "aaab", 0},
      {{"abab"}, "abacabab", "abac", "abacabab", 0},
      {{"abcd", "bc"}, "abcd", "a", "abc", 1},   // ends first
      {{"bc", "abc"}, "xabcd", "x", "xabc", 1},  // end together: the longest
      {{"\n\n"}, "a\nb\n\nc", "a\nb", "a\nb\n\n", 0},
      {{"é"}, "caféx", "caf", "café", 0},
      {{"abc"}, "ab", "ab", "ab", -1},  // held, then let go
  };
  return *cases;
}

// Every way of cutting a text gives the same result, and nothing released
// early is ever taken back.
TEST(StopStringsTest, ResultDependsOnTheTextAloneHoweverCut) {
  for (const StopCase& c : StopCases()) {
    for (const bool include : {false, true}) {
      const size_t cuts = size_t{1} << (c.text.size() - 1);
      for (size_t mask = 0; mask < cuts; ++mask) {
        StopStrings stops(c.stops, include);
        std::string out;
        int matched = -1;
        size_t begin = 0;
        for (size_t i = 1; i <= c.text.size() && matched < 0; ++i) {
          if (i < c.text.size() && ((mask >> (i - 1)) & 1) == 0) continue;
          const auto result = stops.Push(c.text.substr(begin, i - begin));
          out += result.text;
          matched = result.matched;
          begin = i;
          EXPECT_EQ((include ? c.out_included : c.out).rfind(out, 0), 0u);
        }
        if (matched < 0) out += stops.Flush();
        EXPECT_EQ(out, include ? c.out_included : c.out) << c.text;
        EXPECT_EQ(matched, c.matched) << c.text;
      }
    }
  }
}

// What a text comes to of which stop strings count that end behind its first
// `passed` bytes.
std::pair<std::string, int> Stopped(const std::vector<std::string>& stops,
                                    const std::string& text, size_t passed,
                                    bool include) {
  for (size_t end = passed + 1; end <= text.size(); ++end) {
    size_t longest = 0;
    int matched = -1;
    for (size_t i = 0; i < stops.size(); ++i) {
      if (stops[i].size() <= longest ||
          !std::string_view(text).substr(0, end).ends_with(stops[i])) {
        continue;
      }
      longest = stops[i].size();
      matched = static_cast<int>(i);
    }
    if (matched < 0) continue;
    return {text.substr(0, include ? end : end - longest), matched};
  }
  return {text, -1};
}

TEST(StopStringsTest, OneMayBeginInTextInWhichNoneCounts) {
  struct Case {
    std::vector<std::string> stops;
    std::string text;
  };
  for (const Case& c : std::vector<Case>{{{"n a"}, " upon a"},
                                         {{"n a"}, "n an a"},
                                         {{"aa"}, "aaaa"},
                                         {{"abab"}, "abababa"},
                                         {{"abcd", "bc"}, "abcabcd"},
                                         {{"bc", "abcd"}, "abcd"},
                                         {{"abcx", "b", "bcd"}, "abcde"}}) {
    const size_t size = c.text.size();
    for (size_t mask = 0; mask < size_t{1} << (size - 1); ++mask) {
      std::vector<size_t> ends;
      for (size_t i = 1; i < size; ++i) {
        if (((mask >> (i - 1)) & 1) != 0) ends.push_back(i);
      }
      ends.push_back(size);
      // With so many pieces passed, and one behind all of them empty.
      for (size_t pieces = 0; pieces <= ends.size(); ++pieces) {
        for (const bool include : {false, true}) {
          StopStrings stops(c.stops, include);
          std::string out;
          int matched = -1;
          for (size_t i = 0; i < ends.size() && matched < 0; ++i) {
            const size_t begin = i == 0 ? 0 : ends[i - 1];
            const std::string piece = c.text.substr(begin, ends[i] - begin);
            if (i < pieces) {
              out += stops.Pass(piece);
            } else {
              const StopStrings::Result result = stops.Push(piece);
              out += result.text;
              matched = result.matched;
            }
          }
          if (matched < 0) {
            const StopStrings::Result result = stops.Push("");
            out += result.text;
            matched = result.matched;
          }
          if (matched < 0) out += stops.Flush();
          const auto expected = Stopped(
              c.stops, c.text, pieces == 0 ? 0 : ends[pieces - 1], include);
          EXPECT_EQ(std::make_pair(out, matched), expected)
              << c.text << ", cut by " << mask << ", " << pieces << " passed";
        }
      }
    }
  }
}

TEST(StopStringsTest, HoldsBackOnlyTheLongestPrefix) {
  StopStrings stops({"stop!"}, false);
  EXPECT_EQ(stops.Push("no st").text, "no ");
  EXPECT_TRUE(stops.holding());
  EXPECT_EQ(stops.Push("ate").text, "state");
  EXPECT_FALSE(stops.holding());
}

}  // namespace
}  // namespace tandem::router
