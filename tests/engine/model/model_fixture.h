// SPDX-License-Identifier: Apache-2.0
// A checkpoint in a folder of its own, loaded on one thread of a CPU.

#ifndef TANDEM_TESTS_ENGINE_MODEL_MODEL_FIXTURE_H_
#define TANDEM_TESTS_ENGINE_MODEL_MODEL_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/model/model.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/rig.h"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {

class ModelTest : public testing::Test {
 protected:
  // Writes the case's checkpoint, but another config.
  void Write(const char* name, const nlohmann::json& config_changes = {}) {
    nlohmann::json spec = LoadCases()[name];
    WriteCheckpoint(spec, dir_);
    if (config_changes.is_null()) return;
    spec["config"].update(config_changes);
    dir_.Write("config.json", spec["config"].dump());
  }

  absl::StatusOr<std::unique_ptr<Model>> Load(const LoadOptions& options = {}) {
    const auto spec = LoadModelSpec(dir_.path());
    if (!spec.ok()) return spec.status();
    checkpoint_ = Checkpoint::Open(dir_.path());
    if (!checkpoint_.ok()) return checkpoint_.status();
    return Model::Load(*spec, *checkpoint_, options, backend_.get(),
                       [&](uint64_t done, uint64_t total) {
                         progress_.push_back(done);
                         total_ = total;
                       });
  }

  std::unique_ptr<kernels::Backend> backend_ = NewCpu(1);
  TempDir dir_;
  absl::StatusOr<Checkpoint> checkpoint_ = absl::UnknownError("not opened");
  std::vector<uint64_t> progress_;
  uint64_t total_ = 0;
};

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_MODEL_MODEL_FIXTURE_H_
