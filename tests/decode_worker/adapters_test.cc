// SPDX-License-Identifier: Apache-2.0
// Adapters at both workers: whose prefixes are shared, and that nothing but the
// same content under the same name comes together.

#include "worker/adapters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/simulation/parts.h"
#include "tests/worker/rig.h"

namespace tandem::worker {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

// Hex SHA-256, as it were.
std::string Digest(char of) { return std::string(64, of); }

v1::AdapterRef Ref(const std::string& name, char of) {
  v1::AdapterRef ref;
  ref.set_name(name);
  ref.set_digest(Digest(of));
  return ref;
}

class AdaptersTest : public testing::Test {
 protected:
  AdaptersTest() {
    for (AdapterTable* const table : {&table_, &others_}) {
      Put(table, Ref("verse", 'a'));
      Put(table, Ref("twin", 'a'));
    }
    Put(&table_, Ref("prose", 'b'));
    Put(&others_, Ref("prose", 'c'));
    decode_ = rig_.AddDecode("decode", {.num_blocks = 256},
                             [this](auto* o) { o->adapters = &table_; });
    // What it has is not all the same.
    prefill_ = rig_.AddPrefill("prefill", {.num_blocks = 256},
                               [this](auto* o) { o->adapters = &others_; });
  }

  // With the adapter that each worker is told.
  Request* Run(const v1::AdapterRef& decode, const v1::AdapterRef& prefill,
               bool split) {
    Request* const request = rig_.NewRequest({.prompt = Prompt(64)});
    *request->tweak_open.mutable_adapter() = decode;
    *request->tweak_prefill.mutable_adapter() = prefill;
    request->Decode(decode_, split ? prefill_ : nullptr);
    rig_.RunUntil([&] {
      return request->decode_ended.has_value() ||
             (request->prefill_ended.has_value() &&
              !request->prefill_ended->ok());
    });
    if (!request->decode_ended.has_value()) {
      request->DropDecode();
      request->DropPrefill();
      rig_.world.RunFor(absl::Seconds(1));
    }
    return request;
  }

  static void Put(AdapterTable* table, const v1::AdapterRef& adapter) {
    EXPECT_TRUE(table->Add(adapter, *table->Take()).ok());
  }

