// SPDX-License-Identifier: Apache-2.0
// Good files are read exactly; whatever a bad file claims, the answer is an
// error that names the file and the field, soon and in little memory.

#include "engine/checkpoint/safetensors.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint/safetensors_file.h"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string Length(uint64_t value) {
  std::string bytes(8, '\0');
  memcpy(bytes.data(), &value, 8);
  return bytes;
}

std::string File(const std::string& header, const std::string& data = "") {
  return Length(header.size()) + header + data;
}

std::string Data(size_t size) { return std::string(size, 'd'); }

absl::Status ParseFile(const std::string& file) {
  // A heap copy of the exact size: a read beyond it is an error under ASan.
  const std::vector<char> exact(file.begin(), file.end());
  return ParseSafetensors(
             "dir/f.safetensors",
             {reinterpret_cast<const std::byte*>(exact.data()), exact.size()})
      .status();
}

// A tensor's object.
std::string Tensor(const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return absl::StrCat(R"({"dtype":")", dtype, R"(","shape":)", shape,
                      R"(,"data_offsets":)", offsets, "}");
}

const char kTwo[] =
    R"({"b":{"dtype":"F32","shape":[2,1],"data_offsets":[4,12]},)"
    R"("a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},)"
    R"("__metadata__":{"format":"pt"}})";

TEST(Safetensors, ReadsNamesTypesShapesAndPlaces) {
  const std::string file = File(std::string(kTwo) + "   ", Data(12));
  const auto tensors = ParseSafetensors(
      "f", {reinterpret_cast<const std::byte*>(file.data()), file.size()});
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 2);
  EXPECT_EQ((*tensors)[0].name, "a");
  EXPECT_EQ((*tensors)[0].dtype, "BF16");
  EXPECT_THAT((*tensors)[0].shape, ElementsAre(2));
  EXPECT_EQ((*tensors)[0].begin, file.size() - 12);
  EXPECT_EQ((*tensors)[1].name, "b");
  EXPECT_THAT((*tensors)[1].shape, ElementsAre(2, 1));
  EXPECT_EQ((*tensors)[1].end, file.size());
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  const std::pair<const char*, std::string> kFiles[] = {
      {"no tensors", File("{}")},
      {"only metadata", File(R"({"__metadata__":{"a":"b"}})")},
      {"a scalar",
       File(R"({"a":)" + Tensor("F32", "[]", "[0,4]") + "}", Data(4))},
      {"an empty tensor",
       File(R"({"a":)" + Tensor("F32", "[0,7]", "[0,0]") + "}")},
      {"empty tensors between others",
       File(R"({"a":)" + Tensor("U8", "[1]", "[0,1]") + R"(,"b":)" +
                Tensor("F32", "[0]", "[1,1]") + R"(,"c":)" +
                Tensor("U8", "[1]", "[1,2]") + "}",
            Data(2))},
      {"an integer tensor",
       File(R"({"a":)" + Tensor("I64", "[1]", "[0,8]") + "}", Data(8))},
      {"a name of other scripts",
       File(R"({"вес/重み":)" + Tensor("U8", "[1]", "[0,1]") + "}", Data(1))},
      {"an escaped name",
       File(R"({"a\u0000\"":)" + Tensor("U8", "[1]", "[0,1]") + "}", Data(1))},
      {"an empty name",
       File(R"({"":)" + Tensor("U8", "[1]", "[0,1]") + "}", Data(1))}};
  for (const auto& [why, file] : kFiles) {
    EXPECT_TRUE(ParseFile(file).ok()) << why << ": " << ParseFile(file);
  }
}

struct HostileFile {
  const char* why;
  std::string file;
  const char* complaint;
};

// One tensor "t" with the given object, and some data.
std::string One(const std::string& object, size_t data = 4) {
  return File(absl::StrCat(R"({"t":)", object, "}"), Data(data));
}

