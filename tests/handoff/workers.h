// SPDX-License-Identifier: Apache-2.0
// What stands behind a sender and a receiver in tests: real bytes in paged
// blocks, gathered, scattered and digested for real, and a record of every
// callback so that "exactly once" can be checked.

#ifndef TANDEM_TESTS_HANDOFF_WORKERS_H_
#define TANDEM_TESTS_HANDOFF_WORKERS_H_

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/loop.h"
#include "common/random.h"
#include "gtest/gtest.h"
#include "handoff/receiver.h"
#include "handoff/sender.h"
#include "handoff/slices.h"
#include "tests/handoff/pinned.h"

namespace tandem::handoff::testing {

struct Shape {
  int layers = 4;
  int kv_heads = 2;
  int head_dim = 8;
  std::vector<bool> windows = {};  // [layers], or none has one

  bool windowed(int layer) const {
    return !windows.empty() && windows[static_cast<size_t>(layer)];
  }
};

// KV of one history in blocks of `block_size` positions. Elements are small
// integers, so that f32 and bf16 hold the same values.
class FakeKv {
 public:
  FakeKv(const Shape& shape, int positions, int block_size)
      : shape_(shape), block_size_(block_size) {
    blocks_.resize((positions + block_size - 1) / block_size,
                   std::vector<float>(block_size * shape.layers * Row(), -1));
  }

  static FakeKv Of(const Shape& shape, int positions, int block_size,
                   uint64_t seed) {
    FakeKv kv(shape, positions, block_size);
    for (int l = 0; l < shape.layers; ++l) {
      for (int p = 0; p < positions; ++p) {
        SeededRandom random(seed * 1'000'003 + l * 10'007 + p);
        for (int i = 0; i < kv.Row(); ++i) {
          kv.At(l, p)[i] = static_cast<float>(random.Next() % 256);
        }
      }
    }
    return kv;
  }

  // K of all heads, then V of them.
  float* At(int layer, int position) {
    return blocks_[position / block_size_].data() +
           (layer * block_size_ + position % block_size_) * Row();
  }

  // The wire bytes of one row.
  std::string Wire(int layer, int position, const Grant& grant) {
    std::string bytes;
    for (int half = 0; half < 2; ++half) {
      for (int h = grant.head_begin; h < grant.head_end; ++h) {
        const float* row = At(layer, position) +
                           (half * shape_.kv_heads + h) * shape_.head_dim;
        for (int i = 0; i < shape_.head_dim; ++i) {
          char word[4];
          std::memcpy(word, &row[i], 4);
          // bf16 is the upper half; these values lose nothing.
          if (grant.wire == kernels::DType::kF32) bytes.append(word, 2);
          bytes.append(word + 2, 2);
        }
      }
    }
    return bytes;
  }

  void FromWire(int layer, int position, const Grant& grant,
                const std::byte* bytes) {
    for (int half = 0; half < 2; ++half) {
      for (int h = grant.head_begin; h < grant.head_end; ++h) {
        float* row = At(layer, position) +
                     (half * shape_.kv_heads + h) * shape_.head_dim;
        for (int i = 0; i < shape_.head_dim; ++i) {
          char word[4] = {};
          const size_t size = kernels::SizeOf(grant.wire);
          std::memcpy(word + 4 - size, bytes, size);
          bytes += size;
          std::memcpy(&row[i], word, 4);
        }
      }
    }
  }

  kernels::KvDigest Digest(const SliceRange& range, const Grant& grant) {
    kernels::KvDigest sum;
    for (int l = range.layer_begin; l < range.layer_end; ++l) {
      for (int p = range.position_begin; p < range.position_end; ++p) {
        uint64_t low = grant.digest_key ^ (uint64_t(l) << 40) ^ uint64_t(p);
        for (unsigned char byte : Wire(l, p, grant)) {
          low = (low ^ byte) * 0x100000001b3;
        }
        sum += {low, low * 31 + 7};
      }
    }
    return sum;
  }

  bool operator==(const FakeKv& other) const {
    return blocks_ == other.blocks_;
  }
  int Row() const { return 2 * shape_.kv_heads * shape_.head_dim; }

 private:
  Shape shape_;
  int block_size_;
  std::vector<std::vector<float>> blocks_;
};

inline v1::WorkerRef Ref(const std::string& id, const std::string& salt = "") {
  v1::WorkerRef ref;
  ref.set_worker_id(id);
  std::string incarnation = id + salt;
  incarnation.resize(16, '.');
  ref.set_incarnation(incarnation);
  ref.set_endpoint(id + ":1");
  return ref;
}

inline Attempt MakeAttempt(int n) {
  Attempt attempt;
  attempt.request_id = "request " + std::to_string(n);
  attempt.request_id.resize(16, '.');
  attempt.number = static_cast<uint32_t>(n);
  return attempt;
}

// How a delegate's `done` comes back: at once, or as a later task.
struct Work {
  Loop* loop = nullptr;
  // With a real device thread behind `loop`: where `done` belongs.
  Loop* home = nullptr;
  absl::Duration delay = absl::ZeroDuration();
  bool inline_done = false;
  bool hold = false;  // until Release
  std::vector<absl::AnyInvocable<void()>> held;

