// SPDX-License-Identifier: Apache-2.0
// What a core was given, as a recorded session keeps it, and back.

#ifndef TANDEM_ROUTER_SESSION_ADMITTED_H_
#define TANDEM_ROUTER_SESSION_ADMITTED_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/core/options.h"
#include "router/core/request.h"
#include "tandem/v1/session.pb.h"

namespace tandem::router::session {

// Quarters of a nanosecond, as exact as Abseil is; infinite stays infinite.
int64_t ToTicks(absl::Duration duration);
absl::Duration FromTicks(int64_t ticks);

v1::SessionStatus ToEntry(const absl::Status& status);
absl::Status FromEntry(const v1::SessionStatus& entry);

// All but what it pays for.
v1::SessionSubmit ToEntry(const AdmittedRequest& admitted);
AdmittedRequest FromEntry(v1::SessionSubmit entry);

void ToEntry(const RouterOptions& options, v1::SessionStart* start);
// INVALID_ARGUMENT: one that is not known, or is missing.
absl::StatusOr<RouterOptions> OptionsOf(const v1::SessionStart& start);

}  // namespace tandem::router::session

#endif  // TANDEM_ROUTER_SESSION_ADMITTED_H_