std::vector<HostileFile> HostileFiles() {
  const std::string good = Tensor("F32", "[1]", "[0,4]");
  const auto two = [&](const std::string& a, const std::string& b, size_t n) {
    return File(absl::StrCat(R"({"a":)", a, R"(,"b":)", b, "}"), Data(n));
  };
  return {
      {"an empty file", "", "header length"},
      {"seven bytes", "\2\0\0\0\0\0\0", "header length"},
      {"only a length", Length(2), "header length 2"},
      {"length 0", Length(0) + "{}", "JSON object must begin"},
      {"length 1", Length(1) + "{", "JSON object must begin"},
      {"a Git LFS pointer",
       "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
       "f.safetensors: is a Git LFS pointer, not the file itself: run"},
      {"length of all ones", Length(UINT64_MAX) + "{}", "above the limit"},
      {"length with the sign bit", Length(uint64_t{1} << 63) + "{}",
       "above the limit"},
      {"length that wraps with the 8 before it", Length(UINT64_MAX - 7) + "{}",
       "above the limit"},
      {"length just above the limit", Length(kMaxSafetensorsHeader + 1),
       "above the limit"},
      {"length one beyond the file", Length(3) + "{}", "goes beyond"},
      {"big-endian length", std::string("\0\0\0\0\0\0\0\2{}", 10),
       "above the limit"},
      {"not JSON", File("hello"), "must begin"},
      {"leading space", File(" {}"), "must begin"},
      {"leading byte order mark", File("\xEF\xBB\xBF{}"), "must begin"},
      {"an array", File("[]"), "must begin"},
      {"unclosed", File(R"({"t":)"), "not valid JSON"},
      {"trailing comma", File("{,}"), "not valid JSON"},
      {"text after the object", File("{} x"), "not valid JSON"},
      {"two objects", File("{}{}"), "not valid JSON"},
      {"NUL padding", File(std::string("{}\0\0", 4)), "not valid JSON"},
      {"text after a NUL", File(std::string("{}\0[", 4)), "a NUL byte"},
      {"a comment", File("{/**/}"), "not valid JSON"},
      {"bad UTF-8 in a name", File("{\"\xff\xfe\":" + good + "}", Data(4)),
       "not valid JSON"},
      {"overlong UTF-8", File("{\"\xc0\x80\":" + good + "}", Data(4)),
       "not valid JSON"},
      {"lone surrogate", File(R"({"\ud800":)" + good + "}", Data(4)),
       "not valid JSON"},
      {"bad UTF-8 in metadata", File("{\"__metadata__\":{\"a\":\"\xff\"}}"),
       "not valid JSON"},
      {"a control character", File("{\"a\nb\":" + good + "}", Data(4)),
       "not valid JSON"},
      {"depth bomb of arrays", File(R"({"t":)" + std::string(1 << 20, '[')),
       "unexpected an array"},
      {"depth bomb of objects", File([] {
         std::string bomb;
         for (int i = 0; i < 200000; ++i) bomb += R"({"a":)";
         return bomb;
       }()),
       "unknown field"},
      {"depth bomb in a shape", One(R"({"shape":)" + std::string(1 << 20, '[')),
       "unexpected an array"},
      {"depth bomb in metadata",
       File(R"({"__metadata__":{"a":)" + std::string(1 << 20, '[')),
       "unexpected an array"},
      {"metadata that is a string", File(R"({"__metadata__":"a"})"),
       "unexpected a string"},
      {"metadata with a number", File(R"({"__metadata__":{"a":1}})"),
       "unexpected the number 1"},
      {"metadata twice", File(R"({"__metadata__":{},"__metadata__":{}})"),
       "named twice"},
      {"a tensor that is null", One("null"), "unexpected null"},
      {"a tensor that is a number", One("7"), "unexpected the number 7"},
      {"a tensor that is a string", One(R"("F32")"), "unexpected a string"},
      {"a tensor that is an array", One("[]"), "unexpected an array"},
      {"an empty tensor object", One("{}"), "dtype is missing"},
      {"no shape", One(R"({"dtype":"F32","data_offsets":[0,4]})"),
       "shape is missing"},
      {"no offsets", One(R"({"dtype":"F32","shape":[1]})"),
       "data_offsets is missing"},
      {"unknown field",
       One(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1})"),
       "unknown field \"x\""},
      {"dtype twice",
       One(R"({"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]})"),
       "dtype is given twice"},
      {"shape twice",
       One(R"({"dtype":"F32","shape":[],"shape":[1],"data_offsets":[0,4]})"),
       "shape is given twice"},
      {"offsets twice",
       One(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],)"
           R"("data_offsets":[0,4]})"),
       "data_offsets is given twice"},
      {"unknown dtype", One(Tensor("F99", "[1]", "[0,4]")),
       "dtype \"F99\" is not known"},
      {"lower-case dtype", One(Tensor("f32", "[1]", "[0,4]")),
       "dtype \"f32\" is not known"},
      {"dtype that is a number", One(R"({"dtype":32})"),
       "unexpected the number 32"},
      {"dtype that is an array", One(R"({"dtype":["F32"]})"),
       "unexpected an array in dtype"},
      {"shape that is a number", One(R"({"shape":1})"),
       "unexpected the number 1 in shape"},
      {"a negative dimension", One(Tensor("F32", "[-1]", "[0,4]")),
       "unexpected the negative number -1 in shape"},
      {"a fraction as dimension", One(Tensor("F32", "[1.0]", "[0,4]")),
       "unexpected the number \"1.0\" in shape"},
      {"an exponent as dimension", One(Tensor("F32", "[1e0]", "[0,4]")),
       "unexpected the number \"1e0\" in shape"},
      {"a dimension beyond 64 bits",
       One(Tensor("F32", "[18446744073709551616]", "[0,4]")), "in shape"},
      {"a dimension beyond 63 bits",
       One(Tensor("F32", "[9223372036854775808]", "[0,4]")), "too large"},
      {"a null dimension", One(Tensor("F32", "[null]", "[0,4]")),
       "unexpected null in shape"},
      {"shape that overflows",
       One(Tensor("F32", "[4294967296,4294967296]", "[0,4]")), "overflows"},
      {"shape that overflows by the type",
       One(Tensor("F64", "[2305843009213693952]", "[0,4]")), "overflows"},
      {"shape that overflows beside a zero",
       One(Tensor("F32", "[0,4294967296,4294967296]", "[0,0]"), 0),
       "overflows"},
      {"too many dimensions",
       One(Tensor("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]")),
       "more than 8 dimensions"},
      {"one offset", One(Tensor("F32", "[1]", "[4]")), "must be two numbers"},
      {"three offsets", One(Tensor("F32", "[1]", "[0,4,4]")),
       "must be two numbers"},
      {"no offset", One(Tensor("F32", "[1]", "[]")), "must be two numbers"},
      {"negative offset", One(Tensor("F32", "[1]", "[-4,0]")),
       "negative number -4 in data_offsets"},
      {"fractional offset", One(Tensor("F32", "[1]", "[0.5,4]")),
       "in data_offsets"},
      {"end before begin", One(Tensor("F32", "[1]", "[4,0]")),
       "outside the file's 4 bytes"},
      {"end beyond the data", One(Tensor("F32", "[2]", "[0,8]")),
       "outside the file's 4 bytes"},
      {"end beyond 63 bits",
       One(Tensor("F32", "[1]", "[0,18446744073709551615]")), "outside"},
      {"begin and end that wrap",
       One(Tensor("F32", "[1]", "[18446744073709551612,0]")), "outside"},
      {"dtype that lies: more bytes", One(Tensor("F64", "[1]", "[0,4]")),
       "takes 8 bytes, but data_offsets hold 4"},
      {"dtype that lies: fewer bytes", One(Tensor("BF16", "[1]", "[0,4]")),
       "takes 2 bytes, but data_offsets hold 4"},
      {"shape that lies", One(Tensor("F32", "[1,2]", "[0,4]")),
       "takes 8 bytes"},
      {"a scalar that holds more", One(Tensor("F32", "[]", "[0,8]"), 8),
       "takes 4 bytes"},
      {"duplicate names",
       File(R"({"a":)" + good + R"(,"a":)" + good + "}", Data(4)),
       "tensor \"a\": named twice"},
      {"duplicate names by escape",
       File(R"({"a":)" + good + R"(,"\u0061":)" + good + "}", Data(4)),
       "tensor \"a\": named twice"},
      {"the same bytes twice", two(good, good, 4), "overlap"},
      {"partial overlap",
       two(Tensor("F32", "[2]", "[0,8]"), Tensor("F32", "[2]", "[4,12]"), 12),
       "tensor \"b\": data_offsets [4, 12] overlap"},
      {"one inside the other",
       two(Tensor("F32", "[3]", "[0,12]"), Tensor("F32", "[1]", "[4,8]"), 12),
       "overlap"},
      {"a hole between", two(good, Tensor("F32", "[1]", "[8,12]"), 12),
       "leave a hole"},
      {"a hole in front", One(Tensor("F32", "[1]", "[4,8]"), 8),
       "leave a hole"},
      {"trailing bytes", One(good, 5), "data_offsets end at 4, but 5 bytes"},
      {"data without tensors", File("{}", Data(1)), "end at 0, but 1 bytes"},
      {"an empty tensor inside another",
       two(Tensor("F32", "[2]", "[0,8]"), Tensor("F32", "[0]", "[4,4]"), 8),
       "overlap"},
      {"data shorter by one", One(good, 3), "outside the file's 3 bytes"},
      {"a number too large for a double", One("1e999"), "not valid JSON"},
      {"NaN", One("NaN"), "not valid JSON"},
  };
}

