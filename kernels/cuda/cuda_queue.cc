// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/cuda_queue.h"

#include <pthread.h>

#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem::kernels::cuda {
namespace {

using Callable = absl::AnyInvocable<void()>;

void RunCallable(void* argument) {
  const std::unique_ptr<Callable> callable(static_cast<Callable*>(argument));
  (*callable)();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Memory>> Memory::OnDevice(Device& device,
                                                         size_t bytes) {
  const absl::StatusOr<std::byte*> data = device.Allocate(bytes);
  if (!data.ok()) return data.status();
  return std::unique_ptr<Memory>(new Memory(device, *data, bytes, false));
}

absl::StatusOr<std::unique_ptr<Memory>> Memory::OnHost(Device& device,
                                                       size_t bytes) {
  const absl::StatusOr<std::byte*> data = device.AllocateHost(bytes);
  if (!data.ok()) return data.status();
  return std::unique_ptr<Memory>(new Memory(device, *data, bytes, true));
}

Memory::~Memory() {
  device_.Enter();
  host_ ? device_.FreeHost(data()) : device_.Free(data(), size());
}

void Die(std::string_view what, std::string_view why) {
  std::fprintf(stderr, "fatal: GPU: %s: %s; this process ends\n",
               std::string(what).c_str(), std::string(why).c_str());
  std::_Exit(70);  // EX_SOFTWARE; destructors would wait for the device
}

template <typename T>
T CudaQueue::Must(absl::StatusOr<T> value, std::string_view what) {
  if (!value.ok()) Die(what, std::string(value.status().message()));
  return *std::move(value);
}

CudaQueue::CudaQueue(Device& device, bool urgent)
    : device_(device),
      stream_(Must(device.NewStream(urgent), "new stream")),
      callbacks_(Must(device.NewStream(urgent), "new stream")),
      done_(Must(device.NewEvent(), "new event")),
      waited_(Must(device.NewEvent(), "new event")),
      device_digests_(Must(
          Memory::OnDevice(device, kDigests * sizeof(KvDigest)), "digests")),
      host_digests_(
          Must(Memory::OnHost(device, kDigests * sizeof(KvDigest)), "digests")),
      free_digests_(kDigests) {
  std::iota(free_digests_.begin(), free_digests_.end(), 0);
  watch_ = std::thread([this] { Watch(); });
}

CudaQueue::~CudaQueue() {
  Synchronize();
  {
    MutexLock lock(&watch_mutex_);
    closed_ = true;
    closing_.NotifyAll();
  }
  watch_.join();
  DropGraphs();
  device_.DestroyEvent(done_);
  device_.DestroyEvent(waited_);
  device_.DestroyStream(callbacks_);
  device_.DestroyStream(stream_);
}

void CudaQueue::Watch() {
  pthread_setname_np(pthread_self(), "gpu-watch");
  device_.Enter();
  MutexLock lock(&watch_mutex_);
  while (!closed_) {
    closing_.WaitFor(&watch_mutex_, std::chrono::seconds(1));
    for (void* const stream : {stream_, callbacks_}) {
      const int error = device_.ErrorOf(stream);
      if (error != 0) Die("work on the device", device_.ErrorText(error));
    }
  }
}

Stream CudaQueue::stream() {
  device_.Enter();
  const DeviceFacts& facts = device_.facts();
  return {stream_, facts.generation, facts.multiprocessors,
          std::exchange(after_kernel_, true)};
}

void CudaQueue::Copy(void* to, const void* from, size_t bytes) {
  device_.Enter();
  after_kernel_ = false;
  Check(device_.Copy(stream_, to, from, bytes), "copy");
}

void CudaQueue::Check(int error, std::string_view what) {
  if (error != 0 && capturing_) {
    capture_error_ = error;  // nothing has run: no harm is done
    return;
  }
  if (error != 0) Die(what, device_.ErrorText(error));
}

void CudaQueue::Callback(absl::AnyInvocable<void()> callback) {
  device_.Enter();
  after_kernel_ = false;
  Check(device_.Record(done_, stream_), "event");
  Check(device_.Wait(callbacks_, done_), "event");
  Call(callbacks_, std::move(callback));
}

void CudaQueue::HostWork(absl::AnyInvocable<void()> work) {
  device_.Enter();
  after_kernel_ = false;
  Call(stream_, std::move(work));
}

void CudaQueue::Call(void* stream, absl::AnyInvocable<void()> call) {
  auto callable = std::make_unique<Callable>(std::move(call));
  Check(device_.HostCall(stream, &RunCallable, callable.release()),
        "host call");
}

absl::Status CudaQueue::Record(uint64_t key, absl::FunctionRef<void()> record) {
  // Once as they are: loads what kernels are not loaded yet and takes working
  // memory, neither of which a capture may do.
  record();
  device_.Enter();
  after_kernel_ = false;
  MutexLock lock(&watch_mutex_);  // whoever asks of the stream ends a capture
  if (const int error = device_.BeginCapture(stream_); error != 0) {
    return absl::InternalError(device_.ErrorText(error));
  }
  capturing_ = true;
  capture_error_ = 0;
  record();
  capturing_ = false;
  after_kernel_ = false;
  const absl::StatusOr<void*> graph = device_.EndCapture(stream_);
  if (!graph.ok()) return graph.status();
  if (capture_error_ != 0) {
    device_.DestroyGraph(*graph);
    return absl::InternalError(device_.ErrorText(capture_error_));
  }
  const auto [at, added] = graphs_.emplace(key, *graph);
  if (!added) {
    Synchronize();  // the old one may run
    device_.DestroyGraph(std::exchange(at->second, *graph));
  }
  return absl::OkStatus();
}

bool CudaQueue::Replay(uint64_t key) {
  const auto found = graphs_.find(key);
  if (found == graphs_.end()) return false;
  device_.Enter();
  after_kernel_ = false;
  Check(device_.LaunchGraph(stream_, found->second), "graph");
  return true;
}

void CudaQueue::DropGraphs() {
  for (const auto& [key, graph] : graphs_) device_.DestroyGraph(graph);
  graphs_.clear();
}

void CudaQueue::WaitFor(Queue& other) {
  device_.Enter();
  CudaQueue& before = static_cast<CudaQueue&>(other);
  before.after_kernel_ = false;
  after_kernel_ = false;
  Check(device_.Record(waited_, before.stream_), "event");
  Check(device_.Wait(stream_, waited_), "event");
}

void CudaQueue::Synchronize() {
  device_.Enter();
  Check(device_.Synchronize(stream_), "waiting for the device");
  Check(device_.Synchronize(callbacks_), "waiting for the device");
}

KvDigest* CudaQueue::NewDigest() {
  int slot = -1;
  for (;;) {
    {
      MutexLock lock(&mutex_);
      if (!free_digests_.empty()) {
        slot = free_digests_.back();
        free_digests_.pop_back();
        break;
      }
    }
    Synchronize();  // frees those of operations that were sent
  }
  KvDigest* const digest =
      reinterpret_cast<KvDigest*>(device_digests_->data()) + slot;
  device_.Enter();
  after_kernel_ = false;
  Check(device_.Zero(stream_, digest, sizeof(KvDigest)), "digest");
  return digest;
}

void CudaQueue::SendDigest(KvDigest* digest, KvDigest* to) {
  const auto slot = static_cast<int>(
      digest - reinterpret_cast<KvDigest*>(device_digests_->data()));
  KvDigest* const landed =
      reinterpret_cast<KvDigest*>(host_digests_->data()) + slot;
  Copy(landed, digest, sizeof(KvDigest));
  Callback([this, slot, landed, to] {
    *to = *landed;
    MutexLock lock(&mutex_);
    free_digests_.push_back(slot);
  });
}

std::byte* CudaQueue::scratch(Scratch which, size_t bytes) {
  std::unique_ptr<Memory>& memory = scratch_[which];
  if (memory == nullptr || memory->size() < bytes) {
    outgrown_.push_back(std::exchange(
        memory, Must(Memory::OnDevice(device_, std::bit_ceil(bytes)),
                     "working memory")));
  }
  return memory->data();
}

void CudaQueue::Adopt(Scratch which, std::unique_ptr<Memory> memory) {
  Synchronize();
  DropGraphs();
  scratch_[which] = std::move(memory);
}

}  // namespace tandem::kernels::cuda
