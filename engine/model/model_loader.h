// SPDX-License-Identifier: Apache-2.0
// Loads one model: which tensors make which matrix. Q, K and V become one
// matrix, and so do gate and up: fewer, wider products. What a layer's
// attention takes is read in load_attention.cc, of latent attention in
// load_latent.cc, its feed-forward part in load_feed_forward.cc, what it is
// told of tokens in load_told.cc.

#ifndef TANDEM_ENGINE_MODEL_MODEL_LOADER_H_
#define TANDEM_ENGINE_MODEL_MODEL_LOADER_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint/model_config.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/model/model.h"
#include "engine/model/weight_packer.h"
#include "kernels/backend.h"

namespace tandem::engine {

// For one call of Load.
class ModelLoader {
 public:
  ModelLoader(const ModelSpec& spec, const Checkpoint& checkpoint,
              const LoadOptions& options, kernels::Backend* backend,
              LoadProgress progress)
      : spec_(spec),
        checkpoint_(checkpoint),
        options_(options),
        backend_(backend),
        packer_(spec, checkpoint, options, backend, progress),
        model_(new Model()) {}

  absl::StatusOr<std::unique_ptr<Model>> Load();

 private:
  absl::Status LoadLayer(int index, Model::Layer& layer);
  absl::Status LoadAttention(int index, Model::Layer& layer);
  absl::Status LoadQkv(int index, Model::Layer& layer);
  absl::Status LoadLatent(int index, Model::Latent& latent);
  absl::Status LoadDense(int index, Model::Layer& layer);
  absl::Status LoadTold(Model::Told& told);
  absl::Status LoadToldLayer(int index, Model::ToldLayer& told);
  absl::Status LoadRouter(int index, Model::Layer& layer);
  absl::Status LoadExpertNorms(int index, Model::Layer& layer);
  absl::Status LoadExperts(int index, Model::Layer& layer);
  absl::Status LoadStackedExperts(int index, Model::Layer& layer);
  absl::Status GroupExperts(int index, Model::Layer& layer);
  // Puts the parts one after another among the f32 vectors; `target` becomes
  // their device address when they are uploaded.
  absl::Status AddVector(const std::vector<TensorPart>& parts,
                         const float** target);
  // A matrix [rows, cols] among the vectors, each row in this order.
  absl::Status AddMatrixValues(const std::string& name, int rows, int cols,
                               const std::vector<int>& order,
                               const float** target);
  // The norm of this name, its numbers in this order.
  absl::Status AddNorm(const std::string& name, int size, Model::Norm& norm,
                       const std::vector<int>& order = {});
  // A layer's; none where that has no name.
  absl::Status AddNorm(int layer, std::string_view part, int size,
                       Model::Norm& norm, const std::vector<int>& order = {});
  absl::Status AddHeadNorms(int layer, std::string_view part, int heads,
                            Model::Norm& norm);
  void AddValues(const std::vector<float>& values, const float** target);
  absl::Status ReadNumber(const std::string& name, float* number);
  void AddRope(RopeSpec& rope, int head_dim, kernels::RopeTable& table);
  absl::Status UploadVectors();
  // As transformers multiplies this tensor: in its type.
  double RoundedScale(const std::string& table, double scale) const;
  bool HasHead() const;
  // A tensor's name in this checkpoint.
  std::string NameOf(std::string_view name, std::string_view what) const;
  std::string NameOf(int layer, std::string_view name,
                     std::string_view what) const;
  absl::Status CheckLimits();

  const ModelSpec& spec_;
  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  kernels::Backend* const backend_;
  WeightPacker packer_;
  std::unique_ptr<Model> model_;
  bool bare_ = false;  // names are without the optional prefix
  std::vector<float> vectors_;
  std::vector<std::pair<size_t, const float**>> targets_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_MODEL_LOADER_H_
