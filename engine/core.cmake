# Block accounting and scheduling: plain single-threaded code that knows no
# tensors. tandem_engine_testing is a device whose KV is a hash of history.
find_package(OpenSSL REQUIRED)

tandem_library(tandem_engine_core
  SRCS beam_search.cc beams.cc draft_length.cc draft_model.cc drafter.cc
       engine.cc logit_edits.cc scheduler.cc sequence_blocks.cc sequences.cc
       speculation.cc step_results.cc work.cc
       kv/block_cells.cc kv/block_file.cc kv/block_hash.cc kv/kv_offload.cc
       kv/kv_pool.cc kv/kv_pool_check.cc
  DEPS tandem_common OpenSSL::Crypto absl::flat_hash_map absl::any_invocable
       absl::span absl::status absl::statusor absl::strings absl::time)

if(NOT TARGET tandem_common_testing)
  add_subdirectory(${PROJECT_SOURCE_DIR}/common/testing
                   ${PROJECT_BINARY_DIR}/common/testing)
endif()
tandem_library(tandem_engine_testing
  SRCS testing/fake_executor.cc testing/fake_grammar.cc testing/fake_model.cc
       testing/noisy_drafter.cc
  DEPS tandem_engine_core tandem_common_testing)
