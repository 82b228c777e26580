// SPDX-License-Identifier: Apache-2.0
// main() of tests of kernels with a fault in them: succeeds if they notice.

#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (RUN_ALL_TESTS() != 0) {
    std::puts("The fault was noticed, as it must be.");
    return 0;
  }
  std::puts("The tests are green with a fault in the kernels.");
  return 1;
}
