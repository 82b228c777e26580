// SPDX-License-Identifier: Apache-2.0
#include "tests/figures/figures.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tandem::figures {
namespace {

// "kills" of KillsRow.
std::string NameOfRow() {
  const std::string suite =
      testing::UnitTest::GetInstance()->current_test_info()->test_suite_name();
  return absl::AsciiStrToLower(suite.substr(0, suite.size() - 3));
}

uint64_t SeedOfRow() {
  uint64_t seed = 0;
  const char* const text = std::getenv("TANDEM_SEED");
  if (text == nullptr) return SystemRandom().Below(1'000'000);
  if (!absl::SimpleAtoi(text, &seed)) {
    std::fprintf(stderr, "TANDEM_SEED is no number: %s\n", text);
    std::exit(2);
  }
  return seed;
}

}  // namespace

bool Full() {
  static const bool full = [] {
    const char* const text = std::getenv("TANDEM_FIGURES_SIZE");
    const std::string size = text == nullptr ? "full" : text;
    if (size != "full" && size != "ci") {
      std::fprintf(stderr, "TANDEM_FIGURES_SIZE is full or ci\n");
      std::exit(2);
    }
    return size == "full";
  }();
  return full;
}

Row::Row() : name_(NameOfRow()), seed_(SeedOfRow()), random_(seed_) {
  std::printf("row %s, TANDEM_SEED=%lu\n", name_.c_str(), seed_);
  std::fflush(stdout);
}

void Row::Tell(const std::string& asked, const std::string& measured,
               bool right, bool goal) const {
  const bool held = right && goal;
  std::printf("%s: %s\n  %s\n  %s\n", name_.c_str(), asked.c_str(),
              measured.c_str(), held ? "held" : "NOT HELD");
  std::fflush(stdout);
  EXPECT_TRUE(right) << asked << ": " << measured << "; seed " << seed_;
  const char* const path = std::getenv("TANDEM_FIGURES");
  if (path == nullptr) return;
  std::ofstream(path, std::ios::app)
      << nlohmann::ordered_json{{"row", name_},
                                {"asked", asked},
                                {"measured", measured},
                                {"held", held},
                                {"form", Full() ? "full" : "small"},
                                {"seed", seed_},
                                {"date",
                                 absl::FormatTime("%Y-%m-%d", absl::Now(),
                                                  absl::UTCTimeZone())}}
             .dump()
      << "\n";
}

void Row::TellWhatIsLeft() {
  const std::string left = cluster_->WhatIsLeft("Story");
  Tell("then nothing is left", left.empty() ? "nothing" : left, left.empty());
}

void Row::Begin(integration::ClusterOptions options,
                const std::vector<v1::GenerateRequest>& requests) {
  cluster_ = std::make_unique<Cluster>(std::move(options));
  const absl::Status status = cluster_->Start();
  ASSERT_TRUE(status.ok()) << status;
  expectations_ = integration::RunAlone(cluster_.get(), requests);
  for (const Expectation& expected : expectations_) {
    ASSERT_FALSE(expected.token_ids.empty());
  }
  ASSERT_EQ(cluster_->WhatIsLeft(), "");
}

std::string Row::Oldest() const {
  const auto state = cluster_->State();
  if (!state.ok()) return state.status().ToString();
  std::vector<v1::RequestStatus> requests(state->in_flight().begin(),
                                          state->in_flight().end());
  std::sort(requests.begin(), requests.end(), [](const auto& a, const auto& b) {
    return a.age().seconds() > b.age().seconds();
  });
  std::string text;
  for (size_t i = 0; i < std::min<size_t>(5, requests.size()); ++i) {
    absl::StrAppend(&text, "\n  ", requests[i].ShortDebugString());
  }
  return text;
}

void Row::Pause(std::chrono::milliseconds longest) {
  std::this_thread::sleep_for(std::chrono::milliseconds(
      random_.Below(static_cast<uint64_t>(longest.count()))));
}

