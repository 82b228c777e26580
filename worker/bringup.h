// SPDX-License-Identifier: Apache-2.0
// From flags to a worker's running engine parts: device, model, KV memory,
// fingerprint, and what the worker says of itself to routers. The same for
// both roles; what differs is decided in their mains.

#ifndef TANDEM_WORKER_BRINGUP_H_
#define TANDEM_WORKER_BRINGUP_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "engine/device/device_executor.h"
#include "engine/engine.h"
#include "engine/kv/kv_offload.h"
#include "engine/kv/kv_pool.h"
#include "engine/model/fingerprint.h"
#include "engine/model/model.h"
#include "kernels/backend.h"
#include "tandem/v1/registry.pb.h"
#include "worker/draft_model.h"
#include "worker/gpu_handoff.h"
#include "worker/load_adapters.h"
#include "worker/startup_clock.h"
#include "worker/startup_progress.h"
#include "worker/text_grammars.h"

namespace tandem::worker {

// Flags of both workers, with the names that users of vLLM and llama.cpp
// know. docs/operations.md explains each.
struct WorkerFlags {
  std::string model_dir;
  std::string served_model_name;  // empty: the directory's name
  std::string worker_id;          // empty: drawn
  std::string metrics_compat = "none";
  std::vector<std::string> routers;  // host:port of their internal listeners
  std::string host = "127.0.0.1";
  int grpc_port = 0;  // 0: a free one
  int http_port = 0;
  std::string advertise_host;           // empty: host
  std::string device = "auto";          // auto, cpu, cuda:N
  std::string cuda_library;             // empty: beside the program
  std::string nccl_library;             // the same
  double gpu_memory_utilization = 0.9;  // of the GPU's memory, this process's
  double tenant_cache_share = 0.5;      // of the KV blocks (KvPool)
  int threads = 0;                      // 0: all cores of this process
  std::string dtype = "auto";           // of weights: auto, f32, bf16, f16
  // Of products' inputs on a CPU: auto (f32), f32, bf16.
  std::string activation_dtype = "auto";
  std::string quantization = "none";  // of weights: none, fp8, int8, int4, w8a8
  std::string kv_cache_dtype = "auto";  // auto: f32 for f32 weights, else bf16
  int max_model_len = 0;                // 0: what the model and the pool allow
  int max_num_seqs = 64;
  int max_num_batched_tokens = 512;
  int block_size = 16;
  int num_blocks = 0;          // 0: from kv_cache_bytes
  int64_t kv_cache_bytes = 0;  // 0: 1 GiB; on a GPU its share
  int64_t structured_cache_bytes = int64_t{64} << 20;
  int64_t kv_offload_bytes = 0;       // of host memory; 0: no offloading
  std::string kv_offload_path;        // a directory; empty: no file
  int64_t kv_offload_file_bytes = 0;  // in it
  std::string kv_cache = "on";        // off: each token computes all again
  bool attention_output = false;      // tokens may bring weights along
  bool prefix_caching = true;
  bool mixed_numerics = false;
  AdapterFlags adapters;
  bool enforce_eager = false;             // a GPU's steps are not recorded
  std::string async_scheduling = "auto";  // on, off; auto: on a GPU
  std::string speculative_config;         // JSON; empty: no speculation
  int layers_per_group = 0;      // of a handoff; 0: so that slices are large
  std::string handoff = "auto";  // auto, nccl, shm, grpc
  int64_t slab_bytes = 0;        // 0: 8 MiB on a GPU, else 1 MiB
  absl::Duration shutdown_timeout = absl::Seconds(30);
  absl::Duration lease = absl::Seconds(4);
  absl::Duration liveness_timeout = absl::Seconds(60);
};

// Fields in order of construction: later ones use earlier ones.
struct WorkerParts {
  std::unique_ptr<kernels::Backend> backend;
  std::unique_ptr<GpuHandoff> gpu;  // null on a CPU
  std::unique_ptr<engine::Model> model;
  LoadedAdapters adapters;
  std::unique_ptr<TextGrammars> grammars;  // null: not offered
  std::unique_ptr<engine::DeviceExecutor> executor;
  std::unique_ptr<engine::KvPool> pool;
  DraftParts draft;
  std::unique_ptr<kernels::Buffer> offload_memory;  // these three: null
  std::unique_ptr<engine::BlockFile> offload_file;  // where nothing is
  std::unique_ptr<engine::KvOffload> offload;       // offloaded
  engine::EngineOptions engine_options;
  engine::FingerprintParts fingerprint;
  std::string kv_dtype;
  std::string incarnation;  // 16 random bytes
  std::string host_id;
  std::vector<std::string> ways;
  int64_t slab_bytes = 0;
  v1::WorkerHello hello;  // without endpoints
  StartupClock clock;     // its phases so far
};

// Loads everything, with progress on standard error and in `progress`. `loop`
// is where the executor reports. Errors say what to change.
absl::StatusOr<WorkerParts> BringUp(const WorkerFlags& flags,
                                    v1::WorkerRole role, Loop* loop,
                                    StartupProgress* progress);

// Equal in all processes that share memory: the kernel's boot id and the
// network namespace's abstract sockets.
std::string HostId();

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_BRINGUP_H_
