// SPDX-License-Identifier: Apache-2.0
// Runs fuzz targets over every file of their committed corpora, so that each
// input that once mattered is a plain test in every build. Exit 1 if a corpus
// is missing or empty: a test that ran nothing must not pass.
//
//   text_corpora_test fuzz_grammar=tests/text/corpus/grammar ...

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "tests/fuzz.h"

namespace tandem::fuzz {
namespace {

std::map<std::string, Target>& Targets() {
  static auto* const targets = new std::map<std::string, Target>();
  return *targets;
}

// How many inputs ran.
int RunCorpus(Target target, const std::string& path) {
  int inputs = 0;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(path, error)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    target(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    ++inputs;
  }
  return inputs;
}

bool Run(const std::string& argument) {
  const size_t cut = argument.find('=');
  const std::string name = argument.substr(0, cut);
  const auto target = Targets().find(name);
  if (cut == std::string::npos || target == Targets().end()) {
    std::printf("'%s' names no target of this program\n", argument.c_str());
    return false;
  }
  std::printf("%-24s ", name.c_str());
  std::fflush(stdout);  // before it may abort
  const auto begun = std::chrono::steady_clock::now();
  const int inputs = RunCorpus(target->second, argument.substr(cut + 1));
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - begun;
  std::printf("%4d inputs, %.2f s\n", inputs, took.count());
  return inputs > 0;
}

}  // namespace

Registered::Registered(const char* name, Target target) {
  Targets()[name] = target;
}

}  // namespace tandem::fuzz

int main(int argc, char** argv) {
  bool right = argc > 1;
  for (int i = 1; i < argc; ++i) right &= tandem::fuzz::Run(argv[i]);
  return right ? 0 : 1;
}
