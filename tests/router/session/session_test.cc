// SPDX-License-Identifier: Apache-2.0
// What a recording keeps, and what a replay finds. That sessions replay as
// they were is shown by every test that has a World, and by the simulation.

#include <gmock/gmock.h>
#include <google/protobuf/util/delimited_message_util.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <functional>
#include <sstream>

#include "router/session/admitted.h"
#include "router/session/replay.h"
#include "router/session/session_file.h"
#include "tests/router/world.h"

namespace tandem::router::session {
namespace {

using google::protobuf::util::SerializeDelimitedToOstream;
using testing::AllOf;
using testing::HasSubstr;

std::vector<v1::SessionEntry> Entries(const std::string& bytes) {
  std::istringstream in(bytes);
  google::protobuf::io::IstreamInputStream stream(&in);
  std::vector<v1::SessionEntry> entries;
  v1::SessionEntry entry;
  while (google::protobuf::util::ParseDelimitedFromZeroCopyStream(
      &entry, &stream, nullptr)) {
    entries.push_back(entry);
    entry.Clear();
  }
  return entries;
}

std::string Bytes(const std::vector<v1::SessionEntry>& entries) {
  std::ostringstream out;
  for (const v1::SessionEntry& entry : entries) {
    SerializeDelimitedToOstream(entry, &out);
  }
  return out.str();
}

// What a replay tells of the end of its recording.
struct Ending {
  bool within = false;
  int64_t torn_bytes = 0;
  std::string why;
};

// Of a replay of these bytes, to its end.
absl::Status Replayed(const std::string& bytes, Ending* ending = nullptr) {
  std::istringstream in(bytes);
  RouterObserver nobody;
  const auto replay = Replay::Create(&in, &nobody);
  if (!replay.ok()) return replay.status();
  const absl::Status status = (*replay)->Run();
  if (ending != nullptr) {
    *ending = {(*replay)->ended_within(), (*replay)->torn_bytes(),
               (*replay)->why_ended()};
  }
  return status;
}

// Two requests, one of several sequences with text and a stop string, one that
// its client leaves; a worker lost; then the end.
std::string Session() {
  World w;
  w.Prefill("p0");
  w.Decode("d0");
  w.Settle();
  AdmittedRequest asked = World::Ask();
  asked.effective.stopping.add_stop("cd");
  asked.effective.output.set_text(true);
  ClientPipe* const first = w.Submit(std::move(asked));
  w.PrefillAndCommit(1, 40, 1);
  w.decodes.back().Say(World::Tokens(41, {2, 3, 4}));
  EXPECT_EQ(World::Text(*first), "ab");
  ClientPipe* const second = w.Submit(World::Ask());
  w.PrefillAndCommit(1, 40, 5);
  second->Break(absl::CancelledError("gone"));
  w.leases.back().Break(absl::UnavailableError("reset"));
  w.RunFor(absl::Seconds(1));
  w.core->Drain();
  w.core->CloseAll(absl::UnavailableError("going away"));
  return w.recorded.str();
}

TEST(SessionTest, ReplaysToTheSameState) {
  const std::string session = Session();
  std::istringstream in(session);
  RouterObserver nobody;
  const auto replay = Replay::Create(&in, &nobody);
  ASSERT_TRUE(replay.ok()) << replay.status();
  ASSERT_EQ((*replay)->Run(), absl::OkStatus());
  const v1::RouterCounters& counters = (*replay)->core().counters();
  EXPECT_EQ(counters.accepted(), 2u);
  EXPECT_EQ(counters.finished_ok(), 1u);
  EXPECT_EQ(counters.cancelled(), 1u);
  EXPECT_GT((*replay)->acts(), 10);
  EXPECT_FALSE((*replay)->ended_within());
  EXPECT_GE((*replay)->elapsed(), absl::Seconds(1));
  EXPECT_LT((*replay)->elapsed(), absl::Seconds(2));
}

TEST(SessionTest, WhereverAProcessEndsItsSessionReplaysSoFar) {
  const std::string session = Session();
  const std::vector<v1::SessionEntry> entries = Entries(session);
  std::string so_far;
  for (size_t i = 0; i < entries.size(); ++i) {
    const std::string entry = Bytes({entries[i]});
    if (i >= 2) {
      // Behind it nothing of the next one, its first byte, half of it, or all
      // but its last byte.
      for (const size_t written :
           {size_t{0}, size_t{1}, entry.size() / 2, entry.size() - 1}) {
        Ending ending;
        const absl::Status torn =
            Replayed(so_far + entry.substr(0, written), &ending);
        EXPECT_EQ(torn, absl::OkStatus()) << i << " " << written;
        EXPECT_EQ(ending.within, entries[i].has_outcome()) << i;
        EXPECT_EQ(ending.torn_bytes, static_cast<int64_t>(written)) << i;
        EXPECT_EQ(ending.why, "");
      }
    }
    so_far += entry;
  }
  EXPECT_EQ(so_far, session);
}

// Also where the length that is damaged reaches beyond the file's end, as that
// of a last write that was cut short does.
TEST(SessionTest, ADamagedEntryIsNotTakenForTheEnd) {
  const std::string session = Session();
  const std::vector<v1::SessionEntry> entries = Entries(session);
  const auto damaged = [&](size_t at, int bit, size_t entry_at) {
    std::string bytes = session;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << bit));
    const absl::Status status = Replayed(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss)
        << at << " " << bit << ": " << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat(" bytes from offset ", entry_at,
                                       " are no entry")));
  };
  size_t offset = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const size_t size = Bytes({entries[i]}).size();
    if (i >= 2 && size < 128 && i + 1 < entries.size()) {
      for (int bit = 0; bit < 8; ++bit) damaged(offset, bit, offset);
    }
    offset += size;
  }
}

