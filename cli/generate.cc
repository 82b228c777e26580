// SPDX-License-Identifier: Apache-2.0
#include "cli/generate.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/flag_names.h"
#include "common/error.h"
#include "common/lifecycle.h"
#include "common/rpc/status.h"
#include "common/utf8.h"
#include "router/http/openai_usage.h"
#include "tandem/v1/inference.grpc.pb.h"

namespace tandem::cli {
namespace {

using nlohmann::json;

double Milliseconds(const google::protobuf::Duration& duration) {
  return static_cast<double>(duration.seconds()) * 1e3 +
         static_cast<double>(duration.nanos()) * 1e-6;
}

// "FINISH_REASON_STOP" is "stop" to OpenAI's users.
std::string ReasonName(v1::FinishReason reason) {
  std::string name = v1::FinishReason_Name(reason);
  name = name.substr(std::string("FINISH_REASON_").size());
  for (char& c : name) c = static_cast<char>(std::tolower(c));
  return name;
}

// Of the prompt's first token, which has no rank, there is nothing to say.
template <typename Tokens>
json LogprobsJson(const Tokens& tokens) {
  json records = json::array();
  for (const v1::TokenLogprob& token : tokens) {
    json record = {{"token_id", token.token_id()}, {"token", token.token()}};
    if (token.rank() == 0) {
      record["logprob"] = nullptr;
      records.push_back(std::move(record));
      continue;
    }
    record["logprob"] = token.logprob();
    record["rank"] = token.rank();
    record["top"] = json::array();
    for (const v1::TokenAlternative& top : token.top()) {
      record["top"].push_back({{"token_id", top.token_id()},
                               {"token", top.token()},
                               {"logprob", top.logprob()}});
    }
    records.push_back(std::move(record));
  }
  return records;
}

json TimingsJson(const v1::Timings& timings) {
  return {
      {"queue_ms", Milliseconds(timings.queue())},
      {"prefill_ms", Milliseconds(timings.prefill())},
      {"handoff_ms", Milliseconds(timings.handoff())},
      {"handoff_exposed_ms", Milliseconds(timings.handoff_exposed())},
      {"time_to_first_token_ms", Milliseconds(timings.time_to_first_token())},
      {"time_per_output_token_ms",
       Milliseconds(timings.time_per_output_token())},
      {"decode_ms", Milliseconds(timings.decode())},
      {"total_ms", Milliseconds(timings.total())},
      {"kv_bytes", timings.kv_bytes()},
      {"way", timings.way()},
      {"retries", timings.retries()},
      {"preemptions", timings.preemptions()}};
}

// SIGINT cancels the call; the server frees what it held within a step.
std::atomic<bool> interrupted = false;

v1::GeneratedSequence* SequenceAt(int index, v1::GenerateOnceResponse* whole) {
  while (whole->sequences_size() <= index) {
    whole->add_sequences()->set_index(whole->sequences_size() - 1);
  }
  return whole->mutable_sequences(index);
}

// An answer is no program for the terminal.
std::string Shown(const std::string& text) {
  static const bool terminal = isatty(STDOUT_FILENO) != 0;
  return terminal ? ForTerminal(text) : text;
}

// Reads the stream; prints text as it comes unless it is wanted as JSON or is
// of several sequences, which would mix.
void Collect(grpc::ClientReader<v1::GenerateResponse>* reader, bool print,
             v1::GenerateOnceResponse* whole) {
  SequenceAt(0, whole);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (!response.request_id().empty()) {
      whole->set_request_id(response.request_id());
    }
    switch (response.event_case()) {
      case v1::GenerateResponse::kStarted:
        *whole->mutable_started() = response.started();
        print = print && response.started().sampling().n() <= 1;
        break;
      case v1::GenerateResponse::kDelta: {
        const v1::GenerateDelta& delta = response.delta();
        if (print) {
          std::cout << Shown(delta.text()) << std::flush;
        }
        v1::GeneratedSequence* const sequence =
            SequenceAt(delta.index(), whole);
        sequence->mutable_text()->append(delta.text());
        sequence->mutable_reasoning_content()->append(
            delta.reasoning_content());
        sequence->mutable_token_ids()->MergeFrom(delta.token_ids());
        sequence->mutable_logprobs()->MergeFrom(delta.logprobs());
        sequence->mutable_attention()->MergeFrom(delta.attention());
        break;
      }
      case v1::GenerateResponse::kPromptLogprobs:
        whole->mutable_prompt_logprobs()->MergeFrom(
            response.prompt_logprobs().tokens());
        break;
      case v1::GenerateResponse::kFinished:
        *SequenceAt(response.finished().index(), whole)->mutable_finished() =
            response.finished();
        break;
      case v1::GenerateResponse::kDone:
        *whole->mutable_done() = response.done();
        break;
      case v1::GenerateResponse::EVENT_NOT_SET:
        break;
    }
  }
}

json SequenceJson(const v1::GeneratedSequence& sequence) {
  json object = {
      {"text", sequence.text()},
      {"token_ids", sequence.token_ids()},
      {"finish_reason", ReasonName(sequence.finished().finish_reason())}};
  if (!sequence.reasoning_content().empty()) {
    object["reasoning_content"] = sequence.reasoning_content();
  }
  if (sequence.logprobs_size() > 0) {
    object["logprobs"] = LogprobsJson(sequence.logprobs());
  }
  for (const v1::TokenAttention& token : sequence.attention()) {
    json layers = json::array();
    for (const v1::AttentionWeights& row : token.layers()) {
      layers.push_back({{"layer", row.layer()}, {"weights", row.weights()}});
    }
    object["attention"].push_back(std::move(layers));
  }
  return object;
}

}  // namespace

