// SPDX-License-Identifier: Apache-2.0
// TLS below the listener: TLS 1.2 and 1.3 with forward secrecy and AEAD only,
// HTTP/1.1 by ALPN. Included by the listener's own files only: Asio's headers
// are slow to compile.

#ifndef TANDEM_COMMON_HTTP_TLS_H_
#define TANDEM_COMMON_HTTP_TLS_H_

#include <boost/asio/ssl/context.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/ssl/ssl_stream.hpp>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "common/http/server.h"

namespace tandem::http_internal {

// INVALID_ARGUMENT if the texts are no PEM, or key and certificate no pair.
absl::StatusOr<std::shared_ptr<boost::asio::ssl::context>> MakeTlsContext(
    const HttpTls& tls);

// A connection with TLS or without it, as Beast reads and writes streams. One
// type, as sessions differ in nothing else. Its time-outs are the socket's.
class Transport {
 public:
  using executor_type = boost::beast::tcp_stream::executor_type;

  // `context` may be null: plain text.
  Transport(boost::asio::ip::tcp::socket socket,
            std::shared_ptr<boost::asio::ssl::context> context)
      : tcp_(std::move(socket)), context_(std::move(context)) {
    if (context_ != nullptr) tls_.emplace(tcp_, *context_);
  }

  executor_type get_executor() { return tcp_.get_executor(); }
  boost::beast::tcp_stream& tcp() { return tcp_; }
  bool is_tls() const { return tls_.has_value(); }
  boost::beast::ssl_stream<boost::beast::tcp_stream&>& tls() { return *tls_; }

  template <typename Buffers, typename Handler>
  void async_read_some(const Buffers& buffers, Handler&& handler) {
    if (tls_) {
      tls_->async_read_some(buffers, std::forward<Handler>(handler));
    } else {
      tcp_.async_read_some(buffers, std::forward<Handler>(handler));
    }
  }
  template <typename Buffers, typename Handler>
  void async_write_some(const Buffers& buffers, Handler&& handler) {
    if (tls_) {
      tls_->async_write_some(buffers, std::forward<Handler>(handler));
    } else {
      tcp_.async_write_some(buffers, std::forward<Handler>(handler));
    }
  }

 private:
  boost::beast::tcp_stream tcp_;
  const std::shared_ptr<boost::asio::ssl::context> context_;
  std::optional<boost::beast::ssl_stream<boost::beast::tcp_stream&>> tls_;
};

}  // namespace tandem::http_internal

#endif  // TANDEM_COMMON_HTTP_TLS_H_
