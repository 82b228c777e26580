// SPDX-License-Identifier: Apache-2.0
// The embedded model, as a directory.

#ifndef TANDEM_TESTS_CLI_EXPLAIN_TALES_MODEL_H_
#define TANDEM_TESTS_CLI_EXPLAIN_TALES_MODEL_H_

#include <string>

namespace tandem::explain {

inline const std::string kTalesModel = TANDEM_SOURCE_DIR "/models/tales";

}  // namespace tandem::explain

#endif  // TANDEM_TESTS_CLI_EXPLAIN_TALES_MODEL_H_
