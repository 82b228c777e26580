// SPDX-License-Identifier: Apache-2.0
// `tandem status`: what a router knows of its cluster, as a table or JSON.

#ifndef TANDEM_CLI_STATUS_H_
#define TANDEM_CLI_STATUS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/connect.h"
#include "tandem/v1/admin.pb.h"

namespace tandem::cli {

struct StatusFlags {
  ConnectFlags admin;
  bool json = false;
  bool watch = false;
  absl::Duration interval = absl::Seconds(1);
};

absl::StatusOr<v1::GetClusterStateResponse> FetchClusterState(
    const ConnectFlags& admin);

absl::Status ShowStatus(const StatusFlags& flags);

std::string StatusTable(const v1::GetClusterStateResponse& state);

}  // namespace tandem::cli

#endif  // TANDEM_CLI_STATUS_H_
