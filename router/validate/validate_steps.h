// SPDX-License-Identifier: Apache-2.0
// What the files of validate.h share: the words in which a field is refused,
// and the steps that a request passes from one file to the next. Private to
// router/.

#ifndef TANDEM_ROUTER_VALIDATE_VALIDATE_STEPS_H_
#define TANDEM_ROUTER_VALIDATE_VALIDATE_STEPS_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"
#include "router/validate/errors.h"
#include "router/validate/validate.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// Returns from the enclosing function on an error.
#define TANDEM_ROUTER_RETURN_IF_ERROR(expression)                           \
  do {                                                                      \
    if (absl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

// False for NaN.
template <typename T>
bool Between(T value, T low, T high) {
  return value >= low && value <= high;
}

template <typename T>
absl::Status CheckRange(const char* field, T value, T low, T high) {
  if (Between(value, low, high)) return absl::OkStatus();
  return FieldInvalid(field, absl::StrCat(value),
                      absl::StrCat("must be in ", low, "..", high));
}

// validate.cc: fields whose check finds what they mean.
absl::StatusOr<absl::Duration> ReadMaxTime(
    const google::protobuf::Duration& value);
// The adapter that the request names, in its own field or as the model.
absl::StatusOr<std::string> AdapterOf(const v1::GenerateRequest& request,
                                      const ModelLimits& limits);

// validate_sampling.cc
absl::Status CheckSampling(const v1::SamplingOptions& s,
                           const ModelLimits& limits);
// What excludes each other: by name, whatever the values.
absl::Status CheckBeam(const v1::GenerateRequest& request, int widest);

// validate_chat.cc: what the request says to the template of thinking.
std::optional<bool> AskedToThink(const v1::Chat& chat);

// effective_request.cc: of a request whose fields were checked, which may still
// ask for what cannot be together.
absl::StatusOr<EffectiveRequest> EffectiveValues(
    const v1::GenerateRequest& request, const ModelLimits& limits);

// worker_params.cc: the features that workers must heed.
void NoteFeatures(EffectiveRequest* effective);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_VALIDATE_VALIDATE_STEPS_H_
