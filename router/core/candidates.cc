// SPDX-License-Identifier: Apache-2.0
// Which workers a request may go to: the snapshot of them from which a policy
// (placement.h) chooses, and the prefill worker for one that has its decode
// worker. See core.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/error.h"
#include "common/features.h"
#include "engine/kv/kv_pool.h"
#include "engine/kv/prefix_cache.h"
#include "router/core/core.h"
#include "router/placement/placement.h"
#include "router/validate/errors.h"

namespace tandem::router {
namespace {

bool Names(const Worker& worker, std::string_view feature) {
  const auto& heeded = worker.hello.features();
  return std::find(heeded.begin(), heeded.end(), feature) != heeded.end();
}

// An older worker would ignore what it does not know.
bool Heeds(const Worker& worker, const Request& request) {
  const auto names = [&worker](const std::vector<std::string>& needed) {
    return std::all_of(needed.begin(), needed.end(), [&](const auto& feature) {
      return Names(worker, feature);
    });
  };
  const EffectiveRequest& effective = request.effective();
  return names(effective.features) &&
         (worker.hello.role() != v1::WORKER_ROLE_DECODE ||
          names(effective.decode_features));
}

// What all beams of a search may come to: they share full blocks of the prompt
// and nothing else for certain, and none has more than a sequence has at once.
bool HoldsBeams(const Worker& worker, const Request& request) {
  const EffectiveRequest& effective = request.effective();
  if (!effective.beam) return true;
  const int size = worker.hello.block_size();
  const int64_t prompt = static_cast<int64_t>(request.prompt().size());
  const int64_t shared = prompt / size;
  const int64_t all =
      (prompt + effective.stopping.max_tokens() + size - 1) / size;
  const int64_t width = effective.beam->width();
  const int64_t at_once = worker.hello.blocks_at_once();
  const int64_t whole = shared + width * (all - shared);
  return (at_once > 0 ? std::min(whole, width * at_once) : whole) <=
         worker.hello.num_blocks();
}

// Without a cache all at once, whatever the window is.
bool HoldsPositions(const Worker& worker, const Request& request) {
  const v1::WorkerHello& hello = worker.hello;
  const bool pool_holds =
      !request.effective().no_kv_cache ||
      int64_t{hello.num_blocks()} * hello.block_size() >= request.positions();
  return pool_holds && hello.max_model_len() >= request.positions();
}

bool GivesSameResults(const Worker& worker, const Request& request) {
  return request.MayContinueOn(worker.hello) &&
         (request.mixed() || request.MayScoreOn(worker.hello));
}

// Whether a decode worker has all that it needs; room is another matter.
bool CanServe(const Worker& worker, const Request& request) {
  return HoldsPositions(worker, request) && Heeds(worker, request) &&
         HoldsBeams(worker, request) && request.HasAdapter(worker.hello) &&
         GivesSameResults(worker, request);
}

// What workers' flags turn off, and of the request what asks for it.
struct Switch {
  std::string_view feature, field, off;
};
constexpr Switch kSwitches[] = {
    {kFeatureBeamSearch, "beam",
     "needs decode workers with a KV cache: here they were started with "
     "--kv-cache off"},
    {kFeatureAttention, "output.attention",
     "needs decode workers that were started with --enable-attention-output"},
};

bool TurnedOff(const Worker& worker, std::string_view feature) {
  return !Names(worker, feature) && Names(worker, kFeatureAdapterLoading);
}

// A worker's count, bounded so that sums with it stay in range.
int Said(int32_t count) { return std::clamp(count, 0, 1 << 28); }

}  // namespace

// False where there are decode workers, and none of them does.
bool RouterCore::AnyHeeds(const Request& request) const {
  bool ready = false;
  for (const auto& [id, worker] : registry_.workers()) {
    if (worker->hello.role() != v1::WORKER_ROLE_DECODE ||
        !registry_.Placeable(*worker)) {
      continue;
    }
    if (Heeds(*worker, request)) return true;
    ready = true;
  }
  return !ready;
}

std::vector<std::string> RouterCore::NeededFeatures(const Request& request) {
  const EffectiveRequest& effective = request.effective();
  std::vector<std::string> needed = effective.features;
  needed.insert(needed.end(), effective.decode_features.begin(),
                effective.decode_features.end());
  return needed;
}

// Newer workers may come by themselves, those with other flags do not: clients
// need not ask again.
absl::Status RouterCore::WhyNobodyHeeds(const Request& request) const {
  const std::vector<std::string> needed = NeededFeatures(request);
  for (const Switch& of : kSwitches) {
    const bool asked =
        std::find(needed.begin(), needed.end(), of.feature) != needed.end();
    if (asked && !AnyDecodeWorker([&](const Worker& worker) {
          return !TurnedOff(worker, of.feature);
        })) {
      return FieldInvalid(of.field, "(set)", of.off);
    }
  }
  return MakeError(
      absl::StatusCode::kUnavailable, "NO_WORKERS",
      absl::StrCat("no decode worker knows all of ",
                   absl::StrJoin(needed, ", "),
                   ": they are of an older version, or started without "
                   "(beam_search needs --kv-cache on, attention "
                   "--enable-attention-output)"),
      {}, absl::Seconds(5));
}

bool RouterCore::AnyDecodeWorker(
    absl::FunctionRef<bool(const Worker&)> matches) const {
  const auto& workers = registry_.workers();
  return std::any_of(workers.begin(), workers.end(), [&](const auto& entry) {
    const Worker& worker = *entry.second;
    return worker.hello.role() == v1::WORKER_ROLE_DECODE &&
           registry_.Placeable(worker) && matches(worker);
  });
}

bool RouterCore::AnyCanServe(const Request& request) const {
  return AnyDecodeWorker(
      [&](const Worker& worker) { return CanServe(worker, request); });
}

bool RouterCore::OthersHaveRoom(const Request& request) const {
  return AnyDecodeWorker([&](const Worker& worker) {
    return !registry_.Full(worker) && !CanServe(worker, request);
  });
}

std::string RouterCore::Wanted(const Request& request) const {
  const EffectiveRequest& effective = request.effective();
  std::string wanted;
  if (!effective.adapter.empty()) {
    absl::StrAppend(&wanted, " with adapter ", effective.adapter);
  }
  if (effective.beam) {
    absl::StrAppend(&wanted, " with room for ", effective.beam->width(),
                    " beams");
  }
  if (AnyDecodeWorker([&](const Worker& worker) {
        return !HoldsPositions(worker, request);
      })) {
    absl::StrAppend(&wanted, " with ", request.positions(), " positions");
  }
  if (AnyDecodeWorker([&](const Worker& worker) {
        return !GivesSameResults(worker, request);
      })) {
    absl::StrAppend(&wanted, " with the same weights and numerics");
  }
  return wanted;
}

Snapshot RouterCore::MakeSnapshot(const Request& request) const {
  std::vector<const Worker*> prefill, decode;
  for (const auto& [id, worker] : registry_.workers()) {
    if (!registry_.Placeable(*worker) || registry_.Full(*worker)) continue;
    if (worker->hello.role() == v1::WORKER_ROLE_PREFILL) {
      if (worker->hello.max_model_len() > request.history_tokens() &&
          Heeds(*worker, request) && request.MayScoreOn(worker->hello) &&
          request.HasAdapter(worker->hello)) {
        prefill.push_back(worker.get());
      }
    } else if (CanServe(*worker, request)) {
      decode.push_back(worker.get());
    }
  }
  Snapshot snapshot;
  if (decode.empty()) return snapshot;
  snapshot.history_tokens = request.history_tokens();
  snapshot.turn = placements_;
  for (const Worker* worker : prefill) {
    snapshot.prefill.push_back(
        MakeView(*worker, CachedTokens(request, *worker)));
  }
  for (const Worker* worker : decode) {
    snapshot.decode.push_back(
        MakeView(*worker, CachedTokens(request, *worker)));
  }
  MendOldRates(&snapshot);
  for (const Worker* p : prefill) {
    for (const Worker* d : decode) {
      snapshot.pair_allowed.push_back(registry_.PairAllowed(*p, *d) &&
                                      request.AdapterOn(p->hello).digest() ==
                                          request.AdapterOn(d->hello).digest());
    }
  }
  return snapshot;
}

Snapshot RouterCore::MakeScoringSnapshot(const Request& request) const {
  Snapshot snapshot;
  snapshot.history_tokens = request.history_tokens();
  snapshot.turn = placements_;
  snapshot.decode.emplace_back();  // nobody
  for (const auto& [id, worker] : registry_.workers()) {
    if (worker->hello.role() == v1::WORKER_ROLE_PREFILL &&
        registry_.Placeable(*worker) && !registry_.Full(*worker) &&
        Heeds(*worker, request) && request.HasAdapter(worker->hello) &&
        request.MayScoreOn(worker->hello) &&
        worker->hello.max_model_len() >= request.history_tokens()) {
      snapshot.prefill.push_back(MakeView(*worker, /*cached_tokens=*/0));
      snapshot.pair_allowed.push_back(true);
    }
  }
  MendOldRates(&snapshot);
  return snapshot;
}

WorkerView RouterCore::MakeView(const Worker& worker, int cached_tokens) const {
  WorkerView view;
  view.worker_id = worker.id();
  view.running = Said(worker.load.running());
  view.waiting = Said(worker.load.waiting()) + worker.unreported_requests;
  view.queued_tokens =
      Said(worker.load.queued_tokens()) + worker.unreported_tokens;
  view.max_num_seqs = worker.hello.max_num_seqs();
  view.num_blocks = worker.hello.num_blocks();
  view.blocks_available =
      Said(worker.load.blocks_free()) + Said(worker.load.blocks_cached());
  view.cached_tokens = cached_tokens;
  view.tokens_per_second = worker.load.prefill_tokens_per_second();
  view.rate_is_old =
      context_.loop->Now() > worker.stepped + options_.rate_holds;
  return view;
}

int RouterCore::CachedTokens(const Request& request,
                             const Worker& worker) const {
  // What is scored is computed.
  if (worker.cached.empty() || request.effective().bypass_prefix_cache ||
      !request.scores_complete()) {
    return 0;
  }
  const size_t history = request.history_tokens();
  if (hashed_id_ != request.internal_id() || hashed_tokens_ != history) {
    hashed_id_ = request.internal_id();
    hashed_tokens_ = history;
    hashes_.clear();
  }
  const int block_size = worker.hello.block_size();
  const v1::AdapterRef adapter = request.AdapterOn(worker.hello);
  const std::string key = engine::AdapterKey(adapter.name(), adapter.digest());
  const auto [it, fresh] = hashes_.try_emplace({block_size, key});
  if (fresh) {
    // Only a prompt's head: hashing runs on the loop.
    std::vector<int32_t> tokens = request.prompt();
    tokens.insert(tokens.end(), request.output().begin(),
                  request.output().end());
    const size_t limit =
        static_cast<size_t>(options_.max_hashed_blocks) * block_size;
    if (tokens.size() > limit) tokens.resize(limit);
    for (const engine::BlockHash& hash :
         engine::HashBlocks(engine::RootHash(request.effective().cache_salt,
                                             block_size, "", key),
                            tokens, block_size)) {
      it->second.push_back(hash.Short());
    }
  }
  const std::vector<uint64_t>& hashes = it->second;
  const engine::KvWindow window(
      options_.window, {.full = 1, .windowed = options_.some_see_all ? 1 : 0});
  return block_size *
         engine::LongestPrefix(
             static_cast<int>(hashes.size()), block_size, window,
             engine::PrefixCache::kNobodyKeeps,
             [&](int i) {
               return worker.cached.contains(hashes[static_cast<size_t>(i)]);
             },
             [&](int i) {
               return !worker.lacking.contains(hashes[static_cast<size_t>(i)]);
             })
             .end;
}

std::optional<v1::WorkerRef> RouterCore::ChoosePrefill(Request* request,
                                                       bool* full) {
  *full = false;
  const Worker* const decode = registry_.Find(request->decode_worker_id());
  if (decode == nullptr) return std::nullopt;
  Snapshot snapshot;
  snapshot.history_tokens = request->history_tokens();
  snapshot.turn = placements_++;
  snapshot.decode.push_back(MakeView(*decode, CachedTokens(*request, *decode)));
  for (const auto& [id, worker] : registry_.workers()) {
    if (worker->hello.role() != v1::WORKER_ROLE_PREFILL ||
        !registry_.Placeable(*worker) || !Heeds(*worker, *request) ||
        !request->MayScoreOn(worker->hello) ||
        worker->hello.max_model_len() <= request->history_tokens() ||
        !registry_.PairAllowed(*worker, *decode) ||
        request->AdapterOn(worker->hello).digest() !=
            request->AdapterOn(decode->hello).digest()) {
      continue;
    }
    if (registry_.Full(*worker)) {
      *full = true;
      continue;
    }
    snapshot.prefill.push_back(
        MakeView(*worker, CachedTokens(*request, *worker)));
    snapshot.pair_allowed.push_back(true);
  }
  MendOldRates(&snapshot);
  const int chosen =
      PlacePrefill(options_.policy, snapshot, /*decode=*/0, random_);
  const Pair pair{.prefill = chosen, .decode = 0};
  if (WayOf(*request, snapshot, pair) == Way::kLocal) return std::nullopt;
  return registry_.Find(snapshot.prefill[chosen].worker_id)->hello.worker();
}

Way RouterCore::WayOf(const Request& request, const Snapshot& snapshot,
                      const Pair& pair) const {
  return ChooseWay(
      {.placement = request.effective().placement,
       .history_tokens = request.history_tokens(),
       .prefill = pair.prefill < 0 ? nullptr : &snapshot.prefill[pair.prefill],
       .decode = &snapshot.decode[pair.decode],
       .suspect = request.suspect(),
       .max_local_tokens = options_.max_local_tokens});
}

}  // namespace tandem::router
