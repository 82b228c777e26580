// SPDX-License-Identifier: Apache-2.0
// Against DNS rebinding. A listener on loopback without keys trusts who reaches
// it, and so does a web page's browser: a page of evil.example whose name is
// made to resolve to 127.0.0.1 is of the listener's origin for the browser, and
// may read its answers. Only the Host header still tells.

#ifndef TANDEM_COMMON_HTTP_HOST_H_
#define TANDEM_COMMON_HTTP_HOST_H_

#include <string_view>

namespace tandem {

// Can no public name server have brought the request here? So it is where the
// header is absent (no browser leaves it out), an IP address, localhost, a name
// below .localhost, .local or .internal, which public DNS never has, or `own`,
// the name that the listener was given.
bool IsLocalHost(std::string_view header, std::string_view own);

}  // namespace tandem

#endif  // TANDEM_COMMON_HTTP_HOST_H_
