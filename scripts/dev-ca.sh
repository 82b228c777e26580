#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A certificate authority and certificates for a cluster on this machine, for
# development and tests: DIR/ca.pem, DIR/NAME.pem and DIR/NAME.key, valid for 30
# days for localhost and 127.0.0.1, the authority for a year. One that is there
# already is kept.
#
#   scripts/dev-ca.sh DIR                 router prefill decode operator client
#   scripts/dev-ca.sh DIR NAME...         only these
#
# NAME is a role, ROLE/WORKER-ID for one worker alone (DIR/ROLE-WORKER-ID.pem),
# or `serve`: one certificate with all roles, for `tandem serve`.
set -euo pipefail

if [ $# -eq 0 ] || [ "${1#-}" != "$1" ]; then
  sed -n '3,12s/^# \{0,1\}//p' "$0"
  exit 2
fi
mkdir -p "$1"
cd "$1"
shift
[ $# -gt 0 ] || set -- router prefill decode operator client

KEY=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
umask 077
uri() { echo "URI:spiffe://tandem/$1"; }

[ -e ca.key ] || openssl req -x509 "${KEY[@]}" -keyout ca.key -out ca.pem \
  -subj "/CN=Tandem development CA" -days 365 2>/dev/null
if ! openssl x509 -in ca.pem -noout -checkend $((30 * 86400)) > /dev/null; then
  echo "dev-ca.sh: $PWD/ca.pem ends within 30 days: remove it and ca.key for a new authority" >&2
  exit 1
fi

for name in "$@"; do
  case $name in
    serve) uris=$(uri router),$(uri prefill),$(uri decode),$(uri operator),$(uri client) ;;
    router | prefill | decode | operator | client | prefill/* | decode/*)
      uris=$(uri "$name")
      ;;
    *)
      echo "dev-ca.sh: '$name' is no role (router, prefill, decode, operator, client, serve)" >&2
      exit 2
      ;;
  esac
  file=${name//\//-}
  openssl req "${KEY[@]}" -keyout "$file.key" -subj "/CN=$file" 2>/dev/null |
    openssl x509 -req -CA ca.pem -CAkey ca.key -days 30 -out "$file.pem" \
      -set_serial "0x$(openssl rand -hex 16)" \
      -extfile <(printf '%s\n' \
        "subjectAltName=DNS:localhost,IP:127.0.0.1,$uris" \
        'keyUsage=critical,digitalSignature' \
        'extendedKeyUsage=serverAuth,clientAuth') 2>/dev/null
done
