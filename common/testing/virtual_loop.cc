// SPDX-License-Identifier: Apache-2.0

#include "common/testing/virtual_loop.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace tandem {

Loop::TimerId VirtualLoop::After(absl::Duration delay, Task task) {
  const absl::Time due = now_ + std::max(delay, absl::ZeroDuration());
  const TimerId id = ++last_id_;
  tasks_.emplace(Key(due, id), std::move(task));
  due_.emplace(id, due);
  return id;
}

void VirtualLoop::Cancel(TimerId timer) {
  const auto it = due_.find(timer);
  if (it == due_.end()) return;
  const Key key(it->second, timer);
  due_.erase(it);
  // Destroyed last: what a task owns may cancel timers of its own.
  const auto node = tasks_.extract(key);
}

bool VirtualLoop::RunNext() {
  if (tasks_.empty()) return false;
  auto node = tasks_.extract(tasks_.begin());
  now_ = node.key().first;
  due_.erase(node.key().second);
  node.mapped()();
  return true;
}

int64_t VirtualLoop::RunUntilIdle(int64_t max_tasks) {
  int64_t count = 0;
  while (count < max_tasks && RunNext()) ++count;
  return count;
}

void VirtualLoop::RunFor(absl::Duration duration) {
  const absl::Time end = now_ + duration;
  while (!tasks_.empty() && tasks_.begin()->first.first <= end) RunNext();
  now_ = end;
}

Loop::TimerId VirtualProcess::After(absl::Duration delay, Task task) {
  if (stopped_) return 0;
  const TimerId id = ++last_id_;
  const TimerId timer = world_->After(delay, [this, id] { Run(id); });
  pending_.emplace(id, Pending{timer, std::move(task)});
  return id;
}

void VirtualProcess::Cancel(TimerId timer) {
  if (const auto node = pending_.extract(timer); !node.empty()) {
    world_->Cancel(node.mapped().timer);
    return;
  }
  const auto late = std::find_if(late_.begin(), late_.end(), [&](auto& entry) {
    return entry.first == timer;
  });
  if (late == late_.end()) return;
  const Task task = std::move(late->second);
  late_.erase(late);
}

void VirtualProcess::Run(TimerId id) {
  auto node = pending_.extract(id);
  if (frozen_) {
    late_.emplace_back(id, std::move(node.mapped().task));
    return;
  }
  node.mapped().task();
}

void VirtualProcess::Stop() {
  stopped_ = true;
  for (const auto& [id, pending] : pending_) world_->Cancel(pending.timer);
  // Through locals: what tasks own may come back here when it is destroyed.
  const auto pending = std::exchange(pending_, {});
  const auto late = std::exchange(late_, {});
}

void VirtualProcess::Thaw() {
  frozen_ = false;
  // As new tasks under their old ids, so that they can still be cancelled.
  for (auto& [id, task] : std::exchange(late_, {})) {
    const TimerId timer =
        world_->After(absl::ZeroDuration(), [this, id = id] { Run(id); });
    pending_.emplace(id, Pending{timer, std::move(task)});
  }
}

}  // namespace tandem