  void Run(absl::AnyInvocable<void()> done) {
    if (hold) {
      held.push_back(std::move(done));
    } else if (inline_done) {
      done();
    } else if (delay > absl::ZeroDuration()) {
      loop->After(delay, std::move(done));
    } else {
      loop->Post(std::move(done));
    }
  }
  template <typename... Args>
  absl::AnyInvocable<void(Args...)> Home(
      absl::AnyInvocable<void(Args...)> done) {
    if (home == nullptr) return done;
    return [to = home, done = std::move(done)](Args... args) mutable {
      to->Post([done = std::move(done), args...]() mutable { done(args...); });
    };
  }
  void Release() {
    hold = false;
    for (auto& done : std::exchange(held, {})) done();
  }
};

class PrefillSide final : public SenderDelegate {
 public:
  struct Seen {
    std::vector<Answer> answers;
    int acknowledged = 0;
    int failed = 0;
    absl::Status status;
    std::string failed_way;
    HandoffTimings timings;
    bool cancelled = false;
  };

  PrefillSide(const Shape& shape, int block_size, Loop* loop)
      : shape_(shape), block_size_(block_size) {
    gathering.loop = loop;
  }

  void Fill(const Attempt& attempt, int positions, uint64_t seed) {
    kv_.insert_or_assign(attempt.number,
                         std::make_unique<FakeKv>(
                             FakeKv::Of(shape_, positions, block_size_, seed)));
  }

  void OnAnswer(const Attempt& attempt, Answer answer,
                const Grant& grant) override {
    Seen& s = seen[attempt.number];
    EXPECT_EQ(s.acknowledged + s.failed, 0);
    EXPECT_FALSE(s.cancelled);
    s.answers.push_back(answer);
    if (on_answer) on_answer(attempt, answer, grant);
  }
  void Gather(const Attempt& attempt, const SliceRange& range,
              const Grant& grant, std::byte* staging,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    if (on_gather) on_gather(attempt, range);
    EXPECT_TRUE(pinned == nullptr || pinned->Reaches(staging));
    ++gathers;
    FakeKv* kv = kv_.at(attempt.number).get();
    // The store happens at the end of the work, as late as it may.
    gathering.Run([=, this, done = gathering.Home(std::move(done))]() mutable {
      std::byte* out = staging;
      for (int l = range.layer_begin; l < range.layer_end; ++l) {
        for (int p = range.position_begin; p < range.position_end; ++p) {
          const std::string wire = kv->Wire(l, p, grant);
          std::memcpy(out, wire.data(), wire.size());
          out += wire.size();
        }
      }
      kernels::KvDigest digest = kv->Digest(range, grant);
      if (corrupt_digest) digest.low ^= 1;
      done(digest);
    });
  }
  void OnAcknowledged(const Attempt& attempt,
                      const HandoffTimings& timings) override {
    Seen& s = seen[attempt.number];
    EXPECT_FALSE(s.cancelled);
    EXPECT_EQ(++s.acknowledged + s.failed, 1);
    s.timings = timings;
  }
  void OnFailed(const Attempt& attempt, const absl::Status& status,
                const std::string& failed_way) override {
    Seen& s = seen[attempt.number];
    EXPECT_FALSE(s.cancelled);
    EXPECT_EQ(s.acknowledged + ++s.failed, 1);
    s.status = status;
    s.failed_way = failed_way;
    if (on_failed) on_failed(attempt);
  }

  Work gathering;
  int gathers = 0;
  const Pinned* pinned = nullptr;  // what gathers must fill
  bool corrupt_digest = false;
  std::map<uint32_t, Seen> seen;
  std::function<void(const Attempt&, Answer, const Grant&)> on_answer;
  std::function<void(const Attempt&, const SliceRange&)> on_gather;
  std::function<void(const Attempt&)> on_failed;
  FakeKv* kv(const Attempt& attempt) { return kv_.at(attempt.number).get(); }

