// SPDX-License-Identifier: Apache-2.0
#include "router/placement/compatibility.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"
#include "common/fingerprint_words.h"
#include "common/utf8.h"

namespace tandem::router {
namespace {

constexpr char kNumerics[] = "numerics";

std::string Part(const v1::WorkerHello& hello, const std::string& field) {
  const auto it = hello.fingerprint().find(field);
  return it == hello.fingerprint().end() ? "(none)" : it->second;
}

// Names of the parts that differ; a part that only one has differs.
std::vector<std::string> Differences(const v1::WorkerHello& a,
                                     const v1::WorkerHello& b) {
  std::set<std::string> fields;
  for (const auto& [field, value] : a.fingerprint()) fields.insert(field);
  for (const auto& [field, value] : b.fingerprint()) fields.insert(field);
  std::vector<std::string> differences;
  for (const std::string& field : fields) {
    if (Part(a, field) != Part(b, field)) differences.push_back(field);
  }
  return differences;
}

// Digests are long; their heads tell them apart.
constexpr size_t kLongest = 48;

std::string Shown(const std::string& value) {
  return std::string(Utf8Head(value, kLongest));
}

// Senders convert to the receiver's format, and either must know both.
bool Knows(const v1::WorkerHello& hello, const std::string& format) {
  if (hello.kv_formats().empty()) return format == "f32" || format == "bf16";
  return std::find(hello.kv_formats().begin(), hello.kv_formats().end(),
                   format) != hello.kv_formats().end();
}

}  // namespace

absl::Status CheckPair(const v1::WorkerHello& prefill,
                       const v1::WorkerHello& decode) {
  std::vector<std::string> problems;
  const bool mixed = prefill.mixed_numerics() && decode.mixed_numerics();
  for (const std::string& field : Differences(prefill, decode)) {
    if (field == kNumerics && mixed) continue;
    const FingerprintWords words =
        DifferingWords(Part(prefill, field), Part(decode, field), kLongest);
    problems.push_back(absl::StrCat(
        "fingerprint ", field, ": ", words.a, " != ", words.b, words.hint,
        field == kNumerics ? " (--mixed-numerics on both workers "
                             "would allow this)"
                           : ""));
  }
  if (prefill.protocol_max() < decode.protocol_min() ||
      decode.protocol_max() < prefill.protocol_min()) {
    problems.push_back(
        absl::StrCat("handoff protocol: ", prefill.protocol_min(), "..",
                     prefill.protocol_max(), " and ", decode.protocol_min(),
                     "..", decode.protocol_max(), " have none in common"));
  }
  if (mixed && prefill.kv_dtype() != decode.kv_dtype()) {
    if (!Knows(prefill, decode.kv_dtype())) {
      problems.push_back(
          absl::StrCat("KV format: ", Shown(decode.kv_dtype()),
                       ", which the prefill worker does not know"));
    }
    // It refuses links from a format that it has not heard of.
    if (!Knows(decode, prefill.kv_dtype())) {
      problems.push_back(
          absl::StrCat("KV format: ", Shown(prefill.kv_dtype()),
                       ", which the decode worker does not know"));
    }
  }
  if (problems.empty()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition,
                   "FINGERPRINT_MISMATCH", absl::StrJoin(problems, "; "));
}

bool SameResults(const v1::WorkerHello& a, const v1::WorkerHello& b) {
  return Differences(a, b).empty();
}

absl::Status CheckHello(const v1::WorkerHello& hello) {
  const auto invalid = [](std::string_view field, std::string_view need) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "FIELD_INVALID",
        absl::StrCat("hello.", std::string(field), ": ", std::string(need)),
        {{"field", field}});
  };
  constexpr size_t kMaxName = 256;
  const std::string& id = hello.worker().worker_id();
  if (id.empty() || id.size() > kMaxName) {
    return invalid("worker.worker_id", "1..256 bytes are needed");
  }
  if (std::any_of(id.begin(), id.end(),
                  [](unsigned char c) { return c < 0x21 || c == 0x7f; })) {
    return invalid("worker.worker_id", "no spaces or control characters");
  }
  if (hello.worker().incarnation().size() != 16) {
    return invalid("worker.incarnation", "16 bytes are needed");
  }
  const std::string& endpoint = hello.worker().endpoint();
  if (endpoint.empty() || endpoint.size() > kMaxName) {
    return invalid("worker.endpoint", "host:port is needed");
  }
  if (hello.role() != v1::WORKER_ROLE_PREFILL &&
      hello.role() != v1::WORKER_ROLE_DECODE) {
    return invalid("role", "must be PREFILL or DECODE");
  }
  if (hello.max_model_len() < 1) return invalid("max_model_len", "at least 1");
  if (hello.block_size() < 1) return invalid("block_size", "at least 1");
  if (hello.num_blocks() < 1) return invalid("num_blocks", "at least 1");
  if (hello.max_num_seqs() < 1) return invalid("max_num_seqs", "at least 1");
  if (hello.protocol_min() > hello.protocol_max()) {
    return invalid("protocol_min", "must not be above protocol_max");
  }
  return CheckAdapters(hello.adapters());
}

absl::Status CheckAdapters(const Adapters& adapters) {
  std::string problem;
  if (adapters.size() > kMaxAdapters) {
    problem = absl::StrCat(adapters.size(), ", at most ", kMaxAdapters);
  }
  std::set<std::string_view> names;
  for (const v1::AdapterRef& adapter : adapters) {
    const std::string& name = adapter.name();
    if (name.empty() || name.size() > kMaxAdapterNameBytes) {
      problem = absl::StrCat("a name of ", name.size(), " bytes, 1..",
                             kMaxAdapterNameBytes, " are needed");
    } else if (adapter.digest().size() != 64) {
      problem = absl::StrCat("a digest of ", adapter.digest().size(),
                             " bytes, 64 are needed");
    } else if (adapter.path().size() > kMaxAdapterPathBytes) {
      problem = absl::StrCat("a path of ", adapter.path().size(),
                             " bytes, at most ", kMaxAdapterPathBytes);
    } else if (!names.insert(name).second) {
      problem = "a name twice";
    }
  }
  if (problem.empty()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "FIELD_INVALID",
                   absl::StrCat("hello.adapters: ", problem),
                   {{"field", "adapters"}});
}

std::string AdapterDigest(const v1::WorkerHello& hello,
                          std::string_view adapter) {
  for (const v1::AdapterRef& ref : hello.adapters()) {
    if (ref.name() == adapter) return ref.digest();
  }
  return "";
}

}  // namespace tandem::router
