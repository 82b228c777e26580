// SPDX-License-Identifier: Apache-2.0
#include "handoff/slices.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "common/check.h"

namespace tandem::handoff {

void CheckLayers(const WireLayers& layers) {
  TANDEM_CHECK(layers.windowed.empty() ||
                   layers.windowed.size() == static_cast<size_t>(layers.count),
               "each layer has a window or has none");
}

int64_t Rows(const SliceRange& range) {
  return int64_t{range.layer_end - range.layer_begin} *
         (range.position_end - range.position_begin);
}

int64_t RowBytes(const Grant& grant, int head_dim) {
  return kernels::KvRowBytes(grant.wire, grant.head_end - grant.head_begin,
                             head_dim);
}

int64_t WantedRows(const Grant& grant, const WireLayers& layers) {
  const auto windowed = std::count(layers.windowed.begin(),
                                   layers.windowed.end(), /*value=*/true);
  const int unwanted = std::max(0, grant.windowed_begin - grant.position_begin);
  return int64_t{layers.count} * (grant.position_end - grant.position_begin) -
         int64_t{windowed} * unwanted;
}

std::vector<SliceRange> Clip(const SliceRange& range, const Grant& grant,
                             const WireLayers& layers) {
  std::vector<SliceRange> pieces;
  const int begin = std::max(range.position_begin, grant.position_begin);
  const int end = std::min(range.position_end, grant.position_end);
  const int all_from =
      layers.windowed.empty() ? begin : std::max(begin, grant.windowed_begin);
  const auto add = [&](int layer_begin, int layer_end, int from, int to) {
    if (from >= to || layer_begin >= layer_end) return;
    pieces.push_back({layer_begin, layer_end, from, to});
  };
  // Runs of layers that see all, before the others' windows.
  for (int first = range.layer_begin, layer = first;
       begin < all_from && layer < range.layer_end; ++layer) {
    if (layers.windowed[static_cast<size_t>(layer)]) {
      add(first, layer, begin, std::min(end, all_from));
      first = layer + 1;
    } else if (layer + 1 == range.layer_end) {
      add(first, range.layer_end, begin, std::min(end, all_from));
    }
  }
  add(range.layer_begin, range.layer_end, all_from, end);
  return pieces;
}

bool Wants(const Grant& grant, const WireLayers& layers,
           const SliceRange& range) {
  int64_t wanted = 0;
  for (const SliceRange& piece : Clip(range, grant, layers)) {
    wanted += Rows(piece);
  }
  return wanted == Rows(range);
}

std::vector<SliceRange> Cut(const SliceRange& range, int64_t max_rows) {
  std::vector<SliceRange> slices;
  const int layers = range.layer_end - range.layer_begin;
  const int positions = range.position_end - range.position_begin;
  if (layers <= 0 || positions <= 0) return slices;
  const int layer_step = static_cast<int>(std::min<int64_t>(layers, max_rows));
  const int position_step = static_cast<int>(
      std::clamp<int64_t>(max_rows / layer_step, 1, positions));
  for (int p = range.position_begin; p < range.position_end;
       p += position_step) {
    for (int l = range.layer_begin; l < range.layer_end; l += layer_step) {
      slices.push_back({l, std::min(l + layer_step, range.layer_end), p,
                        std::min(p + position_step, range.position_end)});
    }
  }
  return slices;
}

bool Coverage::Overlaps(int layer, int begin, int end) const {
  auto found = layers_.find(layer);
  if (found == layers_.end()) return false;
  auto next = found->second.lower_bound(begin);
  if (next != found->second.end() && next->first < end) return true;
  return next != found->second.begin() && std::prev(next)->second > begin;
}

bool Coverage::Add(const SliceRange& range) {
  for (int l = range.layer_begin; l < range.layer_end; ++l) {
    if (Overlaps(l, range.position_begin, range.position_end)) return false;
  }
  for (int l = range.layer_begin; l < range.layer_end; ++l) {
    std::map<int, int>& intervals = layers_[l];
    int begin = range.position_begin;
    int end = range.position_end;
    auto next = intervals.lower_bound(begin);
    if (next != intervals.end() && next->first == end) {
      end = next->second;
      next = intervals.erase(next);
    }
    if (next != intervals.begin() && std::prev(next)->second == begin) {
      begin = std::prev(next)->first;
    }
    intervals[begin] = end;
  }
  rows_ += Rows(range);
  return true;
}

}  // namespace tandem::handoff
