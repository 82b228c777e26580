// SPDX-License-Identifier: Apache-2.0
// The last decisions of a process, kept in memory and written out when it
// crashes (a failed TANDEM_CHECK is one) or gets SIGUSR1: what led there, of
// which logs tell too little and traces too late. `tandem flight` prints it.
//
//   flight::Install("decode", directory);  // once, in main
//   flight::Attach();                      // on the loop that decides
//   flight::Record(flight::Event::kPlaced, {.request = id, .decode = name});
//
// One ring of fixed size with one writer: no lock, no allocation; on any other
// thread Record does nothing. It takes ids, names, counts, codes and times: no
// text, no token, no key. What a signal handler calls here is
// async-signal-safe. A stack that overflows leaves no record: handlers run on
// the stack of the thread that crashed.

#ifndef TANDEM_COMMON_FLIGHT_RECORDER_H_
#define TANDEM_COMMON_FLIGHT_RECORDER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace tandem::flight {

// What `m`, `n` and `word` are: kWords in flight_recorder.cc.
enum class Event : uint8_t {
  // Of routers.
  kAdmitted,
  kPlaced,
  kOpened,
  kFirstToken,
  kStarted,
  kAttemptLost,
  kPreempted,
  kEnded,
  kRefused,
  kSuspect,
  kRegistered,
  kRejected,
  kWorkerLost,
  kWorkerAvoided,
  kPairAvoided,
  // Of workers.
  kCall,
  kTicket,
  kOffer,
  kGranted,
  kRevoked,
  kComputed,
  kCommitted,
  kDead,
  kCallEnded,
  kStep,
  kStepDone,
};

inline constexpr size_t kNameBytes = 40;
inline constexpr size_t kWordBytes = 16;

struct What {
  std::string_view request = {};  // the first 8 bytes of its internal id
  std::string_view prefill = {};  // a worker's id: kNameBytes of it
  std::string_view decode = {};
  std::string_view word = {};  // of this program's own: kWordBytes of it
  int64_t m = 0, n = 0;        // 0..2^32-1
};

inline constexpr size_t kRingSize = 16384;  // records, of 128 bytes
inline constexpr int kFilesKept = 16;       // of each role in a directory

// From here on crashes and SIGUSR1 write, to
// DIRECTORY/tandem-ROLE-STARTED-PID-{crash,request}.flight or, with an empty
// directory, the last 64 records to stderr. Older files of the role than the
// newest kFilesKept are deleted here. Who handled crashes before still does,
// afterwards. INVALID_ARGUMENT: nothing can be written there.
absl::Status Install(const std::string& role, const std::string& directory);

// The calling thread is the writer. Another than the process's first: ignored.
void Attach();

inline thread_local bool attached = false;
void RecordAttached(Event event, const What& what);
inline void Record(Event event, const What& what) {
  if (attached) RecordAttached(event, what);
}

}  // namespace tandem::flight

#endif  // TANDEM_COMMON_FLIGHT_RECORDER_H_
