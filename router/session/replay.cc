// SPDX-License-Identifier: Apache-2.0
#include "router/session/replay.h"

#include <google/protobuf/io/coded_stream.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/error.h"
#include "router/session/admitted.h"
#include "router/session/recorder.h"

namespace tandem::router::session {
namespace {

absl::Status NotRecorded(const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat("cannot have been recorded: ", what));
}

constexpr int kMaxVarintBytes = 10;
constexpr uint64_t kMaxEntryBytes = std::numeric_limits<int32_t>::max();

// At most `size` bytes: a length that is damaged asks for no memory.
std::string ReadUpTo(std::istream* in, uint64_t size) {
  std::string bytes;
  std::array<char, 1 << 14> chunk;
  while (bytes.size() < size) {
    in->read(chunk.data(), static_cast<std::streamsize>(std::min<uint64_t>(
                               chunk.size(), size - bytes.size())));
    if (in->gcount() == 0) break;
    bytes.append(chunk.data(), static_cast<size_t>(in->gcount()));
  }
  return bytes;
}

// The bytes of a varint, as many as there are.
std::string ReadVarint(std::istream* in) {
  std::string bytes;
  while (bytes.size() < kMaxVarintBytes) {
    const std::string next = ReadUpTo(in, 1);
    bytes += next;
    if (next.empty() || static_cast<uint8_t>(next[0]) < 0x80) break;
  }
  return bytes;
}

// Nothing: the bytes are no whole varint. `length`: how many it took.
std::optional<uint64_t> Varint(std::string_view bytes, size_t* length) {
  google::protobuf::io::CodedInputStream in(
      reinterpret_cast<const uint8_t*>(bytes.data()),
      static_cast<int>(std::min<size_t>(bytes.size(), kMaxVarintBytes)));
  uint64_t value = 0;
  if (!in.ReadVarint64(&value)) return std::nullopt;
  *length = static_cast<size_t>(in.CurrentPosition());
  return value;
}

// Whether an entry of `size` bytes may begin like this. It is one field, a
// number or what is behind a length of its own: a damaged length agrees with
// neither.
bool MayBegin(std::string_view bytes, uint64_t size) {
  constexpr uint8_t kDelimited = 2;  // of protobuf's wire types
  if (bytes.empty()) return size > 0;
  size_t length = 0;
  const std::optional<uint64_t> value = Varint(bytes.substr(1), &length);
  if (!value) return bytes.size() < size && bytes.size() <= kMaxVarintBytes;
  const bool delimited = (static_cast<uint8_t>(bytes[0]) & 7) == kDelimited;
  return 1 + length + (delimited ? *value : 0) == size;
}

std::string_view Verb(v1::SessionActKind kind) {
  switch (kind) {
    case v1::SESSION_ACT_KIND_DIAL_DECODE:
    case v1::SESSION_ACT_KIND_DIAL_PREFILL:
      return "opens";
    case v1::SESSION_ACT_KIND_SEND:
      return "writes to";
    case v1::SESSION_ACT_KIND_PAUSE:
      return "pauses or resumes";
    case v1::SESSION_ACT_KIND_CLOSE:
      return "closes";
    case v1::SESSION_ACT_KIND_DROP:
      return "drops";
    case v1::SESSION_ACT_KIND_TIMER:
      return "sets";
    default:
      return "does something to";
  }
}

}  // namespace

// ---- What stands in for the world.

// The replay's side of a stream.
class Replay::Inbox {
 public:
  virtual ~Inbox() = default;
  // False: the bytes are no message of its kind.
  virtual bool Deliver(const std::string& message) = 0;
  virtual void Drained() = 0;
  virtual void Closed(absl::Status status) = 0;
};

template <typename Out, typename In>
class Replay::ReplayStream final : public Stream<Out, In>, private Inbox {
 public:
  ReplayStream(Replay* replay, uint64_t number)
      : replay_(replay), number_(number) {
    replay_->inboxes_[number_] = this;
  }
  ~ReplayStream() override {
    replay_->Act(v1::SESSION_ACT_KIND_DROP, number_);
    replay_->inboxes_.erase(number_);
  }

