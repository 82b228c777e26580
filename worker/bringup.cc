// SPDX-License-Identifier: Apache-2.0
#include "worker/bringup.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/progress.h"
#include "common/random.h"
#include "engine/model_config.h"
#include "engine/safetensors.h"
#include "handoff/handoff.h"
#include "kernels/cpu/cpu_backend.h"

namespace tandem::worker {
namespace {

using kernels::DType;

absl::StatusOr<std::optional<DType>> ParseDType(const std::string& flag,
                                                const std::string& value) {
  if (value == "auto") return std::optional<DType>();
  if (value == "f32" || value == "float32") return DType::kF32;
  if (value == "bf16" || value == "bfloat16") return DType::kBF16;
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " is '", value, "', expected auto, f32 or bf16"));
}

// Blocks that the flags ask for, and the longest sequence that they hold.
struct KvPlan {
  int num_blocks = 0;
  int max_model_len = 0;
};

absl::StatusOr<KvPlan> PlanKv(const WorkerFlags& flags,
                              const engine::ModelSpec& spec, DType kv_dtype) {
  kernels::KvShape shape;
  shape.num_layers = spec.layers;
  shape.kv_heads = spec.kv_heads;
  shape.head_dim = spec.head_dim;
  shape.dtype = kv_dtype;
  const int64_t block_bytes = shape.bytes_per_position() * flags.block_size;
  KvPlan plan;
  plan.max_model_len = flags.max_model_len > 0
                           ? std::min(flags.max_model_len, spec.max_positions)
                           : spec.max_positions;
  if (flags.max_model_len > spec.max_positions) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--max-model-len ", flags.max_model_len, " is more than the model's ",
        spec.max_positions, " positions"));
  }
  plan.num_blocks = flags.num_blocks;
  if (plan.num_blocks == 0) {
    // No more than every slot full: a small model needs no gigabyte.
    const int64_t useful =
        int64_t{flags.max_num_seqs} * 2 *
        ((plan.max_model_len + flags.block_size - 1) / flags.block_size);
    plan.num_blocks = static_cast<int>(
        std::min<int64_t>({flags.kv_cache_bytes / block_bytes, useful,
                           INT_MAX / flags.block_size}));
  }
  const int64_t fits = int64_t{plan.num_blocks} * flags.block_size;
  if (fits < plan.max_model_len) {
    if (flags.max_model_len > 0 || fits < flags.block_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the KV cache holds ", fits, " tokens, less than one sequence of ",
          plan.max_model_len, ": raise --kv-cache-memory-bytes to ",
          shape.bytes_per_position() * plan.max_model_len,
          ", or lower --max-model-len to ", fits));
    }
    plan.max_model_len = static_cast<int>(fits);
  }
  return plan;
}

// Enough groups that the last one's transfer is a small part of the whole.
int LayersPerGroup(const WorkerFlags& flags, int layers) {
  if (flags.layers_per_group > 0) return flags.layers_per_group;
  return std::max(1, layers / 8);
}

absl::StatusOr<std::vector<std::string>> Ways(const std::string& handoff) {
  if (handoff == "auto") return std::vector<std::string>{"shm", "grpc"};
  if (handoff == "shm" || handoff == "grpc") {
    return std::vector<std::string>{handoff};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--handoff is '", handoff, "', expected auto, shm or grpc"));
}

std::string DirectoryName(const std::string& path) {
  std::filesystem::path normal =
      std::filesystem::weakly_canonical(std::filesystem::path(path));
  return normal.filename().string();
}

v1::WorkerHello MakeHello(const WorkerFlags& flags, v1::WorkerRole role,
                          const WorkerParts& parts) {
  v1::WorkerHello hello;
  hello.mutable_worker()->set_worker_id(
      !flags.worker_id.empty()
          ? flags.worker_id
          : absl::StrCat(
                role == v1::WORKER_ROLE_PREFILL ? "prefill-" : "decode-",
                absl::BytesToHexString(parts.incarnation.substr(0, 4))));
  hello.mutable_worker()->set_incarnation(parts.incarnation);
  hello.set_role(role);
  hello.set_model(!flags.served_model_name.empty()
                      ? flags.served_model_name
                      : DirectoryName(flags.model_dir));
  for (const auto& [name, value] : parts.fingerprint) {
    (*hello.mutable_fingerprint())[name] = value;
  }
  hello.set_protocol_min(handoff::kProtocolMin);
  hello.set_protocol_max(handoff::kProtocolMax);
  hello.set_max_model_len(parts.engine_options.max_model_len);
  hello.set_block_size(flags.block_size);
  hello.set_num_blocks(parts.pool->counts().total);
  hello.set_max_num_seqs(flags.max_num_seqs);
  hello.set_kv_dtype(parts.kv_dtype);
  hello.set_kv_bytes_per_token(parts.executor->kv_shape().bytes_per_position());
  hello.set_host_id(parts.host_id);
  hello.set_mixed_numerics(flags.mixed_numerics);
  return hello;
}

}  // namespace

