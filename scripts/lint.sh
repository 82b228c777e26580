#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formats (all files) and clang-tidy (files that changed since LINT_BASE, by
# default the parent of the last landing; `--all` for every file).
source "$(dirname "$0")/lib.sh"
cd "$ROOT"

mapfile -t sources < <(git ls-files '*.cc' '*.h')
clang-format-14 --dry-run --Werror "${sources[@]}" ||
  die "formats differ: run clang-format-14 -i on the files above"

"$BUILD/venv/bin/ruff" check --quiet tools scripts tests ||
  die "ruff found faults in the Python files above"

if [ "${1:-}" = --all ]; then
  mapfile -t changed < <(git ls-files '*.cc')
else
  base=${LINT_BASE:-$(git rev-parse -q --verify HEAD~1 || git hash-object -t tree /dev/null)}
  mapfile -t changed < <(git diff --name-only --diff-filter=d "$base" -- '*.cc')
fi
[ -e "$BUILD/release/compile_commands.json" ] ||
  die "no build/release: run scripts/test.sh release first"
tidy() {
  printf '%s\n' "${changed[@]}" | grep -vE '^tests/|^$' |
    xargs -r -n 1 -P "$(nproc)" clang-tidy-14 --quiet -p "$BUILD/release" \
      --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-unused-command-line-argument
}
step clang-tidy "clang-tidy (${#changed[@]} changed files)" tidy
