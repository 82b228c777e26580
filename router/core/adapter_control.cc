// SPDX-License-Identifier: Apache-2.0
#include "router/core/adapter_control.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"
#include "common/features.h"
#include "common/utf8.h"

namespace tandem::router {
namespace {

constexpr size_t kMaxChanges = 64;  // at once
constexpr size_t kMaxGone = 1024;   // adapters
constexpr absl::Duration kFirstPause = absl::Seconds(1);
constexpr absl::Duration kLongestPause = absl::Minutes(1);

bool Draining(const Worker& worker) {
  return worker.load.state() == v1::WORKER_STATE_DRAINING;
}

bool CanLoad(const Worker& worker) {
  const auto& features = worker.hello.features();
  return std::find(features.begin(), features.end(), kFeatureAdapterLoading) !=
         features.end();
}

const v1::AdapterRef* FindIn(const Adapters& adapters,
                             const std::string& name) {
  const auto it =
      std::find_if(adapters.begin(), adapters.end(),
                   [&](const auto& adapter) { return adapter.name() == name; });
  return it == adapters.end() ? nullptr : &*it;
}

absl::Status NotFound(const std::string& name) {
  const std::string shown(Utf8Head(name, 128));
  return MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND",
                   absl::StrCat("adapter = ", shown, ": no worker has it"),
                   {{"adapter", shown}});
}

absl::Status CannotLoad(const std::string& worker_id) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "ADAPTER_LOADING",
                   absl::StrCat("worker ", worker_id,
                                " is of a version that loads adapters at its "
                                "start only"),
                   {{"worker", worker_id}});
}

absl::Status StatusOf(const v1::AdapterOutcome& outcome) {
  if (outcome.code() == 0) return absl::OkStatus();
  return MakeError(static_cast<absl::StatusCode>(outcome.code()),
                   outcome.reason(), outcome.message());
}

}  // namespace

AdapterControl::AdapterControl(const RouterOptions* options, Loop* loop,
                               Registry* registry, RouterObserver* observer,
                               std::function<int(const std::string&)> in_flight)
    : options_(options),
      loop_(loop),
      registry_(registry),
      observer_(observer),
      in_flight_(std::move(in_flight)) {}

// ---- What operators ask for

absl::Status AdapterControl::CheckLoad(const std::string& name,
                                       const std::string& path) const {
  const auto invalid = [](const char* field, std::string_view value,
                          const std::string& need) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "FIELD_INVALID",
        absl::StrCat(field, " = ", std::string(Utf8Head(value, 128)), ": ",
                     need),
        {{"field", field}});
  };
  if (name.empty() || name.size() > kMaxAdapterNameBytes ||
      !std::all_of(name.begin(), name.end(),
                   [](char c) { return c > ' ' && c <= '~'; })) {
    return invalid("lora_name", name,
                   absl::StrCat("1..", kMaxAdapterNameBytes,
                                " printable characters without spaces"));
  }
  if (name == options_->model) {
    return invalid("lora_name", name, "is the model's own name");
  }
  if (path.substr(0, 1) != "/" || path.size() > kMaxAdapterPathBytes) {
    return invalid(
        "lora_path", path,
        absl::StrCat("an absolute path of at most ", kMaxAdapterPathBytes,
                     " bytes is needed: every worker opens it"));
  }
  return CheckIdle(name);
}

absl::Status AdapterControl::CheckIdle(const std::string& name) const {
  const auto it = changes_.find(name);
  if (it != changes_.end()) {
    const bool loads = it->second.phase == Phase::kLoading ||
                       it->second.phase == Phase::kUndoing;
    return MakeError(absl::StatusCode::kAborted, "ADAPTER_BUSY",
                     absl::StrCat("adapter ", name, " is being ",
                                  loads ? "loaded" : "unloaded", " already"),
                     {}, absl::Seconds(1));
  }
  if (changes_.size() >= kMaxChanges) {
    return MakeError(absl::StatusCode::kResourceExhausted, "ADAPTER_BUSY",
                     absl::StrCat(changes_.size(),
                                  " adapters are being "
                                  "loaded and unloaded"),
                     {}, absl::Seconds(1));
  }
  return absl::OkStatus();
}

