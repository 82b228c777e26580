// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/authorization.h"

#include <grpc/grpc_security_constants.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/error.h"
#include "common/log.h"
#include "common/rpc/refusals.h"
#include "common/rpc/status.h"

namespace tandem::rpc {
namespace {

absl::StatusOr<std::vector<Identity>> IdentitiesOf(
    const grpc::AuthContext& context) {
  std::vector<std::string> uris;
  for (const grpc::string_ref& uri :
       context.FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME)) {
    uris.emplace_back(uri.data(), uri.size());
  }
  return ParseIdentities(uris);
}

const MethodRule* Find(absl::Span<const MethodRule> rules,
                       std::string_view method) {
  const auto* const found = std::find_if(
      rules.begin(), rules.end(),
      [&](const MethodRule& rule) { return rule.method == method; });
  return found == rules.end() ? nullptr : found;
}

enum Refusal { kNotAllowed, kNoRole, kNoMethod, kRefusals };
constexpr const char* kRefusalNames[] = {"role_not_allowed", "no_role",
                                         "no_method"};
std::atomic<int64_t> refused_calls[kRefusals];

absl::Status Refused(Refusal why, absl::Status status) {
  if (!status.ok()) ++refused_calls[why];
  return status;
}

class Authorizer final : public grpc::AuthMetadataProcessor {
 public:
  explicit Authorizer(absl::Span<const MethodRule> rules) : rules_(rules) {}

  // Nothing here waits.
  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata,
                       grpc::AuthContext* context, OutputMetadata* /*consumed*/,
                       OutputMetadata* /*response*/) override {
    const absl::Status status = Check(metadata, *context);
    if (status.ok()) return grpc::Status::OK;
    static LogLimiter limiter(absl::Seconds(1));
    int64_t hidden;
    if (limiter.Allow(absl::Now(), &hidden)) {
      LogWarning("call refused", {{"status", status}, {"hidden", hidden}});
    }
    return ToGrpc(status);
  }

 private:
  absl::Status Check(const InputMetadata& metadata,
                     const grpc::AuthContext& context) const {
    const auto [path, end] = metadata.equal_range(":path");
    if (path == end || std::next(path) != end) {
      return Refused(kNoMethod,
                     absl::PermissionDeniedError("a call names one method"));
    }
    const std::string_view method(path->second.data(), path->second.size());
    const MethodRule* const rule = Find(rules_, method);
    if (rule != nullptr && rule->anybody) return absl::OkStatus();
    const absl::StatusOr<std::vector<Identity>> identities =
        IdentitiesOf(context);
    if (!identities.ok()) return Refused(kNoRole, identities.status());
    return Refused(rule == nullptr ? kNoMethod : kNotAllowed,
                   Authorize(rules_, method, *identities));
  }

  const absl::Span<const MethodRule> rules_;
};

}  // namespace

std::map<std::string, int64_t> RefusedCalls() {
  std::map<std::string, int64_t> calls;
  for (int why = 0; why < kRefusals; ++why) {
    calls[kRefusalNames[why]] = refused_calls[why];
  }
  return calls;
}

