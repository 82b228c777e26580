// SPDX-License-Identifier: Apache-2.0
#include "cli/model_source.h"

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>

#include "absl/strings/str_cat.h"
#include "cli/config_file.h"
#include "common/error.h"
#include "common/lifecycle.h"
#include "common/progress.h"
#include "text/hub.h"

namespace tandem::cli {
namespace {

// As the help calls it, before what is wrong with it.
constexpr char kFlag[] = "MODEL (--model) ";

// Lines and a bar on standard error, which do not disturb each other.
class Screen {
 public:
  explicit Screen(std::string what) : what_(std::move(what)) {}

  void Say(std::string_view line) {
    bar_.reset();  // ends its line
    std::cerr << what_ << ": " << line << "\n";
  }
  void Bytes(int64_t done, int64_t total) {
    if (bar_ == nullptr || total != total_) {
      total_ = total;
      bar_ = std::make_unique<Progress>(
          Progress::Options{.what = what_,
                            .total_bytes = total,
                            .tty = IsTerminal(stderr),
                            .begin_bytes = done});
    }
    bar_->Update(done);
  }

 private:
  const std::string what_;
  int64_t total_ = 0;
  std::unique_ptr<Progress> bar_;
};

}  // namespace

bool IsHubId(const std::string& model) {
  std::error_code error;
  if (std::filesystem::exists(model, error)) return false;
  const bool path = model.empty() || model.front() == '/' ||
                    model.front() == '.' || model.front() == '~' ||
                    model.back() == '/' || model.ends_with(".json");
  return !path && std::count(model.begin(), model.end(), '/') <= 1;
}

void ModelSource::AddTo(CommandLine* line, const std::string& otherwise) {
  std::string help = "Hugging Face directory, ";
  if (!otherwise.empty()) help += "a config.json, ";
  help += "or an id on its hub such as org/name";
  if (!otherwise.empty()) absl::StrAppend(&help, "; without one ", otherwise);
  line->AddModel(&model, help, otherwise.empty());
  line->Group("Model");
  line->Add("revision", &revision,
            "Branch, tag or commit on the hub; not for directories");
}

absl::StatusOr<std::string> ModelSource::Directory(bool config_only) const {
  if (!IsHubId(model)) {
    std::error_code error;
    const bool config = IsConfigFile(model);
    if (!std::filesystem::exists(model, error)) {
      return absl::InvalidArgumentError(absl::StrCat(
          kFlag, "'", model, "': no such ", config ? "file" : "directory"));
    }
    const std::filesystem::path path(model);
    if (!std::filesystem::is_directory(path, error)) {
      if (!config || !config_only) {
        return absl::InvalidArgumentError(absl::StrCat(
            kFlag, "'", model, "' is a file: give the model's directory"));
      }
    } else if (!std::filesystem::exists(path / "config.json", error)) {
      return absl::InvalidArgumentError(
          absl::StrCat(kFlag, "'", model,
                       "' is no model directory: it holds no config.json"));
    }
    if (revision == "main") return model;
    return UsageError(absl::StrCat("--revision ", revision,
                                   " is of models on the hub, and '", model,
                                   "' is a path: leave one of them out"));
  }
  text::HubOptions options = text::HubOptionsFromEnvironment();
  options.revision = revision;
  options.config_only = config_only;
  Screen screen(model);
  absl::StatusOr<std::string> directory = text::FetchModel(
      model, options,
      {.say = [&](std::string_view line) { screen.Say(line); },
       .bytes = [&](int64_t done,
                    int64_t total) { screen.Bytes(done, total); }});
  if (directory.ok()) return directory;
  return Annotate(directory.status(),
                  absl::StrCat(kFlag, "'", model, "' is no directory here"));
}

absl::Status Pull(const ModelSource& source) {
  const absl::StatusOr<std::string> directory = source.Directory();
  if (directory.ok()) std::cout << *directory << "\n";
  return directory.status();
}

}  // namespace tandem::cli