void AdapterControl::Load(const std::string& name, const std::string& path,
                          Done done) {
  const absl::Status status = closing_.ok() ? CheckLoad(name, path) : closing_;
  if (!status.ok()) return done(status);
  Change change;
  for (const auto& [id, worker] : registry_->workers()) {
    if (Draining(*worker)) continue;
    if (!CanLoad(*worker)) return done(CannotLoad(id));
    change.waiting.insert(id);
  }
  if (change.waiting.empty()) {
    return done(MakeError(absl::StatusCode::kUnavailable, "NO_WORKERS",
                          "no worker is registered that could load it", {},
                          absl::Seconds(5)));
  }
  change.was_served = in_service_.contains(name) || ServedByAny(name);
  change.adapter.set_lora_name(name);
  change.adapter.set_lora_path(path);
  change.due = loop_->Now() + options_->adapter_wait;
  change.done = std::move(done);
  const std::string digest = DigestInService(name);
  for (const std::string& id : change.waiting) {
    // Who lacks it must not take other content for it; who has it says so.
    v1::LoraAdapter told = change.adapter;
    if (AdapterDigest(registry_->Find(id)->hello, name).empty()) {
      told.set_digest(digest);
    } else if (!Told(id, name)) {  // else it is about to let it go
      change.had.insert(id);
    }
    SendLoad(id, told, Command::Of::kChange);
  }
  changes_.emplace(name, std::move(change));
}

void AdapterControl::Unload(const std::string& name, Done done) {
  absl::Status status = closing_.ok() ? CheckIdle(name) : closing_;
  if (status.ok() && !in_service_.contains(name) && !ServedByAny(name)) {
    status = NotFound(name);
  }
  for (const auto& [id, worker] : registry_->workers()) {
    if (status.ok() && !AdapterDigest(worker->hello, name).empty() &&
        !CanLoad(*worker)) {
      status = CannotLoad(id);
    }
  }
  if (!status.ok()) return done(status);
  Change change;
  change.phase = Phase::kDraining;
  change.adapter = Describe(name);
  change.due = absl::InfiniteFuture();  // requests have deadlines
  change.done = std::move(done);
  const auto it = changes_.emplace(name, std::move(change)).first;
  if (changed_) changed_();
  Advance(it);
}

void AdapterControl::Close(const absl::Status& status) {
  closing_ = status;
  std::vector<Done> waiting;
  for (auto& [name, change] : changes_) {
    waiting.push_back(std::exchange(
        change.done, [](const absl::StatusOr<v1::LoraAdapter>&) {}));
  }
  for (Done& done : waiting) done(status);
}

// ---- Commands and their answers

uint64_t AdapterControl::NewCommand(const std::string& worker_id,
                                    const std::string& name, Command::Of of) {
  commands_[++last_command_] = {of, worker_id, name};
  return last_command_;
}

void AdapterControl::SendLoad(const std::string& worker_id,
                              const v1::LoraAdapter& adapter, Command::Of of) {
  v1::RegisterResponse response;
  v1::LoadAdapter* const load = response.mutable_load_adapter();
  load->set_command(NewCommand(worker_id, adapter.lora_name(), of));
  load->set_name(adapter.lora_name());
  load->set_path(adapter.lora_path());
  load->set_digest(adapter.digest());
  registry_->Send(worker_id, std::move(response));
}

void AdapterControl::SendUnload(const std::string& worker_id,
                                const std::string& name, Command::Of of) {
  v1::RegisterResponse response;
  v1::UnloadAdapter* const unload = response.mutable_unload_adapter();
  unload->set_command(NewCommand(worker_id, name, of));
  unload->set_name(name);
  registry_->Send(worker_id, std::move(response));
}

