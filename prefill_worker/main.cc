// SPDX-License-Identifier: Apache-2.0
// tandem-prefill: a prompt in, its KV and first token out.

#include <algorithm>
#include <memory>

#include "common/metrics.h"
#include "handoff/shm/shm_way.h"
#include "prefill_worker/core.h"
#include "prefill_worker/service.h"
#include "worker/load_metrics.h"
#include "worker/process.h"

namespace tandem::prefill_worker {
namespace {

struct Flags {
  int max_queue = 256;
  double waiting_share = 0.5;
};
Flags flags;  // read once, by Parse

class HandoffTimes {
 public:
  explicit HandoffTimes(Metrics* metrics)
      : total_(metrics->AddHistograms(
            "tandem_handoff_duration_seconds",
            "First grant to acknowledgement, of committed handoffs",
            kStageTimeBuckets, "way", 4)),
        exposed_(metrics->AddHistograms("tandem_handoff_exposed_seconds",
                                        "The part that computing did not hide",
                                        kStageTimeBuckets, "way", 4)) {}
  void Observe(const handoff::HandoffTimings& timings) {
    total_[timings.way].Observe(absl::ToDoubleSeconds(timings.transfer));
    exposed_[timings.way].Observe(absl::ToDoubleSeconds(timings.exposed));
  }

 private:
  HistogramSet& total_;
  HistogramSet& exposed_;
};

class PrefillRole final : public worker::Role {
 public:
  explicit PrefillRole(const worker::RoleContext& context)
      : channels_(context.tls),
        metrics_(context.metrics, context.parts.hello),
        handoff_times_(context.metrics),
        core_(MakeOptions(context), context.loop, context.random,
              context.executor, context.parts.pool.get(),
              LinkDialer(context.loop, &channels_)),
        prefill_(context.loop, &core_) {
    const auto& ways = context.parts.ways;
    worker::GpuHandoff* const gpu = context.parts.gpu.get();
    if (std::find(ways.begin(), ways.end(), "nccl") != ways.end()) {
      core_.AddWay(gpu->NewSenderWay());
    }
    if (std::find(ways.begin(), ways.end(), "shm") != ways.end()) {
      core_.AddWay(handoff::NewShmSenderWay(
          context.loop, gpu == nullptr ? nullptr : gpu->host_memory()));
    }
  }

  std::vector<grpc::Service*> services() override { return {&prefill_}; }
  v1::WorkerLoad Load() const override { return core_.Load(); }
  void Drain() override { core_.Drain(); }
  void ReplaceCredentials(const rpc::Credentials& tls) override {
    channels_.Replace(tls);
  }
  bool idle() const override { return core_.idle(); }
  int64_t progress() const override { return core_.progress(); }
  bool has_work() const override { return core_.has_work(); }
  void CloseAll(const absl::Status& status) override { core_.CloseAll(status); }
  void UpdateMetrics() override {
    metrics_.Update(
        core_.Load(), core_.engine_stats(), core_.sender().counters(),
        core_.counters().history_positions, core_.counters().cached_positions);
  }

 private:
  PrefillOptions MakeOptions(const worker::RoleContext& context) {
    const kernels::KvShape& shape = context.executor->kv_shape();
    PrefillOptions options;
    options.incarnation = context.parts.incarnation;
    options.adapters = &context.parts.adapters.table;
    options.grammars = context.parts.grammars.get();
    options.engine = context.parts.engine_options;
    options.attention_layers = context.flags.attention_output
                                   ? context.executor->kv_shape().num_layers
                                   : 0;
    options.offload = context.parts.offload.get();
    options.max_queue = flags.max_queue;
    options.waiting_share = flags.waiting_share;
    options.lease = context.flags.lease;
    options.on_handoff = [this](const handoff::HandoffTimings& timings) {
      handoff_times_.Observe(timings);
    };
    v1::LinkHello& hello = options.sender.hello;
    *hello.mutable_sender() = context.parts.hello.worker();
    for (const auto& [name, value] : context.parts.fingerprint) {
      (*hello.mutable_fingerprint())[name] = value;
    }
    hello.set_host_id(context.parts.host_id);
    for (const std::string& way : context.parts.ways) hello.add_ways(way);
    hello.set_kv_dtype(context.parts.kv_dtype);
    hello.set_mixed_numerics(context.flags.mixed_numerics);
    for (const std::string_view format : handoff::kWireFormats) {
      hello.add_kv_formats(std::string(format));
    }
    options.sender.on_fault = worker::LogHandoffFault;
    options.sender.layers = {
        shape.num_layers, engine::WindowedLayers(context.parts.model->spec())};
    options.sender.kv_heads = shape.kv_heads;
    options.sender.head_dim = shape.head_dim;
    options.sender.whole_heads = shape.other_layers > 0;
    // What gathers fill for gRPC fits into one of its messages.
    options.sender.slab_bytes =
        std::min(context.parts.slab_bytes, int64_t{2} << 20);
    if (context.parts.gpu != nullptr) {
      options.sender.host_memory = context.parts.gpu->host_memory();
      hello.set_gpu(context.parts.gpu->gpu());
    }
    return options;
  }

  worker::Channels channels_;
  worker::LoadMetrics metrics_;
  HandoffTimes handoff_times_;
  PrefillCore core_;
  PrefillServer prefill_;
};

}  // namespace
}  // namespace tandem::prefill_worker

int main(int argc, char** argv) {
  using namespace tandem;  // NOLINT(google-build-using-namespace)
  worker::RoleSpec spec;
  spec.binary = "tandem-prefill";
  spec.description =
      "Prefill worker: runs prompts and hands their KV caches to decode "
      "workers.";
  spec.role = v1::WORKER_ROLE_PREFILL;
  spec.health_services = {"tandem.v1.PrefillService"};
  spec.add_flags = [](CommandLine* line) {
    line->Group("Queue");
    line->AddInt("max-queue", &prefill_worker::flags.max_queue,
                 "Prompts that wait", {1, 65536});
    line->Add("handoff-waiting-share", &prefill_worker::flags.waiting_share,
              "Share of the KV blocks that may wait for one decode worker",
              0.01, 1);
  };
  spec.make = [](const worker::RoleContext& context) {
    return std::make_unique<prefill_worker::PrefillRole>(context);
  };
  return worker::RunWorker(argc, argv, spec);
}
