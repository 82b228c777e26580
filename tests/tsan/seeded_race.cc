// SPDX-License-Identifier: Apache-2.0
// A data race on purpose: under ThreadSanitizer this must fail, or a silent
// run of the other tests proves nothing.

#include <thread>

namespace {

int counter = 0;  // deliberately without a lock

void Count() {
  for (int i = 0; i < 1000; ++i) counter = counter + 1;
}

}  // namespace

int main() {
  std::thread other(Count);
  Count();
  other.join();
  return counter < 0;
}