void AdapterControl::OnOutcome(const std::string& worker_id,
                               const v1::AdapterOutcome& outcome) {
  const auto it = commands_.find(outcome.command());
  if (it == commands_.end() || it->second.worker_id != worker_id) return;
  const Command command = std::move(it->second);
  commands_.erase(it);
  const absl::Status status = StatusOf(outcome);
  if (status.ok()) {
    OnAnswer(command, outcome);
  } else {
    OnAnswer(command, Annotate(status, absl::StrCat("worker ", worker_id)));
  }
}

void AdapterControl::OnLost(const Worker& worker) {
  const std::string& worker_id = worker.id();
  away_.OnLost(worker.hello);
  std::vector<Command> lost;
  for (auto it = commands_.begin(); it != commands_.end();) {
    if (it->second.worker_id != worker_id) {
      ++it;
      continue;
    }
    lost.push_back(std::move(it->second));
    it = commands_.erase(it);
  }
  for (const Command& command : lost) {
    away_.MayHave(worker_id, command.name);
    OnAnswer(command, MakeError(absl::StatusCode::kUnavailable, "WORKER_LOST",
                                absl::StrCat("worker ", worker_id,
                                             " was lost before it answered")));
  }
  std::erase_if(
      late_, [&](const auto& entry) { return entry.first.first == worker_id; });
}

void AdapterControl::OnAnswer(
    const Command& command, const absl::StatusOr<v1::AdapterOutcome>& answer) {
  if (command.of == Command::Of::kLate) {
    OnLateAnswer(command, answer);
    return;
  }
  if (command.of == Command::Of::kNobody) {
    OnNobodysAnswer(command, answer);
    return;
  }
  const auto it = changes_.find(command.name);
  if (it == changes_.end()) return;
  Change& change = it->second;
  if (change.waiting.erase(command.worker_id) == 0) return;
  // Only its stream may have broken: it is told when it comes back. What it had
  // before a load is not of that load, and stays.
  const bool keeps =
      change.phase == Phase::kLoading && change.had.contains(command.worker_id);
  if (ErrorReason(answer.status()) == "WORKER_LOST" && !keeps) {
    away_.Owe(command.worker_id, command.name);
  }
  if (change.phase == Phase::kLoading) {
    OnLoadAnswer(&change, command.worker_id, answer);
  } else if (!answer.ok() && !absl::IsNotFound(answer.status()) &&
             ErrorReason(answer.status()) != "WORKER_LOST" &&
             change.problem.ok()) {
    change.problem = answer.status();
  }
  Advance(it);
}

void AdapterControl::OnLoadAnswer(
    Change* change, const std::string& worker_id,
    const absl::StatusOr<v1::AdapterOutcome>& answer) {
  absl::Status status = answer.status();
  if (answer.ok()) {
    if (answer->loaded()) change->fresh.insert(worker_id);
    v1::LoraAdapter& adapter = change->adapter;
    if (adapter.digest().empty()) {
      adapter.set_digest(answer->digest());
    } else if (answer->digest() != adapter.digest()) {
      status = MakeError(
          absl::StatusCode::kFailedPrecondition, "ADAPTER_MISMATCH",
          absl::StrCat("worker ", worker_id, ": ", adapter.lora_path(),
                       " holds ", answer->digest().substr(0, 16),
                       " there, and ", adapter.digest().substr(0, 16),
                       " on another worker"));
    }
  }
  if (change->problem.ok()) change->problem = std::move(status);
}

// ---- Phases

