// SPDX-License-Identifier: Apache-2.0
// The receiver's side of the hand-over of descriptors (shm_way.h has the
// exchange): one thread that listens, checks secrets, passes descriptors, and
// then watches each peer for its last word or its exit.

#ifndef TANDEM_HANDOFF_SHM_DOORMAN_H_
#define TANDEM_HANDOFF_SHM_DOORMAN_H_

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "common/random.h"
#include "handoff/shm/arena.h"

namespace tandem::handoff {

class Doorman {
 public:
  enum class Event {
    kConnected,  // said before the peer has the descriptor
    kQuiet,      // the peer will store nothing any more
  };
  // Runs on the doorman's thread: it posts.
  using Notify = std::function<void(Event)>;

  // Listens on the abstract socket `name`.
  static absl::StatusOr<std::unique_ptr<Doorman>> Listen(
      const std::string& name);
  ~Doorman();

  // From now on whoever shows `secret` gets `fd`, once.
  void Expect(uint64_t id, const std::string& secret, Fd fd, Notify notify);
  // True: nobody has come for `id`, and nobody will be let in.
  bool Withdraw(uint64_t id);
  // No event of `id` begins after this.
  void Forget(uint64_t id);

 private:
  struct Guest {  // expected
    std::string secret;
    Fd fd;
    Notify notify;
  };
  struct Visit {  // connected
    Fd socket;
    Fd process;  // pidfd
    std::string nonce;
    std::string heard;
    absl::Time deadline;
    uint64_t id = 0;  // 0: has not shown a secret
    Notify notify;
  };

  Doorman(Fd listener, Fd wake);
  void Run();
  void Wake();
  void Accept();
  // False: the visit is over.
  bool Hear(Visit* visit);
  bool Admit(Visit* visit);
  void Tell(const Visit& visit, Event event);

  const Fd listener_;
  const Fd wake_;  // eventfd
  Mutex mutex_;
  std::map<uint64_t, Guest> expected_ ABSL_GUARDED_BY(mutex_);
  // Admitted and not forgotten: only those are told of.
  std::map<uint64_t, bool> admitted_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;

  // Of the thread only.
  std::list<Visit> visits_;
  absl::Time accepts_again_ = absl::InfinitePast();
  SystemRandom random_;
  std::thread thread_;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_SHM_DOORMAN_H_
