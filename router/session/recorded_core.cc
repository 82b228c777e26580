// SPDX-License-Identifier: Apache-2.0
#include "router/session/recorded_core.h"

#include <utility>

#include "router/session/admitted.h"

namespace tandem::router::session {
namespace {

v1::SessionEntry Command(v1::SessionCommandKind kind,
                         const std::string& name = "") {
  v1::SessionEntry entry;
  entry.mutable_command()->set_kind(kind);
  entry.mutable_command()->set_name(name);
  return entry;
}

}  // namespace

RecordedCore::RecordedCore(const RecorderOptions& recording, std::ostream* out,
                           const RouterOptions& options, Loop* loop,
                           Random* random, Dialer* dialer, TextCodec* codec,
                           RouterObserver* observer, SpanSink* spans)
    : Recorder(recording, out, loop, random, dialer, codec,
               [&] {
                 v1::SessionEntry entry;
                 v1::SessionStart* const start = entry.mutable_start();
                 start->set_format(kFormat);
                 start->set_version(recording.version);
                 ToEntry(options, start);
                 start->set_has_text(codec != nullptr);
                 start->set_traced(spans != nullptr);
                 return entry;
               }()),
      RouterCore(options, Recorder::loop(), Recorder::random(),
                 Recorder::dialer(), Recorder::codec(), observer, spans) {
  End();  // of the start, which the recorder began
}

RecordedCore::~RecordedCore() { Finish(); }

void RecordedCore::Submit(AdmittedRequest admitted,
                          std::unique_ptr<ClientStream> client) {
  v1::SessionEntry entry;
  *entry.mutable_submit() = ToEntry(admitted);
  entry.mutable_submit()->set_stream(next_stream());
  const Turn turn(this, entry);
  RouterCore::Submit(std::move(admitted), Wrap(std::move(client)));
}

void RecordedCore::AddRegistration(std::unique_ptr<RegistrationStream> stream,
                                   rpc::PeerIdentity peer) {
  v1::SessionEntry entry;
  v1::SessionRegistration* const registration = entry.mutable_registration();
  registration->set_stream(next_stream());
  registration->set_authenticated(peer.authenticated);
  for (const rpc::Identity& identity : peer.identities) {
    v1::SessionIdentity* const added = registration->add_identities();
    added->set_role(static_cast<uint32_t>(identity.role));
    added->set_worker_id(identity.worker_id);
  }
  const Turn turn(this, entry);
  RouterCore::AddRegistration(Wrap(std::move(stream)), std::move(peer));
}

absl::StatusOr<int> RecordedCore::Cordon(const std::string& worker_id,
                                         bool cordoned) {
  const Turn turn(this, Command(cordoned ? v1::SESSION_COMMAND_KIND_CORDON
                                         : v1::SESSION_COMMAND_KIND_UNCORDON,
                                worker_id));
  return RouterCore::Cordon(worker_id, cordoned);
}

absl::StatusOr<int> RecordedCore::Abort(
    const std::string& id, const std::optional<std::string>& tenant) {
  v1::SessionEntry entry = Command(v1::SESSION_COMMAND_KIND_ABORT, id);
  if (tenant) entry.mutable_command()->set_tenant(*tenant);
  const Turn turn(this, entry);
  return RouterCore::Abort(id, tenant);
}

int RecordedCore::AbortAll(const std::string& tenant) {
  v1::SessionEntry entry = Command(v1::SESSION_COMMAND_KIND_ABORT_ALL);
  entry.mutable_command()->set_tenant(tenant);
  const Turn turn(this, entry);
  return RouterCore::AbortAll(tenant);
}

void RecordedCore::LoadAdapter(const std::string& name, const std::string& path,
                               AdapterControl::Done done) {
  v1::SessionEntry entry = Command(v1::SESSION_COMMAND_KIND_LOAD_ADAPTER, name);
  entry.mutable_command()->set_path(path);
  const Turn turn(this, entry);
  RouterCore::LoadAdapter(name, path, std::move(done));
}

void RecordedCore::UnloadAdapter(const std::string& name,
                                 AdapterControl::Done done) {
  const Turn turn(this, Command(v1::SESSION_COMMAND_KIND_UNLOAD_ADAPTER, name));
  RouterCore::UnloadAdapter(name, std::move(done));
}

void RecordedCore::Drain() {
  const Turn turn(this, Command(v1::SESSION_COMMAND_KIND_DRAIN));
  RouterCore::Drain();
}

void RecordedCore::CloseAll(const absl::Status& status) {
  {
    v1::SessionEntry entry = Command(v1::SESSION_COMMAND_KIND_CLOSE_ALL);
    *entry.mutable_command()->mutable_status() = ToEntry(status);
    const Turn turn(this, entry);
    RouterCore::CloseAll(status);
  }
  Finish();
}

}  // namespace tandem::router::session
