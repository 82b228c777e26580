// SPDX-License-Identifier: Apache-2.0
#include "common/nearest.h"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

int EditDistance(const std::string& a, const std::string& b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = std::exchange(row[0], static_cast<int>(i));
    for (size_t j = 1; j <= b.size(); ++j) {
      const int change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string Nearest(const std::string& typed,
                    const std::vector<std::string>& known) {
  std::string best;
  int limit = std::max<int>(2, static_cast<int>(typed.size()) / 3) + 1;
  for (const std::string& name : known) {
    const int distance = EditDistance(typed, name);
    if (distance < limit) {
      limit = distance;
      best = name;
    }
  }
  return best;
}

}  // namespace tandem