// Another decision, time, number or text than then is found, and where.
TEST(SessionTest, ADifferenceIsFoundWhereItIs) {
  const std::vector<v1::SessionEntry> entries = Entries(Session());
  const auto otherwise = [&](const std::function<bool(v1::SessionEntry*)>& edit,
                             absl::StatusCode code) {
    int edited = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
      std::vector<v1::SessionEntry> changed = entries;
      if (!edit(&changed[i])) continue;
      ++edited;
      const absl::Status status = Replayed(Bytes(changed));
      EXPECT_EQ(status.code(), code) << i << " " << status;
      const std::string where =
          i < 2 ? "at its start" : absl::StrCat("at input ", i / 2);
      EXPECT_THAT(std::string(status.message()), HasSubstr(where));
    }
    EXPECT_GT(edited, 0);
  };
  const auto acts = [](v1::SessionEntry* entry) {
    return entry->mutable_outcome()->mutable_acts();
  };
  otherwise(
      [&](v1::SessionEntry* entry) {
        if (entry->outcome().acts().empty()) return false;
        acts(entry)->Mutable(0)->set_digest(1);
        return true;
      },
      absl::StatusCode::kAborted);
  otherwise(
      [&](v1::SessionEntry* entry) {
        if (entry->outcome().acts().empty()) return false;
        acts(entry)->RemoveLast();
        return true;
      },
      absl::StatusCode::kAborted);
  otherwise(
      [&](v1::SessionEntry* entry) {
        if (!entry->has_outcome()) return false;
        entry->mutable_outcome()->add_acts()->set_kind(
            v1::SESSION_ACT_KIND_SEND);
        return true;
      },
      absl::StatusCode::kAborted);
  otherwise(
      [&](v1::SessionEntry* entry) {
        if (entry->outcome().clock().empty()) return false;
        entry->mutable_outcome()->mutable_clock()->RemoveLast();
        return true;
      },
      absl::StatusCode::kAborted);
  otherwise(
      [&](v1::SessionEntry* entry) {
        if (!entry->has_outcome()) return false;
        entry->mutable_outcome()->add_random(7);
        return true;
      },
      absl::StatusCode::kAborted);
}

// The core that replays has another option than the one that was recorded.
TEST(SessionTest, AnotherOptionDecidesOtherwise) {
  std::vector<v1::SessionEntry> entries = Entries(Session());
  for (v1::SessionOption& option :
       *entries[0].mutable_start()->mutable_options()) {
    if (option.name() == "max_local_tokens") option.set_integer(1000);
  }
  const absl::Status status = Replayed(Bytes(entries));
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("a request"), HasSubstr("the Decode call to d0 "
                                                      "with something else")));
}

TEST(SessionTest, WhatIsNoSessionIsRefused) {
  const std::vector<v1::SessionEntry> entries = Entries(Session());
  const auto refused = [](const std::string& bytes, const char* why) {
    const absl::Status status = Replayed(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  refused("", "no recorded session");
  refused("# Tandem\n\nAn inference service", "no recorded session");
  refused(Bytes({entries[1]}), "no recorded session");
  std::vector<v1::SessionEntry> changed = entries;
  changed[0].mutable_start()->set_format(2);
  refused(Bytes(changed), "format 2");
  changed = entries;
  changed[0].mutable_start()->mutable_options()->RemoveLast();
  refused(Bytes(changed), "avoid_longest is missing");
  changed = entries;
  changed.erase(changed.begin() + 3);  // of the first input
  refused(Bytes(changed), "without an outcome");
  for (size_t i = 2; i < entries.size(); ++i) {
    changed = entries;
    if (changed[i].has_message()) {
      changed[i].mutable_message()->set_stream(99);
      refused(Bytes(changed), "no stream 99");
      changed = entries;
      changed[i].mutable_message()->set_message("\xff\xff");
      refused(Bytes(changed), "a message that is none");
    }
  }
}

TEST(SessionTest, EndsAtItsBound) {
  World w;
  std::stringstream out;
  std::vector<absl::Status> told;
  RecordedCore core(
      {.version = "v",
       .max_bytes = 4096,
       .on_end = [&](const absl::Status& s) { told.push_back(s); }},
      &out, w.options, &w.process, &w.random, &w, &w.letters, &w);
  for (int i = 0; i < 1000; ++i) core.Abort("nobody").IgnoreError();
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].code(), absl::StatusCode::kResourceExhausted);
  EXPECT_LE(out.str().size(), 4096u);
  Ending ending;
  EXPECT_EQ(Replayed(out.str(), &ending), absl::OkStatus());
  EXPECT_EQ(ending.why, told[0].message());
  w.around_recorder = true;  // two cores share its loop
}

