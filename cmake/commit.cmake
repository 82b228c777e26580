# Writes the commit of the sources to a header, which is left alone where it is
# right already. Run by every build: -DSOURCE=... -DOUTPUT=...
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND git -C ${SOURCE} rev-parse --short=12 HEAD
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE
                ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT
"#ifndef TANDEM_COMMON_COMMIT_H_
#define TANDEM_COMMON_COMMIT_H_
namespace tandem {
inline constexpr char kCommit[] = \"@commit@\";
}  // namespace tandem
#endif  // TANDEM_COMMON_COMMIT_H_
")
