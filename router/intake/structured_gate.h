// SPDX-License-Identifier: Apache-2.0
// Where requests whose output is to match something wait until it is known
// that it compiles, which may take seconds of a core. Tenants have paid for
// them by then; a few sources are compiled at a time, fewer of one tenant,
// tenants take turns, and what waits is bounded: sources, which cost a core's
// time, and requests, which cost memory. A request that is aborted or whose
// client goes leaves, and with the last one its source; the core ends it, as if
// it had been there.
//
// What decides is here, on the loop; who compiles is a StructuredChecker.

#ifndef TANDEM_ROUTER_INTAKE_STRUCTURED_GATE_H_
#define TANDEM_ROUTER_INTAKE_STRUCTURED_GATE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "router/core/dialer.h"
#include "router/core/request.h"
#include "router/telemetry/observer.h"

namespace tandem::router {

class StructuredChecker {
 public:
  using Done = absl::AnyInvocable<void(absl::Status)>;
  virtual ~StructuredChecker() = default;
  // Whether it is known to compile, at no cost.
  virtual bool Known(const v1::StructuredOptions& structured) const = 0;
  // Calls `done` on the loop, later, within a bounded time.
  virtual void Check(const v1::StructuredOptions& structured, Done done) = 0;
};

struct StructuredGateOptions {
  int running = 2;             // sources compiled at once
  int running_per_tenant = 1;  // where there are tenants
  int waiting = 64;            // sources that wait
  int waiting_per_tenant = 16;
  int requests = 256;  // that wait, however few their sources
  int requests_per_tenant = 128;
  absl::Duration wait = absl::Seconds(10);  // for its turn
};

// On the loop.
class StructuredGate {
 public:
  // Takes a request that may go on, or has ended.
  using Submit =
      absl::AnyInvocable<void(AdmittedRequest, std::unique_ptr<ClientStream>)>;
  using Refused = absl::AnyInvocable<void(Api, const absl::Status&)>;

  // `refused` hears of each request that is closed here with an error.
  // `checker` calls nothing back once this is gone.
  StructuredGate(const StructuredGateOptions& options, Loop* loop,
                 StructuredChecker* checker, Submit submit, Refused refused);
  ~StructuredGate();

  // At once, if it asks for nothing that must be compiled. Closes `client` with
  // INVALID_ARGUMENT where it does not compile, with RESOURCE_EXHAUSTED
  // (QUEUE_FULL) where too much is waiting.
  void Enter(AdmittedRequest admitted, std::unique_ptr<ClientStream> client);

  // Of those that wait, with finish reason CANCELLED: by the client's id, and
  // with `tenant` of its own alone; or all of a tenant. How many there were.
  int Abort(const std::string& id, const std::optional<std::string>& tenant);
  int AbortAll(const std::string& tenant);

  // Closes all that wait, and from here on whoever would have to.
  void Drain(const absl::Status& status);
  int waiting() const { return static_cast<int>(requests_.size()); }

 private:
  class Held;
  struct Waiting;
  struct Source;
  struct Tenant {
    int running = 0;  // of its sources
    int waiting = 0;
    int requests = 0;
    uint64_t served = 0;  // when it had its last turn, or came
  };
  using Key = std::pair<std::string, std::string>;  // tenant, options' bytes

  // For one more request, and for its source where that is new.
  absl::Status RoomFor(const std::string& tenant, bool new_source) const;
  Source* AddSource(const Key& key, const v1::StructuredOptions& structured);
  Source* Next();
  void Pump();
  void Checked(const Key& key, const absl::Status& status);
  void WaitedTooLong(const Key& key);
  void End(uint64_t request, AdmittedRequest::Ended how);
  int AbortIf(absl::FunctionRef<bool(const AdmittedRequest&)> wanted);
  void DropSource(const Key& key);
  void DropIfIdle(std::map<std::string, Tenant>::iterator tenant);
  // Out of here, and its source with the last one; null: it is not here.
  std::unique_ptr<Waiting> Take(uint64_t request);
  void Refuse(uint64_t request, absl::Status status);

  const StructuredGateOptions options_;
  Loop* const loop_;
  StructuredChecker* const checker_;
  Submit submit_;
  Refused refused_;
  uint64_t next_ = 1;
  uint64_t turn_ = 0;
  int running_ = 0;
  int sources_waiting_ = 0;
  std::map<uint64_t, std::unique_ptr<Waiting>> requests_;
  std::map<Key, std::unique_ptr<Source>> sources_;
  std::map<std::string, Tenant> tenants_;  // with a source or a request
  absl::Status drained_;                   // unless OK
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_INTAKE_STRUCTURED_GATE_H_
