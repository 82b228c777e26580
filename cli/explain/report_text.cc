// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/explain/drawing.h"
#include "cli/explain/report.h"
#include "common/progress.h"

namespace tandem::explain {
namespace {

using kernels::DType;

class Text {
 public:
  explicit Text(bool color) : color_(color) {}

  void Heading(std::string_view title) {
    absl::StrAppend(&text_, "\n", color_ ? "\033[1m" : "", std::string(title),
                    color_ ? "\033[0m" : "", "\n");
  }
  template <typename... Args>
  void Line(const absl::FormatSpec<Args...>& format, const Args&... args) {
    absl::StrAppendFormat(&text_, format, args...);
    text_ += "\n";
  }
  void Append(const std::string& text) { text_ += text; }
  std::string Take() && { return std::move(text_); }

 private:
  const bool color_;
  std::string text_;
};

std::string Ratio(double without, double with) {
  const double ratio = without / with;
  return absl::StrFormat("%.*f", ratio < 100 ? 1 : 0, ratio);
}

std::string Milliseconds(double seconds) {
  const double ms = seconds * 1e3;
  return absl::StrFormat("%.*f", ms < 1 ? 4 : ms < 100 ? 2 : 0, ms);
}

std::string Named(const Formats& formats) {
  const std::string_view weights = kernels::Name(formats.layers);
  const std::string experts =
      formats.experts.has_value()
          ? absl::StrCat(", experts ",
                         std::string(kernels::Name(*formats.experts)))
          : "";
  return absl::StrCat("weights ", std::string(weights), experts, ", KV cache ",
                      std::string(kernels::Name(formats.kv)));
}

void AddModel(const Explanation& e, Text* text) {
  const engine::ModelSpec& spec = e.spec;
  text->Heading(e.model);
  text->Line("  %s: %d layers, %d heads, %s", spec.architecture, spec.layers,
             spec.heads, KvHeads(spec));
  text->Line("  %s parameters; %s", Count(Parameters(spec)), Named(e.formats));
  const int64_t longest = e.lengths.prompt + e.lengths.output;
  if (longest > spec.max_positions) {
    text->Line("  %d positions are more than the %d that it was made for",
               longest, spec.max_positions);
  }
}

void AddQuoted(Text* text) {
  text->Heading("K/V rows computed, one layer and head");
  text->Line("  %6s %6s %16s %12s %8s", "prompt", "output", "without cache",
             "with", "ratio");
  for (const Lengths& lengths : kQuotedLengths) {
    const double without = KvRowsWithoutCache(lengths);
    const double with = KvRowsWithCache(lengths);
    text->Line("  %6d %6d %16s %12s %8s", lengths.prompt, lengths.output,
               Count(without), Count(with), Ratio(without, with));
  }
  text->Line(
      "  p + g with a cache; one less in a loop, where the last token is"
      " not fed back");
}

void AddWorkOfPairs(const Explanation& e, Text* text) {
  text->Heading("All layers and heads");
  text->Line("  %6s %6s %17s %17s %17s", "", "", "K/V rows", "bytes read",
             "FLOPs");
  text->Line("  %6s %6s %8s %8s %8s %8s %8s %8s %6s", "prompt", "output",
             "without", "with", "without", "with", "without", "with", "ratio");
  for (const Lengths& lengths : kQuotedLengths) {
    const Work without = GenerationWork(e.spec, e.formats, lengths, false);
    const Work with = GenerationWork(e.spec, e.formats, lengths, true);
    text->Line("  %6d %6d %8s %8s %8s %8s %8s %8s %6s", lengths.prompt,
               lengths.output, Short(without.kv_rows), Short(with.kv_rows),
               Short(without.bytes_read()), Short(with.bytes_read()),
               Short(without.flops()), Short(with.flops()),
               Ratio(without.flops(), with.flops()));
  }
}

void AddWork(const Explanation& e, Text* text) {
  const Work without = GenerationWork(e.spec, e.formats, e.lengths, false);
  const Work with = GenerationWork(e.spec, e.formats, e.lengths, true);
  text->Heading(absl::StrCat("Prompt of ", e.lengths.prompt, ", output of ",
                             e.lengths.output, ", all layers and heads"));
  text->Line("  %-34s %14s %14s %9s", "", "without cache", "with", "ratio");
  const auto add = [&](std::string_view name, double Work::*field) {
    text->Line("  %-34s %14s %14s %9s", name, Count(without.*field),
               Count(with.*field), Ratio(without.*field, with.*field));
  };
  add("K/V rows computed", &Work::kv_rows);
  add("positions attended by new tokens", &Work::positions_attended);
  add("query-key pairs", &Work::query_key_pairs);
  add("bytes of weights read", &Work::weight_bytes);
  add("bytes of KV read", &Work::kv_bytes_read);
  add("bytes of KV written", &Work::kv_bytes_written);
  add("FLOPs of matrices", &Work::matrix_flops);
  add("FLOPs of attention", &Work::attention_flops);
  text->Line("  The cache saves arithmetic; what a step reads stays.");
}

void AddKvBytes(const Explanation& e, Text* text) {
  text->Heading("KV cache");
  text->Line("  %-6s %14s %16s %22s", "format", "per token",
             absl::StrCat("block of ", e.block_size),
             absl::StrCat(e.lengths.prompt + e.lengths.output, " tokens"));
  for (const DType type : kKvFormats) {
    const int64_t bytes = KvBytesPerToken(e.spec, type);
    const int64_t blocks =
        (e.lengths.prompt + e.lengths.output + e.block_size - 1) / e.block_size;
    text->Line("  %-6s %14s %16s %22s", kernels::Name(type),
               absl::StrCat(bytes, " B"),
               HumanBytes(static_cast<double>(bytes * e.block_size)),
               HumanBytes(static_cast<double>(bytes * e.block_size * blocks)));
  }
}

void AddRoofline(const Explanation& e, Text* text) {
  const Machine& machine = *e.machine;
  text->Heading("Prefill and decode on this machine");
  text->Line("  %d thread%s: at most %sFLOP/s, reads at %sB/s (over %s)",
             machine.threads, machine.threads == 1 ? "" : "s",
             Count(machine.matrix_flops_per_second),
             Count(machine.bytes_per_second), HumanBytes(machine.read_bytes));
  text->Line(
      "  ridge %.1f FLOP/byte: a step below waits for memory, one above "
      "computes",
      machine.ridge());
  text->Line("  %-20s %9s %12s %11s %16s", "", "context", "FLOP/byte",
             "bound by", "ms/token, least");
  for (const Phase& phase : Phases(e.spec, e.formats, e.lengths)) {
    const bool compute = IsComputeBound(phase.work, machine);
    text->Line("  %-20s %9d %12.2f %11s %16.3f", phase.name, phase.context,
               phase.work.intensity(), compute ? "arithmetic" : "memory",
               PredictSeconds(phase.work, machine) / phase.tokens * 1e3);
  }
}

void AddTiming(const Explanation& e, Text* text) {
  const Timing& timing = *e.timing;
  const Lengths lengths = timing.lengths;
  const Work without = GenerationWork(e.spec, e.formats, lengths, false);
  const Work with = GenerationWork(e.spec, e.formats, lengths, true);
  const double without_s = timing.without_total();
  const double with_s = timing.with_total();
  text->Heading(absl::StrCat("Timed on this machine: prompt of ",
                             lengths.prompt, ", output of ", lengths.output));
  text->Line("  %-34s %14s %14s %9s", "", "without cache", "with", "ratio");
  const auto add = [&](std::string_view name, double a, double b) {
    text->Line("  %-34s %14s %14s %9s", name, Milliseconds(a), Milliseconds(b),
               Ratio(a, b));
  };
  add("all steps, ms", without_s, with_s);
  add("last step, ms", timing.without_seconds.back(),
      timing.with_seconds.back());
  const auto count = [&](std::string_view name, double a, double b) {
    text->Line("  %-34s %14s %14s %9s", name, Count(a), Count(b), Ratio(a, b));
  };
  // What the engine counted beside what the formulas say.
  const Work& a = timing.without_work;
  const Work& b = timing.with_work;
  count("K/V rows, predicted", without.kv_rows, with.kv_rows);
  count("K/V rows, counted", a.kv_rows, b.kv_rows);
  count("positions attended, predicted", without.positions_attended,
        with.positions_attended);
  count("positions attended, counted", a.positions_attended,
        b.positions_attended);
  count("bytes read, predicted", without.bytes_read(), with.bytes_read());
  count("bytes read, counted", a.bytes_read(), b.bytes_read());
  count("FLOPs, predicted", without.flops(), with.flops());
  count("FLOPs, counted", a.flops(), b.flops());
  text->Line("  %-34s %14s %14s", "FLOP/s", Count(a.flops() / without_s),
             Count(b.flops() / with_s));
  if (lengths.output > 1) {
    const double prefill = timing.prefill_per_token();
    const double decode = timing.decode_per_token();
    text->Line("  prefill %s ms/token, decode %s ms/token: %s times as much",
               Milliseconds(prefill), Milliseconds(decode),
               Ratio(decode, prefill));
  }
  text->Line("  the same %d tokens both ways", timing.tokens.size());
}

void AddTimedPairs(const Explanation& e, Text* text) {
  text->Heading("Timed on this machine: all steps, ms");
  text->Line("  %6s %6s %14s %14s %8s %13s", "prompt", "output",
             "without cache", "with", "ratio", "of K/V rows");
  for (const TimedPair& pair : e.pairs) {
    const Lengths lengths = pair.lengths;
    if (!pair.timing.has_value()) {
      text->Line("  %6d %6d  left out: %s", lengths.prompt, lengths.output,
                 pair.left_out);
      continue;
    }
    const double without = pair.timing->without_total();
    const double with = pair.timing->with_total();
    text->Line("  %6d %6d %14s %14s %8s %13s", lengths.prompt, lengths.output,
               Milliseconds(without), Milliseconds(with), Ratio(without, with),
               Ratio(KvRowsWithoutCache(lengths), KvRowsWithCache(lengths)));
  }
}

}  // namespace

std::string Count(double value) {
  if (value >= 1e7) return Short(value);
  const std::string digits = absl::StrFormat("%.0f", value);
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped += ' ';
    grouped += digits[i];
  }
  return grouped;
}

