// SPDX-License-Identifier: Apache-2.0
// Which workers may work together, from what they said when they registered.
// Both ends of a handoff must agree on the fingerprint; a mismatch is told
// field by field.

#ifndef TANDEM_ROUTER_PLACEMENT_COMPATIBILITY_H_
#define TANDEM_ROUTER_PLACEMENT_COMPATIBILITY_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "tandem/v1/registry.pb.h"

namespace tandem::router {

// Whether a prefill and a decode worker can hand KV over. They may differ in
// numerics alone, if both allow it. FAILED_PRECONDITION names each difference.
absl::Status CheckPair(const v1::WorkerHello& prefill,
                       const v1::WorkerHello& decode);

// Whether a sequence begun on one decode worker may go on on another one with
// the same tokens: everything of the fingerprint is equal.
bool SameResults(const v1::WorkerHello& a, const v1::WorkerHello& b);

// A hello that makes sense by itself. INVALID_ARGUMENT names the field.
absl::Status CheckHello(const v1::WorkerHello& hello);

// The same for a list of adapters.
using Adapters = google::protobuf::RepeatedPtrField<v1::AdapterRef>;
inline constexpr int kMaxAdapters = 1024;  // of a worker
inline constexpr size_t kMaxAdapterNameBytes = 64;
inline constexpr size_t kMaxAdapterPathBytes = 4096;
absl::Status CheckAdapters(const Adapters& adapters);

// What is in the worker's adapter of that name; empty: it has none.
std::string AdapterDigest(const v1::WorkerHello& hello,
                          std::string_view adapter);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_PLACEMENT_COMPATIBILITY_H_
