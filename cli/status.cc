// SPDX-License-Identifier: Apache-2.0
#include "cli/status.h"

#include <google/protobuf/util/json_util.h>

#include <chrono>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/output.h"
#include "cli/watch.h"
#include "common/lifecycle.h"
#include "common/rpc/status.h"
#include "tandem/v1/admin.grpc.pb.h"

namespace tandem::cli {
namespace {

std::string RoleName(v1::WorkerRole role) {
  return role == v1::WORKER_ROLE_PREFILL  ? "prefill"
         : role == v1::WORKER_ROLE_DECODE ? "decode"
                                          : "?";
}

std::string WorkerLine(const v1::WorkerStatus& worker) {
  const v1::WorkerHello& hello = worker.hello();
  const v1::WorkerLoad& load = worker.load();
  return absl::StrFormat(
      "  %-16s %-8s %-10s %5d %7d %8d %7d %6d %6d %6d  %s\n",
      InOneLine(hello.worker().worker_id()), RoleName(hello.role()),
      worker.placeable() ? "ready" : InOneLine(worker.reason()), load.running(),
      load.waiting(), load.queued_tokens(), load.blocks_free(),
      load.blocks_reserved(), load.blocks_live(), load.blocks_cached(),
      InOneLine(hello.http_endpoint()));
}

// "3 of 8", or "3" where nothing bounds it.
std::string Used(int64_t used, bool bounded, int64_t limit) {
  return bounded ? absl::StrCat(used, " of ", limit) : absl::StrCat(used);
}
// "120 of 600 left".
std::string Left(bool bounded, int64_t left, int64_t limit) {
  return bounded ? absl::StrCat(left, " of ", limit, " left") : "-";
}

}  // namespace

absl::StatusOr<v1::GetClusterStateResponse> FetchClusterState(
    const ConnectFlags& admin) {
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = Connect(admin);
  if (!channel.ok()) return channel.status();
  const auto stub = v1::AdminService::NewStub(*channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::seconds(5));
  v1::GetClusterStateRequest request;
  request.set_include_requests(true);
  v1::GetClusterStateResponse response;
  const grpc::Status status =
      stub->GetClusterState(&context, request, &response);
  if (!status.ok()) return Explained(rpc::FromGrpc(status, context), admin);
  return response;
}

std::string StatusTable(const v1::GetClusterStateResponse& state) {
  const v1::RequestCounts& requests = state.requests();
  std::string table = absl::StrFormat(
      "model %s, policy %s, up %d s%s\n", state.model(), state.policy(),
      state.uptime().seconds(), state.draining() ? ", draining" : "");
  absl::StrAppendFormat(
      &table,
      "requests: %d in flight (%d queued, %d opening, %d prefilling, "
      "%d handing over, %d decoding, %d retrying)\n",
      requests.total(), requests.queued(), requests.opening(),
      requests.prefilling(), requests.handing_over(), requests.decoding(),
      requests.retrying());
  absl::StrAppendFormat(
      &table, "%-18s %-8s %-10s %5s %7s %8s %7s %6s %6s %6s  %s\n", "  worker",
      "role", "state", "runs", "waiting", "tokens", "free", "resvd", "live",
      "cached", "metrics at");
  for (const v1::WorkerStatus& worker : state.workers()) {
    table += WorkerLine(worker);
  }
  if (state.workers().empty()) table += "  no worker is registered\n";
  if (!state.tenants().empty()) {
    absl::StrAppendFormat(&table, "%-18s %13s %15s %21s\n", "  tenant",
                          "running", "requests/min", "tokens/min");
  }
  for (const v1::TenantStatus& tenant : state.tenants()) {
    absl::StrAppendFormat(
        &table, "  %-16s %13s %15s %21s\n", tenant.tenant(),
        Used(tenant.running(), tenant.has_max_parallel_requests(),
             tenant.max_parallel_requests()),
        Left(tenant.has_requests_per_minute(), tenant.requests_left(),
             tenant.requests_per_minute()),
        Left(tenant.has_tokens_per_minute(), tenant.tokens_left(),
             tenant.tokens_per_minute()));
  }
  for (const v1::AvoidedPair& pair : state.avoided_pairs()) {
    absl::StrAppend(&table, "  avoided: ", InOneLine(pair.prefill_worker_id()),
                    " -> ", InOneLine(pair.decode_worker_id()),
                    pair.way().empty() ? "" : " by " + InOneLine(pair.way()),
                    ": ", InOneLine(pair.reason()), "\n");
  }
  for (const v1::RejectedWorker& worker : state.rejected()) {
    absl::StrAppend(&table, "  rejected: ", InOneLine(worker.worker_id()), ": ",
                    InOneLine(worker.reason()), "\n");
  }
  return table;
}

absl::Status ShowStatus(const StatusFlags& flags) {
  // Which --watch would show again and again.
  const absl::StatusOr<std::string> address = HostAndPort(flags.admin);
  if (!address.ok()) return address.status();
  if (flags.watch) {
    if (flags.json) {
      return UsageError(
          "--watch and --json exclude each other: give one of them");
    }
    Watch(absl::ToChronoMilliseconds(flags.interval), [&]() -> std::string {
      const auto now = FetchClusterState(flags.admin);
      if (now.ok()) return StatusTable(*now);
      return absl::StrCat(std::string(now.status().message()), "\n");
    });
    return absl::OkStatus();
  }
  absl::StatusOr<v1::GetClusterStateResponse> state =
      FetchClusterState(flags.admin);
  if (!state.ok()) return state.status();
  if (!flags.json) {
    std::cout << StatusTable(*state);
    return absl::OkStatus();
  }
  std::string text;
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  const auto status =
      google::protobuf::util::MessageToJsonString(*state, &text, options);
  if (!status.ok()) return absl::InternalError(status.ToString());
  std::cout << text;
  return absl::OkStatus();
}

}  // namespace tandem::cli
