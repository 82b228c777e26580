# How every target of the project is declared: one warning set, one include
# root, one place where tests get their label, time limit and test data.

set(TANDEM_WARNINGS -Wall -Wextra -Wvla -Wshadow -Wnon-virtual-dtor
    -Woverloaded-virtual -Wundef -Wno-unused-parameter -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  list(APPEND TANDEM_WARNINGS -Wthread-safety)
endif()

# Sanitizers are here to find faults, not to be fast, and clang spends half of
# its time on optimising what they insert: only what computes is optimised.
# Headers that most files include are parsed once there.
set(TANDEM_COMPUTES "/(kernels|engine|handoff|simulation)")
if(TANDEM_SANITIZE)
  find_package(GTest REQUIRED)
  foreach(level 0 1)
    # Programs are compiled with -fPIE, libraries with -fPIC.
    set(file ${PROJECT_SOURCE_DIR}/cmake/precompiled)
    add_library(precompiled_STATIC_LIBRARY_${level} OBJECT ${file}.cc)
    add_executable(precompiled_EXECUTABLE_${level} ${file}.cc)
    target_link_libraries(precompiled_EXECUTABLE_${level}
                          PRIVATE GTest::gmock GTest::gtest_main)
    target_precompile_headers(precompiled_EXECUTABLE_${level} PRIVATE
                              <gmock/gmock.h> <gtest/gtest.h>)
    foreach(kind STATIC_LIBRARY EXECUTABLE)
      target_precompile_headers(precompiled_${kind}_${level} PRIVATE ${file}.h)
      target_compile_options(precompiled_${kind}_${level} PRIVATE -O${level}
                             "SHELL:-Xclang -fno-pch-timestamp")
    endforeach()
  endforeach()
endif()

# Several files of a target are compiled as one, since headers take half of the
# time; scripts/lint.sh, which parses each file by itself, finds an include that
# is missing. Not kernels, which are compiled once for each instruction set.
function(tandem_unity target)
  if(NOT TANDEM_UNITY OR
     CMAKE_CURRENT_SOURCE_DIR MATCHES "^${PROJECT_SOURCE_DIR}/kernels")
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON
                        UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  set(count 0)
  foreach(source ${sources})
    math(EXPR part "${count} / 16")
    math(EXPR count "${count} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP part_${part})
  endforeach()
endfunction()

# How hard the compiler works on a target of the current folder.
function(tandem_effort target)
  if(NOT TANDEM_SANITIZE)
    return()
  endif()
  set(level 0)
  if(CMAKE_CURRENT_SOURCE_DIR MATCHES "${TANDEM_COMPUTES}")
    set(level 1)
  endif()
  get_target_property(kind ${target} TYPE)
  target_compile_options(${target} PRIVATE -O${level})
  target_precompile_headers(${target} REUSE_FROM precompiled_${kind}_${level})
endfunction()

# Tests are compiled more often than they run: those that compute themselves are
# optimised, under sanitizers only those of kernels and of the handoff.
function(tandem_test_effort target)
  if(NOT TANDEM_SANITIZE)
    if(CMAKE_CURRENT_SOURCE_DIR MATCHES
       "/tests/(engine|handoff|kernels|simulation|text)")
      target_compile_options(${target} PRIVATE -O1)
    else()
      target_compile_options(${target} PRIVATE -O0 -U_FORTIFY_SOURCE)
    endif()
  elseif(CMAKE_CURRENT_SOURCE_DIR MATCHES "/tests/(handoff|kernels)")
    tandem_effort(${target})
  else()
    target_compile_options(${target} PRIVATE -O0)
    target_precompile_headers(${target} REUSE_FROM precompiled_EXECUTABLE_0)
  endif()
endfunction()

# tandem_library(NAME SRCS ... [DEPS ...] [INTERFACE])
function(tandem_library name)
  cmake_parse_arguments(ARG "INTERFACE" "" "SRCS;DEPS" ${ARGN})
  if(ARG_INTERFACE)
    add_library(${name} INTERFACE)
    target_include_directories(${name} INTERFACE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${name} INTERFACE ${ARG_DEPS})
    return()
  endif()
  add_library(${name} STATIC ${ARG_SRCS})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS})
  target_compile_options(${name} PRIVATE ${TANDEM_WARNINGS})
  tandem_effort(${name})
  tandem_unity(${name})
endfunction()

