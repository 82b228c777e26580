// SPDX-License-Identifier: Apache-2.0
#ifndef TANDEM_COMMON_AVAILABLE_CPUS_H_
#define TANDEM_COMMON_AVAILABLE_CPUS_H_

#include <string>

namespace tandem {

// How many threads of this process can compute at once, at least 1: hardware
// threads that it may run on, or the whole CPUs of the smallest quota that a
// control group gives it (`docker run --cpus`, a limit of Kubernetes'). More
// threads than that would use the quota up and then all stand still until its
// period (0.1 s) ends. `root` is where /proc and /sys are.
int AvailableCpus(const std::string& root = "");

}  // namespace tandem

#endif  // TANDEM_COMMON_AVAILABLE_CPUS_H_
