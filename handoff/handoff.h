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
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/stream.h"
#include "kernels/backend.h"
#include "tandem/v1/handoff.pb.h"

namespace tandem::handoff {

// Neighbouring versions work together.
inline constexpr uint32_t kProtocolMin = 1;
inline constexpr uint32_t kProtocolMax = 2;
inline constexpr uint32_t kProtocolBatches = 2;  // the first that has them

// Formats of KV that this program puts on the wire, and takes off it. A peer
// that names none knows the first two.
inline constexpr std::string_view kWireFormats[] = {"f32", "bf16", "f16",
                                                    "fp8", "int8", "int4"};

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

  bool operator==(const SliceRange&) const = default;
};

// Layers as both ends count them.
struct WireLayers {
  int count = 0;
  // [count], of those that have a window where others see all; else empty.
  std::vector<bool> windowed = {};
};

// What the receiver wants, and how.
struct Grant {
  int position_begin = 0;
  int position_end = 0;
  // Of layers with a window positions before this are not wanted; elsewhere, or
  // where it is not past position_begin, it changes nothing.
  int windowed_begin = 0;
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

// What has happened so far, for metrics. Only ever grows.
struct HandoffCounters {
  struct Way {
    int64_t committed = 0;
    int64_t failed = 0;     // by this end or the other, a lost link included
    int64_t cancelled = 0;  // not needed any more, says either end
    int64_t slices = 0;     // sent, or landed
    int64_t bytes = 0;      // of those slices
    std::map<std::string, int64_t, std::less<>> failed_in;  // by stage
  };
  std::map<std::string, Way> ways;  // "": attempts that ended without a way
  int64_t links = 0;                // established
  int64_t links_lost = 0;           // other than by being idle
  int64_t links_refused = 0;        // incarnation, version or fingerprint
  int64_t ways_failed = 0;          // could not be set up for a link
  int64_t offers_refused = 0;
  int64_t slices_refused = 0;  // fitted no live grant; payload untouched
  int64_t late_messages = 0;   // named an ended attempt or a dead credit
  int64_t duplicates = 0;      // said again what was already done
  int64_t quarantines = 0;     // slabs that went through it
  int64_t arenas_dropped = 0;  // quarantine outlived its deadline
};

// Something that failed, as it is found: for the log. Ids, no payload.
struct HandoffFault {
  std::string_view what;   // "handoff failed", "handoff link lost", ...
  std::string peer;        // the other worker's id; empty: it never said
  std::string way;         // empty: none was chosen
  std::string_view stage;  // a phase of the attempt; empty: of a link
  absl::Status status;
};
using FaultListener = std::function<void(const HandoffFault&)>;

// States of a slab; the sum is the arena's size.
struct SlabCounts {
  int total = 0;
  int free = 0;
  int granted = 0;      // a credit is out
  int in_flight = 0;    // being gathered, sent or scattered
  int quarantined = 0;  // may still be written by a peer
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_HANDOFF_H_
