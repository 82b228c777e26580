// SPDX-License-Identifier: Apache-2.0
// Limits of this CPU, roughly: what the emulator is compared with means
// nothing, and only has to be there.

#include <chrono>
#include <cstring>

#include "bench/gpu/yardstick.h"

namespace tandem::bench {
namespace {

using Clock = std::chrono::steady_clock;

class HostYardstick final : public Yardstick {
 public:
  std::vector<std::pair<std::string, std::string>> Facts() override {
    return {{"device", "emulated: no figure means anything"}};
  }
  absl::StatusOr<double> CopyBandwidth() override {
    const size_t bytes = size_t{8} << 20;
    const std::vector<char> from(bytes, 1);
    std::vector<char> to(bytes);
    const auto begin = Clock::now();
    std::memcpy(to.data(), from.data(), bytes);
    const std::chrono::duration<double> took = Clock::now() - begin;
    return 2 * static_cast<double>(bytes) / took.count();
  }
  absl::StatusOr<double> BestMatMul(int tokens, int rows, int cols) override {
    return 2e-9 * tokens * rows * cols;  // one operation per nanosecond
  }
};

}  // namespace

std::unique_ptr<Yardstick> NewHostYardstick() {
  return std::make_unique<HostYardstick>();
}

}  // namespace tandem::bench
