// SPDX-License-Identifier: Apache-2.0
// All that a router does with a request before it is queued, on the embedded
// model, and what its answers must be like whatever was asked.

#ifndef TANDEM_TESTS_ROUTER_FRONT_H_
#define TANDEM_TESTS_ROUTER_FRONT_H_

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/utf8.h"
#include "router/intake/intake.h"
#include "tests/engine/temp_dir.h"
#include "tests/router/validate/bad_requests.h"

namespace tandem::router {

// The embedded model with a chat template that knows tools.
inline std::unique_ptr<ModelText> LoadModelWithTools() {
  const engine::TempDir folder;
  for (const auto& file :
       std::filesystem::directory_iterator(TANDEM_SOURCE_DIR "/models/tales")) {
    std::filesystem::create_symlink(
        file.path(),
        std::filesystem::path(folder.path()) / file.path().filename());
  }
  folder.Write("chat_template.jinja", kToolTemplate);
  return *ModelText::Load(folder.path(), {.served_name = "m"});
}

class Front {
 public:
  Front() { facts_.context_length = kContext; }

  absl::StatusOr<AdmittedRequest> Prepare(
      const v1::GenerateRequest& request) const {
    return intake_.Prepare(Api::kGrpc, request, {}, absl::InfiniteDuration());
  }

  // "" where a request that was admitted keeps the model's limits.
  std::string WhatIsWrong(const AdmittedRequest& admitted) const {
    const EffectiveRequest& effective = admitted.effective;
    const auto prompt = static_cast<int64_t>(admitted.prompt.size());
    const int tokens = effective.stopping.max_tokens();
    if (prompt < 1) return "admitted without a prompt";
    if (tokens < 0 || prompt + tokens > kContext + (tokens == 0 ? 1 : 0)) {
      return absl::StrCat(prompt, " and ", tokens, " tokens do not fit");
    }
    for (const int32_t id : admitted.prompt) {
      if (id < 0 || id >= model_->limits().vocabulary_size) {
        return absl::StrCat("token ", id, " is none of the model's");
      }
    }
    const v1::SamplingParams sampling = ToSamplingParams(effective);
    if (!(sampling.temperature() >= 0 && sampling.temperature() <= 2) ||
        !(sampling.top_p() > 0 && sampling.top_p() <= 1) ||
        !(sampling.min_p() >= 0 && sampling.min_p() <= 1)) {
      return "sampling beyond its range";
    }
    const int sequences = effective.sampling.n();
    if (sequences < 1 || sequences > kMaxSequences) return "n beyond its range";
    return "";
  }

  int vocabulary() const { return model_->limits().vocabulary_size; }
  int end_tokens() const {
    return static_cast<int>(model_->limits().eos_token_ids.size());
  }

  static constexpr int kContext = 256;

 private:
  const std::unique_ptr<ModelText> model_ = LoadModelWithTools();
  ClusterFacts facts_;
  RouterObserver nobody_;
  Metrics metrics_{"router", "m"};
  RouterMetrics router_metrics_{&metrics_, Policy::kRoundRobin};
  Access access_{[] { return absl::UnixEpoch(); }, &nobody_};
  const Intake intake_{model_.get(),
                       &facts_,
                       {},
                       {},
                       &router_metrics_,
                       &access_,
                       [](int /*priority*/) { return absl::OkStatus(); }};
};

// "" where a client may be shown it: a typed refusal of what it sent, short,
// in whole characters, without addresses or paths of ours, unless it sent them.
inline std::string WhatIsWrongWithRefusal(const absl::Status& status,
                                          std::string_view sent = "") {
  const std::string message(status.message());
  if (!absl::IsInvalidArgument(status) && !absl::IsNotFound(status)) {
    return absl::StrCat("refused as ", status.ToString());
  }
  if (ErrorReason(status).empty()) {
    return absl::StrCat("without a reason: ", message);
  }
  if (message.empty() || message.size() > 4000) {
    return absl::StrCat("a message of ", message.size(), " bytes");
  }
  for (std::string_view rest = message; !rest.empty();) {
    const size_t length = Utf8Length(rest);
    if (length == 0) return "a message that is no UTF-8";
    rest.remove_prefix(length);
  }
  for (const char* const ours :
       {TANDEM_SOURCE_DIR, "ipv4:1", "ipv6:%5B", "0x7f"}) {
    if (message.find(ours) != message.npos && sent.find(ours) == sent.npos) {
      return absl::StrCat("tells of our inside: ", message);
    }
  }
  return "";
}

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_FRONT_H_
