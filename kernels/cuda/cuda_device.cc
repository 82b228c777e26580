// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem::kernels::cuda {
namespace {

std::string Text(cudaError_t error) {
  return absl::StrCat(cudaGetErrorString(error), " (", cudaGetErrorName(error),
                      ")");
}

std::string Version(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

// The first call into the runtime: what is wrong with driver or device, in
// words that say what to do.
absl::Status Explain(cudaError_t error) {
  int driver = 0;
  int runtime = 0;
  // Errors here say no more than the one at hand.
  (void)cudaDriverGetVersion(&driver);
  (void)cudaRuntimeGetVersion(&runtime);
  if (driver == 0) {
    return absl::UnavailableError(
        "no NVIDIA driver: libcuda.so.1 was not found or is no driver; install "
        "the driver, or give the container the GPU");
  }
  if (error == cudaErrorInsufficientDriver) {
    return absl::UnavailableError(absl::StrCat(
        "the NVIDIA driver supports CUDA ", Version(driver),
        ", older than this program's ", Version(runtime), ": update it"));
  }
  if (error == cudaErrorNoDevice) {
    return absl::UnavailableError(
        "the NVIDIA driver sees no GPU (is CUDA_VISIBLE_DEVICES empty?)");
  }
  return absl::UnavailableError(absl::StrCat("CUDA: ", Text(error)));
}

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, DeviceFacts facts)
      : ordinal_(ordinal), facts_(std::move(facts)) {}

  const DeviceFacts& facts() const override { return facts_; }
  void Enter() override { (void)cudaSetDevice(ordinal_); }

  absl::StatusOr<std::byte*> Allocate(size_t bytes) override {
    Enter();
    void* data = nullptr;
    cudaError_t error = cudaMalloc(&data, bytes);
    if (error == cudaSuccess) error = cudaMemset(data, 0, bytes);
    // The zeros are written behind our back, and our streams would not wait.
    if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
    if (error == cudaSuccess) {
      used_ += bytes;
      return static_cast<std::byte*>(data);
    }
    (void)cudaGetLastError();  // not for the next call to find
    return Exhausted(bytes, error, "GPU");
  }
  void Free(std::byte* data, size_t bytes) override {
    used_ -= bytes;
    (void)cudaFree(data);
  }
  size_t UsedBytes() const override { return used_; }

  absl::StatusOr<std::byte*> AllocateHost(size_t bytes) override {
    Enter();
    void* data = nullptr;
    const cudaError_t error = cudaHostAlloc(
        &data, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return Exhausted(bytes, error, "pinned host");
    }
    std::byte* const begin = static_cast<std::byte*>(data);
    std::fill(begin, begin + bytes, std::byte{0});
    return begin;
  }
  void FreeHost(std::byte* data) override { (void)cudaFreeHost(data); }

