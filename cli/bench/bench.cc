// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/bench.h"

#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <future>
#include <iostream>
#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cli/bench/progress_bar.h"
#include "cli/bench/report.h"
#include "cli/bench/trace.h"
#include "common/error.h"
#include "common/lifecycle.h"
#include "common/random.h"
#include "common/rpc/client_stream.h"
#include "common/thread_loop.h"
#include "tandem/v1/inference.grpc.pb.h"

namespace tandem::bench {
namespace {

constexpr absl::Duration kRedraw = absl::Milliseconds(200);
constexpr absl::Duration kReadyWait = absl::Seconds(5);
constexpr int kSaltBytes = 8;

absl::StatusOr<v1::ModelInfo> AskForModel(v1::InferenceService::Stub* stub,
                                          const BenchOptions& options) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::seconds(5));
  v1::GetModelRequest request;
  request.set_model(options.request.model());
  v1::GetModelResponse response;
  const grpc::Status status = stub->GetModel(&context, request, &response);
  if (status.ok()) return response.model();
  const absl::Status failed = rpc::FromGrpc(status, context);
  if (absl::IsUnavailable(failed) || absl::IsUnimplemented(failed)) {
    return cli::Explained(failed, options.router);
  }
  return Annotate(
      failed, absl::StrCat("asking the router at ", options.router.address));
}

// Waits a little for a cluster that is only just coming up.
absl::StatusOr<v1::ModelInfo> FetchModel(v1::InferenceService::Stub* stub,
                                         const BenchOptions& options) {
  const absl::Time give_up = absl::Now() + kReadyWait;
  absl::StatusOr<v1::ModelInfo> model = AskForModel(stub, options);
  while (model.ok() && model->ready_decode_workers() == 0) {
    if (absl::Now() > give_up) {
      return absl::UnavailableError(
          absl::StrCat("the router at ", options.router.address,
                       " has no decode worker that is ready"));
    }
    absl::SleepFor(kRedraw);
    model = AskForModel(stub, options);
  }
  if (model.ok() && model->context_length() < 2) {
    return absl::FailedPreconditionError(
        "a context of fewer than 2 positions holds no prompt and output");
  }
  if (model.ok() && model->vocabulary_size() <= model->eos_token_ids_size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("a vocabulary of ", model->vocabulary_size(),
                     " tokens leaves none to make prompts of"));
  }
  return model;
}

std::string DescribeLoad(const BenchOptions& options) {
  std::string load;
  const double rate = options.synthetic.request_rate;
  if (!options.trace.empty()) {
    // Where it lies is among the flags.
    load =
        absl::StrCat("arrivals of ",
                     std::filesystem::path(options.trace).filename().string());
    if (options.time_scale != 1) {
      absl::StrAppend(&load, ", times by ", options.time_scale);
    }
    if (options.length_scale != 1) {
      absl::StrAppend(&load, ", lengths by ", options.length_scale);
    }
  } else if (options.run.closed_loop) {
    return absl::StrCat("closed loop, ", options.run.max_concurrency,
                        " in flight");
  } else if (std::isinf(rate)) {
    load = "all at once";
  } else if (options.synthetic.burstiness == 1) {
    load = absl::StrCat("Poisson arrivals, ", rate, " requests/s");
  } else {
    load =
        absl::StrCat("gamma arrivals, burstiness ",
                     options.synthetic.burstiness, ", ", rate, " requests/s");
  }
  if (options.run.max_concurrency > 0) {
    absl::StrAppend(&load, ", at most ", options.run.max_concurrency,
                    " in flight");
  }
  return load;
}

absl::StatusOr<std::vector<PlannedRequest>> MakePlan(
    const BenchOptions& options) {
  if (options.trace.empty()) return PlanSynthetic(options.synthetic);
  absl::StatusOr<std::vector<TraceRow>> rows =
      ReadTrace(options.trace, options.trace_rows);
  if (!rows.ok()) return rows.status();
  return PlanTrace(*rows, options.time_scale, options.length_scale);
}

int TerminalColumns() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) {
    return 80;
  }
  return size.ws_col;
}

double ProcessCpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) +
           static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Opened before the run, so that a path that cannot be written is known then.
// What the file holds stays until WriteOutput.
absl::StatusOr<std::ofstream> OpenOutput(const std::string& path) {
  std::ofstream file;
  if (path.empty()) return file;
  file.open(path, std::ios::binary | std::ios::app);
  if (!file) {
    return absl::InvalidArgumentError(absl::StrCat("cannot write ", path));
  }
  return file;
}

void WriteOutput(const std::string& path, const std::string& text,
                 std::ofstream* file) {
  std::error_code ignored;  // pipes have no size
  std::filesystem::resize_file(path, 0, ignored);
  *file << text;
  file->close();
}

// A run on a loop of its own.
class Run {
 public:
  Run(const BenchOptions& options, const v1::ModelInfo& model,
      const std::vector<PlannedRequest>& plan, v1::InferenceService::Stub* stub,
      ThreadLoop* loop, SignalWatcher* signals)
      : options_(options),
        plan_(plan),
        stub_(stub),
        loop_(loop),
        signals_(signals),
        vocabulary_(model.vocabulary_size(), {model.eos_token_ids().begin(),
                                              model.eos_token_ids().end()}),
        cache_salt_(absl::BytesToHexString(SystemRandom().Bytes(kSaltBytes))) {}

  // A late signal must not find this gone.
  ~Run() { loop_->Stop(); }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Blocks until all has ended.
  std::vector<RequestRecord> Execute();
  bool interrupted() const { return signals_->signal() != 0; }
  int ExitCode() const { return signals_->ExitCode(kExitOk); }

 private:
  v1::GenerateRequest Compose(size_t index) const;
  std::unique_ptr<Runner::GenerateStream> Open();
  void Redraw();

