// SPDX-License-Identifier: Apache-2.0
#include "cli/keys.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <string_view>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/output.h"
#include "common/error.h"
#include "common/lifecycle.h"
#include "common/random.h"
#include "common/read_file.h"

namespace tandem::cli {
namespace {

// Hashes are no keys, but limits and names are nobody else's business.
constexpr mode_t kNewFileMode = 0600;
constexpr int kMaxLinks = 40;  // as Linux
constexpr auto kLockPoll = std::chrono::milliseconds(50);
constexpr auto kLockPatience = std::chrono::seconds(10);

absl::Status Failed(const std::string& what, const std::string& path) {
  return absl::UnavailableError(
      absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(errno)));
}

// A descriptor that closes itself, and with it gives back its lock.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

std::string FolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// Two writers would each lose the other's key. The folder is locked, as the
// file is another one after each write.
absl::Status Lock(const File& folder, const std::string& path) {
  if (folder.fd() < 0) return Failed("open the folder of", path);
  const auto deadline = std::chrono::steady_clock::now() + kLockPatience;
  while (flock(folder.fd(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return Failed("lock the folder of", path);
    if (std::chrono::steady_clock::now() > deadline) {
      return absl::UnavailableError(
          absl::StrCat("another process has been writing ", path, " for ",
                       kLockPatience.count(), " s: try again"));
    }
    std::this_thread::sleep_for(kLockPoll);
  }
  return absl::OkStatus();
}

bool WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    text.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

// In one step, so that a router never reads half of it, and for good. Mode and
// owner stay, so that whoever could read it still can. Under the lock. `show`
// is what must have succeeded before the file is another one.
absl::Status Replace(const std::string& path, const std::string& text,
                     const File& folder,
                     absl::FunctionRef<absl::Status()> show) {
  struct stat info {};
  const bool exists = stat(path.c_str(), &info) == 0;
  const std::string fresh = path + ".new";
  unlink(fresh.c_str());  // of one that was killed
  const File file(open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                       kNewFileMode));
  if (file.fd() < 0) return Failed("make", fresh);
  absl::Status status;
  if (exists && (fchown(file.fd(), info.st_uid, info.st_gid) != 0 ||
                 fchmod(file.fd(), info.st_mode & mode_t{0777}) != 0)) {
    status = Failed("keep the owner and the mode of", path);
  } else if (!WriteAll(file.fd(), text) || fsync(file.fd()) != 0) {
    status = Failed("write", fresh);
  } else if (status = show();
             status.ok() && rename(fresh.c_str(), path.c_str()) != 0) {
    status = Failed("replace", path);
  }
  if (!status.ok()) unlink(fresh.c_str());
  // The key is shown and in the file already.
  if (status.ok() && fsync(folder.fd()) != 0) {
    std::cerr << "warning: "
              << Failed("keep for good what was written to", path).message()
              << "\n";
  }
  return status;
}

std::string Limit(int64_t value) {
  return value == 0 ? "-" : absl::StrCat(value);
}

}  // namespace

void KeysCommand::AddTo(CommandLine* line) {
  line_ = line;
  new_ = line->AddCommand(
      "new", "Make a key, add its hash to the file, and print it once");
  new_->Example("tandem keys new acme --api-keys-file keys --rpm-limit 600");
  new_->AddPositional("TENANT", &tenant_, "Whose key it is", true);
  new_->Add("api-keys-file", &path_, "The router's; made if there is none");
  new_->Add("name", &name_, "What to tell the key by later");
  new_->Group("The tenant's limits, all its keys together");
  new_->AddInt("tpm-limit", &limits_.tokens_per_minute,
               "Tokens per minute, prompts and answers; 0: not said here",
               {0, router::kMaxLimitPerMinute});
  new_->AddInt("rpm-limit", &limits_.requests_per_minute,
               "Requests per minute; 0: not said here",
               {0, router::kMaxLimitPerMinute});
  new_->AddInt("max-parallel-requests", &limits_.parallel_requests,
               "Requests at a time; 0: not said here",
               {0, router::kMaxParallelRequests});
  CommandLine* const list =
      line->AddCommand("list", "Tenants, their keys' hashes and limits");
  list->Add("api-keys-file", &path_, "The router's");
}

absl::Status KeysCommand::Run() {
  if (path_.empty()) {
    return UsageError(
        "--api-keys-file is needed: the file of the router's flag of that "
        "name");
  }
  return line_->chosen() == new_ ? New() : List();
}

absl::Status KeysCommand::New() {
  absl::Status status = router::CheckTenantName(tenant_);
  if (status.ok() && !name_.empty()) status = router::CheckTenantName(name_);
  if (!status.ok()) return UsageError(std::string(status.message()));
  std::string text;
  std::error_code error;
  std::string path = path_;
  // What a link points to is written, even where it is not there yet.
  for (int links = 0;
       links < kMaxLinks && std::filesystem::is_symlink(path, error); ++links) {
    path = (std::filesystem::path(path).parent_path() /
            std::filesystem::read_symlink(path, error))
               .string();
  }
  const File folder(
      open(FolderOf(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  status = Lock(folder, path);
  if (!status.ok()) return status;
  if (std::filesystem::exists(path, error)) {
    absl::StatusOr<std::string> content = ReadFile(path);
    if (!content.ok()) return content.status();
    text = *std::move(content);
    if (!text.empty() && text.back() != '\n') text += '\n';
  }
  SystemRandom random;
  const std::string key = router::NewKey(&random);
  absl::StrAppend(
      &text,
      router::FormatKeyEntry(
          {.tenant = tenant_, .digest = router::DigestOf(key), .name = name_},
          limits_),
      "\n");
  const absl::StatusOr<router::KeyFile> valid = router::ParseKeyFile(text);
  if (!valid.ok()) return Annotate(valid.status(), path_);
  return Replace(path, text, folder, [&] {
    std::cerr << "The key of " << tenant_
              << ", which is shown this once and kept nowhere:\n";
    std::cout << key << "\n";
    return FlushOutput();
  });
}

absl::Status KeysCommand::List() const {
  const absl::StatusOr<router::KeyFile> file = router::ReadKeyFile(path_);
  if (!file.ok()) return file.status();
  std::cout << absl::StrFormat("%-20s %-16s %-14s %12s %10s %9s\n", "tenant",
                               "key", "sha256", "tokens/min", "reqs/min",
                               "parallel");
  for (const router::KeyEntry& entry : file->keys) {
    const router::TenantLimits& limits = file->tenants.at(entry.tenant);
    const std::string hash = absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(entry.digest.data()),
                          entry.digest.size()));
    std::cout << absl::StrFormat(
        "%-20s %-16s %-14s %12s %10s %9s\n", entry.tenant, entry.name,
        hash.substr(0, 12), Limit(limits.tokens_per_minute),
        Limit(limits.requests_per_minute), Limit(limits.parallel_requests));
  }
  return absl::OkStatus();
}

}  // namespace tandem::cli