std::string ToJson(const v1::GenerateOnceResponse& response) {
  const v1::Usage& usage = response.done().usage();
  json object = {
      {"request_id", response.request_id()},
      {"model", response.started().model()},
      {"prompt_token_ids", response.started().prompt_token_ids()},
      // Drawn where none was asked for.
      {"seed", response.started().sampling().seed()},
      {"system_fingerprint", response.started().system_fingerprint()},
      {"usage",
       {{"prompt_tokens", usage.prompt_tokens()},
        {"completion_tokens", usage.completion_tokens()},
        {"total_tokens", usage.total_tokens()},
        {"cached_tokens", usage.cached_tokens()},
        {"accepted_prediction_tokens", usage.accepted_prediction_tokens()},
        {"rejected_prediction_tokens", usage.rejected_prediction_tokens()}}},
      {"timings", TimingsJson(response.done().timings())},
      {"workers",
       {{"prefill", response.done().workers().prefill()},
        {"decode", response.done().workers().decode()}}},
      {"reproducible", !response.done().not_reproducible()}};
  if (response.done().has_work()) {
    object["work"] = router::WorkJson(response.done().work());
  }
  if (response.prompt_logprobs_size() > 0) {
    object["prompt_logprobs"] = LogprobsJson(response.prompt_logprobs());
  }
  object.update(SequenceJson(response.sequences(0)));
  if (response.sequences_size() > 1) {
    for (const v1::GeneratedSequence& sequence : response.sequences()) {
      object["sequences"].push_back(SequenceJson(sequence));
    }
  }
  // Bytes of a token need not be a whole character.
  return object.dump(1, ' ', false, json::error_handler_t::replace);
}

std::string TimingsTable(const v1::GenerateDone& done) {
  const v1::Usage& usage = done.usage();
  const v1::Timings& t = done.timings();
  const bool split = !done.workers().prefill().empty();
  const auto line = [](std::string_view name, const std::string& value) {
    return absl::StrFormat("  %-12s %s\n", std::string(name), value);
  };
  const auto ms = [](const google::protobuf::Duration& duration) {
    return absl::StrFormat("%10.2f ms", Milliseconds(duration));
  };
  std::string table;
  table += line("prompt",
                absl::StrFormat("%7d tokens, %d of them cached",
                                usage.prompt_tokens(), usage.cached_tokens()));
  table += line("generated",
                absl::StrFormat("%7d tokens", usage.completion_tokens()));
  const int drafted =
      usage.accepted_prediction_tokens() + usage.rejected_prediction_tokens();
  if (drafted > 0) {
    table +=
        line("drafted", absl::StrFormat("%7d tokens, %d of them right", drafted,
                                        usage.accepted_prediction_tokens()));
  }
  table += line("queue", ms(t.queue()));
  table += line("prefill", ms(t.prefill()));
  table += line(
      "handoff",
      split ? absl::StrCat(
                  ms(t.handoff()), ", ",
                  absl::StrFormat("%.2f", Milliseconds(t.handoff_exposed())),
                  " ms of it not hidden")
            : "         - (the decode worker prefilled)");
  table += line("decode", ms(t.decode()));
  table += line("TTFT", ms(t.time_to_first_token()));
  table += line("TPOT", ms(t.time_per_output_token()));
  table +=
      line("KV moved",
           absl::StrFormat("%7d bytes%s", t.kv_bytes(),
                           t.way().empty() ? "" : " by way of " + t.way()));
  if (done.has_work()) {
    table += line("computed", absl::StrFormat("%7d positions, %d K/V rows",
                                              done.work().positions_computed(),
                                              done.work().kv_rows()));
  }
  table += line("workers",
                absl::StrCat("prefill ", split ? done.workers().prefill() : "-",
                             ", decode ", done.workers().decode(),
                             done.not_reproducible()
                                 ? " (mixed numerics: not reproducible)"
                                 : ""));
  return table;
}

