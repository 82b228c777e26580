// SPDX-License-Identifier: Apache-2.0
// Whether AddressSanitizer watches, which fills the address space, takes many
// times as long, and needs fewer examples of the same thing.

#ifndef TANDEM_TESTS_SANITIZED_H_
#define TANDEM_TESTS_SANITIZED_H_

namespace tandem {

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace tandem

#endif  // TANDEM_TESTS_SANITIZED_H_
