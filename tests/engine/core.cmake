# Block accounting and scheduling.
tandem_test(engine_test
  SRCS beam_search_test.cc draft_length_test.cc drafter_test.cc
       engine_ahead_test.cc engine_beams_test.cc engine_blocks_test.cc
       engine_constraint_test.cc engine_draft_model_test.cc
       engine_scoring_test.cc engine_speculation_test.cc engine_test.cc
       engine_window_test.cc fake_executor_test.cc logit_edits_test.cc
       virtual_loop_test.cc work_test.cc
       kv/block_file_test.cc kv/block_hash_test.cc kv/block_parts_test.cc
       kv/kv_offload_test.cc kv/kv_pool_test.cc
  DEPS tandem_engine_testing LABELS unit tsan)
tandem_test(engine_soak_test SRCS engine_soak_test.cc
            DEPS tandem_engine_testing LABELS sim tsan)
if(NOT TANDEM_SANITIZE MATCHES "thread")  # which has an operator new of its own
  tandem_test(engine_allocation_test SRCS engine_allocation_test.cc
              DEPS tandem_engine_core tandem_common_testing)
endif()
