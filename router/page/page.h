// SPDX-License-Identifier: Apache-2.0
// The page that people open in a browser: GET / and GET /page/NAME, files of
// the binary itself. Nothing in it is secret, and it asks for nothing outside
// its own origin, which its Content-Security-Policy also forbids.

#ifndef TANDEM_ROUTER_PAGE_PAGE_H_
#define TANDEM_ROUTER_PAGE_PAGE_H_

#include <map>
#include <string>
#include <string_view>

#include "common/http/server.h"

namespace tandem::router {

class Page {
 public:
  // Compresses all files once.
  Page();

  // It must outlive the server's Stop.
  void Register(HttpServer* server) const;

 private:
  struct File {
    std::string_view content_type;
    std::string_view bytes;
    std::string gzip;  // empty where it would not be smaller
    std::string etag;  // of `bytes`, without quotes
  };

  HttpResponse Answer(const HttpRequest& request,
                      const std::string& name) const;

  std::map<std::string, File, std::less<>> files_;  // by name
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_PAGE_PAGE_H_
