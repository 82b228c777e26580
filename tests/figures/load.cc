// SPDX-License-Identifier: Apache-2.0
// Row "load": many streams held for minutes.

#include "absl/strings/str_format.h"
#include "tests/figures/figures.h"

namespace tandem::figures {
namespace {

using std::chrono::seconds;

class LoadRow : public Row {};

TEST_F(LoadRow, Holds) {
  const int streams = Sized(256, 64);
  const seconds held(Sized(300, 20));
  const int least = Sized(20000, 300);
  Begin({.prefill = 2,
         .decode = 2,
         .worker_arguments = {"--max-num-seqs", "128"},
         // No more KV than is soon touched, of which a huge page in each layer
         // holds 512 blocks: what grows then is a leak.
         .prefill_arguments = {"--num-kv-blocks", "512"},
         .decode_arguments = {"--num-kv-blocks", Sized("1024", "768")}},
        [&] {
          auto requests = Requests(64, seed_, 8, 200, 64);
          for (auto& request : requests) {
            request.mutable_stopping()->set_max_tokens(
                1 + static_cast<int>(random_.Below(64)));
          }
          return requests;
        }());
  if (HasFatalFailure()) return;
  MemoryWatch memory(
      *cluster_, {"router", "prefill-0", "prefill-1", "decode-0", "decode-1"});
  Load load(cluster_.get(), &expectations_, streams);
  std::this_thread::sleep_for(held);
  memory.Stop();
  load.Finish();
  const std::vector<Served> served = load.served();
  const std::vector<double> gaps = Gaps(served);
  const std::vector<double> first = FirstTokens(served);
  const double rate =
      static_cast<double>(load.completed()) / static_cast<double>(held.count());
  Tell(absl::StrFormat("%d streams held %d s, at least %d requests: 0 failed, "
                       "wrong or hung",
                       streams, held.count(), least),
       absl::StrFormat("%s; %.0f a second; first token p50 %.2f s, p99 %.2f s; "
                       "largest gap of a stream p50 %.2f s, p99 %.2f s",
                       Counts(load), rate, Percentile(first, 0.5),
                       Percentile(first, 0.99), Percentile(gaps, 0.5),
                       Percentile(gaps, 0.99)),
       Clean(load), load.completed() >= least);
  EXPECT_EQ(load.faults(), "");
  const auto [name, slope] = memory.Steepest(held * 2 / 5);
  const double growth =
      slope / 3600 * static_cast<double>(held.count()) * 3 / 5;
  Tell(absl::StrFormat("memory grows by at most 2 MiB from second %d on",
                       held.count() * 2 / 5),
       absl::StrFormat("by %.2f MiB (%.1f MiB/h), %s", growth, slope, name),
       true, growth <= 2);
  TellWhatIsLeft();
}

}  // namespace
}  // namespace tandem::figures