  void Start(StreamHandler<In>* handler) override { handler_ = handler; }
  void Send(Out message) override {
    replay_->Act(v1::SESSION_ACT_KIND_SEND, number_, Digest(message));
  }
  size_t unsent() const override {
    return replay_->Next(replay_->outcome_.unsent(), &replay_->unsent_,
                         "a stream's messages");
  }
  void PauseReading(bool paused) override {
    replay_->Act(v1::SESSION_ACT_KIND_PAUSE, number_, paused ? 1 : 0);
  }
  void Close(absl::Status status) override {
    replay_->Act(v1::SESSION_ACT_KIND_CLOSE, number_, Digest(status));
  }
  std::string peer() const override {
    return replay_->Next(replay_->outcome_.text(), &replay_->text_, "a peer");
  }

 private:
  bool Deliver(const std::string& bytes) override {
    In message;
    if (handler_ == nullptr || !message.ParseFromString(bytes)) return false;
    handler_->OnMessage(std::move(message));
    return true;
  }
  void Drained() override {
    if (handler_ != nullptr) handler_->OnDrained();
  }
  void Closed(absl::Status status) override {
    if (handler_ != nullptr) handler_->OnClosed(std::move(status));
  }

  Replay* const replay_;
  const uint64_t number_;
  StreamHandler<In>* handler_ = nullptr;
};

class Replay::ReplayLoop final : public Loop {
 public:
  explicit ReplayLoop(Replay* replay) : replay_(replay) {}

  absl::Time Now() const override { return replay_->Clock(); }
  void Post(Task task) override {
    After(absl::ZeroDuration(), std::move(task));
  }
  TimerId After(absl::Duration delay, Task task) override {
    const TimerId timer = ++timers_;
    replay_->Act(v1::SESSION_ACT_KIND_TIMER, timer,
                 static_cast<uint64_t>(ToTicks(delay)));
    tasks_[timer] = std::move(task);
    return timer;
  }
  void Cancel(TimerId timer) override { tasks_.erase(timer); }

  // False: it is not set.
  bool Fire(TimerId timer) {
    const auto it = tasks_.find(timer);
    if (it == tasks_.end()) return false;
    Task task = std::move(it->second);
    tasks_.erase(it);
    task();
    return true;
  }

 private:
  Replay* const replay_;
  TimerId timers_ = 0;
  std::map<TimerId, Task> tasks_;
};

class Replay::ReplayRandom final : public Random {
 public:
  explicit ReplayRandom(Replay* replay) : replay_(replay) {}
  uint64_t Next() override {
    return replay_->Next(replay_->outcome_.random(), &replay_->random_next_,
                         "a random number");
  }

 private:
  Replay* const replay_;
};

class Replay::ReplayText final : public TextStream {
 public:
  explicit ReplayText(Replay* replay) : replay_(replay) {}
  std::string Push(int32_t) override { return Finish(); }
  std::string Finish() override {
    return replay_->Next(replay_->outcome_.text(), &replay_->text_, "text");
  }

 private:
  Replay* const replay_;
};

class Replay::ReplayCodec final : public TextCodec {
 public:
  explicit ReplayCodec(Replay* replay) : replay_(replay) {}
  std::unique_ptr<TextStream> NewStream(absl::Span<const int32_t>,
                                        bool) override {
    return std::make_unique<ReplayText>(replay_);
  }
  std::string TokenBytes(int32_t) override {
    return ReplayText(replay_).Finish();
  }

 private:
  Replay* const replay_;
};

class Replay::ReplayDialer final : public Dialer {
 public:
  explicit ReplayDialer(Replay* replay) : replay_(replay) {}
  std::unique_ptr<DecodeStream> DialDecode(const v1::WorkerRef& worker,
                                           absl::Duration deadline,
                                           const TraceContext& trace) override {
    replay_->Act(v1::SESSION_ACT_KIND_DIAL_DECODE, replay_->streams_ + 1,
                 Digest(worker, deadline, trace));
    return replay_->NewStream<v1::DecodeRequest, v1::DecodeResponse>(
        "the Decode call to " + worker.worker_id());
  }
  std::unique_ptr<PrefillStream> DialPrefill(
      const v1::WorkerRef& worker, absl::Duration deadline,
      const TraceContext& trace) override {
    replay_->Act(v1::SESSION_ACT_KIND_DIAL_PREFILL, replay_->streams_ + 1,
                 Digest(worker, deadline, trace));
    return replay_->NewStream<v1::PrefillRequest, v1::PrefillResponse>(
        "the Prefill call to " + worker.worker_id());
  }

