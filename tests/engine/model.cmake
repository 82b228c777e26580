# Checkpoints, the forward pass and the device executor.
tandem_test(safetensors_test SRCS safetensors_test.cc DEPS tandem_engine_model)
tandem_test(model_config_test SRCS model_config_test.cc
            DEPS tandem_engine_model)
tandem_fuzzer(fuzz_safetensors SRCS fuzz_safetensors.cc
              DEPS tandem_engine_model
              CORPUS ${CMAKE_CURRENT_SOURCE_DIR}/corpus/safetensors)
tandem_fuzzer(fuzz_config SRCS fuzz_config.cc DEPS tandem_engine_model
              CORPUS ${CMAKE_CURRENT_SOURCE_DIR}/corpus/config)
