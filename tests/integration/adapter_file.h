// SPDX-License-Identifier: Apache-2.0
// LoRA adapters of the embedded model, made up.

#ifndef TANDEM_TESTS_INTEGRATION_ADAPTER_FILE_H_
#define TANDEM_TESTS_INTEGRATION_ADAPTER_FILE_H_

#include <string>

namespace tandem::integration {

// Of its attention and gates, drawn from `seed`, into a directory that is made.
void WriteAdapter(const std::string& directory, unsigned seed, int rank = 4);

}  // namespace tandem::integration

#endif  // TANDEM_TESTS_INTEGRATION_ADAPTER_FILE_H_
