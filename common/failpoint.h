// SPDX-License-Identifier: Apache-2.0
// Faults on command: named places in the code at which a test lets a process
// crash, stand still, or go on as if something had failed.
//
//   if (TANDEM_FAILPOINT("decode.open", "crash fail stall")) {
//     return failpoint::Error();
//   }
//
// The second argument lists the actions that make sense at the place: others
// are refused. `crash` (SIGKILL to itself), `stall` and `delay` (the calling
// thread sleeps) act inside; `fail`, `drop`, `duplicate`, `corrupt` and
// `truncate` are returned, and the code at the place does what they say. Before
// it acts, a hit writes one line to stderr: "failpoint decode.open crash".
//
// Armed by the environment variable TANDEM_FAILPOINTS, in service by
// POST /failpoints (common/http/failpoints.h), with the same words:
//
//   name=action[(milliseconds)][@nth][*count];...
//
// acts at the nth passage from now (1) and at those that follow, `count` in all
// (1). Of stall 3000 ms are meant, of delay 30, unless told. name=off disarms.
//
// Or a handler judges each passage and acts: that of the simulation, which
// lets one of its processes crash or stand still and not the program.
//
// Only programs of tests have failpoints (tests/failpoints/CMakeLists.txt):
// without the definition TANDEM_FAILPOINTS the macro is a constant, and nothing
// of this is left. Never in a header, where it would be defined with and
// without it, nor in a template or an inline function, since their variables
// are merged and cannot share the section.

#ifndef TANDEM_COMMON_FAILPOINT_H_
#define TANDEM_COMMON_FAILPOINT_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace tandem::failpoint {

enum Hit { kNone = 0, kFail, kDrop, kDuplicate, kCorrupt, kTruncate };

// What a place that `fail`s reports.
inline absl::Status Error(
    absl::StatusCode code = absl::StatusCode::kUnavailable) {
  return absl::Status(code, "failpoint");
}

// Flips one bit in the middle of [data, data + size).
inline void Corrupt(const void* data, size_t size) {
  if (size > 0) {
    static_cast<unsigned char*>(const_cast<void*>(data))[size / 2] ^= 1;
  }
}

constexpr Hit Nothing() { return kNone; }

// A place, linked into the program whether it is passed or not.
struct Site {
  const char* name;
  const char* actions;  // separated by blanks
};

// A thread passes the place. Thread-safe, as all below.
Hit Pass(const Site& site);

class Handler {
 public:
  virtual ~Handler() = default;
  virtual Hit OnPass(const Site& site) = 0;
};
// Of this thread's passages from now on, in place of what is armed. Borrowed
// until the next call; null: none.
void SetHandler(Handler* handler);

// INVALID_ARGUMENT, and nothing is armed, if one word of it is wrong.
absl::Status Arm(std::string_view faults);

// What is returned for the action; kNone for those that act inside.
Hit HitOf(std::string_view action);

struct State {
  std::string name;
  std::string actions;
  int passed = 0;
  int hits = 0;
};
// Of all places of the program, by name.
std::vector<State> States();

}  // namespace tandem::failpoint

// The linker gathers pointers to all places in section tandem_fp (to the places
// themselves it might add padding).
#ifdef TANDEM_FAILPOINTS
#define TANDEM_FAILPOINT(name, actions)                                    \
  ([]() -> ::tandem::failpoint::Hit {                                      \
    static constexpr ::tandem::failpoint::Site tandem_site{name, actions}; \
    __attribute__((                                                        \
        section("tandem_fp"),                                              \
        used)) static const ::tandem::failpoint::Site* tandem_listed =     \
        &tandem_site;                                                      \
    return ::tandem::failpoint::Pass(*tandem_listed);                      \
  }())
#else
#define TANDEM_FAILPOINT(name, actions) (::tandem::failpoint::Nothing())
#endif

#endif  // TANDEM_COMMON_FAILPOINT_H_
