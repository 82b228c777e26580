// SPDX-License-Identifier: Apache-2.0
// A worker's adapters loaded and unloaded while it serves, with the files and
// the device in the test's hands.

#include "worker/adapter_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"

namespace tandem::worker {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

std::string Digest(char of) { return std::string(64, of); }

// Answers when the test says so.
struct FakeMemory final : AdapterMemory {
  void Read(
      const std::string& path,
      absl::AnyInvocable<void(absl::StatusOr<std::string>)> done) override {
    story += "read " + path + "; ";
    read = std::move(done);
  }
  void Put(int slot, absl::AnyInvocable<void()> done) override {
    story += "put " + std::to_string(slot) + "; ";
    put = std::move(done);
  }
  void Forget() override { story += "forget; "; }

  void HasRead(absl::StatusOr<std::string> digest) {
    std::exchange(read, nullptr)(std::move(digest));
  }
  void HasPut() { std::exchange(put, nullptr)(); }

  std::string story;
  absl::AnyInvocable<void(absl::StatusOr<std::string>)> read;
  absl::AnyInvocable<void()> put;
};

struct AdapterLoaderTest : testing::Test {
  explicit AdapterLoaderTest(int slots = 2)
      : table(slots), loader(&table, &memory, [this] {
          v1::AdapterList list;
          table.List(list.mutable_adapters());
          names.clear();
          for (const auto& adapter : list.adapters()) {
            names += adapter.name() + " ";
          }
        }) {}

  uint64_t Load(const std::string& name, const std::string& path,
                const std::string& digest = "") {
    v1::LoadAdapter load;
    load.set_command(++last);
    load.set_name(name);
    load.set_path(path);
    load.set_digest(digest);
    loader.Load(load, Hear());
    return last;
  }
  uint64_t Unload(const std::string& name) {
    v1::UnloadAdapter unload;
    unload.set_command(++last);
    unload.set_name(name);
    loader.Unload(unload, Hear());
    return last;
  }
  AdapterLoader::Done Hear() {
    return [this](const v1::AdapterOutcome& outcome) {
      outcomes[outcome.command()] = outcome;
    };
  }
  // A load from beginning to end.
  void Have(const std::string& name, char content) {
    const uint64_t command = Load(name, "/" + name);
    memory.HasRead(Digest(content));
    memory.HasPut();
    EXPECT_EQ(CodeOf(command), StatusCode::kOk);
    EXPECT_TRUE(outcomes[command].loaded());
  }
  AdapterUse Use(const std::string& name, char content) {
    v1::AdapterRef ref;
    ref.set_name(name);
    ref.set_digest(Digest(content));
    absl::StatusOr<AdapterUse> use = table.Use(ref);
    EXPECT_TRUE(use.ok()) << use.status();
    return use.ok() ? *std::move(use) : AdapterUse();
  }
  std::optional<StatusCode> CodeOf(uint64_t command) {
    const auto it = outcomes.find(command);
    if (it == outcomes.end()) return std::nullopt;
    return static_cast<StatusCode>(it->second.code());
  }
  std::string Counts() const {
    const AdapterCounts c = table.counts();
    EXPECT_EQ(c.free + c.taken + c.named + c.leaving, table.slots());
    return std::to_string(c.free) + std::to_string(c.taken) +
           std::to_string(c.named) + std::to_string(c.leaving);
  }

