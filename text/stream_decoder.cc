// SPDX-License-Identifier: Apache-2.0
// StreamDecoder: a walk over the decode table, with the bytes of an unfinished
// character kept back. Tokenizer::Decode is the same walk over a whole list.

#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "text/ffi.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace tandem::text {
namespace {

std::string_view Piece(const char* bytes, const uint32_t* ends, int32_t id) {
  const uint32_t begin = id == 0 ? 0 : ends[id - 1];
  return {bytes + begin, ends[id] - begin};
}

}  // namespace

StreamDecoder::StreamDecoder(const Tokenizer* tokenizer,
                             std::span<const int32_t> context, Options options)
    : table_(tokenizer->table_.get()),
      skip_special_tokens_(options.skip_special_tokens),
      strip_left_(table_->strip_count),
      strip_(table_->strip_count > 0 ? ToUtf8(table_->strip) : "") {
  std::string behind;
  for (const int32_t id : context) {
    // Ids without a token say nothing about the text; Append refuses them.
    Append(id, behind).IgnoreError();
    behind.clear();
  }
}

absl::StatusOr<std::string> StreamDecoder::Push(int32_t id) {
  std::string out;
  if (absl::Status status = Append(id, out); !status.ok()) return status;
  return out;
}

std::string StreamDecoder::Finish() {
  std::string out;
  Drain(/*is_end=*/true, out);
  return out;
}

absl::Status StreamDecoder::Append(int32_t id, std::string& out) {
  if (id < 0 || static_cast<size_t>(id) >= table_->num_ids) {
    return absl::InvalidArgumentError(
        absl::StrCat("token id ", id, " is outside [0, ", table_->num_ids,
                     "), the tokenizer's vocabulary"));
  }
  const uint8_t flags = table_->flags[id];
  if ((flags & ffi::kPresent) == 0) return absl::OkStatus();
  if (skip_special_tokens_ && (flags & ffi::kSpecial) != 0) {
    return absl::OkStatus();
  }
  pending_ += is_first_ ? Piece(table_->first_bytes, table_->first_ends, id)
                        : Piece(table_->later_bytes, table_->later_ends, id);
  is_first_ = false;
  Drain(/*is_end=*/false, out);
  return absl::OkStatus();
}

void StreamDecoder::Drain(bool is_end, std::string& out) {
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const Utf8Step step = NextUtf8(rest);
    if (step.kind == Utf8Kind::kCharacter) {
      Emit(rest.substr(0, step.size), out);
    } else if (step.kind == Utf8Kind::kIncomplete && !is_end) {
      break;
    } else {
      const size_t marks = table_->one_mark_per_byte ? step.size : 1;
      for (size_t i = 0; i < marks; ++i) Emit(kReplacementCharacter, out);
    }
    rest.remove_prefix(step.size);
  }
  pending_.erase(0, pending_.size() - rest.size());
}

void StreamDecoder::Emit(std::string_view character, std::string& out) {
  if (strip_left_ > 0) {
    if (character == strip_) {
      --strip_left_;
      return;
    }
    strip_left_ = 0;
  }
  out += character;
}

}  // namespace tandem::text
