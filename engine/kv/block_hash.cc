// SPDX-License-Identifier: Apache-2.0
// Chained block hashes (engine/kv/kv_pool.h). SHA-256, because tenants choose
// the content: whoever could make two prompts collide would read, through the
// prefix cache, another's KV.

#include <openssl/evp.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/check.h"
#include "engine/kv/kv_pool.h"

namespace tandem::engine {
namespace {

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    // Fetched once: looking the algorithm up costs more than hashing a block.
    static const EVP_MD* const algorithm =
        EVP_MD_fetch(nullptr, "SHA256", nullptr);
    TANDEM_CHECK(context_ != nullptr && algorithm != nullptr,
                 "libcrypto has no SHA-256");
    algorithm_ = algorithm;
  }

  BlockHash operator()(absl::Span<const uint8_t> first,
                       absl::Span<const uint8_t> second) {
    uint8_t digest[EVP_MAX_MD_SIZE];
    TANDEM_CHECK(
        EVP_DigestInit_ex(context_.get(), algorithm_, nullptr) == 1 &&
            EVP_DigestUpdate(context_.get(), first.data(), first.size()) == 1 &&
            EVP_DigestUpdate(context_.get(), second.data(), second.size()) ==
                1 &&
            EVP_DigestFinal_ex(context_.get(), digest, nullptr) == 1,
        "SHA-256 failed");
    BlockHash hash;
    std::memcpy(hash.bytes.data(), digest, hash.bytes.size());
    return hash;
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  std::unique_ptr<EVP_MD_CTX, Free> context_;
  const EVP_MD* algorithm_;
};

Sha256& ThreadSha256() {
  thread_local Sha256 sha256;
  return sha256;
}

void AppendLittleEndian(uint64_t value, int bytes, std::string* out) {
  for (int i = 0; i < bytes; ++i) {
    out->push_back(static_cast<char>(value >> (8 * i)));
  }
}

absl::Span<const uint8_t> AsBytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

uint64_t BlockHash::Short() const {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | bytes[i];
  return value;
}

// Lengths stand before the strings, so that no two tuples read alike; the
// first word keeps roots apart from children, which start with a hash.
BlockHash RootHash(std::string_view salt, int block_size,
                   std::string_view formats, std::string_view adapter) {
  std::string message = "tandem kv root 1";
  AppendLittleEndian(static_cast<uint64_t>(block_size), 4, &message);
  AppendLittleEndian(salt.size(), 8, &message);
  message.append(salt);
  AppendLittleEndian(formats.size(), 8, &message);
  message.append(formats);
  if (!adapter.empty()) {
    AppendLittleEndian(adapter.size(), 8, &message);
    message.append(adapter);
  }
  return ThreadSha256()(AsBytes(message), {});
}

std::string AdapterKey(std::string_view name, std::string_view digest) {
  if (name.empty() && digest.empty()) return "";
  std::string key(digest);
  key.push_back(' ');
  key.append(name);
  return key;
}

BlockHash ChildHash(const BlockHash& parent, absl::Span<const int32_t> tokens) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
                "token ids are hashed as they lie in memory");
  return ThreadSha256()(parent.bytes,
                        {reinterpret_cast<const uint8_t*>(tokens.data()),
                         tokens.size() * sizeof(int32_t)});
}

std::vector<BlockHash> HashBlocks(const BlockHash& root,
                                  absl::Span<const int32_t> tokens,
                                  int block_size) {
  const size_t size = static_cast<size_t>(block_size);
  std::vector<BlockHash> hashes;
  hashes.reserve(tokens.size() / size);
  BlockHash parent = root;
  for (size_t begin = 0; begin + size <= tokens.size(); begin += size) {
    parent = ChildHash(parent, tokens.subspan(begin, size));
    hashes.push_back(parent);
  }
  return hashes;
}

}  // namespace tandem::engine
