// SPDX-License-Identifier: Apache-2.0
#include "cli/cordon.h"

#include <iostream>
#include <memory>

#include "absl/time/clock.h"
#include "common/rpc/status.h"
#include "tandem/v1/admin.grpc.pb.h"

namespace tandem::cli {

void CordonCommand::AddTo(CommandLine* line) {
  admin_.address = kDefaultAdmin;
  line->AddPositional("WORKER", &worker_id_,
                      "Its id, as `tandem status` shows it", true);
  line->Group("Router");
  line->Add("admin", &admin_.address, "The router's admin address");
  line->Group("TLS");
  tls_.AddTo(line);
}

absl::Status CordonCommand::Run() {
  if (absl::Status status = CheckUtf8("WORKER", worker_id_); !status.ok()) {
    return status;
  }
  admin_.tls_cert = tls_.cert;
  admin_.tls_key = tls_.key;
  admin_.tls_ca = tls_.ca;
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = Connect(admin_);
  if (!channel.ok()) return channel.status();
  const auto stub = v1::AdminService::NewStub(*channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(5)));
  v1::SetWorkerStateRequest request;
  request.set_worker_id(worker_id_);
  request.set_cordoned(cordoned_);
  v1::SetWorkerStateResponse response;
  const grpc::Status status =
      stub->SetWorkerState(&context, request, &response);
  if (!status.ok()) return Explained(rpc::FromGrpc(status, context), admin_);
  std::cout << worker_id_ << (cordoned_ ? " cordoned, " : " uncordoned, ")
            << response.requests() << " requests on it\n";
  return absl::OkStatus();
}

}  // namespace tandem::cli