TEST(Safetensors, HostileFilesAreRefusedByName) {
  const std::vector<HostileFile> files = HostileFiles();
  EXPECT_GE(files.size(), 60);
  double slowest_s = 0;
  for (const HostileFile& hostile : files) {
    const auto start = std::chrono::steady_clock::now();
    const absl::Status status = ParseFile(hostile.file);
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - start;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << hostile.why;
    const std::string message(status.message());
    EXPECT_THAT(message, testing::StartsWith("dir/f.safetensors: "))
        << hostile.why;
    EXPECT_THAT(message, HasSubstr(hostile.complaint)) << hostile.why;
    EXPECT_LT(message.size(), 600) << hostile.why;
    EXPECT_LT(took.count(), 30) << hostile.why;  // sanitizers, busy machines
    slowest_s = std::max(slowest_s, took.count());
  }
  RecordProperty("files", static_cast<int>(files.size()));
  RecordProperty("slowest_ms", absl::StrCat(slowest_s * 1e3));
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string file = File(kTwo, Data(12));
  ASSERT_TRUE(ParseFile(file).ok());
  for (size_t length = 0; length < file.size(); ++length) {
    EXPECT_EQ(ParseFile(file.substr(0, length)).code(),
              absl::StatusCode::kInvalidArgument)
        << length;
  }
}

