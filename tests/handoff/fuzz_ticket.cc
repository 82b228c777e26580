// SPDX-License-Identifier: Apache-2.0
// A sealed ticket changed in any way opens to nothing, one that is sealed
// right to what was sealed, and a record of any bytes under a right seal to an
// answer. The first byte says which.

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <string>

#include "handoff/ticket.h"
#include "tests/fuzz.h"

namespace tandem::handoff {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1000);
const std::string kKey(32, 'k');

std::string Sealed(std::string record) {
  unsigned char mac[32];
  unsigned int size = sizeof(mac);
  HMAC(EVP_sha256(), kKey.data(), static_cast<int>(kKey.size()),
       reinterpret_cast<const unsigned char*>(record.data()), record.size(),
       mac, &size);
  return record.append(reinterpret_cast<const char*>(mac), size);
}

Ticket Any(fuzz::Input* input) {
  Ticket ticket;
  ticket.attempt.request_id = std::string(input->Take(16));
  ticket.attempt.request_id.resize(16, '\0');
  ticket.attempt.sequence_index = input->Byte();
  ticket.attempt.number = input->Byte();
  ticket.max_positions = input->Byte() << 23;
  ticket.expires = kNow + absl::Milliseconds(1 + input->Byte());
  ticket.sender_id = std::string(input->Take(input->Byte()));
  ticket.sender_incarnation = std::string(input->Take(16));
  ticket.receiver_incarnation = std::string(input->Take(16));
  ticket.fingerprint = std::string(input->Take(32));
  return ticket;
}

void Check(fuzz::Input input) {
  const int kind = input.Below(3);
  if (kind == 0) {  // whatever is under a seal
    const auto opened =
        OpenTicket(Sealed(std::string(input.Rest())), kKey, kNow);
    TANDEM_FUZZ_REQUIRE(!opened.ok() || opened->expires > kNow);
    return;
  }
  const Ticket ticket = Any(&input);
  const std::string good = SealTicket(ticket, kKey);
  if (kind == 1) {
    const auto opened = OpenTicket(good, kKey, kNow);
    TANDEM_FUZZ_REQUIRE(opened.ok() && SealTicket(*opened, kKey) == good);
    TANDEM_FUZZ_REQUIRE(!OpenTicket(good, kKey, ticket.expires).ok());
    return;
  }
  std::string bad = good;
  bad.resize(bad.size() - std::min<size_t>(input.Byte(), bad.size()));
  while (!input.empty() && !bad.empty()) {
    size_t at = input.Byte();
    at |= size_t{input.Byte()} << 8;
    bad[at % bad.size()] ^= static_cast<char>(input.Byte());
  }
  TANDEM_FUZZ_REQUIRE(bad == good || !OpenTicket(bad, kKey, kNow).ok());
}

}  // namespace
}  // namespace tandem::handoff

TANDEM_FUZZ_TARGET(fuzz_ticket)(const uint8_t* data, size_t size) {
  tandem::handoff::Check({data, size});
  return 0;
}
