// SPDX-License-Identifier: Apache-2.0
#ifndef TANDEM_COMMON_RPC_CERTIFICATE_H_
#define TANDEM_COMMON_RPC_CERTIFICATE_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tandem::rpc {

struct Validity {
  absl::Time begin, end;
};

// Of the first certificate of `pem`. INVALID_ARGUMENT: it has none.
absl::StatusOr<Validity> ValidityOf(const std::string& pem);

// Whether the first certificate of `chain` was issued by one of `authorities`,
// by way of the others of `chain`, whatever the time and its use.
// INVALID_ARGUMENT: it was not, or they hold none.
absl::Status CheckIssuer(const std::string& chain,
                         const std::string& authorities);

// Whether it may take the place of one in use: INVALID_ARGUMENT, naming `flag`,
// if it has expired. One that is not valid yet may, since nobody would come
// back for it.
absl::Status CheckNotExpired(const std::string& pem, std::string_view flag);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CERTIFICATE_H_
