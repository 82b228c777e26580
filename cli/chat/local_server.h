// SPDX-License-Identifier: Apache-2.0
// A `tandem serve` of one's own for as long as a command runs.

#ifndef TANDEM_CLI_CHAT_LOCAL_SERVER_H_
#define TANDEM_CLI_CHAT_LOCAL_SERVER_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem::chat {

class LocalServer {
 public:
  // Starts it on free ports of loopback and waits until it can answer. Before
  // any channel exists: gRPC does not survive a fork. Its words go to a file
  // without a name; the last one is the error's where it ends.
  static absl::StatusOr<std::unique_ptr<LocalServer>> Start(
      const std::string& model_dir, const std::vector<std::string>& arguments);
  // Drains and waits.
  ~LocalServer();
  LocalServer(const LocalServer&) = delete;
  LocalServer& operator=(const LocalServer&) = delete;

  const std::string& address() const { return address_; }

 private:
  LocalServer() = default;
  // OK while it runs.
  absl::Status Check();

  pid_t pid_ = -1;
  std::string address_;
  int log_ = -1;  // its words, in a file without a name
};

}  // namespace tandem::chat

#endif  // TANDEM_CLI_CHAT_LOCAL_SERVER_H_
