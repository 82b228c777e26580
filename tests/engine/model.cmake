# Checkpoints, the forward pass and the device executor.
tandem_test(safetensors_test SRCS safetensors_test.cc DEPS tandem_engine_model)
tandem_test(model_config_test SRCS model_config_test.cc
            DEPS tandem_engine_model)
tandem_fuzzer(fuzz_safetensors SRCS fuzz_safetensors.cc
              DEPS tandem_engine_model
              CORPUS ${CMAKE_CURRENT_SOURCE_DIR}/corpus/safetensors)
tandem_fuzzer(fuzz_config SRCS fuzz_config.cc DEPS tandem_engine_model
              CORPUS ${CMAKE_CURRENT_SOURCE_DIR}/corpus/config)

# With a backend to run on: the rig, and what stands on it.
if(TARGET tandem_kernels)
  find_package(absl REQUIRED)
  tandem_library(tandem_engine_rig
    SRCS checkpoint_maker.cc rig.cc
    DEPS tandem_engine_model tandem_kernels tandem_common
         absl::synchronization)
  target_compile_definitions(tandem_engine_rig PRIVATE
    TANDEM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  tandem_test(golden_test SRCS golden_test.cc DEPS tandem_engine_rig
              LABELS golden TIMEOUT 600)
  tandem_test(numerics_test SRCS numerics_test.cc
              DEPS tandem_engine_rig tandem_kernels_testing TIMEOUT 600)
  tandem_test(device_executor_test SRCS device_executor_test.cc
              DEPS tandem_engine_rig tandem_kernels_testing)
endif()