TEST(Safetensors, EveryHeaderLengthButTheTrueOneIsRefused) {
  const std::string file = File(kTwo, Data(12));
  for (uint64_t length = 0; length < file.size() + 4; ++length) {
    const std::string changed = Length(length) + file.substr(8);
    EXPECT_EQ(ParseFile(changed).ok(), length == strlen(kTwo)) << length;
  }
}

TEST(Safetensors, AHeaderOfManyTensorsIsReadInLinearTime) {
  std::string header = "{";
  int count = 0;
  while (header.size() < kMaxSafetensorsHeader - 200) {
    absl::StrAppend(
        &header, count == 0 ? "" : ",", "\"t", count, "\":",
        Tensor("U8", "[1]", absl::StrCat("[", count, ",", count + 1, "]")));
    ++count;
  }
  const std::string file = File(header + "}", Data(count));
  const auto tensors = ParseSafetensors(
      "f", {reinterpret_cast<const std::byte*>(file.data()), file.size()});
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ(tensors->size(), count);
  EXPECT_GT(count, 200000);
}

// ---- Directories.

std::string OneTensorFile(const std::string& name) {
  return File(
      absl::StrCat("{\"", name, "\":", Tensor("F32", "[1]", "[0,4]"), "}"),
      Data(4));
}

TEST(Checkpoint, ReadsShardsThroughTheirIndex) {
  TempDir dir;
  dir.Write("a.safetensors", OneTensorFile("x"));
  dir.Write("b.safetensors", OneTensorFile("y"));
  dir.Write("model.safetensors.index.json",
            R"({"metadata":{"total_size":8},)"
            R"("weight_map":{"y":"b.safetensors","x":"a.safetensors"}})");
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->total_bytes(), 8);
  ASSERT_NE(checkpoint->Find("y"), nullptr);
  EXPECT_EQ(checkpoint->path(*checkpoint->Find("y")),
            dir.path() + "/b.safetensors");
  EXPECT_EQ(checkpoint->Find("z"), nullptr);
  EXPECT_EQ(checkpoint->bytes(*checkpoint->Find("x")).size(), 4);
}