  AdapterTable table_ = AdapterTable(4);
  AdapterTable others_ = AdapterTable(4);
  Rig rig_;
  DecodeMachine* decode_;
  PrefillMachine* prefill_;
};

TEST_F(AdaptersTest, PrefixesAreSharedByTheSameNameAndContentAlone) {
  const struct {
    const char* why;
    v1::AdapterRef adapter;
    int decode_cached;
    int prefill_cached;
  } cases[] = {{"the first", Ref("verse", 'a'), 0, 0},
               {"again", Ref("verse", 'a'), 64, 48},
               {"the model as it is", {}, 0, 0},
               {"the same content under another name", Ref("twin", 'a'), 0, 0},
               {"the model again", {}, 64, 48}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    const Request* const request = Run(c.adapter, c.adapter, true);
    request->ExpectAllRight();
    ASSERT_FALSE(request->opened.empty());
    EXPECT_EQ(request->opened[0].cached_tokens(), c.decode_cached);
    EXPECT_EQ(request->prefill_started->cached_tokens(), c.prefill_cached);
  }
  const Request* const local = Run(Ref("twin", 'a'), {}, false);
  EXPECT_EQ(local->finished->cached_tokens(), 48);
  rig_.ExpectNothingLeft();
}

TEST_F(AdaptersTest, WhatAWorkerDoesNotHaveIsRefusedByName) {
  const Request* const unknown = Run(Ref("rhyme", 'a'), {}, false);
  EXPECT_EQ(unknown->decode_ended->code(), StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown->decode_ended->message()),
              HasSubstr("adapter = rhyme: this worker has prose, twin, verse"));
  const Request* const changed = Run(Ref("verse", 'd'), {}, false);
  EXPECT_EQ(changed->decode_ended->code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(changed->decode_ended->message()),
              HasSubstr("dddddddddddddddd is asked for, aaaaaaaaaaaaaaaa"));
  const Request* const prefill =
      Run(Ref("prose", 'b'), Ref("prose", 'b'), true);
  EXPECT_EQ(prefill->prefill_ended->code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(prefill->started.empty());
  rig_.ExpectNothingLeft();
}

// Each worker has what it is told, but they are told different things.
TEST_F(AdaptersTest, KvOfAnotherAdapterIsNotTaken) {
  const struct {
    v1::AdapterRef decode;
    v1::AdapterRef prefill;
  } cases[] = {{Ref("prose", 'b'), Ref("prose", 'c')},
               {Ref("verse", 'a'), Ref("twin", 'a')},
               {Ref("verse", 'a'), {}},
               {{}, Ref("verse", 'a')}};
  for (const auto& c : cases) {
    const Request* const request = Run(c.decode, c.prefill, true);
    EXPECT_TRUE(request->started.empty());
    ASSERT_TRUE(request->prefill_ended.has_value());
    EXPECT_THAT(std::string(request->prefill_ended->message()),
                HasSubstr("offer.adapter is '"));
  }
  EXPECT_EQ(decode_->core->counters().commits, 0);
  rig_.ExpectNothingLeft();
}

TEST_F(AdaptersTest, ATableTakesEachNameOnce) {
  const int slot = *table_.Take();
  EXPECT_EQ(table_.Take().status().code(), StatusCode::kResourceExhausted);
  for (const char* name : {"verse", "a b", ""}) {
    EXPECT_EQ(table_.Add(Ref(name, 'a'), slot).code(),
              StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(table_.counts().named, 3);
  EXPECT_EQ(table_.counts().taken, 1);
  table_.GiveBack(slot);
  EXPECT_EQ(table_.counts().free, 1);
  EXPECT_EQ(table_.Use({})->slot(), -1);
  EXPECT_EQ(table_.Use(Ref("prose", 'b'))->slot(), 2);
}

// Its calls go on, to the end, at both workers; its slot is free after the
// last of them, whatever ended it.
TEST_F(AdaptersTest, WhatIsUnloadedServesTheCallsThatItHas) {
  std::vector<int> freed;
  table_.set_on_freed([&](int slot) { freed.push_back(slot); });
  others_.set_on_freed([&](int slot) { freed.push_back(100 + slot); });
  const v1::AdapterRef verse = Ref("verse", 'a');
  const auto begin = [&](bool split) {
    Request* const request =
        rig_.NewRequest({.prompt = Prompt(64), .max_tokens = 40});
    *request->tweak_open.mutable_adapter() = verse;
    *request->tweak_prefill.mutable_adapter() = verse;
    request->Decode(decode_, split ? prefill_ : nullptr);
    return request;
  };
  Request* const split = begin(true);
  Request* const local = begin(false);
  Request* const dropped = begin(false);
  rig_.RunUntil([&] {
    return split->prefill_started.has_value() && !local->opened.empty() &&
           !dropped->opened.empty();
  });
  EXPECT_EQ(*table_.Remove("verse"), 0);
  EXPECT_EQ(*others_.Remove("verse"), 0);
  EXPECT_TRUE(table_.leaving(0));
  EXPECT_EQ(table_.counts().leaving, 1);
  EXPECT_EQ(table_.Remove("verse").status().code(), StatusCode::kNotFound);
  const Request* const late = Run(verse, {}, false);
  EXPECT_EQ(late->decode_ended->code(), StatusCode::kNotFound);

  dropped->DropDecode();
  rig_.RunUntil([&] { return split->prefill_ended.has_value(); });
  EXPECT_THAT(freed, testing::ElementsAre(100));
  rig_.RunUntil([&] {
    return split->decode_ended.has_value() && local->decode_ended.has_value();
  });
  split->ExpectAllRight();
  local->ExpectAllRight();
  EXPECT_THAT(freed, testing::ElementsAre(100, 0));
  EXPECT_EQ(table_.counts().free, 2);
  EXPECT_EQ(table_.counts().leaving, 0);
  rig_.ExpectNothingLeft();
}

}  // namespace
}  // namespace tandem::worker