void AdapterControl::Advance(Changes::iterator it) {
  Change& change = it->second;
  if (!change.waiting.empty()) return;
  switch (change.phase) {
    case Phase::kLoading:
      change.problem.ok() ? FinishLoad(it) : Undo(it);
      return;
    case Phase::kUndoing: {
      absl::Status problem = std::move(change.problem);
      Finish(it, std::move(problem));
      return;
    }
    case Phase::kDraining:
      if (in_flight_(it->first) == 0) StartUnloading(it);
      return;
    case Phase::kUnloading:
      FinishUnload(it);
      return;
  }
}

void AdapterControl::FinishLoad(Changes::iterator it) {
  const std::string name = it->first;
  const v1::LoraAdapter& adapter = it->second.adapter;
  in_service_[name] = {adapter.lora_path(), adapter.digest()};
  gone_.erase(name);
  observer_->OnAdapter(name, "loaded", absl::OkStatus());
  Done done = std::move(it->second.done);
  changes_.erase(it);
  if (changed_) changed_();
  done(Describe(name));
  // Workers that came in the meantime.
  for (const auto& [id, worker] : registry_->workers()) Complete(*worker);
}

void AdapterControl::Undo(Changes::iterator it) {
  Change& change = it->second;
  change.phase = Phase::kUndoing;
  change.due = loop_->Now() + options_->adapter_wait;
  for (const std::string& id : std::exchange(change.fresh, {})) {
    if (registry_->Find(id) == nullptr) continue;
    change.waiting.insert(id);
    SendUnload(id, it->first, Command::Of::kChange);
  }
  Advance(it);
}

void AdapterControl::StartUnloading(Changes::iterator it) {
  const std::string& name = it->first;
  Change& change = it->second;
  change.phase = Phase::kUnloading;
  change.due = loop_->Now() + options_->adapter_wait;
  if (gone_.size() < kMaxGone) {
    Gone& gone = gone_[name];
    gone = {change.adapter.digest(), {}};
    for (const auto& [id, worker] : registry_->workers()) gone.told.insert(id);
  }
  TakeOutOfService(name);
  away_.OweAll(name);
  for (const auto& [id, worker] : registry_->workers()) {
    if (AdapterDigest(worker->hello, name).empty() && !Told(id, name)) continue;
    change.waiting.insert(id);
  }
  for (const std::string& id : change.waiting) {
    SendUnload(id, name, Command::Of::kChange);
  }
  Advance(it);
}

void AdapterControl::FinishUnload(Changes::iterator it) {
  if (!it->second.problem.ok()) {
    absl::Status problem = std::move(it->second.problem);
    return Finish(it, std::move(problem));
  }
  v1::LoraAdapter adapter = std::move(it->second.adapter);
  Finish(it, std::move(adapter));
}

void AdapterControl::Finish(Changes::iterator it,
                            absl::StatusOr<v1::LoraAdapter> answer) {
  const Phase phase = it->second.phase;
  observer_->OnAdapter(it->first,
                       phase == Phase::kUndoing ? "not loaded"
                       : answer.ok()            ? "unloaded"
                                                : "not unloaded",
                       answer.status());
  Done done = std::move(it->second.done);
  const std::string name = it->first;
  changes_.erase(it);
  // Workers' lists come before their answers: who has it after all of them was
  // told to load it meanwhile, by another router.
  if (phase == Phase::kUnloading && answer.ok()) {
    for (const auto& [id, worker] : registry_->workers()) {
      const auto* const again = FindIn(worker->hello.adapters(), name);
      if (again != nullptr) Hear(*worker, *again);
    }
  }
  if (changed_) changed_();
  done(std::move(answer));
  // Workers that were passed over while it was changed.
  for (const auto& [id, worker] : registry_->workers()) Complete(*worker);
}