 private:
  Replay* const replay_;
};

class Replay::DropSpans final : public SpanSink {
  void Export(std::vector<otlp::Span>) override {}
};

// ---- What the core asks for and does.

template <typename Out, typename In>
std::unique_ptr<Stream<Out, In>> Replay::NewStream(std::string name) {
  const uint64_t number = ++streams_;
  names_[number] = std::move(name);
  return std::make_unique<ReplayStream<Out, In>>(this, number);
}

void Replay::Diverge(std::string how) {
  if (diverged_.empty()) diverged_ = std::move(how);
}

template <typename Values>
typename Values::value_type Replay::Next(const Values& values, int* next,
                                         const char* what) {
  if (*next < values.size()) return values.Get((*next)++);
  if (!ended_within_) {
    Diverge(absl::StrCat("it asks for ", what, " once more than then"));
  }
  return {};
}

absl::Time Replay::Clock() {
  now_ += FromTicks(Next(outcome_.clock(), &clock_, "the time"));
  return now_;
}

void Replay::Act(v1::SessionActKind kind, uint64_t stream, uint64_t digest) {
  v1::SessionAct act;
  act.set_kind(kind);
  act.set_stream(stream);
  act.set_digest(digest);
  ++acts_;
  if (ended_within_) return;
  if (acts_next_ >= outcome_.acts_size()) {
    return Diverge(absl::StrCat("it ", NameOf(act), " where it then was done"));
  }
  const v1::SessionAct& then = outcome_.acts(acts_next_++);
  if (then.kind() != kind || then.stream() != stream) {
    Diverge(absl::StrCat("it ", NameOf(act), " where it then ", NameOf(then)));
  } else if (then.digest() != digest) {
    Diverge(absl::StrCat("it ", NameOf(act), " with something else than then"));
  }
}

std::string Replay::NameOf(const v1::SessionAct& act) const {
  const std::string verb(Verb(act.kind()));
  if (act.kind() == v1::SESSION_ACT_KIND_TIMER) {
    return absl::StrCat(verb, " timer ", act.stream());
  }
  const auto name = names_.find(act.stream());
  return absl::StrCat(verb, " stream ", act.stream(),
                      name == names_.end() ? "" : ", " + name->second);
}

std::string Replay::NameOf(const v1::SessionEntry& entry) const {
  const auto stream = [&](const char* what, uint64_t number) {
    const auto name = names_.find(number);
    return absl::StrCat(what, " stream ", number,
                        name == names_.end() ? "" : ", " + name->second);
  };
  using Entry = v1::SessionEntry;
  switch (entry.entry_case()) {
    case Entry::kSubmit:
      return "a request";
    case Entry::kRegistration:
      return "a registration";
    case Entry::kMessage:
      return stream("a message of", entry.message().stream());
    case Entry::kDrained:
      return stream("the last write to", entry.drained());
    case Entry::kClosed:
      return stream("the end of", entry.closed().stream());
    case Entry::kTimer:
      return absl::StrCat("timer ", entry.timer());
    case Entry::kCommand:
      return v1::SessionCommandKind_Name(entry.command().kind());
    default:
      return "the start";
  }
}

// ---- The replay

Replay::Replay(std::istream* in)
    : in_(in),
      loop_(std::make_unique<ReplayLoop>(this)),
      random_(std::make_unique<ReplayRandom>(this)),
      codec_(std::make_unique<ReplayCodec>(this)),
      dialer_(std::make_unique<ReplayDialer>(this)),
      spans_(std::make_unique<DropSpans>()) {}

Replay::~Replay() {
  ended_within_ = true;  // what follows was not recorded
  core_.reset();
}

absl::StatusOr<std::unique_ptr<Replay>> Replay::Create(
    std::istream* in, RouterObserver* observer) {
  std::unique_ptr<Replay> replay(new Replay(in));
  const absl::Status status = replay->Start(observer);
  if (!status.ok()) return status;
  return replay;
}

