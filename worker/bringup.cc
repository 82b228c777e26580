// SPDX-License-Identifier: Apache-2.0
#include "worker/bringup.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/cpu_limits.h"
#include "common/features.h"
#include "common/lifecycle.h"
#include "common/log.h"
#include "common/memory_limit.h"
#include "common/progress.h"
#include "common/random.h"
#include "engine/checkpoint/model_config.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/model/layer_parts.h"
#include "engine/model/model_work.h"
#include "engine/model/weight_packer.h"
#include "handoff/handoff.h"
#include "handoff/wire.h"
#include "kernels/cuda/loader.h"
#include "worker/kv_plan.h"
#include "worker/speculation.h"

namespace tandem::worker {
namespace {

using kernels::CpuInputs;
using kernels::DType;

absl::StatusOr<std::optional<DType>> ParseDType(const std::string& flag,
                                                const std::string& value) {
  if (value == "auto") return std::optional<DType>();
  if (value == "f32" || value == "float32") return DType::kF32;
  if (value == "bf16" || value == "bfloat16") return DType::kBF16;
  if (value == "f16" || value == "float16") return DType::kF16;
  return UsageError(
      absl::StrCat(flag, " is '", value, "', expected auto, f32, bf16 or f16"));
}

// vLLM's names too: its fp8 is e4m3.
absl::StatusOr<std::optional<DType>> ParseKvDType(const std::string& value) {
  if (value == "fp8" || value == "fp8_e4m3") return DType::kFp8;
  if (value == "int8") return DType::kInt8;
  if (value == "int4") return DType::kInt4;
  absl::StatusOr<std::optional<DType>> type =
      ParseDType("--kv-cache-dtype", value);
  if (type.ok()) return type;
  return UsageError(
      absl::StrCat("--kv-cache-dtype is '", value,
                   "', expected auto, f32, bf16, f16, fp8, int8 or int4"));
}

absl::StatusOr<std::optional<DType>> ParseQuantization(
    std::string_view flag, const std::string& value) {
  if (value == "none") return std::optional<DType>();
  for (const DType type :
       {DType::kFp8, DType::kInt8, DType::kInt4, DType::kW8A8}) {
    if (value == kernels::Name(type)) return std::optional<DType>(type);
  }
  return UsageError(absl::StrCat(std::string(flag), " is '", value,
                                 "', expected none, fp8, int8, int4 or w8a8"));
}

// What a GPU computes in: as the flag says, else as the checkpoint does.
DType Activations(const std::optional<DType>& flag,
                  const engine::Checkpoint& checkpoint) {
  if (flag.has_value()) return *flag;
  for (const engine::TensorInfo& tensor : checkpoint.tensors()) {
    // Norms are often f32, and codes and masks are integers.
    if (tensor.shape.size() != 2 || !tensor.float_dtype()) continue;
    return tensor.dtype == "BF16"  ? DType::kBF16
           : tensor.dtype == "F16" ? DType::kF16
                                   : DType::kF32;
  }
  return DType::kF32;
}

// What is quantised when it is loaded was of the checkpoint's format before.
bool KeepsF32(const std::optional<DType>& flag,
              const engine::Checkpoint& checkpoint) {
  return Activations(flag, checkpoint) != DType::kBF16;
}

// Whether products on a CPU have weights whose inputs may be rounded.
bool HasBf16Products(std::optional<DType> quantisation, bool keeps_f32) {
  if (!quantisation) return !keeps_f32;
  return !kernels::HasIntegerProducts(*quantisation);
}

// What chains on a CPU round their inputs to.
absl::StatusOr<CpuInputs> ActivationsOnCpu(const WorkerFlags& flags,
                                           std::optional<DType> quantisation,
                                           bool keeps_f32, DType kv_dtype) {
  const bool amx = flags.activation_dtype == "bf16-amx";
  if (!amx && flags.activation_dtype != "bf16") return CpuInputs::kF32;
  if (HasBf16Products(quantisation, keeps_f32) || kv_dtype == DType::kBF16) {
    return amx ? CpuInputs::kBf16Amx : CpuInputs::kBf16;
  }
  return UsageError(absl::StrCat(
      "--activation-dtype ", flags.activation_dtype,
      " is for weights or a KV cache in bf16; here they are ",
      std::string(kernels::Name(quantisation.value_or(DType::kF32))), " and ",
      std::string(kernels::Name(kv_dtype)),
      ": add --dtype bf16, or leave it out"));
}

void LogWeights(const engine::Model& model) {
  LogInfo("weights", {{"format", model.weight_format()}});
  const std::vector<std::string>& dequantised = model.dequantised();
  if (dequantised.empty()) return;
  LogWarning(
      "codes of the checkpoint cannot be kept and are dequantised",
      {{"matrices", dequantised.size()}, {"first", dequantised.front()}});
}

// What is left for the KV cache once steps have their working memory.
absl::StatusOr<std::optional<GpuMemory>> MeasureGpu(
    const engine::DeviceExecutorOptions& options, const engine::Model& model,
    int64_t handoff_bytes, kernels::Backend& backend) {
  if (backend.memory().total_bytes == 0) return std::optional<GpuMemory>();
  const absl::Status reserved =
      backend.Reserve(engine::DeviceExecutor::Limits(options, model));
  if (!reserved.ok()) return reserved;
  const auto coming =
      static_cast<int64_t>(engine::Workspace::Bytes(
          model.spec(), options.max_rows, options.draws(),
          options.loras == nullptr ? nullptr : &options.loras->layout(),
          backend.activation_type())) +
      handoff_bytes + kGpuOverheadBytes;
  const kernels::MemoryFigures memory = backend.memory();
  return GpuMemory{static_cast<int64_t>(memory.total_bytes),
                   static_cast<int64_t>(memory.used_bytes) + coming,
                   static_cast<int64_t>(memory.free_bytes) - coming};
}

// Best first. A pair comes up over a link that already works, so nccl never
// goes without grpc.
absl::StatusOr<std::vector<std::string>> Ways(const std::string& handoff,
                                              bool on_gpu) {
  using List = std::vector<std::string>;
  if (handoff == "auto") {
    return on_gpu ? List{"nccl", "shm", "grpc"} : List{"shm", "grpc"};
  }
  if (handoff == "nccl") {
    if (on_gpu) return List{"nccl", "grpc"};
    return UsageError(
        "--handoff nccl needs a GPU: see the log's line 'device'");
  }
  return List{handoff};
}

inline constexpr int64_t kMinSlabBytes = 4096;

// Of a staging buffer. NCCL's operations each cost a round trip, a quarter of
// a millisecond or so: they must carry much.
int64_t SlabBytes(const WorkerFlags& flags, bool on_gpu) {
  if (flags.slab_bytes > 0) return flags.slab_bytes;
  return on_gpu ? int64_t{8} << 20 : int64_t{1} << 20;
}

DraftKv DraftKvOf(const engine::Model& model, DType kv_dtype, int block_size,
                  int num_blocks, bool on_gpu) {
  kernels::KvShape shape;
  shape.num_layers = engine::OnePart(model.spec()).room();
  engine::SetHeads(model.spec(), &shape);
  shape.dtype = kv_dtype;
  shape.block_size = block_size;
  return {KvBlockBytes(shape, on_gpu), num_blocks};
}

std::string DirectoryName(const std::string& path) {
  std::filesystem::path normal =
      std::filesystem::weakly_canonical(std::filesystem::path(path));
  return normal.filename().string();
}

// Before the worker is ready, so that no step waits for it. Without it steps
// take longer and are right all the same.
void RecordDecodes(engine::DeviceExecutor& executor) {
  const absl::Time start = absl::Now();
  int recorded = 0;
  const absl::Status status =
      executor.RecordDecodes([&](int done, int /*total*/) { recorded = done; });
  if (status.ok()) {
    LogInfo("recorded the steps of decoding as CUDA graphs",
            {{"graphs", recorded}, {"took", absl::Now() - start}});
  } else {
    LogWarning("cannot record steps as CUDA graphs, goes on without",
               {{"graphs", recorded}, {"reason", status}});
  }
}

// Options that make no sense alone.
absl::Status CheckOffload(const WorkerFlags& flags) {
  const auto refuse = [](const char* what) { return UsageError(what); };
  if (flags.kv_offload_bytes > 0 && !flags.prefix_caching) {
    return refuse(
        "--kv-offload-bytes keeps what the prefix cache evicts: give it with "
        "--enable-prefix-caching, or neither");
  }
  if (flags.kv_offload_bytes > 0 && flags.kv_cache == "off") {
    return refuse(
        "--kv-offload-bytes keeps what the prefix cache evicts, and --kv-cache "
        "off has none: take one of them");
  }
  if (flags.kv_offload_path.empty() != (flags.kv_offload_file_bytes == 0)) {
    return refuse(
        "--kv-offload-path and --kv-offload-file-bytes go together: where the "
        "file lies, and how large it may be");
  }
  if (flags.kv_offload_file_bytes > 0 && flags.kv_offload_bytes == 0) {
    return refuse(
        "--kv-offload-file-bytes needs --kv-offload-bytes: blocks go to the "
        "file by way of memory");
  }
  std::error_code error;
  if (!flags.kv_offload_path.empty() &&
      !std::filesystem::is_directory(flags.kv_offload_path, error)) {
    return UsageError(
        absl::StrCat("--kv-offload-path is '", flags.kv_offload_path,
                     "', which is no directory",
                     error ? absl::StrCat(" (", error.message(), ")") : "",
                     ": make it, or name one on a local disk"));
  }
  return absl::OkStatus();
}

// REQUIRES: executor and pool are there.
absl::Status StartOffload(const WorkerFlags& flags, Loop* loop,
                          WorkerParts* parts) {
  if (flags.kv_offload_bytes == 0) return absl::OkStatus();
  const int64_t block = parts->executor->block_bytes();
  const auto blocks = [block](int64_t bytes) {
    return static_cast<int>(std::min<int64_t>(bytes / block, 1 << 24));
  };
  engine::KvOffloadOptions options;
  options.memory_blocks = blocks(flags.kv_offload_bytes);
  options.file_blocks = blocks(flags.kv_offload_file_bytes);
  options.owner_share = flags.tenant_cache_share;
  const bool with_file = flags.kv_offload_file_bytes > 0;
  if (options.memory_blocks == 0 || (with_file && options.file_blocks == 0)) {
    return UsageError(
        absl::StrCat(options.memory_blocks == 0 ? "--kv-offload-bytes is "
                                                : "--kv-offload-file-bytes is ",
                     options.memory_blocks == 0 ? flags.kv_offload_bytes
                                                : flags.kv_offload_file_bytes,
                     ", less than one block of ", block, " bytes"));
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> memory =
      parts->backend->AllocateHost(
          static_cast<size_t>(options.memory_blocks * block));
  if (!memory.ok()) return memory.status();
  parts->offload_memory = *std::move(memory);
  if (with_file) {
    auto file = engine::TemporaryBlockFile::Create(
        flags.kv_offload_path, options.file_blocks, block, loop);
    if (!file.ok()) {
      return absl::Status(
          file.status().code(),
          absl::StrCat("--kv-offload-path: ", file.status().message()));
    }
    parts->offload_file = *std::move(file);
  }
  parts->offload = std::make_unique<engine::KvOffload>(
      options, loop, parts->executor.get(), parts->pool.get(),
      parts->offload_memory->data(), parts->offload_file.get());
  LogInfo("KV that is evicted is kept",
          {{"memory_tokens", int64_t{options.memory_blocks} * flags.block_size},
           {"file_tokens", int64_t{options.file_blocks} * flags.block_size},
           {"directory", flags.kv_offload_path}});
  return absl::OkStatus();
}

std::string ModelName(const WorkerFlags& flags) {
  return !flags.served_model_name.empty() ? flags.served_model_name
                                          : DirectoryName(flags.model_dir);
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
  hello.mutable_worker()->set_shared_decode(role == v1::WORKER_ROLE_DECODE);
  hello.set_role(role);
  hello.set_model(ModelName(flags));
  for (const auto& [name, value] : parts.fingerprint) {
    (*hello.mutable_fingerprint())[name] = value;
  }
  hello.set_protocol_min(handoff::OurProtocol().min);
  hello.set_protocol_max(handoff::OurProtocol().max);
  hello.set_max_model_len(parts.engine_options.max_model_len);
  hello.set_block_size(flags.block_size);
  hello.set_num_blocks(parts.pool->counts().total);
  hello.set_blocks_at_once(
      engine::Engine::BlocksAtOnce(parts.engine_options, flags.block_size,
                                   parts.engine_options.max_model_len));
  hello.set_max_num_seqs(flags.max_num_seqs);
  hello.set_kv_dtype(parts.kv_dtype);
  hello.set_kv_bytes_per_token(parts.executor->kv_shape().bytes_per_position());
  hello.set_host_id(parts.host_id);
  hello.set_mixed_numerics(flags.mixed_numerics);
  for (const std::string_view format : handoff::kWireFormats) {
    hello.add_kv_formats(std::string(format));
  }
  for (const char* const feature :
       {kFeatureTypicalP, kFeatureLogitRules, kFeatureNoKvCache,
        kFeatureAdapterLoading, kFeaturePromptLogprobs}) {
    hello.add_features(feature);
  }
  if (parts.grammars != nullptr) {
    hello.add_features(kFeatureStructured);
    hello.add_features(kFeatureStructuredAfter);
  }
  if (flags.attention_output) hello.add_features(kFeatureAttention);
  // Beams share what they have in common.
  if (flags.kv_cache == "on") hello.add_features(kFeatureBeamSearch);
  parts.adapters.table.List(hello.mutable_adapters());
  hello.set_device(parts.backend->description());
  hello.set_weight_format(parts.model->weight_format());
  for (const std::string& way : parts.ways) hello.add_ways(way);
  return hello;
}

HostMemory MeasureHost() {
  const int64_t own = OwnMemory();
  const int64_t limit = MemoryLimit();
  const int64_t available = AvailableMemory();
  return {available > 0 ? std::min(limit, own + available) : limit, own};
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
                                    v1::WorkerRole role, Loop* loop,
                                    StartupProgress* progress) {
  WorkerParts parts;
  SystemRandom random;
  parts.incarnation = random.Bytes(16);
  parts.host_id = HostId();
  const auto weight_dtype = ParseDType("--dtype", flags.dtype);
  if (!weight_dtype.ok()) return weight_dtype.status();
  const auto kv_flag = ParseKvDType(flags.kv_cache_dtype);
  if (!kv_flag.ok()) return kv_flag.status();
  const absl::StatusOr<std::optional<DType>> quantisation =
      ParseQuantization("--quantization", flags.quantization);
  if (!quantisation.ok()) return quantisation.status();

  const absl::StatusOr<SpeculativeConfig> speculative =
      ParseSpeculativeConfig(flags.speculative_config);
  if (!speculative.ok()) return speculative.status();
  const absl::StatusOr<std::optional<DType>> draft_quantisation =
      ParseQuantization("--speculative-config: quantization",
                        speculative->draft_quantization);
  if (!draft_quantisation.ok()) return draft_quantisation.status();
  const engine::Speculation& speculation = speculative->speculation;
  if (speculation.num_tokens > 0 && role != v1::WORKER_ROLE_DECODE) {
    return UsageError(
        "--speculative-config is for decode workers: a prefill worker draws "
        "one token of each sequence");
  }

  if (speculation.num_tokens > 0 && flags.kv_cache == "off") {
    return UsageError(
        "--speculative-config and --kv-cache off exclude each other: guesses "
        "are verified behind positions that the cache holds");
  }

  if (flags.block_size % 8 != 0) {
    return UsageError(absl::StrCat("--block-size is ", flags.block_size,
                                   ", expected a multiple of 8"));
  }
  const absl::Status offload = CheckOffload(flags);
  if (!offload.ok()) return offload;
  const absl::Status modules = CheckAdapters(flags.adapters, ModelName(flags));
  if (!modules.ok()) return modules;

  absl::StatusOr<engine::ModelSpec> spec =
      engine::LoadModelSpec(flags.model_dir);
  if (!spec.ok()) return spec.status();
  const absl::Status length = CheckMaxModelLen(flags, *spec);
  if (!length.ok()) return length;
  absl::StatusOr<engine::Checkpoint> checkpoint =
      engine::Checkpoint::Open(flags.model_dir);
  if (!checkpoint.ok()) return checkpoint.status();

  kernels::cuda::DeviceOptions device_options;
  device_options.device = flags.device;
  device_options.library = flags.cuda_library;
  device_options.cuda.activation = Activations(*weight_dtype, *checkpoint);
  device_options.cpu.threads = flags.threads;
  const bool keeps_f32 = KeepsF32(*weight_dtype, *checkpoint);
  const DType kv_on_cpu =
      kv_flag->value_or(keeps_f32 ? DType::kF32 : DType::kBF16);
  const absl::StatusOr<CpuInputs> on_cpu =
      ActivationsOnCpu(flags, *quantisation, keeps_f32, kv_on_cpu);
  if (!on_cpu.ok()) return on_cpu.status();
  device_options.cpu.inputs = *on_cpu;
  absl::StatusOr<kernels::cuda::OpenedDevice> opened =
      kernels::cuda::OpenDevice(device_options);
  if (absl::IsInvalidArgument(opened.status())) {
    return UsageError(std::string(opened.status().message()));
  }
  if (!opened.ok()) return opened.status();
  parts.backend = std::move(opened->backend);
  if (opened->is_cuda() && flags.activation_dtype != "auto") {
    return UsageError(
        absl::StrCat("--activation-dtype is ", flags.activation_dtype,
                     ", which is for CPUs: on a GPU --dtype says it"));
  }
  if (!opened->is_cuda() && *kv_flag == DType::kF16) {
    return UsageError(
        "--kv-cache-dtype f16 is for GPUs: on a CPU f32, bf16, fp8, int8 or "
        "int4");
  }
  if (!opened->is_cuda() && weight_dtype->has_value()) {
    const absl::Status kept =
        CheckCpuWeights(**weight_dtype, *quantisation, *spec);
    if (!kept.ok()) return kept;
  }
  LogInfo("device", {{"device", parts.backend->description()},
                     {"reason", opened->reason}});
  if (!opened->is_cuda() && flags.activation_dtype == "auto" &&
      HasBf16Products(*quantisation, keeps_f32) &&
      !FasterActivationDtype().empty()) {
    LogInfo(
        absl::StrCat("this CPU computes prompts faster with "
                     "--activation-dtype ",
                     std::string(FasterActivationDtype()),
                     ", which rounds what products read, as on GPUs"));
  }

  absl::StatusOr<std::vector<std::string>> ways =
      Ways(flags.handoff, opened->is_cuda());
  if (!ways.ok()) return ways.status();
  parts.ways = *std::move(ways);
  parts.slab_bytes = SlabBytes(flags, opened->is_cuda());
  // Slabs lie side by side, and devices copy 16 bytes at a time.
  if (parts.slab_bytes < kMinSlabBytes || parts.slab_bytes % 16 != 0) {
    return UsageError(absl::StrCat(
        "--handoff-slab-bytes is ", parts.slab_bytes,
        ", expected 0 or a multiple of 16, at least ", kMinSlabBytes));
  }
  if (opened->is_cuda()) {
    auto gpu = GpuHandoff::Open({.role = role,
                                 .ordinal = opened->ordinal,
                                 .nccl_library = flags.nccl_library,
                                 .slab_bytes = parts.slab_bytes},
                                parts.backend.get(), &parts.ways);
    if (!gpu.ok()) return gpu.status();
    parts.gpu = *std::move(gpu);
  }
  parts.clock.End("device");

  engine::LoadOptions load;
  load.weight_dtype = *weight_dtype;
  load.quantisation = *quantisation;
  // Tables and the working memory of steps are made for no more than that.
  load.max_positions = flags.max_model_len;
  if (opened->is_cuda()) {
    load.weight_dtype = parts.backend->activation_type();
  } else {
    const absl::Status fits = CheckWeights(
        engine::LeastWeightBytes(*checkpoint, *spec, load), MeasureHost());
    if (!fits.ok()) return fits;
  }
  const int64_t bytes = static_cast<int64_t>(checkpoint->total_bytes());
  Progress loading({.what = "loading weights",
                    .total_bytes = bytes,
                    .tty = IsTerminal(stderr)});
  absl::StatusOr<std::unique_ptr<engine::Model>> model =
      engine::Model::Load(*spec, *checkpoint, load, parts.backend.get(),
                          [&](uint64_t done, uint64_t total) {
                            loading.Update(static_cast<int64_t>(done));
                            progress->Update("loading weights", done, total);
                          });
  if (!model.ok()) return model.status();
  parts.model = *std::move(model);
  LogWeights(*parts.model);
  const int64_t adapter_bytes = AdapterBytes(flags.adapters, *spec);
  if (!opened->is_cuda()) {
    const absl::Status fits = CheckAdapterSlots(adapter_bytes, MeasureHost());
    if (!fits.ok()) return fits;
  }
  absl::StatusOr<LoadedAdapters> adapters =
      LoadAdapters(flags.adapters, *spec, parts.backend.get());
  if (!adapters.ok()) return adapters.status();
  parts.adapters = *std::move(adapters);
  absl::StatusOr<std::unique_ptr<TextGrammars>> grammars = TextGrammars::Load(
      flags.model_dir, spec->vocab_size,
      static_cast<size_t>(flags.structured_cache_bytes), loop);
  if (grammars.ok()) {
    parts.grammars = *std::move(grammars);
  } else {
    LogWarning("no structured outputs", {{"status", grammars.status()}});
  }

  const DType kv_dtype =
      opened->is_cuda() ? kv_flag->value_or(parts.backend->activation_type())
                        : kv_on_cpu;
  parts.kv_dtype = std::string(kernels::Name(kv_dtype));
  engine::DeviceExecutorOptions executor;
  executor.max_rows = flags.max_num_batched_tokens;
  // Each sequence of a step has at least one row.
  executor.max_sequences =
      std::min(flags.max_num_seqs, flags.max_num_batched_tokens);
  executor.max_draws = std::max(MaxDraws(speculation, executor.max_sequences,
                                         flags.max_num_batched_tokens),
                                PlainDraws(flags));
  executor.loras = parts.adapters.slots.get();
  executor.block_size = flags.block_size;
  executor.kv_dtype = kv_dtype;
  int64_t reserved_bytes = parts.gpu == nullptr ? 0 : parts.gpu->buffer_bytes();
  DraftKv draft;
  if (!speculative->draft_model.empty()) {
    progress->Update("loading the draft model's weights");
    engine::LoadOptions draft_load = load;
    draft_load.quantisation = *draft_quantisation;
    auto drafter = LoadDraftModel({.directory = speculative->draft_model,
                                   .target_directory = flags.model_dir,
                                   .target_vocab_size = spec->vocab_size,
                                   .load = draft_load},
                                  parts.backend.get());
    if (!drafter.ok()) return drafter.status();
    parts.draft.model = *std::move(drafter);
    // Each model's queue takes working memory of its own, and what is reserved
    // for one is all that the device counts.
    const size_t used = parts.backend->memory().used_bytes;
    const absl::Status reserved =
        parts.backend->Reserve(engine::DeviceExecutor::Limits(
            DraftExecutorOptions(executor), *parts.draft.model));
    if (!reserved.ok()) return reserved;
    reserved_bytes +=
        static_cast<int64_t>(parts.backend->memory().used_bytes - used) +
        DraftWorkspaceBytes(*parts.draft.model, executor, *parts.backend);
  }
  progress->Update("reserving memory for KV");
  const absl::StatusOr<std::optional<GpuMemory>> gpu =
      MeasureGpu(executor, *parts.model, reserved_bytes, *parts.backend);
  if (!gpu.ok()) return gpu.status();
  if (parts.draft.model != nullptr) {
    draft = DraftKvOf(*parts.draft.model, kv_dtype, flags.block_size,
                      speculative->draft_num_blocks, gpu->has_value());
  }
  const bool with_cache = flags.kv_cache == "on";
  // Without a cache a step computes all positions anew, and needs all blocks.
  HostMemory host = MeasureHost();
  host.used_bytes += flags.kv_offload_bytes;
  if (!opened->is_cuda()) {
    host.used_bytes += UntouchedBytes(parts.adapters);
    host.adapter_bytes = adapter_bytes;
  }
  absl::StatusOr<KvPlan> plan = PlanKv(
      flags, *spec, kv_dtype, *gpu,
      with_cache ? engine::WindowOf(*spec) : engine::KvWindow(), draft, host);
  if (!plan.ok()) return plan.status();
  parts.clock.End("weights");

  Progress hashing({.what = "checking weights",
                    .total_bytes = bytes,
                    .tty = IsTerminal(stderr)});
  absl::StatusOr<engine::FingerprintParts> fingerprint = engine::Fingerprint(
      flags.model_dir, *checkpoint, *parts.model, *parts.backend, kv_dtype,
      std::max(1, flags.threads), [&](uint64_t done, uint64_t total) {
        hashing.Update(static_cast<int64_t>(done));
        progress->Update("checking weights", done, total);
      });
  if (!fingerprint.ok()) return fingerprint.status();
  parts.fingerprint = *std::move(fingerprint);
  parts.clock.End("fingerprint");

  parts.pool = std::make_unique<engine::KvPool>(
      plan->num_blocks, flags.block_size, flags.tenant_cache_share,
      engine::PartsOf(*spec).parts);
  executor.num_blocks = plan->num_blocks;
  executor.cells = &parts.pool->cells();
  // Only prefill workers hand over what they compute.
  if (role == v1::WORKER_ROLE_PREFILL) {
    executor.layers_per_group = flags.layers_per_group;
    // Groups are at least that and seldom twice as large: mostly one slab.
    executor.group_bytes = parts.slab_bytes / 2;
  }
  auto device = engine::DeviceExecutor::Create(executor, parts.model.get(),
                                               parts.backend.get(), loop);
  if (!device.ok()) return device.status();
  parts.executor = *std::move(device);
  parts.clock.End("kv_cache");
  // Nothing has been submitted yet: this thread may still use the executor.
  if (opened->is_cuda() && role == v1::WORKER_ROLE_DECODE &&
      !flags.enforce_eager) {
    RecordDecodes(*parts.executor);
    parts.clock.End("cuda_graphs");
  }
  const absl::Status offloading = StartOffload(flags, loop, &parts);
  if (!offloading.ok()) return offloading;
  if (parts.offload != nullptr) parts.clock.End("kv_offload");

  parts.engine_options.max_num_seqs = executor.max_sequences;
  parts.engine_options.max_num_batched_tokens = flags.max_num_batched_tokens;
  parts.engine_options.max_draws = executor.max_draws;
  parts.engine_options.speculation = speculation;
  parts.engine_options.max_model_len = plan->max_model_len;
  parts.engine_options.vocab_size = spec->vocab_size;
  parts.engine_options.prefix_caching = flags.prefix_caching && with_cache;
  parts.engine_options.window =
      with_cache ? engine::WindowOf(*spec) : engine::KvWindow();
  parts.engine_options.work =
      engine::MakeWorkShape(*parts.model, kv_dtype, opened->is_cuda());
  if (parts.draft.model != nullptr) {
    const auto started = StartDraftModel(
        executor, draft.num_blocks > 0 ? draft.num_blocks : plan->num_blocks,
        plan->max_model_len, flags.tenant_cache_share,
        parts.engine_options.work, opened->is_cuda(), parts.backend.get(), loop,
        &parts.draft);
    if (!started.ok()) return started.status();
    parts.engine_options.speculation.draft_model = *started;
    if (opened->is_cuda() && !flags.enforce_eager) {
      RecordDecodes(*parts.draft.executor);
    }
  }
  // A CPU that computes steps leaves the host nothing to run ahead with.
  parts.engine_options.run_ahead =
      flags.async_scheduling == "on" ||
      (flags.async_scheduling == "auto" && opened->is_cuda());
  const absl::Status valid =
      engine::Engine::Validate(parts.engine_options, *parts.pool);
  if (!valid.ok()) return valid;
  if (parts.draft.model != nullptr) parts.clock.End("draft_model");
  parts.hello = MakeHello(flags, role, parts);
  return parts;
}

}  // namespace tandem::worker
