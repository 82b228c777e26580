// SPDX-License-Identifier: Apache-2.0
// What OpenEngine's control service tells of a router and its cluster. Pure
// functions.

#ifndef TANDEM_ROUTER_OPENENGINE_FACTS_H_
#define TANDEM_ROUTER_OPENENGINE_FACTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "openengine/v1/control.pb.h"
#include "router/validate/validate.h"
#include "tandem/v1/admin.pb.h"

namespace tandem::router {

namespace oe = ::openengine::v1;

oe::ServerInfo MakeServerInfo(const v1::GetClusterStateResponse& state);

// `lora`: adapters may be loaded and unloaded by clients.
oe::ModelInfo MakeModelInfo(const ModelLimits& limits, bool lora);

oe::LoadInfo MakeLoadInfo(const v1::GetClusterStateResponse& state,
                          absl::Time now, bool per_rank);

// Adds a check, READY if `status` is OK, and makes the whole as bad as it.
void AddCheck(const char* name, const absl::Status& status,
              oe::HealthResponse* response);

// The numbers that OpenEngine's clients give adapters. On the router's loop.
class AdapterIds {
 public:
  // Of an adapter that nobody gave one: positive, the same on every router.
  static int64_t Made(const std::string& name);

  int64_t Of(const std::string& name) const;
  // ALREADY_EXISTS where another one of `adapters` has it, or it is there under
  // another number; else it is its own from here on.
  absl::Status Take(const std::string& name, int64_t id,
                    const std::vector<v1::LoraAdapter>& adapters);
  void Drop(const std::string& name) { given_.erase(name); }
  // Forgets those of all others, which somebody else has unloaded.
  void Keep(const std::vector<v1::LoraAdapter>& adapters);

 private:
  std::map<std::string, int64_t> given_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_OPENENGINE_FACTS_H_
