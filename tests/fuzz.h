// SPDX-License-Identifier: Apache-2.0
// A fuzz target is a function of bytes that ends, or aborts where a promise is
// broken. With TANDEM_LIBFUZZER it is a program of libFuzzer's; else
// tests/fuzz_main.cc knows it by its name and runs its committed corpus.
//
//   TANDEM_FUZZ_TARGET(fuzz_ticket)(const uint8_t* data, size_t size) {
//     ...
//     return 0;
//   }

#ifndef TANDEM_TESTS_FUZZ_H_
#define TANDEM_TESTS_FUZZ_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

namespace tandem::fuzz {

using Target = int (*)(const uint8_t* data, size_t size);

struct Registered {
  Registered(const char* name, Target target);
};

// Aborts with the place, which is what libFuzzer saves an input for.
inline void Require(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

// Reads an input as decisions: zeros once it has run out.
class Input {
 public:
  Input(const uint8_t* data, size_t size)
      : rest_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return rest_.empty(); }
  uint8_t Byte() {
    const std::string_view byte = Take(1);
    return byte.empty() ? 0 : static_cast<uint8_t>(byte[0]);
  }
  int Below(int n) { return Byte() % n; }
  // At most `n` bytes.
  std::string_view Take(size_t n) {
    const std::string_view taken = rest_.substr(0, n);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  // As many as the next two bytes say, little-endian.
  std::string_view Piece() {
    const size_t low = Byte();
    return Take(low | size_t{Byte()} << 8);
  }
  std::string_view Rest() { return Take(rest_.size()); }

 private:
  std::string_view rest_;
};

}  // namespace tandem::fuzz

#define TANDEM_FUZZ_REQUIRE(condition) \
  ::tandem::fuzz::Require((condition), #condition)

#ifdef TANDEM_LIBFUZZER
#define TANDEM_FUZZ_TARGET(name) extern "C" int LLVMFuzzerTestOneInput
#else
#define TANDEM_FUZZ_TARGET(name)                                          \
  static int name(const uint8_t* data, size_t size);                      \
  static const ::tandem::fuzz::Registered registered_##name(#name, name); \
  static int name
#endif

#endif  // TANDEM_TESTS_FUZZ_H_
