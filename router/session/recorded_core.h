// SPDX-License-Identifier: Apache-2.0
// A core whose session is recorded: the same decisions, and a file to find out
// later why they were made. The file holds prompts and answers.

#ifndef TANDEM_ROUTER_SESSION_RECORDED_CORE_H_
#define TANDEM_ROUTER_SESSION_RECORDED_CORE_H_

#include <memory>
#include <optional>
#include <ostream>
#include <string>

#include "router/core/core.h"
#include "router/session/recorder.h"

namespace tandem::router::session {

// The recorder is a base so that it is there before the core and goes after it.
class RecordedCore final : private Recorder, public RouterCore {
 public:
  // As RouterCore's and Recorder's.
  RecordedCore(const RecorderOptions& recording, std::ostream* out,
               const RouterOptions& options, Loop* loop, Random* random,
               Dialer* dialer, TextCodec* codec, RouterObserver* observer,
               SpanSink* spans = nullptr);
  ~RecordedCore() override;

  void Submit(AdmittedRequest admitted,
              std::unique_ptr<ClientStream> client) override;
  void AddRegistration(std::unique_ptr<RegistrationStream> stream,
                       rpc::PeerIdentity peer = {}) override;
  absl::StatusOr<int> Cordon(const std::string& worker_id,
                             bool cordoned) override;
  absl::StatusOr<int> Abort(
      const std::string& id,
      const std::optional<std::string>& tenant = std::nullopt) override;
  int AbortAll(const std::string& tenant) override;
  void LoadAdapter(const std::string& name, const std::string& path,
                   AdapterControl::Done done) override;
  void UnloadAdapter(const std::string& name,
                     AdapterControl::Done done) override;
  void Drain() override;
  // The end of what is recorded.
  void CloseAll(const absl::Status& status) override;
};

}  // namespace tandem::router::session

#endif  // TANDEM_ROUTER_SESSION_RECORDED_CORE_H_
