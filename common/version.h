// SPDX-License-Identifier: Apache-2.0
#ifndef TANDEM_COMMON_VERSION_H_
#define TANDEM_COMMON_VERSION_H_

#ifndef TANDEM_VERSION  // CMake's project version
#error "compile with -DTANDEM_VERSION"
#endif

namespace tandem {

// What --version and tandem_build_info say.
inline constexpr char kVersion[] = TANDEM_VERSION;

}  // namespace tandem

#endif  // TANDEM_COMMON_VERSION_H_