# tandem_binary(NAME SRCS ... [DEPS ...]): lands in <build>/bin
function(tandem_binary name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
  target_compile_options(${name} PRIVATE ${TANDEM_WARNINGS})
  tandem_effort(${name})
  tandem_unity(${name})
  set_target_properties(${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
endfunction()

# What only tests with the label slow-sanitized need, and whose kernels take
# minutes to compile.
function(tandem_nightly_library)
  if(TANDEM_SANITIZE)
    set_target_properties(${ARGN} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endfunction()

# tandem_test(NAME SRCS ... [DEPS ...] [LABELS ...] [TIMEOUT s] [ARGS ...])
# One program and one ctest entry for the files of a folder: headers are most
# of a test's compilation, and a run of thousands of tiny processes would cost
# more than the tests. LABELS: unit (default), golden, integration, sim, and
#   tsan               also runs under ThreadSanitizer, in target tsan-tests
#   no-sanitizer       neither built nor run under sanitizers
#   nightly            built by target nightly-tests, run by scripts/nightly.sh
#   slow-sanitized     that, but under sanitizers alone: it takes minutes there
function(tandem_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SRCS;DEPS;LABELS;ARGS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(TANDEM_SANITIZE AND "no-sanitizer" IN_LIST ARG_LABELS)
    return()
  endif()
  if(TANDEM_SANITIZE AND "slow-sanitized" IN_LIST ARG_LABELS)
    list(APPEND ARG_LABELS nightly)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(TANDEM_SANITIZE AND "slow-sanitized" IN_LIST ARG_LABELS)
    math(EXPR ARG_TIMEOUT "12 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock
                        GTest::gtest GTest::gtest_main)
  target_compile_options(${name} PRIVATE ${TANDEM_WARNINGS})
  tandem_test_effort(${name})
  tandem_unity(${name})
  target_compile_definitions(${name} PRIVATE
    TANDEM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  set_target_properties(${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name} ${ARG_ARGS})
  # Who may take longest begins first, where tests run side by side.
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}"
                       TIMEOUT ${ARG_TIMEOUT} COST ${ARG_TIMEOUT})
  if("tsan" IN_LIST ARG_LABELS)
    set_property(GLOBAL APPEND PROPERTY TANDEM_TSAN_TESTS ${name})
  endif()
  if("nightly" IN_LIST ARG_LABELS)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    set_property(GLOBAL APPEND PROPERTY TANDEM_NIGHTLY_TESTS ${name})
  endif()
endfunction()

# tandem_fuzzer(NAME SRCS ... [DEPS ...] CORPUS dir): with clang and
# TANDEM_FUZZ=ON a libFuzzer binary in <build>/fuzz, its corpus at
# <build>/seeds/NAME, both made by the target `fuzzers`. Always a part of the
# folder's <folder>_corpora_test, which runs the corpora of all targets there.
function(tandem_fuzzer name)
  cmake_parse_arguments(ARG "" "CORPUS" "SRCS;DEPS" ${ARGN})
  get_filename_component(folder ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  set(test ${folder}_corpora_test)
  if(NOT TARGET ${test})
    add_executable(${test} ${PROJECT_SOURCE_DIR}/tests/fuzz_main.cc)
    target_compile_options(${test} PRIVATE ${TANDEM_WARNINGS})
    tandem_test_effort(${test})
    target_include_directories(${test} PRIVATE ${PROJECT_SOURCE_DIR})
    target_compile_definitions(${test} PRIVATE
      TANDEM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    set_target_properties(${test} PROPERTIES
      RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    add_test(NAME ${test}
             COMMAND ${test} "$<TARGET_PROPERTY:${test},TANDEM_CORPORA>"
             COMMAND_EXPAND_LISTS)
    set_tests_properties(${test} PROPERTIES LABELS unit TIMEOUT 300)
  endif()
  target_sources(${test} PRIVATE ${ARG_SRCS})
  target_link_libraries(${test} PRIVATE ${ARG_DEPS})
  set_property(TARGET ${test} APPEND PROPERTY TANDEM_CORPORA
               ${name}=${ARG_CORPUS})
  if(TANDEM_FUZZ)
    add_executable(${name} ${ARG_SRCS})
    target_link_libraries(${name} PRIVATE ${ARG_DEPS} -fsanitize=fuzzer)
    target_compile_options(${name} PRIVATE ${TANDEM_WARNINGS})
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
    target_compile_definitions(${name} PRIVATE TANDEM_LIBFUZZER
      TANDEM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    set_target_properties(${name} PROPERTIES
      RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzz)
    file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/seeds)
    file(CREATE_LINK ${ARG_CORPUS} ${PROJECT_BINARY_DIR}/seeds/${name} SYMBOLIC)
    if(NOT TARGET fuzzers)
      add_custom_target(fuzzers)
    endif()
    add_dependencies(fuzzers ${name})
  endif()
endfunction()
