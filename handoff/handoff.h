// SPDX-License-Identifier: Apache-2.0
// What both ends of a handoff share: attempts, slices, grants, ways. The
// sender is handoff/sender.h, the receiver handoff/receiver.h; both are plain
// single-threaded code on their worker's Loop, speaking the messages of
// proto/tandem/v1/handoff.proto over a Stream. They know blocks and bytes,
// not models: gathering into a slab and scattering out of one is the
// worker's business, behind delegates.

#ifndef TANDEM_HANDOFF_HANDOFF_H_
#define TANDEM_HANDOFF_HANDOFF_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>

#include "absl/types/span.h"
#include "common/stream.h"
#include "kernels/backend.h"
#include "tandem/v1/handoff.pb.h"

namespace tandem::handoff {

// Neighbouring versions work together.
inline constexpr uint32_t kProtocolMin = 1;
inline constexpr uint32_t kProtocolMax = 1;

// Streams of a link, seen from either end.
using SenderStream = Stream<v1::LinkRequest, v1::LinkResponse>;
using ReceiverStream = Stream<v1::LinkResponse, v1::LinkRequest>;

// One try at filling the KV of one history.
struct Attempt {
  std::string request_id;  // 16 bytes
  uint32_t sequence_index = 0;
  uint32_t number = 0;

  bool operator==(const Attempt&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const Attempt& a) {
    return H::combine(std::move(h), a.request_id, a.sequence_index, a.number);
  }
};

// K and V of layers x positions: what one slab carries.
struct SliceRange {
  int layer_begin = 0;
  int layer_end = 0;
  int position_begin = 0;
  int position_end = 0;
};

// What the receiver wants, and how.
struct Grant {
  int position_begin = 0;
  int position_end = 0;
  int head_begin = 0;
  int head_end = 0;
  kernels::DType wire = kernels::DType::kF32;
  uint64_t digest_key = 0;
};

// With what the decode worker goes on.
struct FirstToken {
  int position = 0;
  v1::Token token;
};

// Measured by the sender.
struct HandoffTimings {
  int64_t bytes = 0;
  absl::Duration transfer;  // first grant to acknowledgement
  absl::Duration exposed;   // last slice computed to acknowledgement
  std::string way;
};

// States of a slab; the sum is the arena's size.
struct SlabCounts {
  int total = 0;
  int free = 0;
  int granted = 0;     // a credit is out
  int in_flight = 0;   // filled, being gathered, sent or scattered
  int quarantined = 0; // may still be written by a peer
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_HANDOFF_H_
