// SPDX-License-Identifier: Apache-2.0
#include "engine/beam_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace tandem::engine {

absl::Status CheckBeams(const BeamOptions& options,
                        absl::Span<const int32_t> stop_token_ids) {
  const auto refuse = [](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat("beam.", parts...));
  };
  if (options.width < 1) {
    return refuse("width is ", options.width, ", expected at least 1");
  }
  const int ends = CandidatesPerBeam(0, stop_token_ids);
  if (options.width > kernels::kMaxTopLogprobs - ends) {
    return refuse("width is ", options.width, ", and there are ", ends,
                  " end tokens: together at most ", kernels::kMaxTopLogprobs);
  }
  if (options.best < 1 || options.best > options.width) {
    return refuse("best is ", options.best, ", expected 1 to the width, ",
                  options.width);
  }
  if (!(std::abs(options.length_penalty) <= kMaxLengthPenalty)) {
    return refuse("length_penalty is ", options.length_penalty, ", expected -",
                  kMaxLengthPenalty, " to ", kMaxLengthPenalty);
  }
  return absl::OkStatus();
}

int CandidatesPerBeam(int width, absl::Span<const int32_t> stop_token_ids) {
  const std::set<int32_t> ends(stop_token_ids.begin(), stop_token_ids.end());
  return width + static_cast<int>(ends.size());
}

BeamSearch::BeamSearch(const BeamOptions& options,
                       std::vector<int32_t> stop_token_ids, int max_tokens,
                       int top)
    : options_(options),
      stop_token_ids_(std::move(stop_token_ids)),
      max_tokens_(max_tokens),
      top_(std::max(top, 0)),
      beams_{{-1, 0.0}} {
  TANDEM_CHECK(CheckBeams(options, stop_token_ids_).ok(), "see CheckBeams");
}

bool BeamSearch::Ends(int32_t token_id) const {
  return std::find(stop_token_ids_.begin(), stop_token_ids_.end(), token_id) !=
         stop_token_ids_.end();
}

double BeamSearch::Penalised(double sum, int length) const {
  return sum / std::pow(length, options_.length_penalty);
}

const std::vector<BeamSearch::Next>& BeamSearch::Step(
    absl::Span<const absl::Span<const TopLogprob>> candidates) {
  TANDEM_CHECK(!done_ && candidates.size() == beams_.size(),
               "every beam brings its candidates");
  continuations_.clear();
  for (size_t b = 0; b < beams_.size(); ++b) {
    for (size_t i = 0; i < candidates[b].size(); ++i) {
      const TopLogprob& candidate = candidates[b][i];
      if (!(candidate.logprob > -std::numeric_limits<float>::infinity())) {
        break;
      }
      continuations_.push_back(
          {beams_[b].sum + static_cast<double>(candidate.logprob),
           static_cast<int>(b), static_cast<int>(i), candidate});
    }
  }
  std::sort(continuations_.begin(), continuations_.end(),
            [](const Continuation& a, const Continuation& b) {
              return std::tuple(-a.sum, a.beam, a.candidate.token_id) <
                     std::tuple(-b.sum, b.beam, b.candidate.token_id);
            });

  ++length_;
  const bool last = length_ >= max_tokens_;
  const size_t width = static_cast<size_t>(options_.width);
  std::vector<Beam> beams;
  next_.clear();
  for (size_t i = 0; i < continuations_.size() && next_.size() < width; ++i) {
    const Continuation& continuation = continuations_[i];
    const bool stops = Ends(continuation.candidate.token_id);
    if ((stops || last) && i >= width) continue;
    const int node = AddNode(
        continuation, candidates[static_cast<size_t>(continuation.beam)]);
    if (stops || last) {
      Keep({node, Penalised(continuation.sum, length_), length_, stops});
      continue;
    }
    beams.push_back({node, continuation.sum});
    next_.push_back({continuation.beam, continuation.candidate.token_id});
  }
  beams_ = std::move(beams);
  const bool full = finished_.size() == width;
  done_ = beams_.empty() ||
          (full && (options_.early_stopping == EarlyStopping::kAlways ||
                    !CanImprove(beams_[0].sum)));
  if (done_) next_.clear();
  return next_;
}

int BeamSearch::AddNode(const Continuation& continuation,
                        absl::Span<const TopLogprob> candidates) {
  SampledToken token;
  token.token_id = continuation.candidate.token_id;
  token.logprob = continuation.candidate.logprob;
  token.rank = continuation.rank + 1;
  const auto top = candidates.subspan(0, static_cast<size_t>(top_));
  token.top.assign(top.begin(), top.end());
  nodes_.push_back(
      {beams_[static_cast<size_t>(continuation.beam)].node, std::move(token)});
  return static_cast<int>(nodes_.size()) - 1;
}

// Behind those of the same score, which were there before.
void BeamSearch::Keep(const Finished& finished) {
  const auto at = std::upper_bound(
      finished_.begin(), finished_.end(), finished,
      [](const Finished& a, const Finished& b) { return a.score > b.score; });
  finished_.insert(at, finished);
  if (finished_.size() > static_cast<size_t>(options_.width)) {
    finished_.pop_back();
  }
}

// REQUIRES: all hypotheses are there.
bool BeamSearch::CanImprove(double best_sum) const {
  const bool longest = options_.early_stopping == EarlyStopping::kNever &&
                       options_.length_penalty > 0;
  return Penalised(best_sum, longest ? max_tokens_ : length_) >
         finished_.back().score;
}

std::vector<Hypothesis> BeamSearch::Best() const {
  TANDEM_CHECK(done_, "the search goes on");
  std::vector<Hypothesis> best;
  const size_t count =
      std::min(finished_.size(), static_cast<size_t>(options_.best));
  for (size_t i = 0; i < count; ++i) {
    const Finished& finished = finished_[i];
    Hypothesis hypothesis;
    hypothesis.score = finished.score;
    hypothesis.stopped = finished.stopped;
    for (int node = finished.node; node >= 0;
         node = nodes_[static_cast<size_t>(node)].before) {
      hypothesis.tokens.push_back(nodes_[static_cast<size_t>(node)].token);
    }
    std::reverse(hypothesis.tokens.begin(), hypothesis.tokens.end());
    best.push_back(std::move(hypothesis));
  }
  return best;
}

int BeamSearch::tokens() const {
  int tokens = 0;
  for (const Finished& finished : finished_) tokens += finished.length;
  return tokens;
}

}  // namespace tandem::engine
