#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formats (all files), buf over proto/, and clang-tidy over the .cc files that
# changed since LINT_BASE (default: the last commit older than 12 hours), or
# `--all`. What does not fit into TIDY_MINUTES (default 9) is named and left to
# the nightly run.
source "$(dirname "$0")/lib.sh"
cd "$ROOT"

mapfile -t sources < <(git ls-files '*.cc' '*.h')
clang-format-14 --dry-run --Werror "${sources[@]}" ||
  die "formats differ: run clang-format-14 -i on the files above"

"$BUILD/venv/bin/ruff" check --quiet tools scripts tests sdk ||
  die "ruff found faults in the Python files above"

# proto/released.binpb is what clients out there may have been built from:
#   build/venv/bin/buf build --exclude-source-info -o proto/released.binpb
# makes it anew, at a release.
"$BUILD/venv/bin/buf" lint || die "buf found faults in proto/"
"$BUILD/venv/bin/buf" breaking --against proto/released.binpb ||
  die "proto/ breaks clients that were built before (see buf.yaml)"

[ -e "$BUILD/release/compile_commands.json" ] ||
  die "no build/release: run scripts/test.sh release first"

minutes=${TIDY_MINUTES:-9}
if [ "${1:-}" = --all ]; then
  minutes=600
  mapfile -t changed < <(git ls-files '*.cc' ':!tests' ':!bench')
else
  base=${LINT_BASE:-$(git rev-list -1 --before='12 hours ago' HEAD)}
  [ -n "$base" ] || base=$(git hash-object -t tree /dev/null)
  # Those that changed most come first, those that were only moved last.
  mapfile -t changed < <(git diff -M -z --numstat --diff-filter=d "$base" -- \
    '*.cc' ':!tests' ':!bench' | tr '\0' '\n' |
    awk -F'\t' '$3 == "" { n = $1 + $2; getline; getline; print n "\t" $0; next }
      { print $1 + $2 "\t" $3 }' | sort -rn | cut -f2)
fi

# The build compiles several files as one; here each has its own command, with
# the headers that the build made.
commands_of_files() {
  cmake --preset release -S "$ROOT" -B "$BUILD/lint" -DTANDEM_UNITY=OFF &&
    sed -i "s#$BUILD/lint#$BUILD/release#g" "$BUILD/lint/compile_commands.json"
}
step configure-lint "configure (lint)" commands_of_files

# One file; what was not begun in time goes to a list of its own, so that
# findings end the log.
skipped=$LOGS/clang-tidy-skipped.log
tidy_one() {
  if [ "$(date +%s)" -gt "$2" ]; then
    echo "$1" >>"$4"
    return 0
  fi
  # What needs CUDA's headers is in the other build only.
  local builds=$3 file=$1 preset
  for preset in lint cuda-check cuda; do
    grep -qsF "/$file\"" "$builds/$preset/compile_commands.json" || continue
    clang-tidy-14 --quiet -p "$builds/$preset" \
      --extra-arg=-Wno-unknown-warning-option \
      --extra-arg=-Wno-unused-command-line-argument "$file" 2>/dev/null
    return
  done
  echo "not checked, since it is not built here: $file"
}
export -f tidy_one
tidy() {
  [ ${#changed[@]} -gt 0 ] || return 0
  printf '%s\n' "${changed[@]}" | xargs -r -P "$(nproc)" -I{} \
    bash -c 'tidy_one "$@"' _ {} $(($(date +%s) + minutes * 60)) \
    "$BUILD" "$skipped"
}
: >"$skipped"
step clang-tidy "clang-tidy (${#changed[@]} changed files)" tidy
left=$(wc -l <"$skipped")
[ "$left" = 0 ] || say "clang-tidy: $left files left to scripts/nightly.sh"
