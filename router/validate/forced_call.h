// SPDX-License-Identifier: Apache-2.0
// Tool calls that a model must make or may make, as a text that its output must
// match, in the style that the model writes calls in: one call and nothing else
// (forced), one call or an answer of a certain form, or free text with calls
// whose arguments satisfy the schemas of strict functions. Where the style has
// tags for arguments, or a syntax of its own, these are an object in its place.
// The text is a structural tag (text/grammar.h); tool_calls.h reads what comes
// of it.

#ifndef TANDEM_ROUTER_VALIDATE_FORCED_CALL_H_
#define TANDEM_ROUTER_VALIDATE_FORCED_CALL_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "router/validate/validate.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// Whether the chat says that a tool must be called.
bool ForcesCall(const v1::Chat& chat);

// The arguments satisfy the function's schema. INVALID_ARGUMENT, with the
// tool's field, where one is not of objects.
// REQUIRES: ForcesCall and ValidateChat; a style other than none.
absl::StatusOr<std::string> ForcedCallTag(const v1::Chat& chat,
                                          const ModelLimits& limits);

// A call or `answer`, as the model likes: what a client expects that offers
// tools and asks for answers of a form. Arguments satisfy the schemas of strict
// functions, those of others are any object. None where the answer's form
// cannot stand in a structural tag, or is not what it should be; of models that
// answer in messages as AnswerTag has it.
// INVALID_ARGUMENT of a tag that is no JSON object, or too deep a one.
// REQUIRES: ValidateChat; a style other than none.
absl::StatusOr<std::optional<std::string>> CallOrAnswerTag(
    const v1::Chat& chat, const v1::StructuredOptions& answer,
    const ModelLimits& limits);

// `answer` of a model that answers in messages (text/harmony.h): what the last
// one says, behind any number of thoughts. None as above, but INVALID_ARGUMENT
// of a structural tag of the older form, which has no place for that.
// REQUIRES: limits.harmony.
absl::StatusOr<std::optional<std::string>> AnswerTag(
    const v1::StructuredOptions& answer, const ModelLimits& limits);

// `text` behind any number of thoughts between these marks, or none (Gemma's:
// text/reasoning.h). None as above.
absl::StatusOr<std::optional<std::string>> BehindThoughtsTag(
    const v1::StructuredOptions& text, const ReasoningMarks& marks);

// Whether some function's arguments must satisfy its schema.
bool HasStrictTool(const v1::Chat& chat);

// Any text and any number of calls, as the model likes; the arguments of strict
// functions satisfy their schemas, those of others are any object. Of Llama's
// calls, which bear no mark, the text has nothing in front; there an answer
// that begins with '{' is a call. Errors are those of ForcedCallTag.
// REQUIRES: HasStrictTool and ValidateChat; a style other than none.
absl::StatusOr<std::string> StrictCallsTag(const v1::Chat& chat,
                                           const ModelLimits& limits);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_VALIDATE_FORCED_CALL_H_