TEST(Checkpoint, TheOnlyFileOfAWholeModelMayHaveAnyName) {
  TempDir dir;
  dir.Write("gptq_model-4bit-128g.safetensors", OneTensorFile("x"));
  dir.Write("adapter_model.safetensors", OneTensorFile("lora"));
  dir.Write("model-00001-of-00002.safetensors", OneTensorFile("half"));
  dir.Write("consolidated.safetensors", OneTensorFile("mistral"));
  const auto only = Checkpoint::Open(dir.path());
  ASSERT_TRUE(only.ok()) << only.status();
  EXPECT_NE(only->Find("x"), nullptr);
  EXPECT_EQ(only->main_path(),
            dir.path() + "/gptq_model-4bit-128g.safetensors");
  dir.Write("other.safetensors", OneTensorFile("x"));
  const absl::Status two = Checkpoint::Open(dir.path()).status();
  EXPECT_EQ(two.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(two.message(), HasSubstr("2 other files might be the model: "
                                       "\"gptq_model-4bit-128g.safetensors\", "
                                       "\"other.safetensors\""));
  dir.Write("model.safetensors", OneTensorFile("y"));
  const auto usual = Checkpoint::Open(dir.path());
  ASSERT_TRUE(usual.ok()) << usual.status();
  EXPECT_EQ(usual->Find("x"), nullptr);
}

std::vector<std::string> NamesIn(const FileTensors& tensors) {
  TempDir dir;
  dir.Write("model.safetensors", SafetensorsFile(tensors));
  const auto checkpoint = Checkpoint::Open(dir.path());
  if (!checkpoint.ok()) return {std::string(checkpoint.status().message())};
  std::vector<std::string> names;
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    names.push_back(tensor.name);
    EXPECT_EQ(checkpoint->bytes(tensor).front(), std::byte{7});
  }
  EXPECT_EQ(checkpoint->total_bytes(), 4 * names.size());
  return names;
}

TEST(Checkpoint, OfAModelThatSeesTheTextPartIsThere) {
  const FileTensor own = {"F32", {1}, std::string("\7\0\0\0", 4)};
  const FileTensor other = {"F32", {1}, std::string("\1\0\0\0", 4)};
  EXPECT_THAT(NamesIn({{"language_model.lm_head.weight", own},
                       {"language_model.model.norm.weight", own},
                       {"multi_modal_projector.norm.weight", other},
                       {"vision_tower.ln_pre.weight", other}}),
              ElementsAre("lm_head.weight", "model.norm.weight"));
  EXPECT_THAT(NamesIn({{"lm_head.weight", own},
                       {"model.language_model.norm.weight", own},
                       {"model.multi_modal_projector.norm.weight", other},
                       {"model.vision_tower.ln_pre.weight", other}}),
              ElementsAre("lm_head.weight", "model.norm.weight"));
  EXPECT_THAT(
      NamesIn({{"base_model.model.model.language_model.layers.0.q", own},
               {"base_model.model.language_model.model.layers.1.q", own},
               {"base_model.model.model.vision_tower.layers.0.q", other},
               {"base_model.model.vision_tower.layers.1.q", other}}),
      ElementsAre("base_model.model.model.layers.0.q",
                  "base_model.model.model.layers.1.q"));
  EXPECT_THAT(NamesIn({{"model.norm.weight", own},
                       {"visual.blocks.0.norm1.weight", other}}),
              ElementsAre("model.norm.weight"));
  EXPECT_THAT(
      NamesIn({{"language_model.model.norm.weight", own},
               {"model.language_model.norm.weight", own}}),
      ElementsAre(HasSubstr("tensor \"model.norm.weight\" is there twice")));
}

