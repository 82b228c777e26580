// SPDX-License-Identifier: Apache-2.0
// Writes the tiny checkpoints of tests/golden/engine/cases.json, byte for byte
// as tools/oracle/make_checkpoints.py does (which has the definition), so
// that only the goldens need to be committed; and the same with the layers'
// products in the forms of quantisers (engine/checkpoint/quantisation.h has
// them), of random codes.

#ifndef TANDEM_TESTS_ENGINE_CHECKPOINT_MAKER_H_
#define TANDEM_TESTS_ENGINE_CHECKPOINT_MAKER_H_

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/engine/checkpoint/safetensors_file.h"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {

// A committed JSON file of tests/golden/engine; aborts if it is not there.
nlohmann::json ReadGolden(std::string_view file);

// Case names to their specs.
const nlohmann::json& LoadCases();

void WriteCheckpoint(const nlohmann::json& spec, const TempDir& dir);

// One product as a quantiser leaves it.
struct CodedProduct {
  FileTensors tensors = {};          // by what stands behind the product's name
  std::vector<double> numbers = {};  // [rows, cols], that they stand for
};

struct CodedForm {
  nlohmann::json config;  // quantization_config
  // REQUIRES: rows and cols are multiples of 8.
  CodedProduct (*make)(size_t rows, size_t cols, std::mt19937& random);
};

// By name: gptq_act_order, gptq_orders_apart, awq, packed_int4, int8, w8a8,
// fp8, fp8_blocks.
const std::map<std::string, CodedForm>& CodedForms();

// Writes the case's checkpoint with its layers' products coded into `coded`,
// and into `plain` (null: nowhere) the same in the numbers that they stand for,
// rounded to f32.
void WriteCoded(const nlohmann::json& spec, const CodedForm& form,
                const TempDir& coded, const TempDir* plain);

// An adapter of tests/golden/engine/adapters.json.
void WriteAdapter(const nlohmann::json& adapter, const TempDir& dir);

// The ids that the goldens' prompts of this length have.
std::vector<int32_t> PromptIds(const nlohmann::json& spec, int length);

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_CHECKPOINT_MAKER_H_
