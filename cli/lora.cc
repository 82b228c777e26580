// SPDX-License-Identifier: Apache-2.0
#include "cli/lora.h"

#include <google/protobuf/util/json_util.h>

#include <filesystem>
#include <iostream>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/rpc/status.h"
#include "tandem/v1/admin.grpc.pb.h"

namespace tandem::cli {
namespace {

std::string Shown(const v1::LoraAdapter& adapter) {
  std::string text = absl::StrFormat(
      "%-20s %-10s %8d  %s  %s%s\n", adapter.lora_name(), adapter.state(),
      adapter.requests(), adapter.digest().substr(0, 16), adapter.lora_path(),
      adapter.in_service() ? "" : "  (of workers' starts)");
  for (const v1::LoraAdapterHolder& holder : adapter.workers()) {
    if (holder.digest() == adapter.digest() && holder.problem().empty()) {
      continue;
    }
    absl::StrAppend(
        &text, "  ", holder.worker_id(),
        holder.digest().empty()
            ? " has it not"
            : absl::StrCat(" has another one, ", holder.digest().substr(0, 16)),
        holder.problem().empty() ? "" : absl::StrCat(": ", holder.problem()),
        "\n");
  }
  return text;
}

absl::Status Print(const v1::ListLoraAdaptersResponse& list, bool as_json) {
  if (!as_json) {
    std::cout << absl::StrFormat("%-20s %-10s %8s  %-16s  %s\n", "adapter",
                                 "state", "requests", "digest", "path");
    for (const v1::LoraAdapter& adapter : list.adapters()) {
      std::cout << Shown(adapter);
    }
    return absl::OkStatus();
  }
  std::string text;
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  const auto status =
      google::protobuf::util::MessageToJsonString(list, &text, options);
  if (!status.ok()) return absl::InternalError(status.ToString());
  std::cout << text;
  return absl::OkStatus();
}

}  // namespace

void LoraCommand::AddRouter(CommandLine* line) {
  line->Group("Router");
  line->Add("admin", &admin_.address, "The router's admin address");
  line->AddDuration("timeout", &timeout_, "For the answer");
  line->LastNotFromEnvironment();  // it is generate's, in seconds
  line->Group("TLS");
  tls_.AddTo(line);
}

void LoraCommand::AddTo(CommandLine* line) {
  line_ = line;
  admin_.address = kDefaultAdmin;
  load_ = line->AddCommand("load", "Have every worker load an adapter");
  load_->AddPositional("NAME", &name_, "What requests call it", true);
  load_->AddPositional("DIRECTORY", &path_,
                       "As PEFT saves it, where every worker sees it", true);
  AddRouter(load_);
  unload_ = line->AddCommand(
      "unload", "Take no new request for it, let the others end, free it");
  unload_->AddPositional("NAME", &name_, "The adapter", true);
  AddRouter(unload_);
  CommandLine* const list =
      line->AddCommand("list", "Adapters and who has them");
  list->Add("json", &json_, "All of it, as JSON");
  AddRouter(list);
}

absl::Status LoraCommand::Run() {
  if (absl::Status status = CheckUtf8("NAME", name_); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckUtf8("DIRECTORY", path_); !status.ok()) {
    return status;
  }
  admin_.tls_cert = tls_.cert;
  admin_.tls_key = tls_.key;
  admin_.tls_ca = tls_.ca;
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = Connect(admin_);
  if (!channel.ok()) return channel.status();
  const auto stub = v1::AdminService::NewStub(*channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout_));
  v1::ListLoraAdaptersResponse shown;
  grpc::Status status;
  if (line_->chosen() == load_) {
    v1::LoadLoraAdapterRequest request;
    request.set_lora_name(name_);
    // Workers do not share this shell's directory.
    request.set_lora_path(std::filesystem::absolute(path_).lexically_normal());
    v1::LoadLoraAdapterResponse response;
    status = stub->LoadLoraAdapter(&context, request, &response);
    *shown.add_adapters() = response.adapter();
  } else if (line_->chosen() == unload_) {
    v1::UnloadLoraAdapterRequest request;
    request.set_lora_name(name_);
    v1::UnloadLoraAdapterResponse response;
    status = stub->UnloadLoraAdapter(&context, request, &response);
    if (status.ok()) {
      std::cout << "unloaded " << name_ << "\n";
      return absl::OkStatus();
    }
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
      return absl::DeadlineExceededError(absl::StrCat(
          name_, " is not unloaded yet after ", absl::FormatDuration(timeout_),
          ": it takes no new requests, and goes when those that "
          "run have ended; `tandem lora list` shows it"));
    }
  } else {
    status = stub->ListLoraAdapters(&context, {}, &shown);
  }
  if (!status.ok()) return Explained(rpc::FromGrpc(status, context), admin_);
  return Print(shown, json_);
}

}  // namespace tandem::cli
