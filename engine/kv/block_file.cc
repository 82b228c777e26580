// SPDX-License-Identifier: Apache-2.0

#include "engine/kv/block_file.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/failpoint.h"
#include "common/mutex.h"

namespace tandem::engine {
namespace {

using Sum = std::array<uint8_t, 32>;

Sum SumOf(EVP_MD_CTX* context, const BlockHash& hash,
          absl::Span<const std::byte> data) {
  Sum sum;
  TANDEM_CHECK(EVP_DigestInit_ex(context, EVP_sha256(), nullptr) == 1 &&
                   EVP_DigestUpdate(context, hash.bytes.data(),
                                    hash.bytes.size()) == 1 &&
                   EVP_DigestUpdate(context, data.data(), data.size()) == 1 &&
                   EVP_DigestFinal_ex(context, sum.data(), nullptr) == 1,
               "SHA-256 failed");
  return sum;
}

absl::Status FileError(const char* what, int error) {
  return absl::ErrnoToStatus(error, absl::StrCat("KV offload file: ", what));
}

absl::Status WriteAll(int fd, absl::Span<const std::byte> data,
                      int64_t offset) {
  if (TANDEM_FAILPOINT("engine.offload_write", "crash fail stall")) {
    return failpoint::Error();
  }
  while (!data.empty()) {
    const ssize_t done = pwrite(fd, data.data(), data.size(), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return FileError("write", done < 0 ? errno : EIO);
    data.remove_prefix(static_cast<size_t>(done));
    offset += done;
  }
  return absl::OkStatus();
}

absl::Status ReadAll(int fd, absl::Span<std::byte> data, int64_t offset) {
  const absl::Span<std::byte> all = data;
  const failpoint::Hit hit =
      TANDEM_FAILPOINT("engine.offload_read", "fail corrupt stall");
  if (hit == failpoint::kFail) return failpoint::Error();
  while (!data.empty()) {
    const ssize_t done = pread(fd, data.data(), data.size(), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return FileError("read", errno);
    if (done == 0) return absl::DataLossError("KV offload file: truncated");
    data.remove_prefix(static_cast<size_t>(done));
    offset += done;
  }
  if (hit == failpoint::kCorrupt) failpoint::Corrupt(all.data(), all.size());
  return absl::OkStatus();
}

}  // namespace

struct TemporaryBlockFile::Impl {
  struct Operation {
    int slot;
    BlockHash hash;
    absl::Span<const std::byte> source;  // of a write
    absl::Span<std::byte> target;        // of a read
    Done done;
  };

  Impl(int descriptor, int slots, int64_t bytes, Loop* reports)
      : fd(descriptor),
        block_bytes(bytes),
        loop(reports),
        context(EVP_MD_CTX_new()),
        sums(static_cast<size_t>(slots)),
        thread([this] { Run(); }) {
    TANDEM_CHECK(context != nullptr, "libcrypto is out of memory");
    pthread_setname_np(thread.native_handle(), "kv-offload");
  }
  ~Impl() {
    {
      MutexLock lock(&mutex);
      stopped = true;
    }
    wake.NotifyAll();
    thread.join();
    EVP_MD_CTX_free(context);
    close(fd);
  }

  void Push(Operation operation) {
    {
      MutexLock lock(&mutex);
      operations.push_back(std::move(operation));
    }
    wake.NotifyOne();
  }

  void Run() {
    for (;;) {
      Operation operation;
      {
        MutexLock lock(&mutex);
        while (!stopped && operations.empty()) wake.Wait(&mutex);
        if (stopped) return;
        operation = std::move(operations.front());
        operations.pop_front();
      }
      absl::Status status =
          operation.target.empty() ? Write(operation) : Read(operation);
      loop->Post(
          [done = std::move(operation.done),
           status = std::move(status)]() mutable { done(std::move(status)); });
    }
  }
  absl::Status Write(const Operation& operation) {
    sums[static_cast<size_t>(operation.slot)] =
        SumOf(context, operation.hash, operation.source);
    return WriteAll(fd, operation.source, operation.slot * block_bytes);
  }
  absl::Status Read(const Operation& operation) {
    absl::Status status =
        ReadAll(fd, operation.target, operation.slot * block_bytes);
    if (!status.ok()) return status;
    if (SumOf(context, operation.hash, operation.target) !=
        sums[static_cast<size_t>(operation.slot)]) {
      return absl::DataLossError(
          "KV offload file: a block is not what was written");
    }
    return absl::OkStatus();
  }

  const int fd;
  const int64_t block_bytes;
  Loop* const loop;
  EVP_MD_CTX* const context;  // of the thread alone, like the sums
  std::vector<Sum> sums;      // [slots]
  Mutex mutex;
  CondVar wake;
  bool stopped ABSL_GUARDED_BY(mutex) = false;
  std::deque<Operation> operations ABSL_GUARDED_BY(mutex);
  std::thread thread;  // last: uses all of the above
};

TemporaryBlockFile::TemporaryBlockFile(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}
TemporaryBlockFile::~TemporaryBlockFile() = default;

absl::StatusOr<std::unique_ptr<TemporaryBlockFile>> TemporaryBlockFile::Create(
    const std::string& directory, int slots, int64_t block_bytes, Loop* loop) {
  std::string path = absl::StrCat(directory, "/tandem-kv-XXXXXX");
  const int fd = mkostemp(path.data(), O_CLOEXEC);  // mode 0600
  if (fd < 0) return FileError(path.c_str(), errno);
  if (unlink(path.c_str()) != 0) {
    const int error = errno;
    close(fd);
    return FileError(path.c_str(), error);
  }
  return std::unique_ptr<TemporaryBlockFile>(new TemporaryBlockFile(
      std::make_unique<Impl>(fd, slots, block_bytes, loop)));
}

void TemporaryBlockFile::Write(int slot, const BlockHash& hash,
                               absl::Span<const std::byte> data, Done done) {
  impl_->Push({slot, hash, data, {}, std::move(done)});
}

void TemporaryBlockFile::Read(int slot, const BlockHash& hash,
                              absl::Span<std::byte> data, Done done) {
  impl_->Push({slot, hash, {}, data, std::move(done)});
}

int TemporaryBlockFile::descriptor() const { return impl_->fd; }

}  // namespace tandem::engine
