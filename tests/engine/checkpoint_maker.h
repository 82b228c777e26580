// SPDX-License-Identifier: Apache-2.0
// Writes the tiny checkpoints of tests/golden/engine/cases.json, byte for byte
// as tools/oracle/make_checkpoints.py does (which has the definition), so
// that only the goldens need to be committed.

#ifndef TANDEM_TESTS_ENGINE_CHECKPOINT_MAKER_H_
#define TANDEM_TESTS_ENGINE_CHECKPOINT_MAKER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {

// A committed JSON file of tests/golden/engine; aborts if it is not there.
nlohmann::json ReadGolden(std::string_view file);

// Case names to their specs.
nlohmann::json LoadCases();

void WriteCheckpoint(const nlohmann::json& spec, const TempDir& dir);

// An adapter of tests/golden/engine/adapters.json.
void WriteAdapter(const nlohmann::json& adapter, const TempDir& dir);

// The ids that the goldens' prompts of this length have.
std::vector<int32_t> PromptIds(const nlohmann::json& spec, int length);

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_CHECKPOINT_MAKER_H_
