// SPDX-License-Identifier: Apache-2.0
// TANDEM_CHECK(condition, "what this means"): for bugs of this program only
// (a broken invariant is worse than a crash, since a crash is recovered
// from). Whatever input can cause is an absl::Status instead.

#ifndef TANDEM_COMMON_CHECK_H_
#define TANDEM_COMMON_CHECK_H_

#include <cstdio>
#include <cstdlib>

#include "absl/base/optimization.h"

#define TANDEM_CHECK(condition, meaning)                              \
  do {                                                                \
    if (ABSL_PREDICT_FALSE(!(condition))) {                           \
      std::fprintf(stderr, "%s:%d: check failed: %s: %s\n", __FILE__, \
                   __LINE__, #condition, meaning);                    \
      std::abort();                                                   \
    }                                                                 \
  } while (false)

#endif  // TANDEM_COMMON_CHECK_H_
