// SPDX-License-Identifier: Apache-2.0
// A router's errors name the fields of the gRPC API; who typed flags reads
// theirs ("--max-tokens", not "stopping.max_tokens").

#ifndef TANDEM_CLI_FLAG_NAMES_H_
#define TANDEM_CLI_FLAG_NAMES_H_

#include "absl/status/status.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::cli {

// `status`, by which `request` of SamplingFlags was refused: a UsageError where
// it is about a flag.
absl::Status InFlags(const absl::Status& status,
                     const v1::GenerateRequest& request);

}  // namespace tandem::cli

#endif  // TANDEM_CLI_FLAG_NAMES_H_
