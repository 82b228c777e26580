# Block accounting and scheduling.
tandem_test(kv_pool_test SRCS kv_pool_test.cc DEPS tandem_engine_core
            LABELS unit tsan)
tandem_test(block_file_test SRCS block_file_test.cc DEPS tandem_engine_core
            LABELS unit tsan)
tandem_test(kv_offload_test SRCS kv_offload_test.cc DEPS tandem_engine_testing)
tandem_test(block_hash_test SRCS block_hash_test.cc DEPS tandem_engine_core)
tandem_test(virtual_loop_test SRCS virtual_loop_test.cc
            DEPS tandem_common_testing)
tandem_test(fake_executor_test SRCS fake_executor_test.cc
            DEPS tandem_engine_testing)
tandem_test(logit_edits_test SRCS logit_edits_test.cc DEPS tandem_engine_core)
tandem_test(drafter_test SRCS drafter_test.cc DEPS tandem_engine_core)
tandem_test(draft_length_test SRCS draft_length_test.cc
            DEPS tandem_engine_core)
tandem_test(engine_test SRCS engine_test.cc DEPS tandem_engine_testing
            LABELS unit tsan)
tandem_test(engine_blocks_test SRCS engine_blocks_test.cc
            DEPS tandem_engine_testing)
tandem_test(engine_ahead_test SRCS engine_ahead_test.cc
            DEPS tandem_engine_testing)
tandem_test(beam_search_test SRCS beam_search_test.cc DEPS tandem_engine_core)
tandem_test(engine_beams_test SRCS engine_beams_test.cc
            DEPS tandem_engine_testing LABELS unit tsan)
tandem_test(engine_scoring_test SRCS engine_scoring_test.cc
            DEPS tandem_engine_testing)
tandem_test(engine_speculation_test SRCS engine_speculation_test.cc
            DEPS tandem_engine_testing)
tandem_test(engine_constraint_test SRCS engine_constraint_test.cc
            DEPS tandem_engine_testing)
tandem_test(engine_draft_model_test SRCS engine_draft_model_test.cc
            DEPS tandem_engine_testing)
tandem_test(work_test SRCS work_test.cc DEPS tandem_engine_testing)
tandem_test(engine_window_test SRCS engine_window_test.cc
            DEPS tandem_engine_testing)
tandem_test(engine_soak_test SRCS engine_soak_test.cc
            DEPS tandem_engine_testing LABELS sim tsan)
if(NOT TANDEM_SANITIZE MATCHES "thread")  # which has an operator new of its own
  tandem_test(engine_allocation_test SRCS engine_allocation_test.cc
              DEPS tandem_engine_core tandem_common_testing)
endif()
