// SPDX-License-Identifier: Apache-2.0
// tandem-decode: KV in, tokens out.

#include <algorithm>
#include <memory>
#include <utility>

#include "common/log.h"
#include "decode_worker/core.h"
#include "decode_worker/service.h"
#include "handoff/shm/shm_way.h"
#include "worker/links.h"
#include "worker/load_metrics.h"
#include "worker/process.h"

namespace tandem::decode_worker {
namespace {

struct Flags {
  int max_calls = 0;
  double admission_factor = 0.95;
  absl::Duration stall_limit = absl::Seconds(30);
};
Flags flags;  // read once, by Parse

handoff::ReceiverOptions MakeReceiverOptions(
    const worker::RoleContext& context) {
  const kernels::KvShape& shape = context.executor->kv_shape();
  handoff::ReceiverOptions options;
  options.self = context.parts.hello.worker();
  options.fingerprint = context.parts.fingerprint;
  options.host_id = context.parts.host_id;
  options.ways = context.parts.ways;
  options.kv_dtype = context.parts.kv_dtype;
  options.mixed_numerics = context.flags.mixed_numerics;
  options.layers = {shape.num_layers,
                    engine::WindowedLayers(context.parts.model->spec())};
  options.kv_heads = shape.kv_heads;
  options.head_dim = shape.head_dim;
  options.slab_bytes = context.parts.slab_bytes;
  options.on_fault = worker::LogHandoffFault;
  if (context.parts.gpu != nullptr) {
    options.host_memory = context.parts.gpu->host_memory();
    options.slabs_per_peer = worker::GpuHandoff::kSlabsPerPeer;
    options.num_slabs = worker::GpuHandoff::kSlabs;
  }
  return options;
}

class DecodeRole final : public worker::Role {
 public:
  explicit DecodeRole(const worker::RoleContext& context)
      : core_(MakeOptions(context), context.loop, context.random,
              context.executor, context.parts.pool.get()),
        decode_(context.loop, &core_),
        links_(context.loop,
               [this](auto stream, const rpc::CallInfo& info) {
                 core_.AddLink(std::move(stream), info.identity);
               }),
        metrics_(context.metrics, context.parts.hello) {
    const auto& ways = context.parts.ways;
    worker::GpuHandoff* const gpu = context.parts.gpu.get();
    if (std::find(ways.begin(), ways.end(), "nccl") != ways.end()) {
      core_.AddWay(gpu->NewReceiverWay());
    }
    if (std::find(ways.begin(), ways.end(), "shm") == ways.end()) return;
    auto shm = handoff::NewShmReceiverWay(
        context.loop, context.random,
        gpu == nullptr ? nullptr : gpu->host_memory());
    if (shm.ok()) {
      core_.AddWay(*std::move(shm));
    } else {
      LogWarning("no shared memory, KV comes by gRPC",
                 {{"status", shm.status()}});
    }
  }

  std::vector<grpc::Service*> services() override {
    return {&decode_, &links_};
  }
  v1::WorkerLoad Load() const override { return core_.Load(); }
  void Drain() override { core_.Drain(); }
  bool idle() const override { return core_.idle() && decode_.idle(); }
  int64_t progress() const override { return core_.progress(); }
  bool has_work() const override { return core_.has_work(); }
  void CloseAll(const absl::Status& status) override {
    core_.CloseAll(status);
    decode_.CloseShared(status);
  }
  absl::Status fatal() const override { return core_.fatal(); }
  void UpdateMetrics() override {
    metrics_.Update(
        core_.Load(), core_.engine_stats(), core_.receiver().counters(),
        core_.counters().history_positions, core_.counters().cached_positions);
  }

 private:
  static DecodeOptions MakeOptions(const worker::RoleContext& context) {
    DecodeOptions options;
    options.incarnation = context.parts.incarnation;
    options.adapters = &context.parts.adapters.table;
    options.grammars = context.parts.grammars.get();
    options.engine = context.parts.engine_options;
    options.attention_layers = context.flags.attention_output
                                   ? context.executor->kv_shape().num_layers
                                   : 0;
    options.offload = context.parts.offload.get();
    options.receiver = MakeReceiverOptions(context);
    if (flags.max_calls > 0) {
      options.max_calls = flags.max_calls;
    } else {
      options.max_calls =
          std::max(options.max_calls, context.flags.max_num_seqs);
    }
    options.kv_cache = context.flags.kv_cache == "on";
    options.admission_factor = flags.admission_factor;
    options.stall_limit = flags.stall_limit;
    options.lease = context.flags.lease;
    return options;
  }

  DecodeCore core_;
  DecodeServer decode_;
  worker::LinkServer links_;
  worker::LoadMetrics metrics_;
};

}  // namespace
}  // namespace tandem::decode_worker

int main(int argc, char** argv) {
  using namespace tandem;  // NOLINT(google-build-using-namespace)
  worker::RoleSpec spec;
  spec.binary = "tandem-decode";
  spec.description =
      "Decode worker: receives KV caches and generates tokens, all sequences "
      "in one batch.";
  spec.role = v1::WORKER_ROLE_DECODE;
  spec.health_services = {"tandem.v1.DecodeService",
                          "tandem.v1.HandoffService"};
  spec.add_flags = [](CommandLine* line) {
    line->Group("Admission");
    line->AddInt("max-requests", &decode_worker::flags.max_calls,
                 "Sequences admitted at once; 0: 256, or --max-num-seqs where "
                 "that is more",
                 {0, 65536});
    line->Add("admission-factor", &decode_worker::flags.admission_factor,
              "Share of the KV blocks that may be in use or promised", 0.05,
              16);
    line->AddDuration("stall-limit", &decode_worker::flags.stall_limit,
                      "For a reader that takes no token",
                      absl::Milliseconds(1));
  };
  spec.make = [](const worker::RoleContext& context) {
    return std::make_unique<decode_worker::DecodeRole>(context);
  };
  return worker::RunWorker(argc, argv, spec);
}
