// SPDX-License-Identifier: Apache-2.0
// A row of logits against a golden's, which has those of some ids and the size
// of the largest one.

#ifndef TANDEM_TESTS_ENGINE_GOLDEN_ROW_H_
#define TANDEM_TESTS_ENGINE_GOLDEN_ROW_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace tandem::engine {

inline void ExpectRow(const std::vector<float>& logits,
                      const nlohmann::json& row, const std::string& where) {
  constexpr double kTolerance = 1e-4;  // of the largest logit in the row
  const double allowed = kTolerance * row["max_abs"].get<double>();
  for (size_t i = 0; i < row["ids"].size(); ++i) {
    const int id = row["ids"][i];
    EXPECT_NEAR(logits[id], row["logits"][i].get<double>(), allowed)
        << where << ", logit " << id;
  }
}

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_GOLDEN_ROW_H_