void AdapterControl::TimeOut(Changes::iterator it) {
  Change& change = it->second;
  const absl::Status late = MakeError(
      absl::StatusCode::kDeadlineExceeded, "ADAPTER_TIMEOUT",
      absl::StrCat("no answer from ", absl::StrJoin(change.waiting, ", "),
                   " within ", absl::FormatDuration(options_->adapter_wait)));
  if (change.problem.ok()) change.problem = late;
  // A worker takes commands in their order: it lets go what it has yet to load.
  if (change.phase == Phase::kLoading && !change.was_served) {
    change.fresh.insert(change.waiting.begin(), change.waiting.end());
  }
  std::erase_if(commands_, [&](const auto& entry) {
    return entry.second.of == Command::Of::kChange &&
           entry.second.name == it->first;
  });
  change.waiting.clear();
  if (change.phase == Phase::kLoading) {
    Undo(it);
  } else {
    absl::Status problem = std::move(change.problem);
    Finish(it, std::move(problem));
  }
}

// ---- Workers that come and go

bool AdapterControl::ServedByAny(const std::string& name) const {
  return std::any_of(registry_->workers().begin(), registry_->workers().end(),
                     [&](const auto& entry) {
                       return !AdapterDigest(entry.second->hello, name).empty();
                     });
}

bool AdapterControl::HeldByAny(const std::string& name,
                               const std::string& digest) const {
  return std::any_of(registry_->workers().begin(), registry_->workers().end(),
                     [&](const auto& entry) {
                       return AdapterDigest(entry.second->hello, name) ==
                              digest;
                     });
}

bool AdapterControl::Told(const std::string& worker_id,
                          const std::string& name) const {
  return std::any_of(commands_.begin(), commands_.end(), [&](const auto& e) {
    return e.second.worker_id == worker_id && e.second.name == name;
  });
}

void AdapterControl::Learn(const v1::AdapterRef& adapter) {
  if (!adapter.in_service() || changes_.contains(adapter.name())) return;
  const Origin theirs{adapter.path(), adapter.digest()};
  gone_.erase(adapter.name());
  const auto [it, is_new] = in_service_.try_emplace(adapter.name(), theirs);
  // Who is alone with what it knows was away while another router replaced it.
  if (!is_new && it->second.digest != theirs.digest &&
      !HeldByAny(adapter.name(), it->second.digest)) {
    it->second = theirs;
  }
}

bool AdapterControl::Missed(const Worker& worker,
                            const v1::AdapterRef& adapter) const {
  const auto gone = gone_.find(adapter.name());
  if (gone == gone_.end() || gone->second.digest != adapter.digest() ||
      gone->second.told.contains(worker.id()) || !adapter.in_service() ||
      in_service_.contains(adapter.name())) {
    return false;
  }
  return std::none_of(
      registry_->workers().begin(), registry_->workers().end(),
      [&](const auto& entry) {
        return entry.second->id() != worker.id() &&
               !AdapterDigest(entry.second->hello, adapter.name()).empty();
      });
}

void AdapterControl::Hear(const Worker& worker, const v1::AdapterRef& adapter) {
  if (Told(worker.id(), adapter.name())) return;
  if (Missed(worker, adapter)) {
    SendUnload(worker.id(), adapter.name(), Command::Of::kNobody);
  } else {
    Learn(adapter);
  }
}

void AdapterControl::Collect(const Worker& worker) {
  // Whether its hello names them or not: it may be loading them still.
  for (const std::string& name : away_.Return(worker.hello.worker())) {
    if (in_service_.contains(name) &&
        AdapterDigest(worker.hello, name) == DigestInService(name)) {
      continue;  // loaded again since
    }
    const auto change = changes_.find(name);
    if (change != changes_.end() &&
        (change->second.phase == Phase::kUndoing ||
         change->second.phase == Phase::kUnloading)) {
      change->second.waiting.insert(worker.id());
      SendUnload(worker.id(), name, Command::Of::kChange);
    } else {
      SendUnload(worker.id(), name, Command::Of::kNobody);
    }
  }
}

void AdapterControl::OnRegistered(const Worker& worker) {
  for (const auto& adapter : worker.hello.adapters()) {
    let_go_.erase(adapter.name());
  }
  Collect(worker);
  for (const auto& adapter : worker.hello.adapters()) Hear(worker, adapter);
  Complete(worker);
}

