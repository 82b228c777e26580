// SPDX-License-Identifier: Apache-2.0
// A block file on virtual time: one operation after the other, each after a
// while, some of which fail as a disk's do.

#ifndef TANDEM_ENGINE_TESTING_FAKE_BLOCK_FILE_H_
#define TANDEM_ENGINE_TESTING_FAKE_BLOCK_FILE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/loop.h"
#include "common/random.h"
#include "engine/kv/block_file.h"

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
    // Takes the data when it begins, as early as a thread may.
    auto taken = std::make_shared<std::vector<std::byte>>();
    auto take = [taken, data] { taken->assign(data.begin(), data.end()); };
    auto write = [this, slot, hash, taken, done = std::move(done)]() mutable {
      if (!slots_.contains(slot) && slots_.size() >= room_) {
        return done(absl::ResourceExhaustedError("no space left on device"));
      }
      Slot& to = slots_[slot];
      to.data = std::move(*taken);
      to.hash = hash;
      if (random_.Uniform() < options_.full) {
        to = Slot();
        done(absl::ResourceExhaustedError("no space left on device"));
      } else {
        done(absl::OkStatus());
      }
    };
    Push({std::move(take), std::move(write)});
  }
  void Read(int slot, const BlockHash& hash, absl::Span<std::byte> data,
            Done done) override {
    auto read = [this, slot, hash, data, done = std::move(done)]() mutable {
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
    };
    Push({[] {}, std::move(read)});
  }

  // Of a disk on which others write: what has been written keeps its place.
  void set_room(size_t slots) { room_ = slots; }

 private:
  struct Slot {
    BlockHash hash;
    std::vector<std::byte> data;
  };

  struct Operation {
    absl::AnyInvocable<void()> begin;
    absl::AnyInvocable<void()> end;
  };

  void Push(Operation operation) {
    operations_.push_back(std::move(operation));
    if (operations_.size() == 1) Start();
  }
  void Start() {
    operations_.front().begin();
    timer_.Start(options_.latency, [this] {
      absl::AnyInvocable<void()> end = std::move(operations_.front().end);
      operations_.pop_front();
      if (!operations_.empty()) Start();
      end();
    });
  }

  const FakeBlockFileOptions options_;
  SeededRandom random_;
  size_t room_ = std::numeric_limits<size_t>::max();
  std::map<int, Slot> slots_;
  std::deque<Operation> operations_;
  Timer timer_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_TESTING_FAKE_BLOCK_FILE_H_
