# Checkpoints, the forward pass and the device executor.
tandem_test(engine_model_test
  SRCS checkpoint/experts_config_test.cc checkpoint/fp4_tensors_test.cc
       checkpoint/hostile_config_test.cc checkpoint/model_config_test.cc
       checkpoint/latent_config_test.cc
       checkpoint/gemma4_config_test.cc checkpoint/parallel_config_test.cc
       checkpoint/quantisation_test.cc checkpoint/quantised_tensors_test.cc
       checkpoint/rope_config_test.cc checkpoint/safetensors_test.cc
       model/layer_groups_test.cc model/layer_parts_test.cc
       model/step_layout_test.cc
  DEPS tandem_engine_model tandem_common)
tandem_fuzzer(fuzz_safetensors SRCS checkpoint/fuzz_safetensors.cc
              DEPS tandem_engine_model
              CORPUS ${CMAKE_CURRENT_SOURCE_DIR}/corpus/safetensors)
tandem_fuzzer(fuzz_config SRCS checkpoint/fuzz_config.cc DEPS tandem_engine_model
              CORPUS ${CMAKE_CURRENT_SOURCE_DIR}/corpus/config)
tandem_fuzzer(fuzz_lora SRCS model/fuzz_lora.cc DEPS tandem_engine_model
              CORPUS ${CMAKE_CURRENT_SOURCE_DIR}/corpus/lora)

# With a backend to run on: the rig, and what stands on it.
if(TARGET tandem_kernels)
  tandem_library(tandem_engine_rig
    SRCS checkpoint_maker.cc rig.cc
        DEPS tandem_engine_model tandem_kernels tandem_common)
  target_compile_definitions(tandem_engine_rig PRIVATE
    TANDEM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  tandem_test(golden_test SRCS golden_test.cc model/coded_weights_test.cc
              model/lora_test.cc model/model_test.cc
              DEPS tandem_engine_rig LABELS golden TIMEOUT 600)
  tandem_test(numerics_test SRCS numerics_test.cc
              DEPS tandem_engine_rig tandem_kernels_testing
              LABELS unit slow-sanitized TIMEOUT 600)
  tandem_test(device_executor_test SRCS device/device_executor_test.cc
              DEPS tandem_engine_rig tandem_kernels_testing
              LABELS unit tsan)
  if(TARGET tandem_cuda_testing)
    tandem_library(tandem_engine_test_device
      SRCS test_device.cc
            DEPS tandem_cuda_loader tandem_cuda_testing)
    tandem_nightly_library(tandem_engine_test_device)
    # The engine on a GPU, or where there is none on the emulated one.
    tandem_test(device_test
      SRCS attention_output_test.cc beams_golden_test.cc cuda_engine_test.cc
           device_golden_test.cc device_speculation_test.cc mixed_window_test.cc
           quality_test.cc run_ahead_test.cc scoring_golden_test.cc
           window_test.cc
      DEPS tandem_engine_rig tandem_engine_test_device tandem_engine_testing
           tandem_kernels_testing
      LABELS unit slow-sanitized TIMEOUT 900)
    if(TANDEM_CUDA)
      add_dependencies(cuda-parts device_test)
    endif()
  endif()
endif()

if(TARGET tandem_engine_test_device AND NOT TANDEM_SANITIZE)
  # The same checkpoints through an independent float64 forward, live. Needs
  # NumPy (the venv of the build folder has it) and skips visibly without.
  add_executable(engine_probe engine_probe.cc)
  target_link_libraries(engine_probe PRIVATE tandem_engine_rig
                                             tandem_engine_test_device)
  target_compile_options(engine_probe PRIVATE ${TANDEM_WARNINGS})
  set_target_properties(engine_probe PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  find_program(TANDEM_PYTHON3 python3)
  if(TANDEM_PYTHON3)
    add_test(NAME numpy_oracle_test
             COMMAND ${TANDEM_PYTHON3}
                     ${PROJECT_SOURCE_DIR}/tools/oracle/compare_numpy.py
                     --probe $<TARGET_FILE:engine_probe>)
    # Quantised checkpoints of each format that is read, made on the spot.
    add_test(NAME quantised_oracle_test
             COMMAND ${TANDEM_PYTHON3}
                     ${PROJECT_SOURCE_DIR}/tools/oracle/compare_quantised.py
                     --probe $<TARGET_FILE:engine_probe>)
    set_tests_properties(numpy_oracle_test quantised_oracle_test PROPERTIES
                         LABELS golden TIMEOUT 600 SKIP_RETURN_CODE 77)
  endif()
endif()