absl::StatusOr<bool> Replay::Read(v1::SessionEntry* entry) {
  const std::string head = ReadVarint(in_);
  if (head.empty()) return false;
  size_t length = 0;
  const std::optional<uint64_t> size = Varint(head, &length);
  const std::string bytes =
      size && *size <= kMaxEntryBytes ? ReadUpTo(in_, *size) : "";
  const auto read = static_cast<int64_t>(head.size() + bytes.size());
  const bool whole = size && bytes.size() == *size;
  const bool possible = size ? *size <= kMaxEntryBytes && MayBegin(bytes, *size)
                             : head.size() < kMaxVarintBytes;
  if (!possible || (whole && !entry->ParseFromString(bytes))) {
    return absl::DataLossError(
        absl::StrCat(read, " bytes from offset ", offset_,
                     " are no entry: the file was damaged, or something else "
                     "wrote to it"));
  }
  offset_ += read;
  if (!whole) torn_bytes_ = read;
  if (entry->has_end()) why_ended_ = entry->end().why();
  return whole && !entry->has_end();
}

absl::Status Replay::Start(RouterObserver* observer) {
  v1::SessionEntry entry;
  const absl::StatusOr<bool> read = Read(&entry);
  if (!read.ok() || !*read || !entry.has_start()) {
    return absl::InvalidArgumentError("is no recorded session");
  }
  const v1::SessionStart& start = entry.start();
  version_ = start.version();
  if (start.format() != kFormat) {
    return absl::InvalidArgumentError(
        absl::StrCat("is of format ", start.format(), ", recorded by ",
                     version_, "; this program knows format ", kFormat));
  }
  absl::StatusOr<RouterOptions> options = OptionsOf(start);
  if (!options.ok()) return options.status();
  absl::Status status = ReadOutcome();
  if (!status.ok()) return status;
  now_ = absl::UnixEpoch();
  began_ = now_ + FromTicks(outcome_.clock_size() > 0 ? outcome_.clock(0) : 0);
  core_ = std::make_unique<RouterCore>(
      *options, loop_.get(), random_.get(), dialer_.get(),
      start.has_text() ? codec_.get() : nullptr, observer,
      start.traced() ? spans_.get() : nullptr);
  status = CheckOutcome();
  return status.ok() ? status : Annotate(status, "at its start");
}

absl::Status Replay::ReadOutcome() {
  v1::SessionEntry entry;
  outcome_.Clear();
  clock_ = random_next_ = unsent_ = text_ = acts_next_ = 0;
  const absl::StatusOr<bool> read = Read(&entry);
  if (!read.ok()) return read.status();
  if (!*read) {
    ended_within_ = true;
  } else if (!entry.has_outcome()) {
    return NotRecorded("an input without an outcome");
  } else {
    outcome_ = std::move(*entry.mutable_outcome());
  }
  return absl::OkStatus();
}

absl::Status Replay::CheckOutcome() {
  if (!ended_within_ && diverged_.empty()) {
    if (acts_next_ < outcome_.acts_size()) {
      Diverge(absl::StrCat("it is done where it then ",
                           NameOf(outcome_.acts(acts_next_))));
    } else if (clock_ < outcome_.clock_size() ||
               random_next_ < outcome_.random_size() ||
               unsent_ < outcome_.unsent_size() ||
               text_ < outcome_.text_size()) {
      Diverge(
          "it asks less often than then for the time, random numbers, text or "
          "what is unsent");
    }
  }
  return diverged_.empty() ? absl::OkStatus() : absl::AbortedError(diverged_);
}

absl::StatusOr<bool> Replay::Step() {
  v1::SessionEntry entry;
  if (ended_within_) return false;
  const absl::StatusOr<bool> read = Read(&entry);
  if (!read.ok()) {
    return Annotate(read.status(),
                    absl::StrFormat("behind input %d, after %.6f s", inputs_,
                                    absl::ToDoubleSeconds(elapsed())));
  }
  if (!*read) return false;
  absl::Status status = ReadOutcome();
  ++inputs_;
  std::string name = NameOf(entry);
  if (status.ok()) status = Take(&entry);
  if (status.ok()) status = CheckOutcome();
  if (!status.ok()) {
    return Annotate(
        status, absl::StrFormat("at input %d, %s, after %.6f s", inputs_, name,
                                absl::ToDoubleSeconds(elapsed())));
  }
  return true;
}