std::string LogprobsTable(
    const google::protobuf::RepeatedPtrField<v1::TokenLogprob>& tokens,
    int position) {
  std::string table = absl::StrFormat("%8s  %8s  %10s  %6s  %s\n", "position",
                                      "id", "logprob", "rank", "token");
  double sum = 0;
  int count = 0;
  for (const v1::TokenLogprob& token : tokens) {
    const bool scored = token.rank() > 0;
    count += scored;
    absl::StrAppend(
        &table,
        absl::StrFormat(
            "%8d  %8d  %10s  %6s  %s\n", position++, token.token_id(),
            scored ? absl::StrFormat("%.4f", token.logprob()) : "-",
            scored ? absl::StrCat(token.rank()) : "-",
            // As a JSON string: with its spaces, and no control characters.
            json(token.token())
                .dump(-1, ' ', false, json::error_handler_t::replace)));
    sum += double{token.logprob()};
  }
  if (count == 0) return table;
  return absl::StrCat(table, absl::StrFormat("sum %.4f, perplexity %.4f\n", sum,
                                             std::exp(-sum / count)));
}

namespace {

// What streams as text has come by now.
void PrintRest(const v1::GenerateOnceResponse& whole) {
  const bool several = whole.sequences_size() > 1;
  if (!several) std::cout << "\n";
  if (whole.prompt_logprobs_size() > 0) {
    std::cout << LogprobsTable(whole.prompt_logprobs(), 0);
  }
  for (const v1::GeneratedSequence& sequence : whole.sequences()) {
    if (several) {
      std::cout << "[" << sequence.index() << "] " << Shown(sequence.text())
                << "\n";
    }
    if (sequence.logprobs_size() > 0) {
      std::cout << LogprobsTable(sequence.logprobs(),
                                 whole.done().usage().prompt_tokens());
    }
  }
}

// What has no effect would mislead.
absl::Status CheckFlags(const GenerateFlags& flags) {
  if (!flags.json && flags.request.output().has_attention()) {
    return UsageError(
        "--attention brings a number for each position, layer and token, which "
        "only --json prints: give --json as well");
  }
  if (!flags.chat && !flags.system.empty()) {
    return UsageError("--system is a message of a chat: give --chat as well");
  }
  return CheckUtf8("--system", flags.system);
}

}  // namespace

absl::StatusOr<int> Generate(const GenerateFlags& flags) {
  if (absl::Status status = CheckFlags(flags); !status.ok()) return status;
  v1::GenerateRequest request = flags.request;
  std::string prompt = flags.prompt;
  if (!flags.prompt_given) {
    if (isatty(STDIN_FILENO)) {
      std::cerr << "Reading the prompt from the terminal; end with Ctrl-D.\n";
    }
    prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
  }
  if (ValidUtf8(prompt) != prompt) {
    return absl::InvalidArgumentError("the prompt is not UTF-8 text");
  }
  if (flags.chat) {
    if (!flags.system.empty()) {
      v1::ChatMessage* const system = request.mutable_chat()->add_messages();
      system->set_role("system");
      system->set_content(flags.system);
    }
    v1::ChatMessage* const user = request.mutable_chat()->add_messages();
    user->set_role("user");
    user->set_content(prompt);
  } else {
    request.set_text(prompt);
  }
  request.mutable_output()->set_return_token_ids(flags.json);

  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel =
      Connect(flags.router);
  if (!channel.ok()) return channel.status();
  const auto stub = v1::InferenceService::NewStub(*channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(
                           static_cast<int64_t>(flags.timeout_seconds * 1e3)));
  // A reader that waits is woken by a thread: TryCancel is no signal handler's
  // business.
  std::signal(SIGINT, [](int) { interrupted = true; });
  std::atomic<bool> finished = false;
  std::thread canceller([&] {
    while (!finished) {
      if (interrupted) context.TryCancel();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });

  v1::GenerateOnceResponse whole;
  const auto reader = stub->Generate(&context, request);
  Collect(reader.get(), !flags.json, &whole);
  finished = true;
  canceller.join();
  const absl::Status status = rpc::FromGrpc(reader->Finish(), context);
  if (!status.ok()) {
    if (!flags.json && !whole.sequences(0).text().empty()) std::cout << "\n";
    // What the reader gave up is no failure that needs words.
    if (interrupted) return 128 + SIGINT;
    if (absl::IsDeadlineExceeded(status) && ErrorReason(status).empty()) {
      return absl::DeadlineExceededError(
          absl::StrFormat("no whole answer within --timeout, %g s: give more, "
                          "or ask `tandem status` what the workers do",
                          flags.timeout_seconds));
    }
    if (!whole.has_started()) {
      return InFlags(Explained(status, flags.router), request);
    }
    if (absl::IsUnavailable(status) && ErrorReason(status).empty()) {
      return absl::UnavailableError(
          absl::StrCat("the router at ", flags.router.address,
                       " went away in the midst of the answer (",
                       status.message(), "): ask again"));
    }
    return status;
  }
  if (flags.json) {
    std::cout << ToJson(whole) << "\n";
  } else {
    PrintRest(whole);
  }
  if (flags.timings) std::cerr << TimingsTable(whole.done());
  return 0;
}

}  // namespace tandem::cli