void AdapterControl::OnAdapters(const Worker& worker, const Adapters& before) {
  const Adapters& now = worker.hello.adapters();
  for (const v1::AdapterRef& adapter : before) {
    if (FindIn(now, adapter.name()) == nullptr && let_go_.size() < kMaxGone) {
      let_go_.insert(adapter.name());
    }
  }
  for (const v1::AdapterRef& adapter : now) let_go_.erase(adapter.name());
  for (const v1::AdapterRef& adapter : before) {
    if (adapter.in_service() && !changes_.contains(adapter.name()) &&
        adapter.digest() == DigestInService(adapter.name()) &&
        FindIn(now, adapter.name()) == nullptr &&
        !Told(worker.id(), adapter.name())) {
      TakeOutOfService(adapter.name());  // by another router
    }
  }
  for (const v1::AdapterRef& adapter : now) {
    if (FindIn(before, adapter.name()) == nullptr &&
        !Told(worker.id(), adapter.name())) {
      Learn(adapter);
    }
  }
}

void AdapterControl::TakeOutOfService(const std::string& name) {
  in_service_.erase(name);
  std::erase_if(late_, [&](const auto& e) { return e.first.second == name; });
}

void AdapterControl::Complete(const Worker& worker) {
  if (Draining(worker) || !CanLoad(worker)) return;
  for (const auto& [name, origin] : in_service_) {
    const auto change = changes_.find(name);
    if (change != changes_.end() && change->second.phase != Phase::kDraining) {
      continue;
    }
    const std::string has = AdapterDigest(worker.hello, name);
    // What it was told to let go it loads behind that.
    const bool told = Told(worker.id(), name);
    if (has == origin.digest && !told) {
      late_.erase({worker.id(), name});
      continue;
    }
    Late& late = late_[{worker.id(), name}];
    if (late.waiting) continue;
    late.waiting = true;
    // It was away while this one was replaced, and takes commands in order.
    const v1::AdapterRef* const other = FindIn(worker.hello.adapters(), name);
    if (other != nullptr && other->in_service() && !told) {
      SendUnload(worker.id(), name, Command::Of::kNobody);
    }
    v1::LoraAdapter adapter;
    adapter.set_lora_name(name);
    adapter.set_lora_path(origin.path);
    adapter.set_digest(origin.digest);
    SendLoad(worker.id(), adapter, Command::Of::kLate);
  }
}

void AdapterControl::OnLateAnswer(
    const Command& command, const absl::StatusOr<v1::AdapterOutcome>& answer) {
  const auto it = late_.find({command.worker_id, command.name});
  if (it == late_.end()) {
    // Another router unloaded it meanwhile, and did not know of this one.
    if (answer.ok() && answer->loaded() &&
        !in_service_.contains(command.name) &&
        !changes_.contains(command.name)) {
      SendUnload(command.worker_id, command.name, Command::Of::kNobody);
    }
    return;
  }
  if (answer.ok()) {
    late_.erase(it);
    return;
  }
  Late& late = it->second;
  late.waiting = false;
  late.problem = std::string(answer.status().message());
  late.pause = std::clamp(late.pause * 2, kFirstPause, kLongestPause);
  late.next = loop_->Now() + late.pause;
  observer_->OnAdapter(command.name, "not loaded", answer.status());
}

void AdapterControl::OnNobodysAnswer(
    const Command& command, const absl::StatusOr<v1::AdapterOutcome>& answer) {
  if (absl::IsNotFound(answer.status())) return;  // it has never had it
  if (ErrorReason(answer.status()) == "WORKER_LOST") {
    away_.Owe(command.worker_id, command.name);
  }
  const std::string what = absl::StrCat(answer.ok() ? "" : "not ",
                                        "unloaded from ", command.worker_id);
  observer_->OnAdapter(command.name, what, answer.status());
}

