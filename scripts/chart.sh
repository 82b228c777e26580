#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The Helm chart by Kubernetes' own tools: helm lint, kubeconform, kube-score,
# yamllint, and a real kube-apiserver. They are built from source the first
# time: about 20 min on two cores, then a minute.
#
#   scripts/chart.sh              all checks
#   scripts/chart.sh --quick      without the API server
#   scripts/chart.sh --write      render the examples anew into deploy/kubernetes
source "$(dirname "$0")/lib.sh"
source "$(dirname "$0")/tools.sh"

KUBERNETES=1.34.2
CHART=$ROOT/deploy/helm/tandem
RENDERED=$ROOT/deploy/kubernetes
OUT=$BUILD/chart
mode=${1:-all}
case $mode in
  all | --quick | --write) ;;
  *) die "unknown option '$mode' (--quick, --write)" ;;
esac

use_go
go_tool helm helm.sh/helm/v3 v3.19.2 helm.sh/helm/v3/cmd/helm
helm=$TOOLS/bin/helm
export HELM_CACHE_HOME=$OUT/helm HELM_CONFIG_HOME=$OUT/helm HELM_DATA_HOME=$OUT/helm
mkdir -p "$OUT"

# render RELEASE ARGUMENTS...: as `helm template` has it, without its comments
# on where an object is from.
render() {
  "$helm" template "$1" "$CHART" --namespace tandem \
    --kube-version "$KUBERNETES" "${@:2}" | grep -v '^# Source: '
}
for values in "$CHART"/examples/*.yaml; do
  name=$(basename "$values")
  render tandem -f "$values" >"$OUT/$name"
  if [ "$mode" = --write ]; then cp "$OUT/$name" "$RENDERED/$name"; fi
  cmp "$OUT/$name" "$RENDERED/$name" ||
    die "deploy/kubernetes/$name is not what the chart renders: scripts/chart.sh --write"
done
if [ "$mode" = --write ]; then exit 0; fi

python_tools "$ROOT/scripts/deploy-requirements.txt"
go_tool kubeconform github.com/yannh/kubeconform v0.7.0 \
  github.com/yannh/kubeconform/cmd/kubeconform
go_tool kube-score github.com/zegl/kube-score v1.20.0 \
  github.com/zegl/kube-score/cmd/kube-score

lint() {
  local values
  "$helm" lint --strict --quiet "$CHART" || return 1
  for values in "$CHART"/examples/*.yaml; do
    "$helm" lint --strict --quiet "$CHART" -f "$values" || return 1
  done
  "$TOOLS/venv/bin/yamllint" --strict -d '{extends: default, rules:
    {document-start: disable, line-length: {max: 100}, braces: {max-spaces-inside: 0},
     brackets: {max-spaces-inside: 0}, comments: {min-spaces-from-content: 2},
     truthy: {check-keys: false}}}' "$CHART"/*.yaml "$CHART"/examples
}
step chart-lint "helm lint, yamllint" lint

# refuses MESSAGE ARGUMENTS...: contradictions do not render.
refuses() {
  local said
  said=$(render tandem "${@:2}" 2>&1) || true
  [[ $said == *"$1"* ]] || die "with ${*:2} the chart should say '$1', but says:
$(tail -n 3 <<<"$said")"
}
refuses 'set tls.existingSecret, or' --set tls.enabled=true
refuses 'need tls.enabled' --set tls.existingSecret=x
refuses 'exclude each other' --set tls.enabled=true,tls.existingSecret=x \
  --set tls.certManager.enabled=true
refuses 'issuerRef.name' --set tls.enabled=true,tls.certManager.enabled=true
refuses 'the chart sets --port itself' --set decode.args.port=1
refuses 'the chart sets --ssl-certfile itself' --set router.args.ssl-certfile=x
refuses 'the chart sets --allow-plaintext itself' \
  --set decode.args.allow-plaintext=true
refuses 'the chart sets --api-keys-file itself' \
  --set router.args.api-keys-file=x
refuses 'probes show no certificate' --set router.args.ssl-ca-certs=x
refuses 'whoever reads the pod' --set router.args.api-key=x
refuses 'keda needs a Prometheus' --set autoscaling.kind=keda \
  --set decode.autoscaling.enabled=true
refuses 'is above maxReplicas' --set decode.autoscaling.enabled=true \
  --set decode.autoscaling.minReplicas=9
refuses 'way nccl needs handoff.nccl' --set handoff.way=nccl
refuses 'rdma.enabled needs handoff.nccl' --set handoff.rdma.enabled=true \
  --set handoff.rdma.resource=rdma/x
refuses 'hostNetwork needs networkPolicy.enabled=false' \
  --set handoff.rdma.enabled=true,handoff.rdma.hostNetwork=true \
  --set handoff.rdma.resource=rdma/x,handoff.nccl=true
refuses "additional properties 'replica' not allowed" --set decode.replica=2

# Custom resources are left to their operators.
CUSTOM=Certificate,PodMonitor,PrometheusRule,ScaledObject
# The oldest that the chart promises, ours, and the newest with schemas.
VERSIONS=(v1.30.0 v1.34.0 v1.37.0)
conform() {
  local version from to
  from=$("$TOOLS/venv/bin/python" -c 'import kubernetes_validate as k, os
print(os.path.dirname(k.__file__))')/kubernetes-json-schema || return 1
  for version in "${VERSIONS[@]}"; do
    to=$OUT/schemas/$version
    if [ ! -e "$to" ]; then
      # As files that name each other.
      mkdir -p "$to" && cp "$from/$version-local-strict"/*.json "$to" &&
        sed -i -e 's|/api/_definitions.json|_definitions.json|' \
          -e 's/"$id":/"$comment":/' "$to"/*.json || return 1
    fi
    "$TOOLS/bin/kubeconform" -strict -summary -skip "$CUSTOM" \
      -schema-location "$to/{{.ResourceKind}}{{.KindSuffix}}.json" \
      "$OUT"/*.yaml || return 1
  done
}
step chart-conform "kubeconform (${VERSIONS[*]})" conform

# Left out: a limit on processors, since a throttled step loop stalls every
# stream; when to pull, which is the user's; and temporary storage, of which
# there are only logs.
step chart-score "kube-score" "$TOOLS/bin/kube-score" score --output-format ci \
  --kubernetes-version v1.34 \
  --ignore-container-cpu-limit \
  --ignore-test container-image-pull-policy \
  --ignore-test container-ephemeral-storage-request-and-limit \
  "$OUT"/*.yaml
[ "$mode" = all ] || exit 0

build_apiserver() (
  local folder=$TOOLS/src/kube-apiserver directory
  rm -rf "$folder" && mkdir -p "$folder" "$TOOLS/bin" && cd "$folder" &&
    printf 'module tool\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes v%s\n' \
      "$KUBERNETES" >go.mod &&
    directory=$(go mod download -json "k8s.io/kubernetes@v$KUBERNETES" |
      sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') && [ -n "$directory" ] || return 1
  # Its own parts are folders of its repository there, modules for others.
  sed -n 's|^\t*\(k8s.io/[^ ]*\) => ./staging.*|\1|p' "$directory/go.mod" |
    sort -u | while read -r part; do
    echo "replace $part => $part v0.${KUBERNETES#1.}"
  done >>go.mod
  nice go build -mod=mod -o "$TOOLS/bin/kube-apiserver" \
    k8s.io/kubernetes/cmd/kube-apiserver &&
    echo "$KUBERNETES" >"$TOOLS/kube-apiserver.version"
)
if [ "$(cat "$TOOLS/kube-apiserver.version" 2>/dev/null)" != "$KUBERNETES" ]; then
  step tool-kube-apiserver "kube-apiserver $KUBERNETES" build_apiserver
fi
debian_program etcd etcd-server usr/bin/etcd
step openssl "openssl" debian_packages openssl
step chart-apiserver "objects accepted by kube-apiserver $KUBERNETES" \
  env PATH="$TOOLS/bin:$PATH" "$TOOLS/venv/bin/python" \
  "$ROOT/tests/deploy/apiserver.py" "$OUT"/*.yaml
