# Checkpoints, the forward pass, and its executor on a kernels::Backend.
find_package(nlohmann_json REQUIRED)
tandem_library(tandem_engine_model
  SRCS checkpoint/canonical.cc checkpoint/config_family.cc checkpoint/config_fields.cc
       checkpoint/experts_config.cc checkpoint/families.cc checkpoint/file.cc
       checkpoint/fp4_tensors.cc checkpoint/json.cc checkpoint/layers_config.cc
       checkpoint/model_config.cc
       checkpoint/quantisation.cc checkpoint/quantised_tensors.cc
       checkpoint/rope_config.cc
       checkpoint/safetensors.cc checkpoint/safetensors_header.cc
       checkpoint/widen.cc
       device/device_executor.cc device/executor_memory.cc
       device/kv_transfers.cc device/mask_threads.cc device/recorded_decodes.cc
       device/step_check.cc
       model/fingerprint.cc model/forward.cc model/layer_parts.cc
       model/leftovers.cc model/load_attention.cc model/load_feed_forward.cc model/load_latent.cc model/load_told.cc
       model/lora_adapter.cc model/lora_layout.cc model/lora_slots.cc
       model/model_loader.cc model/model_work.cc model/rope.cc
       model/step_layout.cc model/weight_packer.cc model/workspace.cc
  DEPS tandem_engine_core nlohmann_json::nlohmann_json OpenSSL::Crypto
       Threads::Threads
       absl::any_invocable absl::flat_hash_map absl::flat_hash_set
       absl::function_ref absl::inlined_vector absl::span absl::status
       absl::statusor absl::strings
       absl::str_format absl::time)
