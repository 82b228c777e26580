// SPDX-License-Identifier: Apache-2.0
// A data race on purpose: under ThreadSanitizer this must fail, or a silent
// run of the other tests proves nothing.

#include <thread>

namespace {

// Deliberately without a lock; volatile, so that no loop becomes one addition,
// which the sanitizer misses now and then.
volatile int counter = 0;

void Count() {
  for (int i = 0; i < 100000; ++i) counter = counter + 1;
}

}  // namespace

int main() {
  std::thread other(Count);
  Count();
  other.join();
  return counter < 0;
}
