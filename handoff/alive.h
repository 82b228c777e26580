// SPDX-License-Identifier: Apache-2.0
// Lets callbacks that were handed out notice that their object is gone. They
// run on the object's loop, so a check there is enough; the count itself is
// atomic because callbacks are copied and destroyed on other threads. (The
// one shared pointer here owns nothing but that fact.)

#ifndef TANDEM_HANDOFF_ALIVE_H_
#define TANDEM_HANDOFF_ALIVE_H_

#include <memory>
#include <utility>

namespace tandem::handoff {

class Alive {
 public:
  // `callback`, or nothing once this object is destroyed.
  template <typename Callback>
  auto Guard(Callback callback) const {
    return [alive = std::weak_ptr<const char>(token_),
            callback = std::move(callback)](auto&&... args) mutable {
      if (!alive.expired()) callback(std::forward<decltype(args)>(args)...);
    };
  }

 private:
  std::shared_ptr<const char> token_ = std::make_shared<const char>();
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_ALIVE_H_
