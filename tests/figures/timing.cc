// SPDX-License-Identifier: Apache-2.0
// Row "timing": whether a tenant can tell by its first token that another
// asked the same before. Half of B's prompts were A's a moment ago, nobody has
// asked the rest; the times of both halves are compared by their ranks (Mann
// and Whitney's test). That it can see a difference shows where there is one:
// in what B asks again itself.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "router/tenants/key_file.h"
#include "tests/figures/figures.h"

namespace tandem::figures {
namespace {

// By how many standard deviations the ranks of `a` lie above what they would
// be if `a` and `b` were drawn alike. Times do not tie.
double RankDeviation(const std::vector<double>& a,
                     const std::vector<double>& b) {
  const auto n = static_cast<double>(a.size());
  const auto m = static_cast<double>(b.size());
  double above = 0;  // pairs in which a's is the larger
  for (const double x : a) {
    above += static_cast<double>(
        std::count_if(b.begin(), b.end(), [x](double y) { return x > y; }));
  }
  return (above - n * m / 2) / std::sqrt(n * m * (n + m + 1) / 12);
}

class TimingRow : public Row {
 protected:
  ~TimingRow() override { std::filesystem::remove(keys_); }

  void BeginWithTenants() {
    {
      std::ofstream file(keys_);
      for (const auto& [tenant, key] : {std::pair("a", &a_), {"b", &b_}}) {
        *key = router::NewKey(&random_);
        file << router::FormatKeyEntry(
                    {.tenant = tenant, .digest = router::DigestOf(*key)}, {})
             << "\n";
      }
    }
    cluster_ = std::make_unique<Cluster>(integration::ClusterOptions{
        .router_arguments = {"--api-keys-file", keys_}});
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status;
  }
  // Seconds to the first token.
  double Ask(const std::string& key, const v1::GenerateRequest& request) {
    grpc::ClientContext context;
    Cluster::SetDeadline(&context);
    context.AddMetadata("authorization", absl::StrCat("Bearer ", key));
    const integration::Outcome outcome = cluster_->Generate(request, &context);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    // Who is computed anew finds what it left itself.
    cached_ = outcome.done.timings().retries() > 0
                  ? 0
                  : outcome.done.usage().cached_tokens();
    return outcome.deltas.empty()
               ? 0
               : Served::Seconds(outcome.deltas.front() - outcome.sent);
  }

  const std::string keys_ =
      absl::StrCat(testing::TempDir(), "/tandem-timing-", getpid());
  std::string a_, b_;
  int cached_ = 0;  // of the last answer
};

TEST_F(TimingRow, Holds) {
  constexpr size_t kHalf = 8;
  const int rounds = Sized(64, 12);
  BeginWithTenants();
  if (HasFatalFailure()) return;
  std::vector<double> others, nobodys, again;
  int shared = 0;
  for (int round = 0; round < rounds; ++round) {
    // The first half are A's, too.
    std::vector<v1::GenerateRequest> prompts =
        Requests(2 * kHalf, random_.Next(), 120, 120, 1);
    for (v1::GenerateRequest& prompt : prompts) {
      // No prompt begins as one of an earlier round.
      prompt.set_text(absl::StrCat(random_.Next(), " ", prompt.text()));
      prompt.clear_cache();
    }
    for (size_t i = 0; i < kHalf; ++i) Ask(a_, prompts[i]);
    std::vector<size_t> order(prompts.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[random_.Below(i)]);
    }
    for (const size_t i : order) {
      (i < kHalf ? others : nobodys).push_back(Ask(b_, prompts[i]));
      shared += cached_;
    }
    for (size_t i = kHalf; i < prompts.size(); ++i) {
      again.push_back(Ask(b_, prompts[i]));
    }
  }
  const double told = RankDeviation(others, nobodys);
  const double seen = RankDeviation(again, nobodys);
  Tell(absl::StrFormat("first tokens of %d prompts that another tenant asked "
                       "before, and of %d that nobody did: no difference "
                       "(p > 0.01)",
                       others.size(), nobodys.size()),
       absl::StrFormat(
           "medians %.2f and %.2f ms, ranks differ by %.2f standard "
           "deviations; of a tenant's own %.2f ms, by %.1f; %d "
           "tokens shared",
           Percentile(others, 0.5) * 1e3, Percentile(nobodys, 0.5) * 1e3, told,
           Percentile(again, 0.5) * 1e3, seen, shared),
       shared == 0 && seen < -5, std::abs(told) < 2.58);
  TellWhatIsLeft();
}

}  // namespace
}  // namespace tandem::figures
