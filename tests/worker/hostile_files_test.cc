// SPDX-License-Identifier: Apache-2.0
// Every kind of file that a worker or router reads of a model, with each byte
// of its text set to 0, to 255 and changed by a bit, and cut at every byte: an
// error that says so or a file that is as good, soon and in little memory. Each
// kind is read in a process of its own, whose address space ends 64 MiB above
// what it has and the file.

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint/model_config.h"
#include "engine/checkpoint/quantisation.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/model/lora.h"
#include "tests/engine/checkpoint/safetensors_file.h"
#include "tests/engine/temp_dir.h"
#include "tests/sanitized.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace tandem::worker {
namespace {

using engine::SafetensorsFile;
using engine::TempDir;
using engine::Zeros;

constexpr rlim_t kMemory = 64 << 20;

// A good folder, one file of which is spoiled.
struct Kind {
  std::string name;
  std::map<std::string, std::string> files;
  std::string file;
  std::function<absl::Status(const std::string& folder)> read;
  bool cut_is_good = false;  // a shorter file may be one, too
  size_t text = 0;           // bytes to change, from the beginning; 0: all
};

// ---- Good files

size_t HeaderEnd(const std::string& file) {
  uint64_t size = 0;
  std::memcpy(&size, file.data(), 8);
  return static_cast<size_t>(size) + 8;
}

constexpr char kConfig[] = R"({"architectures":["LlamaForCausalLM"],
"model_type":"llama","hidden_act":"silu","hidden_size":16,
"intermediate_size":24,"num_hidden_layers":1,"num_attention_heads":2,
"num_key_value_heads":2,"vocab_size":32,"max_position_embeddings":64,
"rms_norm_eps":1e-05,"rope_theta":10000.0,"tie_word_embeddings":false,
"bos_token_id":1,"eos_token_id":2})";
constexpr char kGeneration[] =
    R"({"eos_token_id":[2,3],"temperature":0.6,"top_p":0.9,"top_k":5})";
constexpr char kQuantize[] =
    R"({"bits":4,"group_size":128,"desc_act":true,"sym":false,"damp":0.01})";
constexpr char kAdapter[] =
    R"({"peft_type":"LORA","r":2,"lora_alpha":4,"bias":"none"})";
constexpr char kTokenizer[] = R"({"version":"1.0","truncation":null,
"padding":null,"added_tokens":[{"id":0,"content":"<s>","single_word":false,
"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
"normalizer":null,"pre_tokenizer":null,"post_processor":null,
"decoder":{"type":"Fuse"},"model":{"type":"BPE","dropout":null,
"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
"fuse_unk":false,"byte_fallback":false,"vocab":{"<s>":0,"a":1,"b":2,"ab":3},
"merges":[["a","b"]]}})";
constexpr char kTokenizerConfig[] =
    R"({"bos_token":"<s>","chat_template":"{{ bos_token }}"})";
constexpr char kTemplate[] =
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m.content | trim }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}";

std::string Adapter() {
  const std::string name =
      "base_model.model.model.layers.0.self_attn.q_proj.lora_";
  return SafetensorsFile({{name + "A.weight", {"F32", {2, 16}, Zeros(128)}},
                          {name + "B.weight", {"F16", {16, 2}, Zeros(64)}}});
}
std::string Quantised() {
  return SafetensorsFile({{"p.weight", {"I8", {8, 64}, Zeros(512)}},
                          {"p.weight_scale", {"F32", {8, 1}, Zeros(32)}}});
}

// ---- What reads them

absl::Status ReadTensors(const std::string& folder) {
  return engine::Checkpoint::Open(folder).status();
}
absl::Status ReadConfig(const std::string& folder) {
  return engine::LoadModelSpec(folder).status();
}
absl::Status ReadAdapter(const std::string& folder) {
  const auto spec = *engine::ParseModelSpec("config", kConfig, "", "");
  return engine::ReadLoraAdapter(folder, spec, engine::LoraLayout(spec, 8))
      .status();
}
absl::Status ReadQuantised(const std::string& folder) {
  const auto checkpoint = engine::Checkpoint::Open(folder);
  if (!checkpoint.ok()) return checkpoint.status();
  if (!engine::HasCodes(*checkpoint, "p")) {
    return absl::InvalidArgumentError("another name");
  }
  return engine::ReadCodes(*checkpoint, {engine::Quantisation::Method::kPlain},
                           "p", 8, 64)
      .status();
}
absl::Status ReadTokenizer(const std::string& folder) {
  const auto tokenizer = text::Tokenizer::Load(folder);
  if (!tokenizer.ok()) return tokenizer.status();
  return tokenizer->Encode("abab<s>", true).status();
}
absl::Status ReadTemplate(const std::string& folder) {
  const auto chat = text::ChatTemplate::Load(folder);
  if (!chat.ok()) return chat.status();
  return chat->Render({.messages_json = R"([{"role":"user","content":"Hi"}])"})
      .status();
}

