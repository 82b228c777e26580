// SPDX-License-Identifier: Apache-2.0
#include "common/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/check.h"
#include "common/mutex.h"

// The linker's names for the section's ends; null where it has no entry.
extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier): the linker's, not ours.
__attribute__((weak)) extern const tandem::failpoint::Site* __start_tandem_fp;
__attribute__((weak)) extern const tandem::failpoint::Site* __stop_tandem_fp;
// NOLINTEND(bugprone-reserved-identifier)
}

namespace tandem::failpoint {
namespace {

struct Armed {
  std::string action;
  absl::Duration time;  // of stall and delay
  int skip = 0;         // passages
  int left = 0;         // hits; 0: off
};

struct Place {
  const char* actions = "";
  Armed armed = {};
  int passed = 0;
  int hits = 0;
};

absl::Status Refused(const std::string& fault, const std::string& why) {
  return absl::InvalidArgumentError(
      absl::StrCat("failpoint '", fault, "': ", why));
}

bool Lists(const char* actions, const std::string& action) {
  for (const absl::string_view listed : absl::StrSplit(actions, ' ')) {
    if (listed == action) return true;
  }
  return false;
}

// Cuts "<mark><number>" off the end of `text`, if it is there.
bool CutNumber(char mark, std::string* text, int* number) {
  const size_t at = text->rfind(mark);
  if (at == std::string::npos) return true;
  const bool valid =
      absl::SimpleAtoi(text->substr(at + 1), number) && *number > 0;
  text->resize(at);
  return valid;
}

// Of "action[(milliseconds)][@nth][*count]".
absl::StatusOr<Armed> Parse(const std::string& fault, std::string text) {
  Armed armed;
  int nth = 1, count = 1;
  if (!CutNumber('*', &text, &count) || !CutNumber('@', &text, &nth)) {
    return Refused(fault, "@nth and *count are numbers from 1");
  }
  int milliseconds = 0;
  if (!text.empty() && text.back() == ')') {
    text.pop_back();
    if (!CutNumber('(', &text, &milliseconds)) {
      return Refused(fault, "(milliseconds) is a number from 1");
    }
  } else if (text == "stall") {
    milliseconds = 3000;
  } else if (text == "delay") {
    milliseconds = 30;
  }
  if (milliseconds > 0 && text != "stall" && text != "delay") {
    return Refused(fault, "only stall and delay take milliseconds");
  }
  armed.action = std::move(text);
  armed.time = absl::Milliseconds(milliseconds);
  armed.skip = nth - 1;
  armed.left = armed.action == "off" ? 0 : count;
  return armed;
}

class Places {
 public:
  static Places& Get() {
    static Places* const places = new Places;  // outlives all threads
    return *places;
  }

  // What the place is to do now; an empty action: nothing.
  Armed Pass(const char* name) {
    const MutexLock lock(&mutex_);
    Place& place = places_.at(name);
    ++place.passed;
    Armed& armed = place.armed;
    if (armed.left == 0) return {};
    if (armed.skip > 0) {
      --armed.skip;
      return {};
    }
    --armed.left;
    ++place.hits;
    return armed;
  }

  absl::Status Arm(std::string_view faults) {
    const MutexLock lock(&mutex_);
    std::map<std::string, Armed> wanted;
    const absl::string_view text(faults.data(), faults.size());
    for (const absl::string_view part :
         absl::StrSplit(text, ';', absl::SkipWhitespace())) {
      const std::string fault(absl::StripAsciiWhitespace(part));
      const size_t equals = fault.find('=');
      const auto place = places_.find(fault.substr(0, equals));
      if (equals == std::string::npos || place == places_.end()) {
        return Refused(fault, "no place of this program is called that");
      }
      absl::StatusOr<Armed> armed = Parse(fault, fault.substr(equals + 1));
      if (!armed.ok()) return armed.status();
      if (armed->action != "off" &&
          !Lists(place->second.actions, armed->action)) {
        return Refused(fault,
                       absl::StrCat("its actions are ", place->second.actions));
      }
      wanted[place->first] = *std::move(armed);
    }
    for (auto& [name, armed] : wanted) places_[name].armed = std::move(armed);
    return absl::OkStatus();
  }

  std::vector<State> States() {
    const MutexLock lock(&mutex_);
    std::vector<State> states;
    for (const auto& [name, place] : places_) {
      states.push_back({name, place.actions, place.passed, place.hits});
    }
    return states;
  }

 private:
  Places() {
    for (const Site** site = &__start_tandem_fp; site < &__stop_tandem_fp;
         ++site) {
      const bool fresh =
          places_.emplace((*site)->name, Place{(*site)->actions}).second;
      TANDEM_CHECK(fresh, (*site)->name);  // named twice
    }
  }

  Mutex mutex_;
  std::map<std::string, Place> places_ ABSL_GUARDED_BY(mutex_);
};

// Before main: places on the way there are armed too.
[[maybe_unused]] const bool from_environment = [] {
  const char* const faults = std::getenv("TANDEM_FAILPOINTS");
  if (faults == nullptr) return false;
  const absl::Status status = Arm(faults);
  if (!status.ok()) {
    std::fprintf(stderr, "TANDEM_FAILPOINTS: %s\n",
                 std::string(status.message()).c_str());
    _exit(2);
  }
  return true;
}();

thread_local Handler* handler = nullptr;

}  // namespace

void SetHandler(Handler* next) { handler = next; }

Hit HitOf(std::string_view action) {
  static const std::map<std::string, Hit, std::less<>> kHits = {
      {"fail", kFail},
      {"drop", kDrop},
      {"duplicate", kDuplicate},
      {"corrupt", kCorrupt},
      {"truncate", kTruncate}};
  const auto found = kHits.find(action);
  return found == kHits.end() ? kNone : found->second;
}

Hit Pass(const Site& site) {
  if (handler != nullptr) return handler->OnPass(site);
  const Armed armed = Places::Get().Pass(site.name);
  if (armed.action.empty()) return kNone;
  const std::string line =
      absl::StrCat("failpoint ", site.name, " ", armed.action, "\n");
  // One write, and not the log's: a crash must not come before it.
  (void)!write(STDERR_FILENO, line.data(), line.size());
  if (armed.action == "crash") {
    raise(SIGKILL);
    for (;;) pause();
  }
  absl::SleepFor(armed.time);
  return HitOf(armed.action);
}

absl::Status Arm(std::string_view faults) { return Places::Get().Arm(faults); }

std::vector<State> States() { return Places::Get().States(); }

}  // namespace tandem::failpoint