std::string Row::Draw(std::string_view role, int count) {
  return absl::StrCat(std::string(role), "-",
                      random_.Below(static_cast<uint64_t>(count)));
}

std::vector<v1::GenerateRequest> Requests(int count, uint64_t seed,
                                          int min_words, int max_words,
                                          int max_tokens) {
  SeededRandom random(seed);
  std::vector<v1::GenerateRequest> requests;
  // A long text, of which each takes a part.
  std::string words;
  for (const std::string& prompt : integration::SomePrompts(64, seed)) {
    absl::StrAppend(&words, " ", prompt);
  }
  for (int i = 0; i < count; ++i) {
    std::string prompt = absl::StrCat("Story ", i, ".");
    const int number =
        min_words + static_cast<int>(random.Below(static_cast<uint64_t>(
                        std::max(1, max_words - min_words))));
    size_t at = words.find(' ', random.Below(words.size() / 2));
    for (int w = 0; w < number && at != std::string::npos; ++w) {
      const size_t next = words.find(' ', at + 1);
      prompt.append(words, at, next - at);
      at = next;
    }
    v1::GenerateRequest request = integration::TextRequest(prompt, max_tokens);
    request.set_placement(v1::PLACEMENT_SPLIT);
    request.mutable_stopping()->set_ignore_eos(true);
    if (i % 2 == 1) {
      request.mutable_sampling()->set_temperature(0.8f);
      request.mutable_sampling()->set_seed(random.Below(1 << 30));
    }
    if (i % 4 >= 2) {
      request.mutable_sampling()->set_repetition_penalty(1.3f);
      request.mutable_sampling()->set_frequency_penalty(0.4f);
    }
    request.mutable_cache()->set_bypass_prefix_cache(i % 3 == 0);
    requests.push_back(std::move(request));
  }
  return requests;
}

std::string Counts(const Load& load) {
  return absl::StrCat(load.completed(), " requests, ",
                      load.fault_count() - load.wrong_count(), " failed, ",
                      load.wrong_count(), " wrong, ", load.hung(), " hung");
}

double Percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(share * static_cast<double>(values.size()));
  return values[static_cast<size_t>(std::max(0.0, rank - 1))];
}

std::vector<double> Gaps(const std::vector<Served>& served) {
  std::vector<double> gaps;
  for (const Served& one : served) {
    if (one.gap.count() > 0) gaps.push_back(one.gap_seconds());
  }
  return gaps;
}

std::vector<double> FirstTokens(const std::vector<Served>& served) {
  std::vector<double> times;
  for (const Served& one : served) {
    if (one.first) times.push_back(Served::Seconds(*one.first - one.sent));
  }
  return times;
}

double Largest(const std::vector<double>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

double Resident(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/statm"));
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return static_cast<double>(resident) * 4096 / (1 << 20);
}

MemoryWatch::MemoryWatch(const Cluster& cluster,
                         const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    processes_[name] = {cluster.pid(name), {}};
  }
  thread_ = std::thread([this] {
    const TimePoint begun = Clock::now();
    for (int second = 0; !stop_;) {
      if (Clock::now() < begun + std::chrono::seconds(second)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        continue;
      }
      for (auto& [name, process] : processes_) {
        process.second.emplace_back(second, Resident(process.first));
      }
      ++second;
    }
  });
}

void MemoryWatch::Stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

std::pair<std::string, double> MemoryWatch::Steepest(
    std::chrono::seconds warm_up) const {
  std::pair<std::string, double> steepest{"", -1e9};
  for (const auto& [name, process] : processes_) {
    double n = 0, x = 0, y = 0, xx = 0, xy = 0;
    for (const auto& [second, size] : process.second) {
      if (second < static_cast<double>(warm_up.count())) continue;
      n += 1;
      x += second;
      y += size;
      xx += second * second;
      xy += second * size;
    }
    const double spread = n * xx - x * x;
    if (spread <= 0) continue;
    const double slope = (n * xy - x * y) / spread * 3600;
    if (slope > steepest.second) steepest = {name, slope};
  }
  return steepest;
}

}  // namespace tandem::figures
