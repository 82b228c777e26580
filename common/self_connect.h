// SPDX-License-Identifier: Apache-2.0
// Dials this process's own ports, as clients do: a server may have gone deaf
// for good while all else goes on, and nothing within the process shows it.
// Whoever is told ends the process, to be started anew.

#ifndef TANDEM_COMMON_SELF_CONNECT_H_
#define TANDEM_COMMON_SELF_CONNECT_H_

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "common/mutex.h"

namespace tandem {

struct SelfConnectOptions {
  absl::Duration interval = absl::Seconds(2);
  // For a word or an end from the other side of a connection.
  absl::Duration timeout = absl::Seconds(5);
  int failures = 3;  // in a row, of one address
};

// Whether who listens at `address`, "host:port" or "[host]:port" as numbers,
// takes a connection within `timeout`: it says something or hangs up once it
// hears that nothing will come, be it TLS or not. A host of all addresses
// stands for loopback. True also where nobody can tell: without a descriptor to
// ask with, or where the network resets the connection.
bool Answers(const std::string& address, absl::Duration timeout);

class SelfConnect {
 public:
  // `deaf` runs once, on a thread of this, with an address that answered once
  // and does not any more.
  SelfConnect(std::vector<std::string> addresses, SelfConnectOptions options,
              std::function<void(const std::string& address)> deaf);
  // Waits for a look that is underway, up to its timeout.
  ~SelfConnect();
  SelfConnect(const SelfConnect&) = delete;
  SelfConnect& operator=(const SelfConnect&) = delete;

 private:
  void Run();
  // False when it is time to end.
  bool Pause();

  const std::vector<std::string> addresses_;
  const SelfConnectOptions options_;
  const std::function<void(const std::string& address)> deaf_;
  Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_SELF_CONNECT_H_
