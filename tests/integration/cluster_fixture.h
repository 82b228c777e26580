// SPDX-License-Identifier: Apache-2.0
// A cluster for one test, which must leave nothing behind.

#ifndef TANDEM_TESTS_INTEGRATION_CLUSTER_FIXTURE_H_
#define TANDEM_TESTS_INTEGRATION_CLUSTER_FIXTURE_H_

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "tests/integration/cluster.h"

namespace tandem::integration {

class ClusterTest : public testing::Test {
 protected:
  void Begin(ClusterOptions options) {
    cluster_ = std::make_unique<Cluster>(std::move(options));
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status;
    // Connections and pollers of a first request are part of the baseline.
    ASSERT_TRUE(
        cluster_->Generate(TextRequest("Once upon a time", 4)).status.ok());
    ASSERT_EQ(cluster_->WhatIsLeft(), "");
  }
  void TearDown() override {
    if (cluster_ != nullptr && !HasFatalFailure()) {
      EXPECT_EQ(cluster_->WhatIsLeft(), "");
    }
  }

  std::unique_ptr<Cluster> cluster_;
};

}  // namespace tandem::integration

#endif  // TANDEM_TESTS_INTEGRATION_CLUSTER_FIXTURE_H_
