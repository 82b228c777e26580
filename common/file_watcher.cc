// SPDX-License-Identifier: Apache-2.0
#include "common/file_watcher.h"

#include <pthread.h>
#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

// What differs once any of them was written, replaced, or came or went.
std::string SignatureOf(const std::vector<std::string>& paths) {
  std::string signature;
  for (const std::string& path : paths) {
    struct stat info {};
    if (stat(path.c_str(), &info) != 0) {
      signature += "none;";
      continue;
    }
    absl::StrAppend(&signature, info.st_dev, " ", info.st_ino, " ",
                    info.st_size, " ", info.st_mtim.tv_sec, " ",
                    info.st_mtim.tv_nsec, " ", info.st_ctim.tv_sec, " ",
                    info.st_ctim.tv_nsec, ";");
  }
  return signature;
}

}  // namespace

void FileWatcher::Stop() {
  {
    const MutexLock lock(&mutex_);
    stopping_ = true;
  }
  stop_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

void FileWatcher::Watch(std::vector<std::string> paths,
                        std::function<void()> changed) {
  Group group{std::move(paths), std::move(changed), {}};
  group.signature = SignatureOf(group.paths);
  groups_.push_back(std::move(group));
}

void FileWatcher::Start() {
  if (groups_.empty()) return;
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "files");
    Run();
  });
}

void FileWatcher::Run() {
  for (;;) {
    {
      const MutexLock lock(&mutex_);
      if (!stopping_)
        stop_.WaitFor(&mutex_, absl::ToChronoNanoseconds(period_));
      if (stopping_) return;
    }
    for (Group& group : groups_) {
      // Taken before the files are read: what changes meanwhile is seen again.
      std::string signature = SignatureOf(group.paths);
      if (signature == group.signature) continue;
      group.signature = std::move(signature);
      group.changed();
    }
  }
}

}  // namespace tandem