absl::Span<const MethodRule> ClusterRules() {
  using enum PeerRole;
  static const auto* const rules = new std::vector<MethodRule>{
      {"/tandem.v1.RegistryService/Register", {kPrefill, kDecode}},
      {"/tandem.v1.DecodeService/Decode", {kRouter}},
      {"/tandem.v1.DecodeService/DecodeShared", {kRouter}},
      {"/tandem.v1.PrefillService/Prefill", {kRouter}},
      {"/tandem.v1.HandoffService/Link", {kPrefill}},
      // A router's own: whoever can use its key can stop it, too.
      {"/tandem.v1.AdminService/GetClusterState", {kOperator, kRouter}},
      {"/tandem.v1.AdminService/Abort", {kOperator, kRouter}},
      {"/tandem.v1.AdminService/SetWorkerState", {kOperator, kRouter}},
      {"/tandem.v1.AdminService/LoadLoraAdapter", {kOperator, kRouter}},
      {"/tandem.v1.AdminService/UnloadLoraAdapter", {kOperator, kRouter}},
      {"/tandem.v1.AdminService/ListLoraAdapters", {kOperator, kRouter}},
      // Clients' port, where it has the cluster's certificates.
      {"/tandem.v1.InferenceService/Generate", {kClient, kOperator}},
      {"/tandem.v1.InferenceService/GenerateOnce", {kClient, kOperator}},
      {"/tandem.v1.InferenceService/Tokenize", {kClient, kOperator}},
      {"/tandem.v1.InferenceService/Detokenize", {kClient, kOperator}},
      {"/tandem.v1.InferenceService/ListModels", {kClient, kOperator}},
      {"/tandem.v1.InferenceService/GetModel", {kClient, kOperator}},
      {"/openengine.v1.Inference/Generate", {kClient, kOperator}},
      {"/openengine.v1.Control/GetServerInfo", {kClient, kOperator}},
      {"/openengine.v1.Control/GetModelInfo", {kClient, kOperator}},
      {"/openengine.v1.Control/GetLoad", {kClient, kOperator}},
      {"/openengine.v1.Control/Health", {kClient, kOperator}},
      {"/openengine.v1.Control/Abort", {kClient, kOperator}},
      {"/openengine.v1.Control/LoadLora", {kClient, kOperator}},
      {"/openengine.v1.Control/UnloadLora", {kClient, kOperator}},
      {"/openengine.v1.Control/ListLoras", {kClient, kOperator}},
      {"/openengine.v1.Control/GetKvEventSources", {kClient, kOperator}},
      {"/openengine.v1.Control/SubscribeKvEvents", {kClient, kOperator}},
      {.method = "/grpc.health.v1.Health/Check", .anybody = true},
      {.method = "/grpc.health.v1.Health/Watch", .anybody = true},
      {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
       {kClient, kOperator}},
  };
  return *rules;
}

absl::Status Authorize(absl::Span<const MethodRule> rules,
                       std::string_view method,
                       const std::vector<Identity>& identities) {
  const MethodRule* const rule = Find(rules, method);
  if (rule == nullptr) {
    return MakeError(absl::StatusCode::kPermissionDenied, "ROLE_NOT_ALLOWED",
                     "no role may call this method");
  }
  if (rule->anybody) return absl::OkStatus();
  for (const Identity& identity : identities) {
    if (std::find(rule->roles.begin(), rule->roles.end(), identity.role) !=
        rule->roles.end()) {
      return absl::OkStatus();
    }
  }
  const std::string names = absl::StrJoin(
      identities, ", ", [](std::string* out, const Identity& identity) {
        absl::StrAppend(out, identity.ToString());
      });
  const std::string allowed =
      absl::StrJoin(rule->roles, " or ", [](std::string* out, PeerRole role) {
        absl::StrAppend(out, std::string(RoleName(role)));
      });
  return MakeError(
      absl::StatusCode::kPermissionDenied, "ROLE_NOT_ALLOWED",
      absl::StrCat("the certificate is of ", names, "; ",
                   std::string(method.substr(1)), " takes one of ", allowed));
}

PeerIdentity PeerOf(const grpc::AuthContext& context) {
  // gRPC's own IsPeerAuthenticated is false for certificates without names.
  PeerIdentity peer{
      .authenticated =
          !context.FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME)
               .empty()};
  if (!peer.authenticated) return peer;
  absl::StatusOr<std::vector<Identity>> identities = IdentitiesOf(context);
  if (identities.ok()) peer.identities = *std::move(identities);
  return peer;
}

std::shared_ptr<grpc::AuthMetadataProcessor> MakeAuthorizer(
    absl::Span<const MethodRule> rules) {
  return std::make_shared<Authorizer>(rules);
}

}  // namespace tandem::rpc
