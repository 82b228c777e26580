#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The page in Debian's Chromium against a cluster of real processes: chat, stop,
# failover, figures against the API, accessibility (axe), keyboard, phone width.
# Some two minutes; needs npm's registry the first time.
#
#   scripts/page.sh         test
#   scripts/page.sh docs    and take the pictures of docs/ anew
source "$(dirname "$0")/lib.sh"

pictures=
case ${1-} in
  '') ;;
  docs) pictures=$ROOT/docs ;;
  *) die "unknown argument '$1' (docs)" ;;
esac
"$ROOT/scripts/setup.sh" --page
build release tandem tandem-router tandem-prefill tandem-decode
TOOLS=$BUILD/page
mkdir -p "$TOOLS"
cp "$ROOT"/tests/page/* "$TOOLS/"
step page-tools "Playwright and axe (build/page)" \
  npm install --prefix "$TOOLS" --no-audit --no-fund --silent
SCRIPTED_MODEL=$ROOT/tests/clients/make_scripted_model.py \
  node "$TOOLS/page_test.mjs" "$BUILD/release/bin" "$ROOT/models/tales" $pictures