absl::Status Replay::Run() {
  for (;;) {
    const absl::StatusOr<bool> more = Step();
    if (!more.ok() || !*more) return more.status();
  }
}

absl::StatusOr<Replay::Inbox*> Replay::Find(uint64_t stream) {
  const auto it = inboxes_.find(stream);
  if (it != inboxes_.end()) return it->second;
  if (stream <= streams_) {
    return absl::AbortedError("it has dropped the stream, and then had not");
  }
  return NotRecorded(absl::StrCat("there is no stream ", stream));
}

absl::Status Replay::Take(v1::SessionEntry* entry) {
  using Entry = v1::SessionEntry;
  switch (entry->entry_case()) {
    case Entry::kSubmit: {
      AdmittedRequest admitted = FromEntry(std::move(*entry->mutable_submit()));
      core_->Submit(
          std::move(admitted),
          NewStream<v1::GenerateResponse, v1::GenerateRequest>("a client's"));
      return absl::OkStatus();
    }
    case Entry::kRegistration: {
      const v1::SessionRegistration& registration = entry->registration();
      rpc::PeerIdentity peer{.authenticated = registration.authenticated()};
      for (const v1::SessionIdentity& identity : registration.identities()) {
        peer.identities.push_back({static_cast<rpc::PeerRole>(identity.role()),
                                   identity.worker_id()});
      }
      core_->AddRegistration(
          NewStream<v1::RegisterResponse, v1::RegisterRequest>(
              "a worker's registration"),
          std::move(peer));
      return absl::OkStatus();
    }
    case Entry::kMessage: {
      const absl::StatusOr<Inbox*> inbox = Find(entry->message().stream());
      if (!inbox.ok()) return inbox.status();
      return (*inbox)->Deliver(entry->message().message())
                 ? absl::OkStatus()
                 : NotRecorded("a message that is none");
    }
    case Entry::kDrained: {
      const absl::StatusOr<Inbox*> inbox = Find(entry->drained());
      if (inbox.ok()) (*inbox)->Drained();
      return inbox.status();
    }
    case Entry::kClosed: {
      const absl::StatusOr<Inbox*> inbox = Find(entry->closed().stream());
      if (inbox.ok()) (*inbox)->Closed(FromEntry(entry->closed().status()));
      return inbox.status();
    }
    case Entry::kTimer:
      return loop_->Fire(entry->timer())
                 ? absl::OkStatus()
                 : absl::AbortedError("it has not set that timer");
    case Entry::kCommand:
      return Take(entry->command());
    default:
      return NotRecorded("an entry that is no input");
  }
}

absl::Status Replay::Take(const v1::SessionCommand& command) {
  const auto nobody = [](const absl::StatusOr<v1::LoraAdapter>&) {};
  const std::string& name = command.name();
  switch (command.kind()) {
    case v1::SESSION_COMMAND_KIND_ABORT:
      core_
          ->Abort(name, command.has_tenant()
                            ? std::make_optional(command.tenant())
                            : std::nullopt)
          .IgnoreError();
      return absl::OkStatus();
    case v1::SESSION_COMMAND_KIND_ABORT_ALL:
      core_->AbortAll(command.tenant());
      return absl::OkStatus();
    case v1::SESSION_COMMAND_KIND_CORDON:
    case v1::SESSION_COMMAND_KIND_UNCORDON:
      core_->Cordon(name, command.kind() == v1::SESSION_COMMAND_KIND_CORDON)
          .IgnoreError();
      return absl::OkStatus();
    case v1::SESSION_COMMAND_KIND_LOAD_ADAPTER:
      core_->LoadAdapter(name, command.path(), nobody);
      return absl::OkStatus();
    case v1::SESSION_COMMAND_KIND_UNLOAD_ADAPTER:
      core_->UnloadAdapter(name, nobody);
      return absl::OkStatus();
    case v1::SESSION_COMMAND_KIND_DRAIN:
      core_->Drain();
      return absl::OkStatus();
    case v1::SESSION_COMMAND_KIND_CLOSE_ALL:
      core_->CloseAll(FromEntry(command.status()));
      return absl::OkStatus();
    default:
      return NotRecorded("a command that is none");
  }
}

}  // namespace tandem::router::session