  AdapterTable table;
  FakeMemory memory;
  std::string names;  // as told last
  uint64_t last = 0;
  std::map<uint64_t, v1::AdapterOutcome> outcomes;
  AdapterLoader loader;
};

TEST_F(AdapterLoaderTest, ASlotHasANameWhenAllIsOnTheDevice) {
  const uint64_t command = Load("verse", "/somewhere/verse");
  EXPECT_EQ(Counts(), "2000");
  memory.HasRead(Digest('a'));
  EXPECT_EQ(Counts(), "1100");
  EXPECT_EQ(table.Find("verse"), nullptr);
  EXPECT_EQ(names, "");
  EXPECT_EQ(CodeOf(command), std::nullopt);
  memory.HasPut();
  EXPECT_EQ(Counts(), "1010");
  EXPECT_EQ(names, "verse ");
  EXPECT_EQ(CodeOf(command), StatusCode::kOk);
  EXPECT_EQ(outcomes[command].digest(), Digest('a'));
  EXPECT_TRUE(outcomes[command].loaded());
  EXPECT_EQ(memory.story, "read /somewhere/verse; put 0; forget; ");
  const v1::AdapterRef* const verse = table.Find("verse");
  EXPECT_EQ(verse->path(), "/somewhere/verse");
  EXPECT_TRUE(verse->in_service());
}

// A text that was cut within a character would be no message at all.
TEST_F(AdapterLoaderTest, WhatItQuotesOfACommandCanBeSent) {
  for (size_t ascii = 60; ascii < 132; ++ascii) {
    const std::string text = std::string(ascii, 'a') + "\u00e9\u00e9\u00e9";
    for (const uint64_t command :
         {Load("verse", text), Load(text, "/" + text), Unload(text)}) {
      EXPECT_NE(CodeOf(command), StatusCode::kOk);
      v1::AdapterOutcome read;
      EXPECT_TRUE(read.ParseFromString(outcomes[command].SerializeAsString()));
    }
  }
}

TEST_F(AdapterLoaderTest, WhatIsThereIsComparedAndNotReplaced) {
  Have("verse", 'a');
  const uint64_t same = Load("verse", "/copy");
  memory.HasRead(Digest('a'));
  EXPECT_EQ(CodeOf(same), StatusCode::kOk);
  EXPECT_FALSE(outcomes[same].loaded());
  const uint64_t other = Load("verse", "/other");
  memory.HasRead(Digest('b'));
  EXPECT_EQ(CodeOf(other), StatusCode::kAlreadyExists);
  EXPECT_EQ(outcomes[other].reason(), "ADAPTER_EXISTS");
  EXPECT_THAT(outcomes[other].message(), HasSubstr("aaaa, not bbbb"));
  EXPECT_EQ(Counts(), "1010");
  EXPECT_EQ(table.Find("verse")->digest(), Digest('a'));
}

TEST_F(AdapterLoaderTest, NothingIsLeftOfALoadThatFails) {
  const uint64_t missing = Load("verse", "/missing");
  memory.HasRead(absl::NotFoundError("/missing/adapter_config.json: none"));
  EXPECT_EQ(CodeOf(missing), StatusCode::kNotFound);
  EXPECT_THAT(outcomes[missing].message(), HasSubstr("adapter_config.json"));
  const uint64_t changed = Load("verse", "/changed", Digest('a'));
  memory.HasRead(Digest('b'));
  EXPECT_EQ(CodeOf(changed), StatusCode::kFailedPrecondition);
  EXPECT_EQ(outcomes[changed].reason(), "ADAPTER_MISMATCH");
  EXPECT_EQ(CodeOf(Load("verse", "relative")), StatusCode::kInvalidArgument);
  EXPECT_EQ(CodeOf(Load("verse", "/" + std::string(4096, 'x'))),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(CodeOf(Load("a b", "/x")), StatusCode::kInvalidArgument);
  EXPECT_EQ(CodeOf(Load("", "/x")), StatusCode::kInvalidArgument);
  EXPECT_EQ(Counts(), "2000");
  EXPECT_EQ(names, "");
  EXPECT_EQ(memory.story, "read /missing; forget; read /changed; forget; ");
}

TEST_F(AdapterLoaderTest, CommandsRunOneAtATimeInTheirOrder) {
  const uint64_t verse = Load("verse", "/verse");
  const uint64_t prose = Load("prose", "/prose");
  const uint64_t gone = Unload("verse");
  const uint64_t again = Load("verse", "/again");
  EXPECT_EQ(memory.story, "read /verse; ");
  memory.HasRead(Digest('a'));
  memory.HasPut();
  EXPECT_EQ(CodeOf(verse), StatusCode::kOk);
  EXPECT_EQ(CodeOf(gone), std::nullopt);
  memory.HasRead(Digest('b'));
  memory.HasPut();
  EXPECT_EQ(CodeOf(prose), StatusCode::kOk);
  EXPECT_EQ(CodeOf(gone), StatusCode::kOk);
  EXPECT_EQ(outcomes[gone].digest(), Digest('a'));
  EXPECT_EQ(names, "prose ");
  memory.HasRead(Digest('c'));
  memory.HasPut();
  EXPECT_EQ(CodeOf(again), StatusCode::kOk);
  EXPECT_EQ(names, "prose verse ");
  EXPECT_EQ(table.Find("verse")->digest(), Digest('c'));
}

TEST_F(AdapterLoaderTest, AnUnloadedOneKeepsItsSlotForTheCallsThatUseIt) {
  Have("verse", 'a');
  Have("prose", 'b');
  std::optional<AdapterUse> one = Use("verse", 'a');
  std::optional<AdapterUse> two = Use("verse", 'a');
  EXPECT_EQ(one->slot(), 0);
  const uint64_t gone = Unload("verse");
  EXPECT_EQ(names, "prose ");
  EXPECT_EQ(CodeOf(gone), std::nullopt);
  EXPECT_EQ(Counts(), "0011");
  // Nothing else gets it before, and nothing is read in vain.
  memory.story.clear();
  const uint64_t full = Load("rhyme", "/rhyme");
  EXPECT_EQ(CodeOf(full), StatusCode::kResourceExhausted);
  EXPECT_EQ(outcomes[full].reason(), "ADAPTER_SLOTS");
  EXPECT_THAT(outcomes[full].message(), HasSubstr("--max-loras is 2, 1 of "));
  EXPECT_EQ(memory.story, "forget; ");
  one.reset();
  EXPECT_EQ(CodeOf(gone), std::nullopt);
  two.reset();
  EXPECT_EQ(CodeOf(gone), StatusCode::kOk);
  EXPECT_EQ(Counts(), "1010");
  Have("rhyme", 'c');
  EXPECT_EQ(Use("rhyme", 'c').slot(), 0);
  EXPECT_EQ(CodeOf(Unload("verse")), StatusCode::kNotFound);
}

TEST_F(AdapterLoaderTest, AMovedUseIsOneUse) {
  Have("verse", 'a');
  AdapterUse one = Use("verse", 'a');
  AdapterUse two = std::move(one);
  EXPECT_EQ(two.slot(), 0);
  Unload("verse");
  EXPECT_EQ(Counts(), "1001");
  one = AdapterUse();
  EXPECT_EQ(Counts(), "1001");
  two = AdapterUse();
  EXPECT_EQ(Counts(), "2000");
}

TEST_F(AdapterLoaderTest, NobodyHearsOfAnythingOnceItHasStopped) {
  Have("verse", 'a');
  std::optional<AdapterUse> use = Use("verse", 'a');
  Unload("verse");
  Load("prose", "/prose");
  Load("rhyme", "/rhyme");
  const size_t heard = outcomes.size();
  loader.Stop();
  memory.HasRead(Digest('b'));
  use.reset();
  Load("late", "/late");
  EXPECT_EQ(outcomes.size(), heard);
}

TEST_F(AdapterLoaderTest, WhatWaitsIsBounded) {
  Load("verse", "/verse");
  for (size_t i = 1; i < AdapterLoader::kMaxCommands; ++i) Unload("verse");
  EXPECT_TRUE(outcomes.empty());
  EXPECT_EQ(CodeOf(Unload("verse")), StatusCode::kResourceExhausted);
}

struct NoSlotsTest : AdapterLoaderTest {
  NoSlotsTest() : AdapterLoaderTest(0), none(&table, nullptr, [] {}) {}
  AdapterLoader none;
};

TEST_F(NoSlotsTest, AWorkerWithoutMemoryForThemSaysSo) {
  v1::LoadAdapter load;
  load.set_command(7);
  load.set_name("verse");
  load.set_path("/verse");
  none.Load(load, Hear());
  EXPECT_EQ(CodeOf(7), StatusCode::kFailedPrecondition);
  EXPECT_THAT(outcomes[7].message(), HasSubstr("--max-loras"));
}

}  // namespace
}  // namespace tandem::worker