std::string Short(double value) {
  static constexpr std::string_view kPrefixes[] = {"",   " k", " M", " G",
                                                   " T", " P", " E"};
  size_t prefix = 0;
  // 999.5 would be shown with four digits.
  while (value >= 999.5 && prefix + 1 < std::size(kPrefixes)) {
    value /= 1000;
    ++prefix;
  }
  const int decimals = prefix == 0     ? 0
                       : value < 9.995 ? 2
                       : value < 99.95 ? 1
                                       : 0;
  return absl::StrFormat("%.*f%s", decimals, value,
                         std::string(kPrefixes[prefix]));
}

std::string ReportText(const Explanation& e, bool color) {
  Text text(color);
  AddModel(e, &text);
  AddQuoted(&text);
  AddWorkOfPairs(e, &text);
  AddWork(e, &text);
  AddKvBytes(e, &text);
  text.Heading("K/V rows computed so far, one layer and head");
  text.Append(DrawCurves(e.lengths, color));
  text.Heading("Steps by positions, one layer and head");
  text.Append(DrawGrid(GridLengths(e.lengths), color));
  if (e.machine.has_value()) AddRoofline(e, &text);
  if (e.timing.has_value()) AddTiming(e, &text);
  if (!e.pairs.empty()) AddTimedPairs(e, &text);
  return std::move(text).Take();
}

}  // namespace tandem::explain