void AdapterControl::OnRequestEnded(const std::string& name) {
  const auto it = changes_.find(name);
  if (it != changes_.end()) Advance(it);
}

void AdapterControl::Tick() {
  const absl::Time now = loop_->Now();
  for (auto it = changes_.begin(); it != changes_.end();) {
    const auto change = it++;
    if (now >= change->second.due) {
      TimeOut(change);
    } else {
      Advance(change);
    }
  }
  std::vector<const Worker*> again;
  for (const auto& [key, late] : late_) {
    if (late.waiting || now < late.next) continue;
    const Worker* const worker = registry_->Find(key.first);
    if (worker != nullptr) again.push_back(worker);
  }
  for (const Worker* worker : again) Complete(*worker);
}

// ---- What others see

bool AdapterControl::Closed(const std::string& name) const {
  const auto it = changes_.find(name);
  return it != changes_.end() && !it->second.was_served;
}

absl::Status AdapterControl::CheckNotLetGo(const std::string& name) const {
  if (!let_go_.contains(name) || in_service_.contains(name) ||
      changes_.contains(name)) {
    return absl::OkStatus();
  }
  for (const auto& [id, worker] : registry_->workers()) {
    if (worker->hello.role() == v1::WORKER_ROLE_DECODE &&
        !AdapterDigest(worker->hello, name).empty()) {
      return absl::OkStatus();
    }
  }
  return NotFound(name);
}

std::string AdapterControl::DigestInService(const std::string& name) const {
  const auto it = in_service_.find(name);
  return it == in_service_.end() ? "" : it->second.digest;
}

std::vector<std::string> AdapterControl::InService() const {
  std::vector<std::string> names;
  names.reserve(in_service_.size());
  for (const auto& [name, origin] : in_service_) names.push_back(name);
  return names;
}

v1::LoraAdapter AdapterControl::Describe(const std::string& name) const {
  v1::LoraAdapter adapter;
  const auto change = changes_.find(name);
  if (change != changes_.end()) adapter = change->second.adapter;
  adapter.clear_workers();
  adapter.set_lora_name(name);
  const auto origin = in_service_.find(name);
  adapter.set_in_service(origin != in_service_.end());
  if (adapter.in_service()) {
    adapter.set_lora_path(origin->second.path);
    adapter.set_digest(origin->second.digest);
  }
  adapter.set_requests(in_flight_(name));
  adapter.set_state("ready");
  if (Closed(name)) {
    const Phase phase = change->second.phase;
    adapter.set_state(phase == Phase::kDraining    ? "draining"
                      : phase == Phase::kUnloading ? "unloading"
                                                   : "loading");
  }
  for (const auto& [id, worker] : registry_->workers()) {
    v1::LoraAdapterHolder* const holder = adapter.add_workers();
    holder->set_worker_id(id);
    if (const auto* const ref = FindIn(worker->hello.adapters(), name)) {
      holder->set_digest(ref->digest());
      if (adapter.digest().empty()) adapter.set_digest(ref->digest());
      if (adapter.lora_path().empty()) adapter.set_lora_path(ref->path());
    }
    const auto late = late_.find({id, name});
    if (late != late_.end()) holder->set_problem(late->second.problem);
  }
  return adapter;
}

std::vector<v1::LoraAdapter> AdapterControl::List() const {
  std::set<std::string> names;
  for (const auto& [name, origin] : in_service_) names.insert(name);
  for (const auto& [name, change] : changes_) names.insert(name);
  for (const auto& [id, worker] : registry_->workers()) {
    for (const v1::AdapterRef& adapter : worker->hello.adapters()) {
      names.insert(adapter.name());
    }
  }
  std::vector<v1::LoraAdapter> list;
  list.reserve(names.size());
  for (const std::string& name : names) list.push_back(Describe(name));
  return list;
}

}  // namespace tandem::router
