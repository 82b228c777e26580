// SPDX-License-Identifier: Apache-2.0
// Device memory for the adapters that a model is served with: as many slots as
// were asked for at the start, each with room for the largest rank.

#ifndef TANDEM_ENGINE_MODEL_LORA_SLOTS_H_
#define TANDEM_ENGINE_MODEL_LORA_SLOTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/lora.h"
#include "kernels/backend.h"

namespace tandem::engine {

class LoraSlots {
 public:
  static absl::StatusOr<std::unique_ptr<LoraSlots>> Create(
      const ModelSpec& spec, int slots, int max_rank,
      kernels::Backend* backend);

  const LoraLayout& layout() const { return layout_; }
  int count() const { return static_cast<int>(sections_.size()); }
  // Of one. A CPU takes the memory when something is put there.
  static int64_t SlotBytes(const LoraLayout& layout) {
    return layout.size() * static_cast<int64_t>(sizeof(float));
  }

  // Copies an adapter into a slot, behind what is on the queue already.
  // `adapter` lives until that ran. REQUIRES: no step that is put on a queue
  // later or runs on another one uses what was in the slot.
  void Put(int slot, const LoraAdapter& adapter, kernels::Queue& queue);
  // Sections that the slot's adapter changes, as LoraAdapter has them.
  uint32_t sections(int slot) const { return sections_[slot]; }

  kernels::LoraFactors Factors(int layer, int section) const;

 private:
  LoraSlots(const ModelSpec& spec, int slots, int max_rank,
            kernels::Backend* backend)
      : layout_(spec, max_rank),
        backend_(backend),
        sections_(static_cast<size_t>(slots), 0) {}

  const LoraLayout layout_;
  kernels::Backend* const backend_;
  std::vector<uint32_t> sections_;           // [slots]
  std::unique_ptr<kernels::Buffer> images_;  // [slots, layout.size()]
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_LORA_SLOTS_H_
