// SPDX-License-Identifier: Apache-2.0
#ifndef TANDEM_ROUTER_CORE_SET_DURATION_H_
#define TANDEM_ROUTER_CORE_SET_DURATION_H_

#include <google/protobuf/util/time_util.h>

#include "absl/time/time.h"

namespace tandem::router {

inline void SetDuration(absl::Duration value, google::protobuf::Duration* out) {
  *out = google::protobuf::util::TimeUtil::NanosecondsToDuration(
      absl::ToInt64Nanoseconds(value));
}

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_SET_DURATION_H_
