// SPDX-License-Identifier: Apache-2.0
#include "router/core/adapters_away.h"

#include <algorithm>
#include <utility>

namespace tandem::router {
namespace {

// As many workers as the registry remembers of those that departed. Most never
// come back, since each pod of a rollout has a name of its own, and a router
// lives for months. Who stands still for long comes back before so many others
// have gone: the oldest are forgotten first.
constexpr size_t kMaxLost = 1024;

}  // namespace

std::deque<AdaptersAway::Lost>::iterator AdaptersAway::Find(
    const std::string& worker_id) {
  return std::find_if(lost_.begin(), lost_.end(), [&](const Lost& one) {
    return one.worker_id == worker_id;
  });
}

void AdaptersAway::OnLost(const v1::WorkerHello& hello) {
  Lost lost = {
      hello.worker().worker_id(), hello.worker().incarnation(), {}, {}};
  for (const auto& adapter : hello.adapters()) lost.has.insert(adapter.name());
  lost_.push_back(std::move(lost));
  if (lost_.size() > kMaxLost) lost_.pop_front();
}

void AdaptersAway::MayHave(const std::string& worker_id,
                           const std::string& name) {
  const auto it = Find(worker_id);
  if (it != lost_.end()) it->has.insert(name);
}

void AdaptersAway::Owe(const std::string& worker_id, const std::string& name) {
  const auto it = Find(worker_id);
  if (it != lost_.end()) it->owes.insert(name);
}

void AdaptersAway::OweAll(const std::string& name) {
  for (Lost& lost : lost_) {
    if (lost.has.contains(name)) lost.owes.insert(name);
  }
}

std::set<std::string> AdaptersAway::Return(const v1::WorkerRef& worker) {
  const auto it = Find(worker.worker_id());
  if (it == lost_.end()) return {};
  std::set<std::string> owes;
  if (it->incarnation == worker.incarnation()) owes = std::move(it->owes);
  lost_.erase(it);
  return owes;
}

}  // namespace tandem::router
