// SPDX-License-Identifier: Apache-2.0
// Looks four times a second whether files have changed, on a thread of its own:
// by their identity, size and times, so also when a link on the way to them
// points elsewhere, as where Kubernetes mounts secrets. No inotify: it sees
// neither that nor network file systems.

#ifndef TANDEM_COMMON_FILE_WATCHER_H_
#define TANDEM_COMMON_FILE_WATCHER_H_

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "common/mutex.h"

namespace tandem {

class FileWatcher {
 public:
  explicit FileWatcher(absl::Duration period = absl::Milliseconds(250))
      : period_(period) {}
  ~FileWatcher() { Stop(); }
  FileWatcher(const FileWatcher&) = delete;
  FileWatcher& operator=(const FileWatcher&) = delete;

  // `changed` runs on the watcher's thread when one of `paths` is not what it
  // was when this was called, or when `changed` last ran. Before Start.
  void Watch(std::vector<std::string> paths, std::function<void()> changed);
  // Nothing to watch: no thread.
  void Start();
  // Waits for a `changed` that runs. Idempotent.
  void Stop();

 private:
  struct Group {
    std::vector<std::string> paths;
    std::function<void()> changed;
    std::string signature;
  };
  void Run();

  const absl::Duration period_;
  std::vector<Group> groups_;  // the thread's, once it runs
  Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_FILE_WATCHER_H_