TEST(SessionTest, AFileIsItsOwnersAlone) {
  const std::string directory = testing::TempDir() + "/sessions";
  std::filesystem::create_directories(directory);
  const auto file = CreateSessionFile(directory);
  ASSERT_TRUE(file.ok()) << file.status();
  (*file)->stream << "x" << std::flush;
  struct stat about {};
  ASSERT_EQ(stat((*file)->path.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0600u);
  EXPECT_EQ(about.st_size, 1);
  std::filesystem::remove_all(directory);
  EXPECT_THAT(std::string(CreateSessionFile(directory).status().message()),
              HasSubstr("No such file"));
}

// Every field there and back, by a request that has them all.
TEST(SessionTest, ARequestIsKeptWhole) {
  AdmittedRequest all = World::Ask({1, 2, 3}, 9);
  EffectiveRequest& effective = all.effective;
  effective.request_id = "id";
  effective.chat = true;
  effective.placement = v1::PLACEMENT_SPLIT;
  effective.priority = -3;
  effective.adapter = "a";
  effective.cache_salt = std::string("\xff\0s", 3);
  effective.cache_owner = 1ull << 63;
  effective.bypass_prefix_cache = effective.no_kv_cache = true;
  effective.features = {"f", "g"};
  effective.decode_features = {"h"};
  effective.max_time = absl::Seconds(3);
  effective.beam.emplace().set_width(4);
  effective.structured.emplace().set_regex("a+");
  effective.constraint_of = ConstraintOf::kEither;
  effective.constraint_field = "field";
  effective.model_end_ids = {8, 9};
  effective.tool_calls = ToolCallOptions{.style = ToolCallStyle::kMistral,
                                         .names = {"n"},
                                         .json_parameters = {{"n", {"a", "b"}}},
                                         .parallel = false,
                                         .markers = {{5, "[m]"}},
                                         .id_seed = 77};
  effective.reasoning = ReasoningMarks{.style = ReasoningStyle::kQwen3,
                                       .begin_id = 4,
                                       .end_id = 6,
                                       .calls_id = 9,
                                       .content_first = true};
  effective.harmony = HarmonyFormat{.marks = {{7, "<|end|>"}}};
  effective.bad_word_ids = {{1, 2}, {3}};
  effective.end_token_ids = {26, 27};
  all.deadline = absl::InfiniteDuration();
  all.sequence_index = 2;
  all.api = Api::kOpenEngine;
  all.id_from_header = true;
  all.since = absl::UnixEpoch() + absl::Nanoseconds(5) / 4;
  all.ended = AdmittedRequest::Ended::kClientGone;
  all.trace = {.trace_id = std::string(16, '\x80'),
               .span_id = std::string(8, 's'),
               .sampled = true,
               .state = "k=v"};
  all.tenant = "t";
  const v1::SessionSubmit kept = ToEntry(all);
  // No field was left at what it is by itself, and back is there again.
  std::vector<const google::protobuf::FieldDescriptor*> set;
  kept.GetReflection()->ListFields(kept, &set);
  EXPECT_EQ(static_cast<int>(set.size()),
            v1::SessionSubmit::descriptor()->field_count() - 1);  // stream
  const AdmittedRequest back = FromEntry(kept);
  EXPECT_TRUE(
      google::protobuf::util::MessageDifferencer::Equals(ToEntry(back), kept));
  EXPECT_EQ(back.effective.tool_calls->markers, effective.tool_calls->markers);
  EXPECT_EQ(back.effective.reasoning->end_id, 6);
  EXPECT_TRUE(back.effective.reasoning->content_first);
  EXPECT_EQ(back.effective.harmony->marks, effective.harmony->marks);
  EXPECT_TRUE(back.effective.harmony->reasoning);
  EXPECT_EQ(back.since, all.since);
  EXPECT_EQ(back.deadline, absl::InfiniteDuration());
  EXPECT_EQ(back.ended, AdmittedRequest::Ended::kClientGone);
}

}  // namespace
}  // namespace tandem::router::session
