// SPDX-License-Identifier: Apache-2.0
// A block file on virtual time: one operation after the other, each after a
// while, some of which fail as a disk's do.

#ifndef TANDEM_ENGINE_TESTING_FAKE_BLOCK_FILE_H_
#define TANDEM_ENGINE_TESTING_FAKE_BLOCK_FILE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "common/loop.h"
#include "common/random.h"
#include "engine/block_file.h"

namespace tandem::engine {

struct FakeBlockFileOptions {
  absl::Duration latency = absl::Milliseconds(2);
  double full = 0;     // probability that a write finds no room
  double corrupt = 0;  // probability that a read finds rubbish
  uint64_t seed = 1;
};

class FakeBlockFile final : public BlockFile {
 public:
  FakeBlockFile(const FakeBlockFileOptions& options, Loop* loop)
      : options_(options), random_(options.seed), timer_(loop) {}

  void Write(int slot, const BlockHash& hash, absl::Span<const std::byte> data,
             Done done) override {
    Push([this, slot, hash, data, done = std::move(done)]() mutable {
      Slot& to = slots_[slot];
      to.data.assign(data.begin(), data.end());
      to.hash = hash;
      if (random_.Uniform() < options_.full) {
        to = Slot();
        done(absl::ResourceExhaustedError("no space left on device"));
      } else {
        done(absl::OkStatus());
      }
    });
  }
  void Read(int slot, const BlockHash& hash, absl::Span<std::byte> data,
            Done done) override {
    Push([this, slot, hash, data, done = std::move(done)]() mutable {
      const Slot& from = slots_[slot];
      const bool right = from.data.size() == data.size() && from.hash == hash &&
                         random_.Uniform() >= options_.corrupt;
      if (right) {
        std::copy(from.data.begin(), from.data.end(), data.begin());
        done(absl::OkStatus());
      } else {
        std::fill(data.begin(), data.end(), std::byte{0x5a});
        done(absl::DataLossError("not what was written"));
      }
    });
  }

 private:
  struct Slot {
    BlockHash hash;
    std::vector<std::byte> data;
  };

  void Push(absl::AnyInvocable<void()> run) {
    operations_.push_back(std::move(run));
    if (operations_.size() == 1) Start();
  }
  void Start() {
    timer_.Start(options_.latency, [this] {
      absl::AnyInvocable<void()> run = std::move(operations_.front());
      operations_.pop_front();
      if (!operations_.empty()) Start();
      run();
    });
  }

  const FakeBlockFileOptions options_;
  SeededRandom random_;
  std::map<int, Slot> slots_;
  std::deque<absl::AnyInvocable<void()>> operations_;
  Timer timer_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_TESTING_FAKE_BLOCK_FILE_H_