std::vector<Kind> Kinds() {
  const std::string tensors = SafetensorsFile(
      {{"a", {"BF16", {2}, Zeros(4)}}, {"b", {"F32", {2, 1}, Zeros(8)}}});
  const std::string adapter = Adapter(), quantised = Quantised();
  return {
      {"safetensors",
       {{"model.safetensors", tensors}},
       "model.safetensors",
       ReadTensors,
       false,
       HeaderEnd(tensors)},
      {"index",
       {{"shard.safetensors", tensors},
        {"model.safetensors.index.json",
         R"({"metadata":{"total_size":12},"weight_map":)"
         R"({"a":"shard.safetensors","b":"shard.safetensors"}})"}},
       "model.safetensors.index.json",
       ReadTensors},
      {"config", {{"config.json", kConfig}}, "config.json", ReadConfig},
      {"generation config",
       {{"config.json", kConfig}, {"generation_config.json", kGeneration}},
       "generation_config.json",
       ReadConfig},
      {"quantize config",
       {{"config.json", kConfig}, {"quantize_config.json", kQuantize}},
       "quantize_config.json",
       ReadConfig},
      {"adapter config",
       {{"adapter_config.json", kAdapter},
        {"adapter_model.safetensors", adapter}},
       "adapter_config.json",
       ReadAdapter},
      {"adapter",
       {{"adapter_config.json", kAdapter},
        {"adapter_model.safetensors", adapter}},
       "adapter_model.safetensors",
       ReadAdapter,
       false,
       HeaderEnd(adapter)},
      {"quantised",
       {{"model.safetensors", quantised}},
       "model.safetensors",
       ReadQuantised,
       false,
       HeaderEnd(quantised)},
      {"tokenizer",
       {{"tokenizer.json", kTokenizer}},
       "tokenizer.json",
       ReadTokenizer},
      {"tokenizer config",
       {{"tokenizer.json", kTokenizer},
        {"tokenizer_config.json", kTokenizerConfig}},
       "tokenizer_config.json",
       ReadTokenizer},
      {"template in a config",
       {{"tokenizer_config.json", kTokenizerConfig}},
       "tokenizer_config.json",
       ReadTemplate},
      {"template",
       {{"chat_template.jinja", kTemplate}},
       "chat_template.jinja",
       ReadTemplate,
       true},
  };
}

// ---- The child

struct Outcome {
  int changed = 0, refused = 0;
  double slowest_s = 0;
  std::string wrong;  // the first, and what it was of
};

class Reader {
 public:
  Reader(const Kind& kind, const TempDir& folder)
      : kind_(kind), folder_(folder), good_(kind.files.at(kind.file)) {
    for (const auto& [name, content] : kind.files) folder.Write(name, content);
  }

  Outcome Run() {
    const absl::Status good = kind_.read(folder_.path());
    if (!good.ok()) outcome_.wrong = absl::StrCat("good: ", Show(good));
    const size_t text = kind_.text == 0 ? good_.size() : kind_.text;
    for (size_t at = 0; at < text; ++at) {
      for (const int to : {0, 255, good_[at] ^ 1}) {
        std::string file = good_;
        file[at] = static_cast<char>(to);
        Try(file, absl::StrCat("byte ", at, " set to ", to), true);
      }
    }
    for (size_t size = 0; size < good_.size(); ++size) {
      Try(good_.substr(0, size), absl::StrCat("cut to ", size),
          kind_.cut_is_good);
    }
    return outcome_;
  }