  absl::Status RegisterHost(std::byte* data, size_t bytes) override {
    Enter();
    const cudaError_t error = cudaHostRegister(
        data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (error == cudaSuccess) return absl::OkStatus();
    (void)cudaGetLastError();
    return absl::ResourceExhaustedError(
        absl::StrCat(facts_.name, ": ", bytes >> 20,
                     " MiB of host memory cannot be pinned: ", Text(error)));
  }
  void UnregisterHost(std::byte* data) override {
    Enter();
    (void)cudaHostUnregister(data);
  }

  size_t FreeBytes() override {
    Enter();
    size_t free = 0;
    size_t total = 0;
    (void)cudaMemGetInfo(&free, &total);
    return free;
  }

  bool Reaches(const void* data) override {
    Enter();
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    // With unified addresses the device's pointer is the host's.
    return attributes.type != cudaMemoryTypeUnregistered &&
           attributes.devicePointer == data;
  }

  absl::StatusOr<void*> NewStream(bool urgent) override {
    Enter();
    int least = 0;
    int greatest = 0;
    (void)cudaDeviceGetStreamPriorityRange(&least, &greatest);
    cudaStream_t stream = nullptr;
    const cudaError_t error = cudaStreamCreateWithPriority(
        &stream, cudaStreamNonBlocking, urgent ? greatest : least);
    if (error != cudaSuccess) return absl::InternalError(Text(error));
    return stream;
  }
  void DestroyStream(void* stream) override {
    (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream));
  }
  int Synchronize(void* stream) override {
    return cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
  }
  int ErrorOf(void* stream) override {
    const cudaError_t error =
        cudaStreamQuery(static_cast<cudaStream_t>(stream));
    return error == cudaErrorNotReady ? cudaSuccess : error;
  }
  int Copy(void* stream, void* to, const void* from, size_t bytes) override {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault,
                           static_cast<cudaStream_t>(stream));
  }
  int Zero(void* stream, void* data, size_t bytes) override {
    return cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(stream));
  }
  int HostCall(void* stream, void (*call)(void*), void* argument) override {
    return cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), call,
                              argument);
  }

  absl::StatusOr<void*> NewEvent() override {
    Enter();
    cudaEvent_t event = nullptr;
    const cudaError_t error =
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error != cudaSuccess) return absl::InternalError(Text(error));
    return event;
  }
  void DestroyEvent(void* event) override {
    (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
  int Record(void* event, void* stream) override {
    return cudaEventRecord(static_cast<cudaEvent_t>(event),
                           static_cast<cudaStream_t>(stream));
  }
  int Wait(void* stream, void* event) override {
    return cudaStreamWaitEvent(static_cast<cudaStream_t>(stream),
                               static_cast<cudaEvent_t>(event), 0);
  }

  int BeginCapture(void* stream) override {
    // Other threads allocate and wait as before.
    return cudaStreamBeginCapture(static_cast<cudaStream_t>(stream),
                                  cudaStreamCaptureModeThreadLocal);
  }
  absl::StatusOr<void*> EndCapture(void* stream) override {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    cudaError_t error =
        cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&ready, graph, 0);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    if (error == cudaSuccess) {
      // Now rather than with the first launch.
      error = cudaGraphUpload(ready, static_cast<cudaStream_t>(stream));
    }
    if (error == cudaSuccess) return ready;
    if (ready != nullptr) (void)cudaGraphExecDestroy(ready);
    (void)cudaGetLastError();  // not for the next call to find
    return absl::InternalError(Text(error));
  }
  int LaunchGraph(void* stream, void* graph) override {
    return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph),
                           static_cast<cudaStream_t>(stream));
  }
  void DestroyGraph(void* graph) override {
    (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
  }

  std::string ErrorText(int error) const override {
    return Text(static_cast<cudaError_t>(error));
  }

 private:
  absl::Status Exhausted(size_t bytes, cudaError_t error,
                         std::string_view kind) {
    return absl::ResourceExhaustedError(absl::StrCat(
        facts_.name, ": no ", bytes >> 20, " MiB of ", std::string(kind),
        " memory (", FreeBytes() >> 20, " of ", facts_.total_bytes >> 20,
        " MiB of the GPU's are free): ", Text(error)));
  }

  const int ordinal_;
  const DeviceFacts facts_;
  std::atomic<size_t> used_{0};
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int ordinal) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return Explain(error);
  if (ordinal >= count) {
    return absl::UnavailableError(absl::StrCat("there is no cuda:", ordinal,
                                               ", only ", count,
                                               count == 1 ? " GPU" : " GPUs"));
  }
  cudaDeviceProp properties{};
  error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) {
    error = cudaGetDeviceProperties(&properties, ordinal);
  }
  // Makes the context: fails here rather than in the middle of loading.
  if (error == cudaSuccess) error = cudaFree(nullptr);
  if (error != cudaSuccess) return Explain(error);
  const std::string name =
      absl::StrCat("cuda:", ordinal, " (", properties.name, ")");
  if (properties.major < 8) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, " has compute capability ", properties.major, ".",
                     properties.minor, ", expected 8.0 (Ampere) or newer"));
  }
  return std::unique_ptr<Device>(std::make_unique<CudaDevice>(
      ordinal, DeviceFacts{.name = name,
                           .generation = properties.major * 10,
                           .multiprocessors = properties.multiProcessorCount,
                           .shared_bytes = properties.sharedMemPerBlockOptin,
                           .total_bytes = properties.totalGlobalMem}));
}

}  // namespace tandem::kernels::cuda