TEST(Checkpoint, FollowsLinksAsModelCachesAreMadeOfThem) {
  TempDir dir;
  dir.Write("blob", OneTensorFile("x"));
  std::filesystem::create_symlink(dir.path() + "/blob",
                                  dir.path() + "/model.safetensors");
  EXPECT_TRUE(Checkpoint::Open(dir.path()).ok());
}

TEST(Checkpoint, HostileIndexesAreRefusedByName) {
  const auto index = [](const std::string& shard) {
    return absl::StrCat(R"({"weight_map":{"x":)", shard, "}}");
  };
  const struct {
    const char* why;
    std::string content;
    const char* complaint;
  } kIndexes[] = {
      {"empty", "", "not valid JSON"},
      {"an array", "[]", "weight_map"},
      {"a number", "3", "weight_map"},
      {"no map", "{}", "weight_map"},
      {"map is null", R"({"weight_map":null})", "weight_map"},
      {"map is an array", R"({"weight_map":["a"]})", "weight_map"},
      {"empty map", R"({"weight_map":{}})", "weight_map"},
      {"number as shard", index("1"), "must be the name of a file"},
      {"empty shard", index(R"("")"), "must be the name of a file"},
      {"parent directory", index(R"("../x.safetensors")"),
       "must be the name of a file"},
      {"dot dot", index(R"("..")"), "must be the name of a file"},
      {"dot", index(R"(".")"), "must be the name of a file"},
      {"absolute", index(R"("/etc/passwd")"), "must be the name of a file"},
      {"below", index(R"("sub/x.safetensors")"), "must be the name of a file"},
      {"escaped slash", index(R"("..\u002fx")"), "must be the name of a file"},
      {"NUL in the name", index(R"("a.safetensors\u0000x")"),
       "must be the name of a file"},
      {"endless name", index("\"" + std::string(10000, 'x') + "\""),
       "must be the name of a file"},
      {"missing shard", index(R"("nowhere.safetensors")"),
       "nowhere.safetensors: cannot open"},
      {"a directory as shard", index(R"("folder")"),
       "folder: not a regular file"},
      {"a FIFO as shard", index(R"("fifo")"), "fifo: not a regular file"},
      {"a shard that is no checkpoint", index(R"("text")"), "text: header"},
      {"tensor that no shard has",
       R"({"weight_map":{"x":"a.safetensors","z":"a.safetensors"}})",
       "\"z\" is not in the file named for it"},
      {"tensor that the index lacks", R"({"weight_map":{"x":"b.safetensors"}})",
       "\"y\" is not in this file"},
      {"tensor in another shard",
       R"({"weight_map":{"x":"b.safetensors","y":"a.safetensors"}})",
       "is not in this file"},
      {"depth bomb", std::string(100000, '['), "nested deeper than 32"},
      {"depth bomb of objects",
       [] {
         std::string bomb;
         for (int i = 0; i < 100000; ++i) bomb += R"({"a":)";
         return bomb;
       }(),
       "nested deeper than 32"},
      {"bad UTF-8", "{\"weight_map\":{\"\xff\":\"a\"}}", "not valid JSON"},
  };
  TempDir dir;
  dir.Write("a.safetensors", OneTensorFile("x"));
  dir.Write("b.safetensors", OneTensorFile("y"));
  dir.Write("text", "once upon a time");
  std::filesystem::create_directory(dir.path() + "/folder");
  ASSERT_EQ(mkfifo((dir.path() + "/fifo").c_str(), 0600), 0);
  for (const auto& [why, content, complaint] : kIndexes) {
    dir.Write("model.safetensors.index.json", content);
    const absl::Status status = Checkpoint::Open(dir.path()).status();
    EXPECT_FALSE(status.ok()) << why;
    const std::string message(status.message());
    EXPECT_THAT(message, testing::StartsWith(dir.path())) << why;
    EXPECT_THAT(message, HasSubstr(complaint)) << why;
  }
}

