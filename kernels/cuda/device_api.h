// SPDX-License-Identifier: Apache-2.0
// What the CUDA backend needs of a device beside its kernels (launch.h):
// memory, copies, streams, events and host calls. There are two: cuda_device.cc
// over the CUDA runtime, and testing/host_device.cc, which runs everything in
// host memory, so that one backend is tested without a GPU.
//
// Streams and events are opaque pointers. Calls that put work on a
// stream return 0 or an error code that ErrorText explains.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_API_H_
#define TANDEM_KERNELS_CUDA_DEVICE_API_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::kernels::cuda {

struct DeviceFacts {
  std::string name;    // "cuda:0 (NVIDIA H200)"
  int generation = 0;  // compute capability times ten: 80, 90, 100
  int multiprocessors = 0;
  size_t shared_bytes = 0;  // shared memory that a block may have
  size_t total_bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceFacts& facts() const = 0;

  // Makes this the calling thread's device. Before any launch.
  virtual void Enter() = 0;

  // Memory. RESOURCE_EXHAUSTED says how much was free.
  virtual absl::StatusOr<std::byte*> Allocate(size_t bytes) = 0;  // zeroed
  virtual void Free(std::byte* data, size_t bytes) = 0;
  virtual absl::StatusOr<std::byte*> AllocateHost(size_t bytes) = 0;  // zeroed
  virtual void FreeHost(std::byte* data) = 0;
  // Pins and maps what the caller has, until it takes it back.
  virtual absl::Status RegisterHost(std::byte* data, size_t bytes) = 0;
  virtual void UnregisterHost(std::byte* data) = 0;
  virtual size_t FreeBytes() = 0;
  // Of Allocate, not given back.
  virtual size_t UsedBytes() const = 0;
  // Whether kernels may read and write what is there: device memory, or host
  // memory that is pinned and mapped.
  virtual bool Reaches(const void* data) = 0;

  // Streams. A higher `urgent` one's kernels start first.
  virtual absl::StatusOr<void*> NewStream(bool urgent) = 0;
  virtual void DestroyStream(void* stream) = 0;
  virtual int Synchronize(void* stream) = 0;
  // The error that the stream ended with, or 0, whether it is done or not. From
  // any thread, but not while the stream's launches are captured.
  virtual int ErrorOf(void* stream) = 0;
  // Of any two memories; unpinned host memory may make it wait.
  virtual int Copy(void* stream, void* to, const void* from, size_t bytes) = 0;
  virtual int Zero(void* stream, void* data, size_t bytes) = 0;
  // Runs call(argument) on some thread; what follows on the stream waits. Never
  // does where the device fails before.
  virtual int HostCall(void* stream, void (*call)(void*), void* argument) = 0;

  // Events. What `stream` gets from now on waits for the last Record.
  virtual absl::StatusOr<void*> NewEvent() = 0;
  virtual void DestroyEvent(void* event) = 0;
  virtual int Record(void* event, void* stream) = 0;
  virtual int Wait(void* stream, void* event) = 0;

  // Graphs. From BeginCapture to EndCapture launches on the stream, by this
  // thread, are kept rather than run; nothing else may be put there. The graph
  // repeats them, arguments and all.
  virtual int BeginCapture(void* stream) = 0;
  virtual absl::StatusOr<void*> EndCapture(void* stream) = 0;
  virtual int LaunchGraph(void* stream, void* graph) = 0;
  virtual void DestroyGraph(void* graph) = 0;

  virtual std::string ErrorText(int error) const = 0;
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_API_H_