  const BenchOptions& options_;
  const std::vector<PlannedRequest>& plan_;
  v1::InferenceService::Stub* const stub_;
  ThreadLoop* const loop_;
  SignalWatcher* const signals_;
  const Vocabulary vocabulary_;
  // Of this run alone: an earlier one with the same seed must not have warmed
  // the prefix cache for it.
  const std::string cache_salt_;
  std::unique_ptr<Runner> runner_;
  std::unique_ptr<Timer> redraw_;
};

v1::GenerateRequest Run::Compose(size_t index) const {
  v1::GenerateRequest request = options_.request;
  const std::vector<uint32_t> ids =
      PromptIds(plan_[index].prompt, options_.seed, vocabulary_);
  request.mutable_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
  request.mutable_cache()->set_cache_salt(cache_salt_);
  request.mutable_stopping()->set_max_tokens(plan_[index].output_tokens);
  request.mutable_sampling()->set_seed(options_.seed + index);
  return request;
}

std::unique_ptr<Runner::GenerateStream> Run::Open() {
  return rpc::OpenServerStream<v1::GenerateRequest, v1::GenerateResponse>(
      loop_,
      {.timeout = absl::Seconds(options_.timeout_seconds),
       .peer = options_.router.address},
      [this](auto* context, const auto* request, auto* reactor) {
        stub_->async()->Generate(context, request, reactor);
      });
}

void Run::Redraw() {
  const std::string line = ProgressLine(runner_->progress(), plan_.back().at_s,
                                        TerminalColumns() - 1);
  std::cerr << "\r\033[K" << line << std::flush;
  redraw_->Start(kRedraw, [this] { Redraw(); });
}

std::vector<RequestRecord> Run::Execute() {
  const bool progress = options_.progress && isatty(STDERR_FILENO) != 0;
  std::promise<void> finished;
  loop_->RunSync([&] {
    runner_ = std::make_unique<Runner>(
        loop_, options_.run, &plan_,
        Runner::Hooks{.open = [this] { return Open(); },
                      .compose = [this](size_t i) { return Compose(i); },
                      .finished = [&] { finished.set_value(); }});
    runner_->Start();
    redraw_ = std::make_unique<Timer>(loop_);
    if (progress) Redraw();
  });
  signals_->OnDrain(loop_, [this] {
    if (runner_ != nullptr) runner_->Stop();
  });
  finished.get_future().wait();
  std::vector<RequestRecord> records;
  loop_->RunSync([&] {
    redraw_ = nullptr;
    records = runner_->records();
    runner_ = nullptr;
  });
  if (progress) std::cerr << "\r\033[K";
  return records;
}

absl::Status NothingCompleted(const Summary& summary) {
  const Failures* most = nullptr;
  std::string name;
  for (const auto& [key, failures] : summary.failures) {
    if (most != nullptr && most->count >= failures.count) continue;
    most = &failures;
    name = key;
  }
  return absl::UnavailableError(absl::StrCat(
      "no request completed",
      most == nullptr
          ? ""
          : absl::StrCat("; most failed with ", name, ": ", most->example)));
}

}  // namespace

absl::StatusOr<int> Bench(const BenchOptions& options) {
  absl::StatusOr<std::vector<PlannedRequest>> plan = MakePlan(options);
  if (!plan.ok()) return plan.status();
  absl::StatusOr<std::ofstream> json_file = OpenOutput(options.json_path);
  if (!json_file.ok()) return json_file.status();
  absl::StatusOr<std::ofstream> svg_file = OpenOutput(options.svg_path);
  if (!svg_file.ok()) return svg_file.status();
  // Before gRPC starts threads, which would take the signals otherwise.
  SignalWatcher signals;
  ThreadLoop loop("bench");
  const auto channel = cli::Connect(options.router);
  if (!channel.ok()) return channel.status();
  const auto stub = v1::InferenceService::NewStub(*channel);
  const absl::StatusOr<v1::ModelInfo> model = FetchModel(stub.get(), options);
  if (!model.ok()) return model.status();

  Report report;
  report.clipping = ClipToContext(model->context_length(), &*plan);
  report.date =
      absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone());
  Run run(options, *model, *plan, stub.get(), &loop, &signals);
  const double cpu_before = ProcessCpuSeconds();
  const absl::Time begun = absl::Now();
  const std::vector<RequestRecord> records = run.Execute();
  const double ran_s = absl::ToDoubleSeconds(absl::Now() - begun);
  report.generator_cpu_s = ProcessCpuSeconds() - cpu_before;
  report.interrupted = run.interrupted();
  report.router = options.router.address;
  report.model = model->model();
  report.context_length = model->context_length();
  report.prefill_workers = model->ready_prefill_workers();
  report.decode_workers = model->ready_decode_workers();
  report.load = DescribeLoad(options);
  report.seed = options.seed;
  report.flags = options.flags;
  report.objectives = options.objectives;
  report.metrics = options.metrics;
  report.percentiles = options.percentiles;
  report.summary =
      Summarize(records, options.objectives, report.interrupted ? ran_s : 0);

  std::cout << ReportTable(report) << std::flush;
  if (!options.json_path.empty()) {
    WriteOutput(options.json_path,
                ReportJson(report, options.save_detailed ? &records : nullptr),
                &*json_file);
  }
  if (!options.svg_path.empty()) {
    WriteOutput(options.svg_path, ReportSvg(report), &*svg_file);
  }
  if (json_file->fail() || svg_file->fail()) {
    return absl::DataLossError("a result file could not be written whole");
  }
  if (report.summary.completed == 0 && !report.interrupted) {
    return NothingCompleted(report.summary);
  }
  return run.ExitCode();
}

}  // namespace tandem::bench
