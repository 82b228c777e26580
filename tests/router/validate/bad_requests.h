// SPDX-License-Identifier: Apache-2.0
// Values of each field of a request: at its bounds, beyond them and at what no
// bound foresees, with what a router must say to them. For tests of a router's
// parts and of real ones alike.

#ifndef TANDEM_TESTS_ROUTER_VALIDATE_BAD_REQUESTS_H_
#define TANDEM_TESTS_ROUTER_VALIDATE_BAD_REQUESTS_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// One value of a field, and whether it is accepted.
struct Probe {
  std::string what;
  std::function<void(google::protobuf::Message*,
                     const google::protobuf::Reflection*,
                     const google::protobuf::FieldDescriptor*)>
      set;
  bool good = false;
};
using Probes = std::vector<Probe>;

struct Row {
  std::string path;  // from the request, elements of lists not numbered
  std::string base;  // a good request, in protobuf's text format
  Probes probes;
  std::string field = {};  // that the refusal names, if not the path
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

// What the table is of: a router for the embedded model, without offers beyond
// what is always there, and with kToolTemplate.
struct Served {
  int vocabulary = 0;
  int context = 0;
  int end_tokens = 0;  // of the model's own
};

// A chat template that knows tools, and writes calls as Hermes does.
inline constexpr char kToolTemplate[] =
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m.tool_calls %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% endif %}";
// A good request.
inline constexpr char kGoodRequest[] = "text: 'Once' ";

// Every field that holds a value has a row.
std::vector<Row> BadRequests(const Served& served);
// The row's base with the value.
v1::GenerateRequest RequestWith(const Row& row, const Probe& probe);
// Protobuf's text format.
v1::GenerateRequest ParseRequest(const std::string& text);

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_VALIDATE_BAD_REQUESTS_H_
