// SPDX-License-Identifier: Apache-2.0
// How a model turns queries and keys, as config.json says it.

#ifndef TANDEM_ENGINE_CHECKPOINT_ROPE_CONFIG_H_
#define TANDEM_ENGINE_CHECKPOINT_ROPE_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "engine/checkpoint/config_fields.h"
#include "engine/checkpoint/families.h"

namespace tandem::engine {

// Of any config: positions are exact in f32 up to here.
inline constexpr int kMaxPositions = 1 << 24;

// Frequencies are theta^(-2 i / rotary_dim), and then:
struct RopeSpec {
  enum class Kind : uint8_t {
    kNone,  // positions are learned
    kDefault,
    kLinear,    // divided by `factor`
    kDynamic,   // of a larger theta, for the positions served
    kYarn,      // short wavelengths kept, long ones divided, a ramp between
    kLongRope,  // divided one by one, by one of two lists
    kLlama3,    // like kYarn, with other limits
    // Of theta^(-2 i / head_dim), divided by `factor`; the first rotary_dim / 2
    // pairs of a whole head turn.
    kProportional,
  };
  Kind kind = Kind::kDefault;
  double theta = 10000;
  int rotary_dim = 0;        // leading dimensions of a head that turn; 0: all
  bool trailing = false;     // its last ones do, not the leading ones
  bool interleaved = false;  // 2i turns with 2i + 1, not with i + half of them
  double factor = 1;
  double attention_factor = 1;     // of cos and sin; kYarn and kLongRope
  int original_max_positions = 0;  // that the model was trained with at first

  // kLlama3: wavelengths beyond original_max_positions / low_freq_factor are
  // stretched by `factor`, those below original_max_positions /
  // high_freq_factor are kept, between is blended.
  double low_freq_factor = 1;
  double high_freq_factor = 4;

  // kYarn: turns within original_max_positions from which on a wavelength is
  // kept, and up to which it is stretched.
  double beta_fast = 32;
  double beta_slow = 1;
  bool truncate = true;    // the ramp's ends to whole pairs
  double score_scale = 1;  // latent attention's scores times this

  // Queries are multiplied by 1 + query_beta * ln(1 + n), where n is how often
  // original_max_positions goes into their position: attention stays as sharp
  // over more keys than the model was trained with.
  double query_beta = 0;

  // kLongRope, [rotary_dim / 2]: up to original_max_positions, and beyond.
  std::vector<double> short_factors = {};
  std::vector<double> long_factors = {};

  // kDynamic and kLongRope: positions of a sequence that are served, which
  // decide the frequencies of all positions, so that no result depends on how
  // long a sequence has become. Set when a model is loaded.
  int served_positions = 0;

  // "", or words for the fingerprint that begin with a space.
  std::string Canonical() const;

  int turned(int head_dim) const {
    return rotary_dim > 0 ? rotary_dim : head_dim;
  }
};

// Reads "rope_theta" and "rope_scaling" as of transformers 4, and both together
// in "rope_parameters" as of transformers 5. `slides`: some layer has a window.
// `local` is that of such layers where the family has one, else as `rope`.
// Raises `max_positions` where the scaling does. `head_dim` is that of layers
// without a window, `local_head_dim` of the rest.
void ReadRope(ConfigFields& fields, const Family& family, int head_dim,
              int local_head_dim, bool slides, int* max_positions,
              RopeSpec* rope, RopeSpec* local);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_ROPE_CONFIG_H_
