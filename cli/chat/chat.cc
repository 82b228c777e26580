// SPDX-License-Identifier: Apache-2.0
#include "cli/chat/chat.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cli/chat/line_reader.h"
#include "cli/chat/local_server.h"
#include "cli/flag_names.h"
#include "common/lifecycle.h"

namespace tandem::chat {
namespace {

std::string DefaultHistory() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  std::string state = variable("XDG_STATE_HOME");
  if (state.empty() && !variable("HOME").empty()) {
    state = variable("HOME") + "/.local/state";
  }
  return state.empty() ? "" : state + "/tandem/chat_history";
}

}  // namespace

void ChatCommand::AddTo(CommandLine* line) {
  line_ = line;
  line->Example("tandem chat");
  line->Example("tandem chat models/tales");
  line->Example("echo 'Tell me a story.' | tandem chat --max-tokens 100");
  router_.address = cli::kDefaultRouter;
  router_.flag = "--router";
  history_ = DefaultHistory();
  options_.terminal = isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0;
  options_.timings = options_.terminal;
  line->AddPositional("MODEL", &source_.model,
                      "Directory or id on the hub: start a server for it; "
                      "else talk to --router",
                      false);
  line->Group("Router");
  line->Add("router", &router_.address, "The router's gRPC address");
  line->Add("api-key", &router_.api_key, "The key that the router asks for");
  line->Add("timeout", &options_.timeout_seconds,
            "Deadline of an answer in seconds", 0.001, 1e6);
  line->Group("Server, with MODEL");
  line->Add("revision", &source_.revision,
            "Branch, tag or commit on the hub; not for directories");
  line->Add("device", &device_, "auto, cpu or cuda:N");
  line->Group("Chat");
  line->Add("system", &system_, "The system message");
  line->Add("timings", &options_.timings,
            "A line about each answer; on where it is typed and read");
  line->Add("history", &history_, "File of typed lines; empty: none is kept");
  sampling_.AddTo(line);
  line->Group("TLS");
  tls_.AddTo(line);
}

absl::Status ChatCommand::Run() {
  const bool own = !source_.model.empty();
  for (const char* const flag : {"router", "tls-cert", "tls-key", "tls-ca"}) {
    if (own && line_->typed(flag)) {
      return UsageError(absl::StrCat("MODEL starts a server, and --", flag,
                                     " is of one that runs: give one of them"));
    }
  }
  for (const char* const flag : {"revision", "device"}) {
    if (!own && line_->typed(flag)) {
      return UsageError(
          absl::StrCat("--", flag,
                       " is for a server that MODEL starts: name a "
                       "MODEL, or leave it out"));
    }
  }
  if (absl::Status status = cli::CheckUtf8("--system", system_); !status.ok()) {
    return status;
  }
  std::unique_ptr<LocalServer> server;
  if (own) {
    const absl::StatusOr<std::string> directory = source_.Directory();
    if (!directory.ok()) return directory.status();
    if (options_.terminal) std::cerr << "loading " << source_.model << " ...";
    absl::StatusOr<std::unique_ptr<LocalServer>> started = LocalServer::Start(
        *directory,
        {"--served-model-name", source_.model, "--device", device_});
    if (options_.terminal) std::cerr << "\r\033[K";
    if (!started.ok()) return started.status();
    server = *std::move(started);
    router_.address = server->address();
  } else {
    router_.tls_cert = tls_.cert;
    router_.tls_key = tls_.key;
    router_.tls_ca = tls_.ca;
  }
  const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel =
      cli::Connect(router_);
  if (!channel.ok()) return channel.status();
  const auto stub = v1::InferenceService::NewStub(*channel);

  options_.colour = options_.terminal && std::getenv("NO_COLOR") == nullptr;
  ChatSession session(
      options_, sampling_,
      [&](const v1::GenerateRequest& request, const ShowFunction& show) {
        // On a pipe Ctrl-C ends the program, as it does between answers.
        absl::StatusOr<Answer> answer =
            Ask(stub.get(), request, options_.timeout_seconds,
                /*stoppable=*/options_.terminal, show);
        if (answer.ok()) return answer;
        return absl::StatusOr<Answer>(
            cli::InFlags(cli::Explained(answer.status(), router_), request));
      });
  session.conversation()->set_system(system_);
  if (options_.terminal) {
    // Answers take it, and so does the line that is edited; between them it
    // must not end the program. Not ignored: a child would inherit that.
    struct sigaction action = {};
    action.sa_handler = [](int) {};
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, nullptr);
    std::cout << "/help lists commands, /exit or Ctrl-D ends.\n" << std::flush;
  }
  LineReader reader(options_.terminal, options_.colour, history_);
  while (const std::optional<std::string> line = reader.Read()) {
    if (!session.HandleLine(*line)) break;
    // Nobody is there to try something else.
    if (!options_.terminal && !session.last_status().ok()) {
      return session.last_status();
    }
  }
  if (options_.terminal) std::cout << "\n";
  return absl::OkStatus();
}

}  // namespace tandem::chat
