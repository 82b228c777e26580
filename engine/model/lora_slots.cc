// SPDX-License-Identifier: Apache-2.0
#include "engine/model/lora_slots.h"

#include <utility>

namespace tandem::engine {

absl::StatusOr<std::unique_ptr<LoraSlots>> LoraSlots::Create(
    const ModelSpec& spec, int slots, int max_rank, kernels::Backend* backend) {
  std::unique_ptr<LoraSlots> made(
      new LoraSlots(spec, slots, max_rank, backend));
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> images =
      backend->Allocate(static_cast<size_t>(slots * SlotBytes(made->layout_)));
  if (!images.ok()) return images.status();
  made->images_ = *std::move(images);
  return made;
}

void LoraSlots::Put(int slot, const LoraAdapter& adapter,
                    kernels::Queue& queue) {
  const size_t bytes = adapter.image.size() * sizeof(float);
  sections_[static_cast<size_t>(slot)] = adapter.sections;
  backend_->CopyToDevice(queue,
                         images_->data() + static_cast<size_t>(slot) * bytes,
                         adapter.image.data(), bytes);
}

kernels::LoraFactors LoraSlots::Factors(int layer, int section) const {
  const auto* const image = reinterpret_cast<const float*>(images_->data());
  const LoraSection& of = layout_.sections()[static_cast<size_t>(section)];
  return {.a = image + layout_.a(layer, section),
          .b = image + layout_.b(layer, section),
          .rank = reinterpret_cast<const int32_t*>(image) +
                  layout_.rank(layer, section),
          .scale = image + layout_.scale(layer, section),
          .slot_stride = layout_.size(),
          .max_rank = layout_.max_rank(),
          .cols = of.cols,
          .rows = of.rows};
}

}  // namespace tandem::engine