 private:
  const Shape shape_;
  const int block_size_;
  std::map<uint32_t, std::unique_ptr<FakeKv>> kv_;
};

class DecodeSide final : public ReceiverDelegate {
 public:
  struct Seen {
    int offers = 0;
    int committed = 0;
    int failed = 0;
    bool ended = false;
    absl::Status status;
    std::string failed_way;
    std::string mixed;
    FirstToken first;
  };

  DecodeSide(const Shape& shape, int block_size, Loop* loop)
      : shape_(shape), block_size_(block_size) {
    scattering.loop = digesting.loop = loop;
  }

  absl::StatusOr<Verdict> OnOffer(const Ticket& ticket,
                                  const v1::HandoffOffer& offer,
                                  const std::string& mixed,
                                  Grant* grant) override {
    Seen& s = seen[ticket.attempt.number];
    EXPECT_EQ(++s.offers, 1);
    s.mixed = mixed;
    kv_.insert_or_assign(
        ticket.attempt.number,
        std::make_unique<FakeKv>(shape_, offer.positions(), block_size_));
    *grant = Wanted(offer.positions());
    if (!refuse.ok()) return refuse;
    return verdict;
  }
  Grant Wanted(int positions) const {
    Grant grant;
    grant.position_begin = cached;
    grant.position_end = positions;
    grant.head_end = heads;
    grant.windowed_begin = windowed_begin;
    return grant;
  }
  void Scatter(const Attempt& attempt, const SliceRange& range,
               const Grant& grant, const std::byte* staging,
               absl::AnyInvocable<void()> done) override {
    ++scatters;
    if (on_scatter) on_scatter(attempt, range);
    EXPECT_TRUE(pinned == nullptr || pinned->Reaches(staging));
    FakeKv* kv = kv_.at(attempt.number).get();
    scattering.Run(
        [=, this, done = scattering.Home(std::move(done))]() mutable {
          const std::byte* in = staging;
          for (int l = range.layer_begin; l < range.layer_end; ++l) {
            for (int p = range.position_begin; p < range.position_end; ++p) {
              kv->FromWire(l, p, grant, in);
              in += RowBytes(grant, shape_.head_dim);
            }
          }
          done();
        });
  }
  void Digest(const Attempt& attempt, const Grant& grant,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    digesting.Run([=, this, done = digesting.Home(std::move(done))]() mutable {
      done(DigestOf(attempt, grant));
    });
  }
  absl::Status OnCommit(const Attempt& attempt,
                        const FirstToken& first) override {
    Seen& s = seen[attempt.number];
    EXPECT_FALSE(s.ended);
    EXPECT_EQ(++s.committed + s.failed, 1);
    s.first = first;
    return commit_status;
  }
  void OnFailed(const Attempt& attempt, const absl::Status& status,
                const std::string& failed_way) override {
    Seen& s = seen[attempt.number];
    EXPECT_FALSE(s.ended);
    EXPECT_EQ(s.committed + ++s.failed, 1);
    s.status = status;
    s.failed_way = failed_way;
  }
  void OnFatal(const absl::Status& status) override { fatal = status; }

  Work scattering;
  Work digesting;
  int scatters = 0;
  const Pinned* pinned = nullptr;  // what scatters must read
  int cached = 0;
  int windowed_begin = 0;  // wanted from there of layers with a window
  int heads = 0;           // that are wanted; 0: all
  Verdict verdict = Verdict::kGranted;
  absl::Status refuse;
  absl::Status commit_status;
  absl::Status fatal;
  std::map<uint32_t, Seen> seen;
  std::function<void(const Attempt&, const SliceRange&)> on_scatter;
  FakeKv* kv(const Attempt& attempt) { return kv_.at(attempt.number).get(); }
  // Of all that is granted.
  kernels::KvDigest DigestOf(const Attempt& attempt, const Grant& grant) {
    kernels::KvDigest sum;
    for (int l = 0; l < shape_.layers; ++l) {
      const int begin =
          shape_.windowed(l) ? grant.windowed_begin : grant.position_begin;
      sum += kv(attempt)->Digest({l, l + 1, begin, grant.position_end}, grant);
    }
    return sum;
  }

 private:
  const Shape shape_;
  const int block_size_;
  std::map<uint32_t, std::unique_ptr<FakeKv>> kv_;
};

}  // namespace tandem::handoff::testing

#endif  // TANDEM_TESTS_HANDOFF_WORKERS_H_
