// SPDX-License-Identifier: Apache-2.0
// What a router can be told: read once, validated whole, passed down. Every
// default has its reason beside it.

#ifndef TANDEM_ROUTER_CORE_OPTIONS_H_
#define TANDEM_ROUTER_CORE_OPTIONS_H_

#include <cstddef>
#include <string>

#include "absl/time/time.h"
#include "router/placement/placement.h"

namespace tandem::router {

struct RouterOptions {
  std::string incarnation;  // 16 bytes
  std::string model;        // served name; workers must serve the same
  Policy policy = Policy::kPrefixAware;
  int vocabulary = 0;  // of the model; 0: not known
  int window = 0;      // positions that layers of the model see; 0: all do
  bool some_see_all = false;  // of them nevertheless
  // Uncached prompt tokens that the decode worker computes by itself: about
  // one step's worth of work, less than a handoff costs.
  int max_local_tokens = 32;

  // Admission. Beyond either limit: RESOURCE_EXHAUSTED, QUEUE_FULL.
  int max_requests = 512;  // admitted and not ended
  int max_queued = 256;    // of them waiting for room on a worker
  absl::Duration queue_wait = absl::Seconds(10);
  // For a first token, by the rate of late; beyond it the same refusal. Longer
  // than whoever reads along waits, and what fills a queue in a burst drains.
  absl::Duration max_expected_wait = absl::Seconds(10);
  // Without any decode worker a new request waits this long; one that has
  // been computed already waits for `recovery_wait`, a worker's restart.
  absl::Duration no_workers_wait = absl::Seconds(10);
  absl::Duration recovery_wait = absl::Seconds(60);
  // As long as OpenAI's SDKs wait: whoever sent none gets an answer that is not
  // streamed before it gives up.
  absl::Duration default_deadline = absl::Seconds(600);

  // Calls to workers.
  absl::Duration beat = absl::Seconds(1);
  absl::Duration silence = absl::Seconds(4);     // of a worker: it is lost
  absl::Duration open_limit = absl::Seconds(5);  // to a call's first answer
  // A call broke while its worker computed: how long its lease may take to
  // break too, which tells a crash from a broken link.
  absl::Duration crash_verdict = absl::Milliseconds(300);
  // Calls and leases of two workers broke over one request, as by crashes or by
  // resets on the way to them: how long both have to come back as they were.
  // More than a worker waits before it dials its router again (6 s).
  absl::Duration proof_of_life = absl::Seconds(10);
  // A worker without room is asked again after this.
  absl::Duration refusal_pause = absl::Milliseconds(50);
  // How fast a worker computes is believed so long after its last step.
  absl::Duration rate_holds = absl::Seconds(10);
  // After a request's end: how long its prefill call may take to tell timings.
  absl::Duration timings_wait = absl::Milliseconds(500);

  // Recovery.
  int max_attempts = 3;   // that fail without a new token in between
  int max_failures = 16;  // of one request in all
  int max_preemptions = 64;
  // Retries of all requests together, per request, beyond twice max_requests a
  // minute: Envoy's budget, which ends storms.
  double retry_budget = 0.2;
  // How long a prompt is refused that two workers crashed over.
  absl::Duration suspect_quarantine = absl::Minutes(10);

  // Clients.
  size_t max_unsent = 64;  // messages, before the decode stream is paused
  absl::Duration stall_limit = absl::Seconds(30);

  // Registration.
  absl::Duration lease = absl::Seconds(4);
  absl::Duration load_interval = absl::Milliseconds(250);
  int max_workers = 1024;
  // For workers to load or let go an adapter: its files may be gigabytes.
  absl::Duration adapter_wait = absl::Seconds(60);
  size_t max_cached_hashes = size_t{1} << 20;  // remembered per worker
  int max_hashed_blocks = 1024;  // of a prompt's head, to look for in caches

  // What failed is left alone for the first of these, doubling to the second:
  // a network that healed is in use again within 15 s, and the probes of one
  // that did not cost a request each 10 s.
  absl::Duration avoid_first = absl::Seconds(1);
  absl::Duration avoid_longest = absl::Seconds(10);
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_OPTIONS_H_
