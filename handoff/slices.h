// SPDX-License-Identifier: Apache-2.0
// Arithmetic on slices: how large, how cut, what is covered.

#ifndef TANDEM_HANDOFF_SLICES_H_
#define TANDEM_HANDOFF_SLICES_H_

#include <cstdint>
#include <map>
#include <vector>

#include "handoff/handoff.h"

namespace tandem::handoff {

// Programming errors end the process.
void CheckLayers(const WireLayers& layers);

// Of a slice, as (layer, position) pairs: the unit of all accounting.
int64_t Rows(const SliceRange& range);

// Wire bytes of one row: K and V of the granted heads.
int64_t RowBytes(const Grant& grant, int head_dim);

// All that a grant wants, and whether that is all of `range`.
int64_t WantedRows(const Grant& grant, const WireLayers& layers);
bool Wants(const Grant& grant, const WireLayers& layers,
           const SliceRange& range);

// What a grant wants of `range`, in pieces that do not overlap, of at least a
// row each.
std::vector<SliceRange> Clip(const SliceRange& range, const Grant& grant,
                             const WireLayers& layers);

// Cuts `range` so that no slice has more than `max_rows` rows: by positions,
// and by layers where one position of all of them is too much. REQUIRES:
// max_rows > 0.
std::vector<SliceRange> Cut(const SliceRange& range, int64_t max_rows);

// A set of rows. A layer costs one interval while positions come in order.
class Coverage {
 public:
  // False, and no change, if part of `range` is in already.
  bool Add(const SliceRange& range);
  int64_t rows() const { return rows_; }

 private:
  bool Overlaps(int layer, int begin, int end) const;
  std::map<int, std::map<int, int>> layers_;  // layer -> begin -> end
  int64_t rows_ = 0;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_SLICES_H_
