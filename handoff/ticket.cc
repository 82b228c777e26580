// SPDX-License-Identifier: Apache-2.0
// A sealed ticket:
//
//   "TTK1"                        magic and version
//   request_id                    16 bytes
//   sequence_index, number        u32 each
//   max_positions                 u32
//   expires                       i64, nanoseconds of the issuer's clock
//   four strings                  u16 length, then bytes: sender_id,
//                                 sender_incarnation, receiver_incarnation,
//                                 fingerprint
//   HMAC-SHA-256 of all the above 32 bytes
//
// Integers are little-endian. The MAC is checked before anything is parsed.

#include "handoff/ticket.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <cstring>

#include "absl/status/status.h"

namespace tandem::handoff {
namespace {

constexpr std::string_view kMagic = "TTK1";
constexpr size_t kRequestIdBytes = 16;
constexpr size_t kMacBytes = 32;
constexpr size_t kMaxTicketBytes = 4096;

void PutInt(std::string* out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) {
    out->push_back(static_cast<char>(value >> (8 * i)));
  }
}

void PutString(std::string* out, std::string_view value) {
  PutInt(out, value.size(), 2);
  out->append(value);
}

// Reads what PutInt and PutString wrote; `ok` turns false for good when the
// bytes run out.
struct Reader {
  std::string_view bytes;
  bool ok = true;

  std::string_view Take(size_t n) {
    if (n > bytes.size()) {
      ok = false;
      return {};
    }
    const std::string_view taken = bytes.substr(0, n);
    bytes.remove_prefix(n);
    return taken;
  }
  uint64_t Int(int n) {
    uint64_t value = 0;
    const std::string_view taken = Take(static_cast<size_t>(n));
    for (size_t i = 0; i < taken.size(); ++i) {
      value |= uint64_t{static_cast<uint8_t>(taken[i])} << (8 * i);
    }
    return value;
  }
  std::string String() {
    const size_t size = Int(2);
    return std::string(Take(size));
  }
};

// Empty if OpenSSL fails, which no MAC equals.
std::string Mac(std::string_view record, std::string_view key) {
  std::string mac(kMacBytes, '\0');
  unsigned int size = 0;
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(record.data()), record.size(),
           reinterpret_cast<unsigned char*>(mac.data()), &size) == nullptr ||
      size != kMacBytes) {
    return "";
  }
  return mac;
}

absl::Status Refused() {
  // The same for every cause: a forger learns nothing from it.
  return absl::PermissionDeniedError("handoff ticket is not valid");
}

}  // namespace

std::string SealTicket(const Ticket& ticket, std::string_view key) {
  std::string record(kMagic);
  std::string request_id = ticket.attempt.request_id;
  request_id.resize(kRequestIdBytes, '\0');
  record += request_id;
  PutInt(&record, ticket.attempt.sequence_index, 4);
  PutInt(&record, ticket.attempt.number, 4);
  PutInt(&record, static_cast<uint32_t>(ticket.max_positions), 4);
  PutInt(&record, static_cast<uint64_t>(absl::ToUnixNanos(ticket.expires)), 8);
  PutString(&record, ticket.sender_id);
  PutString(&record, ticket.sender_incarnation);
  PutString(&record, ticket.receiver_incarnation);
  PutString(&record, ticket.fingerprint);
  return record + Mac(record, key);
}

absl::StatusOr<Ticket> OpenTicket(std::string_view bytes, std::string_view key,
                                  absl::Time now) {
  if (bytes.size() < kMacBytes || bytes.size() > kMaxTicketBytes) {
    return Refused();
  }
  const std::string_view record = bytes.substr(0, bytes.size() - kMacBytes);
  const std::string mac = Mac(record, key);
  if (mac.size() != kMacBytes ||
      CRYPTO_memcmp(mac.data(), bytes.data() + record.size(), kMacBytes) != 0) {
    return Refused();
  }
  Reader reader{record};
  if (reader.Take(kMagic.size()) != kMagic) return Refused();
  Ticket ticket;
  ticket.attempt.request_id = std::string(reader.Take(kRequestIdBytes));
  ticket.attempt.sequence_index = static_cast<uint32_t>(reader.Int(4));
  ticket.attempt.number = static_cast<uint32_t>(reader.Int(4));
  ticket.max_positions = static_cast<int32_t>(reader.Int(4));
  ticket.expires = absl::FromUnixNanos(static_cast<int64_t>(reader.Int(8)));
  ticket.sender_id = reader.String();
  ticket.sender_incarnation = reader.String();
  ticket.receiver_incarnation = reader.String();
  ticket.fingerprint = reader.String();
  if (!reader.ok || !reader.bytes.empty() || now >= ticket.expires) {
    return Refused();
  }
  return ticket;
}

}  // namespace tandem::handoff