 private:
  static std::string Show(const absl::Status& status) {
    return status.ToString().substr(0, 300);
  }
  void Try(const std::string& file, const std::string& what, bool may_be_good) {
    if (file == good_) return;
    folder_.Write(kind_.file, file);
    const auto begun = std::chrono::steady_clock::now();
    const absl::Status status = kind_.read(folder_.path());
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - begun;
    outcome_.slowest_s = std::max(outcome_.slowest_s, took.count());
    ++outcome_.changed;
    outcome_.refused += status.ok() ? 0 : 1;
    // A template may also refuse, or find nothing that it is asked for.
    const bool typed = absl::IsInvalidArgument(status) ||
                       absl::IsNotFound(status) ||
                       absl::IsResourceExhausted(status);
    const bool right =
        status.ok() ? may_be_good
                    : typed && !status.message().empty() &&
                          status.message().size() < 2000 &&
                          status.message().find("panic") == std::string::npos;
    if (!right && outcome_.wrong.empty()) {
      outcome_.wrong = absl::StrCat(what, ": ", Show(status));
    }
  }

  const Kind& kind_;
  const TempDir& folder_;
  const std::string good_;
  Outcome outcome_;
};

rlim_t AddressSpace() {
  std::ifstream pages("/proc/self/statm");
  rlim_t total = 0;
  pages >> total;
  return total * static_cast<rlim_t>(getpagesize());
}

// What does not end the process tells by the pipe. No exception leaves it, as
// none leaves a worker.
[[noreturn]] void ReadInChild(const Kind& kind, const TempDir& folder,
                              int to) noexcept {
  if (!kSanitized) {
    malloc_trim(0);  // what earlier tests left free is no part of the bound
    const rlim_t most =
        AddressSpace() + kind.files.at(kind.file).size() + kMemory;
    const rlimit limit = {most, most};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(3);
  }
  const Outcome outcome = Reader(kind, folder).Run();
  const std::string told =
      absl::StrCat(outcome.changed, " ", outcome.refused, " ",
                   outcome.slowest_s, " ", outcome.wrong);
  _exit(write(to, told.data(), told.size()) < 0 ? 4 : 0);
}

void ReadBounded(const Kind& kind, Outcome* sum) {
  const TempDir folder;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) ReadInChild(kind, folder, ends[1]);
  close(ends[1]);
  std::string told(4096, '\0');
  const ssize_t size = read(ends[0], told.data(), told.size());
  close(ends[0]);
  told.resize(size < 0 ? 0 : static_cast<size_t>(size));
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
      << "ended with " << status << " after " << told;
  int changed = 0, refused = 0, at = 0;
  double slowest_s = 0;
  ASSERT_EQ(std::sscanf(told.c_str(), "%d %d %lf %n", &changed, &refused,
                        &slowest_s, &at),
            3)
      << told;
  EXPECT_EQ(told.substr(static_cast<size_t>(at)), "");
  const auto bytes = static_cast<int>(kind.files.at(kind.file).size());
  EXPECT_GE(changed, bytes);
  EXPECT_GT(refused, kind.cut_is_good ? bytes / 4 : bytes);
  // Not a speed: far beyond any sanitizer and any busy machine.
  EXPECT_LT(slowest_s, 30);
  std::printf("%-22s %5d changed, %5d refused, the slowest %.1f ms\n",
              kind.name.c_str(), changed, refused, slowest_s * 1e3);
  sum->changed += changed;
  sum->slowest_s = std::max(sum->slowest_s, slowest_s);
}

TEST(HostileFilesTest, EveryByteAndEveryTruncationEndsInAnAnswer) {
  Outcome sum;
  for (const Kind& kind : Kinds()) {
    SCOPED_TRACE(kind.name);
    ReadBounded(kind, &sum);
  }
  RecordProperty("changed", sum.changed);
  RecordProperty("slowest_ms", absl::StrCat(sum.slowest_s * 1e3));
}

// The bound bites: a reader that takes what a file claims would be seen. It
// takes far more than the bound, as some of the heap may be free.
TEST(HostileFilesTest, AReaderThatTakesTooMuchIsSeen) {
  if (kSanitized) GTEST_SKIP() << "no bound under AddressSanitizer";
  static const Kind greedy = {
      "greedy", {{"f", "x"}}, "f", [](const std::string&) {
        const std::vector<char> taken(4 * kMemory, 1);
        return taken.back() == 1 ? absl::InvalidArgumentError("taken")
                                 : absl::OkStatus();
      }};
  static Outcome sum;
  EXPECT_FATAL_FAILURE(ReadBounded(greedy, &sum), "ended with");
}

}  // namespace
}  // namespace tandem::worker
