// SPDX-License-Identifier: Apache-2.0
// Work that workers counted, summed over a request's calls and sequences.

#ifndef TANDEM_ROUTER_CORE_WORK_H_
#define TANDEM_ROUTER_CORE_WORK_H_

#include "tandem/v1/generation.pb.h"

namespace tandem::router {

// No sum is more than the most there is.
void AddWork(const v1::Work& part, v1::Work* sum);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_WORK_H_
