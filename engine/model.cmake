# Checkpoints, the forward pass, and its executor on a kernels::Backend.
find_package(nlohmann_json REQUIRED)
tandem_library(tandem_engine_model
  SRCS config_fields.cc device_executor.cc executor_memory.cc families.cc file.cc
       fingerprint.cc forward.cc json.cc kv_transfers.cc layer_parts.cc
       lora_adapter.cc lora_layout.cc lora_slots.cc mask_threads.cc model.cc
       model_config.cc model_work.cc quantisation.cc quantised_tensors.cc
       recorded_decodes.cc rope.cc rope_config.cc safetensors.cc
       safetensors_header.cc step_check.cc step_layout.cc widen.cc
  DEPS tandem_engine_core nlohmann_json::nlohmann_json OpenSSL::Crypto
       Threads::Threads
       absl::any_invocable absl::flat_hash_map absl::flat_hash_set
       absl::function_ref absl::inlined_vector absl::span absl::status
       absl::statusor absl::strings
       absl::str_format absl::time)
