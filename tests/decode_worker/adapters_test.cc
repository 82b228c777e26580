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
      EXPECT_TRUE(table->Add("verse", Digest('a')).ok());
    }
    EXPECT_TRUE(table_.Add("prose", Digest('b')).ok());
    EXPECT_TRUE(table_.Add("twin", Digest('a')).ok());
    EXPECT_TRUE(others_.Add("prose", Digest('c')).ok());
    EXPECT_TRUE(others_.Add("twin", Digest('a')).ok());
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

  AdapterTable table_;
  AdapterTable others_;
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
  EXPECT_EQ(table_.Add("verse", Digest('a')).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(table_.Add("a b", Digest('a')).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(table_.Add("", Digest('a')).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(table_.size(), 3);
  EXPECT_EQ(*table_.SlotOf({}), -1);
  EXPECT_EQ(*table_.SlotOf(Ref("prose", 'b')), 1);
}

}  // namespace
}  // namespace tandem::worker
