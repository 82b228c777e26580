// SPDX-License-Identifier: Apache-2.0
// What structured output costs on one thread, over the vocabulary of a model
// directory's tokenizer:
//
//   grammar_bench MODEL_DIR
//
// Texts are drawn at random from what the masks allow, and closed late. A step
// of a model that takes t per token pays the mask beside its forward pass.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "text/grammar.h"

namespace tandem::text {
namespace {

struct Case {
  const char* name;
  GrammarKind kind;
  std::string source;
};

std::vector<Case> Cases() {
  const std::string record =
      R"({"type":"object","properties":{"name":{"type":"string"},)"
      R"("age":{"type":"integer"},"tags":{"type":"array","items":)"
      R"({"type":"string"}},"address":{"type":"object","properties":)"
      R"({"street":{"type":"string"},"zip":{"type":"string",)"
      R"("pattern":"^[0-9]{5}$"}},"required":["street","zip"]}},)"
      R"("required":["name","age","tags","address"],)"
      R"("additionalProperties":false})";
  return {{"json_object", GrammarKind::kJsonObject, ""},
          {"json_schema", GrammarKind::kJsonSchema, record},
          {"regex", GrammarKind::kRegex, "([A-Z][a-z]{1,12} ){4,200}end"},
          {"lark", GrammarKind::kLark,
           "start: sum\nsum: item (\"+\" item)*\n"
           "item: NUMBER | \"(\" sum \")\"\nNUMBER: /[0-9]{1,9}/\n"}};
}

double Micros(absl::Duration time) { return absl::ToDoubleMicroseconds(time); }

struct Costs {
  std::vector<double> masks;  // microseconds each
  double consumed = 0, copies = 0, replayed = 0;
  int tokens = 0;
};

// One text of at most `most` tokens.
void Follow(const GrammarVocabulary& vocabulary, const Grammar& start,
            uint32_t seed, int most, Costs* costs) {
  std::mt19937 random(seed);
  std::vector<uint32_t> mask(static_cast<size_t>(vocabulary.mask_words()));
  Grammar grammar = *start.Copy();
  std::vector<int32_t> ids;
  for (int i = 0; i < most && !grammar.ended(); ++i) {
    absl::Time begun = absl::Now();
    if (!grammar.Mask(mask).ok()) break;
    costs->masks.push_back(Micros(absl::Now() - begun));
    std::vector<int32_t> allowed;
    for (int id = 0; id < vocabulary.vocab_size(); ++id) {
      if ((mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1) != 0) {
        allowed.push_back(id);
      }
    }
    if (allowed.empty()) break;
    ids.push_back(allowed[random() % allowed.size()]);
    begun = absl::Now();
    const Grammar copy = *grammar.Copy();
    costs->copies += Micros(absl::Now() - begun);
    begun = absl::Now();
    if (!grammar.Consume({&ids.back(), 1}).ok()) break;
    costs->consumed += Micros(absl::Now() - begun);
  }
  Grammar replay = *start.Copy();
  const absl::Time begun = absl::Now();
  if (!replay.Consume(ids).ok()) std::abort();
  costs->replayed += Micros(absl::Now() - begun);
  costs->tokens += static_cast<int>(ids.size());
}

void Print(const char* name, double compiled_us, Costs costs) {
  std::sort(costs.masks.begin(), costs.masks.end());
  double sum = 0;
  for (const double mask : costs.masks) sum += mask;
  const size_t count = costs.masks.size();
  std::printf("%-12s %8.2f %8.1f %8.1f %8.1f %9.1f %9.1f %8.1f\n", name,
              compiled_us / 1000, sum / static_cast<double>(count),
              costs.masks[count * 99 / 100], costs.masks.back(),
              costs.consumed / costs.tokens, costs.replayed / costs.tokens,
              costs.copies / costs.tokens);
}

int Run(const char* directory) {
  const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Load(directory);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().ToString().c_str());
    return 1;
  }
  const auto vocabulary =
      GrammarVocabulary::Create(*tokenizer, tokenizer->vocab_size());
  if (!vocabulary.ok()) return 1;
  std::printf(
      "%d tokens; microseconds, but for compiling (ms)\n%-12s %8s %8s "
      "%8s %8s %9s %9s %8s\n",
      vocabulary->vocab_size(), "", "compile", "mask", "p99", "max", "consume",
      "replay", "copy");
  for (const Case& c : Cases()) {
    const absl::Time begun = absl::Now();
    const absl::StatusOr<Grammar> start =
        vocabulary->Compile(c.kind, c.source, absl::Seconds(10));
    const double compiled = Micros(absl::Now() - begun);
    if (!start.ok()) return 1;
    Costs costs;
    for (uint32_t seed = 1; seed <= 20; ++seed) {
      Follow(*vocabulary, *start, seed, 200, &costs);
    }
    Print(c.name, compiled, std::move(costs));
  }
  return 0;
}

}  // namespace
}  // namespace tandem::text

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: grammar_bench MODEL_DIR\n");
    return 2;
  }
  return tandem::text::Run(argv[1]);
}
