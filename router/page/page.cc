// SPDX-License-Identifier: Apache-2.0
#include "router/page/page.h"

#include <openssl/evp.h>
#include <zlib.h>

#include <array>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/check.h"
#include "router/page/assets.h"

namespace tandem::router {
namespace {

constexpr std::string_view kFolder = "/page/";

// Scripts and styles from here and nowhere else, no inline ones, no frame
// around it; text of models can become no markup (Trusted Types).
constexpr char kPolicy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'";

std::string_view ContentType(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 4>
      kTypes = {{{".html", "text/html; charset=utf-8"},
                 {".js", "text/javascript; charset=utf-8"},
                 {".css", "text/css; charset=utf-8"},
                 {".svg", "image/svg+xml"}}};
  for (const auto& [ending, type] : kTypes) {
    if (name.size() > ending.size() &&
        name.substr(name.size() - ending.size()) == ending) {
      return type;
    }
  }
  return "application/octet-stream";
}

std::string Digest(std::string_view bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  TANDEM_CHECK(EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size,
                          EVP_sha256(), nullptr) == 1,
               "OpenSSL has SHA-256");
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), 16));
}

std::string Gzip(std::string_view bytes) {
  z_stream stream{};
  // 15 bits of window, and 16 for gzip's frame.
  TANDEM_CHECK(deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED, 15 + 16, 8,
                            Z_DEFAULT_STRATEGY) == Z_OK,
               "zlib has memory");
  std::string packed(deflateBound(&stream, bytes.size()), '\0');
  stream.next_in =
      reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));  // only read
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  TANDEM_CHECK(deflate(&stream, Z_FINISH) == Z_STREAM_END,
               "deflateBound bounds");
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

// Whether a list names it, quality left out: "gzip, deflate, br;q=0.5". One
// that says q=0 wants it not.
bool Accepts(std::string_view list, std::string_view coding) {
  for (absl::string_view item :
       absl::StrSplit(absl::string_view(list.data(), list.size()), ',')) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(item, absl::MaxSplits(';', 1));
    if (absl::StripAsciiWhitespace(parts.first) !=
        absl::string_view(coding.data(), coding.size())) {
      continue;
    }
    const absl::string_view quality = absl::StripAsciiWhitespace(parts.second);
    return !(quality == "q=0" || absl::StartsWith(quality, "q=0.0"));
  }
  return false;
}

// Whether If-None-Match names it, weakly or not.
bool Names(std::string_view list, const std::string& etag) {
  for (absl::string_view item :
       absl::StrSplit(absl::string_view(list.data(), list.size()), ',')) {
    item = absl::StripAsciiWhitespace(item);
    absl::ConsumePrefix(&item, "W/");
    if (item == "*" || item == etag) return true;
  }
  return false;
}

}  // namespace

Page::Page() {
  for (const Asset& asset : Assets()) {
    File file{.content_type = ContentType(asset.name),
              .bytes = asset.bytes,
              .gzip = Gzip(asset.bytes),
              .etag = Digest(asset.bytes)};
    if (file.gzip.size() >= file.bytes.size()) file.gzip.clear();
    files_.emplace(asset.name, std::move(file));
  }
}

void Page::Register(HttpServer* server) const {
  // It asks for the key itself.
  server->Open("/");
  server->Open(std::string(kFolder));
  server->Handle("GET", "/", [this](const HttpRequest& request) {
    return Answer(request, "index.html");
  });
  server->Handle("GET", std::string(kFolder),
                 [this](const HttpRequest& request) {
                   return Answer(request, request.path.substr(kFolder.size()));
                 });
}

HttpResponse Page::Answer(const HttpRequest& request,
                          const std::string& name) const {
  const auto found = files_.find(name);
  if (found == files_.end()) {
    return {.code = 404,
            .body = absl::StrCat("nothing at ", request.path, "\n")};
  }
  const File& file = found->second;
  const bool packed =
      !file.gzip.empty() && Accepts(request.Header("accept-encoding"), "gzip");
  // Another binary may bring another file under the same name.
  const std::string etag =
      absl::StrCat("\"", file.etag, packed ? "-gzip" : "", "\"");
  HttpResponse response{
      .content_type = std::string(file.content_type),
      .headers = {{"Content-Security-Policy", kPolicy},
                  {"X-Content-Type-Options", "nosniff"},
                  {"Referrer-Policy", "no-referrer"},
                  {"Cross-Origin-Opener-Policy", "same-origin"},
                  {"Cross-Origin-Resource-Policy", "same-origin"},
                  {"Cache-Control", "no-cache"},
                  {"Vary", "Accept-Encoding"},
                  {"ETag", etag}}};
  if (Names(request.Header("if-none-match"), etag)) {
    response.code = 304;
    return response;
  }
  if (packed) response.headers.emplace_back("Content-Encoding", "gzip");
  response.body = packed ? file.gzip : std::string(file.bytes);
  return response;
}

}  // namespace tandem::router