std::string HostId() {
  std::string boot_id = "unknown";
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::getline(file, boot_id);
  // Abstract Unix sockets belong to a network namespace.
  char target[PATH_MAX];
  const ssize_t length = readlink("/proc/self/ns/net", target, sizeof target);
  return absl::StrCat(
      boot_id, "/",
      length > 0 ? std::string(target, static_cast<size_t>(length)) : "");
}

absl::StatusOr<WorkerParts> BringUp(const WorkerFlags& flags,
                                    v1::WorkerRole role, Loop* loop) {
  WorkerParts parts;
  SystemRandom random;
  parts.incarnation = random.Bytes(16);
  parts.host_id = HostId();
  absl::StatusOr<std::vector<std::string>> ways = Ways(flags.handoff);
  if (!ways.ok()) return ways.status();
  parts.ways = *std::move(ways);
  const auto weight_dtype = ParseDType("--dtype", flags.dtype);
  if (!weight_dtype.ok()) return weight_dtype.status();
  const auto kv_flag = ParseDType("--kv-cache-dtype", flags.kv_cache_dtype);
  if (!kv_flag.ok()) return kv_flag.status();

  if (flags.block_size % 8 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--block-size is ", flags.block_size, ", expected a multiple of 8"));
  }

  absl::StatusOr<engine::ModelSpec> spec =
      engine::LoadModelSpec(flags.model_dir);
  if (!spec.ok()) return spec.status();
  absl::StatusOr<engine::Checkpoint> checkpoint =
      engine::Checkpoint::Open(flags.model_dir);
  if (!checkpoint.ok()) return checkpoint.status();

  kernels::CpuOptions cpu;
  cpu.threads = flags.threads;
  absl::StatusOr<std::unique_ptr<kernels::Backend>> backend =
      kernels::NewCpuBackend(cpu);
  if (!backend.ok()) return backend.status();
  parts.backend = *std::move(backend);

  engine::LoadOptions load;
  load.weight_dtype = *weight_dtype;
  const int64_t bytes = static_cast<int64_t>(checkpoint->total_bytes());
  Progress loading({.what = "loading weights",
                    .total_bytes = bytes,
                    .tty = IsTerminal(stderr)});
  absl::StatusOr<std::unique_ptr<engine::Model>> model =
      engine::Model::Load(*spec, *checkpoint, load, parts.backend.get(),
                          [&](uint64_t done, uint64_t total) {
                            loading.Update(static_cast<int64_t>(done));
                          });
  if (!model.ok()) return model.status();
  parts.model = *std::move(model);

  const DType kv_dtype = kv_flag->value_or(
      parts.model->weight_format() == "f32" ? DType::kF32 : DType::kBF16);
  parts.kv_dtype = std::string(kernels::Name(kv_dtype));
  absl::StatusOr<KvPlan> plan = PlanKv(flags, *spec, kv_dtype);
  if (!plan.ok()) return plan.status();

  Progress hashing({.what = "checking weights",
                    .total_bytes = bytes,
                    .tty = IsTerminal(stderr)});
  absl::StatusOr<engine::FingerprintParts> fingerprint = engine::Fingerprint(
      flags.model_dir, *checkpoint, *parts.model, *parts.backend, kv_dtype,
      std::max(1, flags.threads), [&](uint64_t done, uint64_t total) {
        hashing.Update(static_cast<int64_t>(done));
      });
  if (!fingerprint.ok()) return fingerprint.status();
  parts.fingerprint = *std::move(fingerprint);

  engine::DeviceExecutorOptions executor;
  executor.max_rows = flags.max_num_batched_tokens;
  // Each sequence of a step has at least one row.
  executor.max_sequences =
      std::min(flags.max_num_seqs, flags.max_num_batched_tokens);
  executor.block_size = flags.block_size;
  executor.num_blocks = plan->num_blocks;
  executor.kv_dtype = kv_dtype;
  executor.layers_per_group = LayersPerGroup(flags, spec->layers);
  auto device = engine::DeviceExecutor::Create(executor, parts.model.get(),
                                               parts.backend.get(), loop);
  if (!device.ok()) return device.status();
  parts.executor = *std::move(device);
  parts.pool =
      std::make_unique<engine::KvPool>(plan->num_blocks, flags.block_size);

  parts.engine_options.max_num_seqs = executor.max_sequences;
  parts.engine_options.max_num_batched_tokens = flags.max_num_batched_tokens;
  parts.engine_options.max_model_len = plan->max_model_len;
  parts.engine_options.prefix_caching = flags.prefix_caching;
  parts.hello = MakeHello(flags, role, parts);
  return parts;
}

}  // namespace tandem::worker