TEST(Checkpoint, AnOversizedIndexIsNotRead) {
  TempDir dir;
  const std::string path = dir.Write("model.safetensors.index.json", "");
  std::filesystem::resize_file(path, kMaxIndexBytes + 1);
  EXPECT_THAT(std::string(Checkpoint::Open(dir.path()).status().message()),
              HasSubstr("at most 16777216 are read"));
}

TEST(Checkpoint, FilesThatAreNoneAreRefused) {
  TempDir dir;
  EXPECT_EQ(Checkpoint::Open(dir.path()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Checkpoint::Open(dir.path() + "/nowhere").status().code(),
            absl::StatusCode::kNotFound);
  const std::string path = dir.path() + "/model.safetensors";
  std::filesystem::create_directory(path);
  EXPECT_THAT(std::string(Checkpoint::Open(dir.path()).status().message()),
              HasSubstr("not a regular file"));
  std::filesystem::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(std::string(Checkpoint::Open(dir.path()).status().message()),
              HasSubstr("not a regular file"));
  std::filesystem::remove(path);
  std::filesystem::create_symlink("/dev/zero", path);
  EXPECT_THAT(std::string(Checkpoint::Open(dir.path()).status().message()),
              HasSubstr("not a regular file"));
}

TEST(Checkpoint, ACopyHoldsWhatTheFileHeld) {
  TempDir dir;
  const std::string path = dir.Write(
      "one.safetensors",
      File(R"({"t":)" + Tensor("F32", "[2048]", "[0,8192]") + "}", Data(8192)));
  const auto copy = Checkpoint::CopyFile(path, 1 << 20);
  ASSERT_TRUE(copy.ok()) << copy.status();
  std::filesystem::resize_file(path, 0);  // a mapping would be gone
  const TensorInfo* const tensor = copy->Find("t");
  ASSERT_NE(tensor, nullptr);
  const absl::Span<const std::byte> bytes = copy->bytes(*tensor);
  EXPECT_EQ(
      std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
      Data(8192));
  EXPECT_FALSE(Checkpoint::CopyFile(path, 1 << 20).ok());
  std::filesystem::resize_file(path, (1 << 20) + 1);
  EXPECT_THAT(
      std::string(Checkpoint::CopyFile(path, 1 << 20).status().message()),
      HasSubstr("one.safetensors: 1048577 bytes; at most 1048576 are read"));
}

TEST(Checkpoint, TensorsOfAnotherShapeOrTypeAreRefused) {
  TempDir dir;
  dir.Write("model.safetensors",
            File(R"({"f":)" + Tensor("F32", "[2,3]", "[0,24]") + R"(,"i":)" +
                     Tensor("I64", "[2]", "[24,40]") + R"(,"s":)" +
                     Tensor("F32", "[2,2,1]", "[40,56]") + "}",
                 Data(56)));
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_TRUE(checkpoint->Matrix("f", 2, 3).ok());
  const auto stack = checkpoint->Stack("s", 2, 2, 1);
  ASSERT_TRUE(stack.ok()) << stack.status();
  EXPECT_EQ(stack->rows, 4);
  const auto message = [](const auto& result) {
    return std::string(result.status().message());
  };
  EXPECT_THAT(message(checkpoint->Matrix("f", 3, 2)),
              HasSubstr("model.safetensors: tensor \"f\": shape [2, 3], but "
                        "config.json asks for [3, 2]"));
  EXPECT_THAT(message(checkpoint->Vector("f", 6)), HasSubstr("shape [2, 3]"));
  EXPECT_THAT(message(checkpoint->Stack("f", 1, 2, 3)),
              HasSubstr("asks for [1, 2, 3]"));
  EXPECT_THAT(message(checkpoint->Vector("i", 2)),
              HasSubstr("dtype I64; weights must be F32, BF16 or F16"));
  EXPECT_THAT(message(checkpoint->Vector("none", 2)),
              HasSubstr("tensor \"none\" is missing"));
}

}  // namespace
}  // namespace tandem::engine
