// SPDX-License-Identifier: Apache-2.0
#ifndef TANDEM_COMMON_RPC_CERTIFICATE_H_
#define TANDEM_COMMON_RPC_CERTIFICATE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tandem::rpc {

struct Validity {
  absl::Time begin, end;
};

// Of the first certificate of `pem`. INVALID_ARGUMENT: it has none.
absl::StatusOr<Validity> ValidityOf(const std::string& pem);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CERTIFICATE_H_
