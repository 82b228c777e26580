{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters: suffixes and ordinals must fit into a label. */}}
{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tandem.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tandem.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tandem.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tandem.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "role" "router") */}}
{{- define "tandem.tlsSecret" -}}
{{- default (printf "%s-%s-tls" (include "tandem.fullname" .root) .role) .root.Values.tls.existingSecret -}}
{{- end -}}

{{/* Namespace's DNS suffix: SERVICE of it is SERVICE.{{ this }}. */}}
{{- define "tandem.domain" -}}
{{- printf "%s.svc.%s" .Release.Namespace .Values.clusterDomain -}}
{{- end -}}

{{/* (dict "root" $ "role" "router") */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ include "tandem.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "tandem.labels" -}}
app.kubernetes.io/name: {{ include "tandem.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/part-of: tandem
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_") }}
{{- end -}}

{{/* Pods of workers, as a NetworkPolicy's or a Service's peer. */}}
{{- define "tandem.workers" -}}
podSelector:
  matchLabels:
    app.kubernetes.io/name: {{ include "tandem.name" . }}
    app.kubernetes.io/instance: {{ .Release.Name }}
  matchExpressions:
    - {key: app.kubernetes.io/component, operator: In, values: [prefill, decode]}
{{- end -}}

{{/* What the values cannot say right is refused here, by name. */}}
{{- define "tandem.check" -}}
{{- $own := list "host" "port" "grpc-port" "internal-host" "internal-port" "admin-port" "router" "worker-id" "advertise-host" "shutdown-timeout" "served-model-name" "handoff" "tls-cert" "tls-key" "tls-ca" "allow-plaintext" "ssl-certfile" "ssl-keyfile" "api-keys-file" "log-format" -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- range $flag, $_ := (index $.Values $role).args -}}
{{- if has $flag $own -}}
{{- fail (printf "%s.args.%s: the chart sets --%s itself; see values.yaml for the value that it comes from" $role $flag $flag) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey (.Values.router.args | default dict) "ssl-ca-certs" -}}
{{- fail "router.args.ssl-ca-certs: Kubernetes' probes show no certificate; ask for clients' ones in front of the routers" -}}
{{- end -}}
{{- if hasKey (.Values.router.args | default dict) "api-key" -}}
{{- fail "router.args.api-key: whoever reads the pod would read the key; use apiKeys, or TANDEM_API_KEY of a Secret in router.env" -}}
{{- end -}}
{{- with .Values.tls -}}
{{- if and .enabled (not .existingSecret) (not .certManager.enabled) -}}
{{- fail "tls.enabled: set tls.existingSecret, or tls.certManager.enabled" -}}
{{- end -}}
{{- if and .existingSecret .certManager.enabled -}}
{{- fail "tls.existingSecret and tls.certManager.enabled exclude each other" -}}
{{- end -}}
{{- if and .certManager.enabled (not .certManager.issuerRef.name) -}}
{{- fail "tls.certManager.issuerRef.name: the issuer that signs the certificate is missing" -}}
{{- end -}}
{{- if and (not .enabled) (or .existingSecret .certManager.enabled) -}}
{{- fail "tls.existingSecret and tls.certManager need tls.enabled" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.handoff.rdma.enabled (not .Values.handoff.rdma.resource) -}}
{{- fail "handoff.rdma.resource: the device plugin's resource is missing, e.g. rdma/hca_shared_devices_a" -}}
{{- end -}}
{{- if and (eq .Values.handoff.way "nccl") (not .Values.handoff.nccl) -}}
{{- fail "handoff.way nccl needs handoff.nccl: the NetworkPolicy keeps its ports closed otherwise" -}}
{{- end -}}
{{- if and .Values.handoff.rdma.enabled (not .Values.handoff.nccl) -}}
{{- fail "handoff.rdma.enabled needs handoff.nccl: only NCCL uses RDMA" -}}
{{- end -}}
{{- if and .Values.handoff.rdma.enabled .Values.handoff.rdma.hostNetwork .Values.networkPolicy.enabled -}}
{{- fail "handoff.rdma.hostNetwork needs networkPolicy.enabled=false: a NetworkPolicy selects no pod of a host's network, so routers would refuse the workers and nothing would close the workers' ports; close them on the machines" -}}
{{- end -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- with (index $.Values $role).autoscaling -}}
{{- if and .enabled (eq $.Values.autoscaling.kind "keda") (not $.Values.autoscaling.prometheusAddress) -}}
{{- fail "autoscaling.prometheusAddress: keda needs a Prometheus to ask" -}}
{{- end -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.autoscaling: minReplicas %v is above maxReplicas %v" $role .minReplicas .maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Flags that a values map asks for, one item each. */}}
{{- define "tandem.flags" -}}
{{- range $flag, $value := . }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $flag | quote }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $flag (join "," $value) | quote }}
{{- else if kindIs "float64" $value }}
- {{ printf "--%s=%s" $flag (toString (ternary (int64 $value) $value (eq (floor $value) $value))) | quote }}
{{- else }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.args" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .role -}}
{{- with $root.Values }}
- {{ .model.path | quote }}
{{- with .model.servedName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
- {{ printf "--host=%s" .bindAddress | quote }}
- --port=8000
- --grpc-port=50051
{{- if eq $.role "router" }}
- {{ printf "--internal-host=%s" .bindAddress | quote }}
- --internal-port=50052
- --admin-port=50053
{{- if .clientTls.existingSecret }}
- --ssl-certfile=/etc/tandem/client-tls/tls.crt
- --ssl-keyfile=/etc/tandem/client-tls/tls.key
{{- end }}
{{- if .apiKeys.existingSecret }}
- {{ printf "--api-keys-file=/etc/tandem/api-keys/%s" .apiKeys.key | quote }}
{{- end }}
{{- else }}
- {{ printf "--router=%s-routers.%s:50052" (include "tandem.fullname" $root) (include "tandem.domain" $root) | quote }}
- --worker-id=$(POD_NAME)
{{- if .tls.enabled }}
- {{ printf "--advertise-host=$(POD_NAME).%s-%s.%s" (include "tandem.fullname" $root) $.role (include "tandem.domain" $root) | quote }}
{{- else }}
- --advertise-host=$(POD_IP)
{{- end }}
- {{ printf "--handoff=%s" .handoff.way | quote }}
{{- end }}
{{- if .tls.enabled }}
- --tls-cert=/etc/tandem/tls/tls.crt
- --tls-key=/etc/tandem/tls/tls.key
- --tls-ca=/etc/tandem/tls/ca.crt
{{- else }}
- --allow-plaintext
{{- end }}
- {{ printf "--shutdown-timeout=%ds" (int $values.shutdownTimeoutSeconds) | quote }}
- --log-format=json
{{- end }}
{{- include "tandem.flags" $values.args }}
{{- end -}}

{{/* A pod's template: metadata and spec, the same for every role. */}}
{{- define "tandem.pod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $worker := ne $role "router" -}}
{{- $values := index $root.Values $role -}}
{{- $rdma := and $worker $root.Values.handoff.rdma.enabled -}}
{{- $https := and (not $worker) $root.Values.clientTls.existingSecret -}}
{{- $keys := and (not $worker) $root.Values.apiKeys.existingSecret -}}
metadata:
  labels:
    # Not the chart's version: a new chart alone restarts nobody.
    {{- include "tandem.selector" . | nindent 4 }}
    app.kubernetes.io/part-of: tandem
    {{- if $worker }}
    llm-d.ai/role: {{ $role }}
    {{- else }}
    # An endpoint picker's pool is of routers, which place requests themselves.
    llm-d.ai/engine-type: tandem
    llm-d.ai/inference-serving: "true"
    {{- end }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ $role }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tandem.serviceAccount" $root }}
  automountServiceAccountToken: false
  # A Service's variables (TANDEM_PORT=tcp://...) would be taken for flags.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $values.preStopSleepSeconds $values.shutdownTimeoutSeconds 10 }}
  {{- if and $rdma $root.Values.handoff.rdma.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  affinity:
    {{- if $values.affinity }}
    {{- toYaml $values.affinity | nindent 4 }}
    {{- else }}
    # One lost machine should not take all workers of a role.
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                {{- include "tandem.selector" . | nindent 16 }}
    {{- end }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ $role }}
      image: {{ include "tandem.image" $root | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [tandem-{{ $role }}]
      args:
        {{- include "tandem.args" . | trim | nindent 8 }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if $rdma }}
        {{- with $root.Values.handoff.rdma.hca }}
        - {name: NCCL_IB_HCA, value: {{ . | quote }}}
        {{- end }}
        {{- with $root.Values.handoff.rdma.socketInterface }}
        - {name: NCCL_SOCKET_IFNAME, value: {{ . | quote }}}
        {{- end }}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: http, containerPort: 8000}
        - {name: grpc, containerPort: 50051}
        {{- if not $worker }}
        - {name: internal, containerPort: 50052}
        {{- end }}
      # HTTP: Kubernetes' own gRPC probes know no TLS.
      startupProbe:
        httpGet: {path: /livez, port: http{{ if $https }}, scheme: HTTPS{{ end }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $values.startupTimeoutSeconds 4) 5 }}
      livenessProbe:
        httpGet: {path: /livez, port: http{{ if $https }}, scheme: HTTPS{{ end }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
        # What is wedged will not drain: the pod's period is not for it.
        terminationGracePeriodSeconds: {{ add $values.preStopSleepSeconds 5 }}
      readinessProbe:
        httpGet: {path: /readyz, port: http{{ if $https }}, scheme: HTTPS{{ end }}}
        periodSeconds: 3
        timeoutSeconds: 3
        failureThreshold: 2
      {{- if $values.preStopSleepSeconds }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ $values.preStopSleepSeconds }}}
      {{- end }}
      resources:
        {{- $resources := deepCopy $values.resources }}
        {{- if $rdma }}
        {{- $_ := set $resources "limits" (mergeOverwrite (default dict $resources.limits) (dict $root.Values.handoff.rdma.resource $root.Values.handoff.rdma.count)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        runAsNonRoot: true
        capabilities:
          drop: [ALL]
      # The last line of a process that ends is its reason.
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if $worker }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $root.Values.model.volume }}
        - {name: model, mountPath: {{ $root.Values.model.mountPath | quote }}, readOnly: true}
        {{- end }}
        {{- if $root.Values.tls.enabled }}
        - {name: tls, mountPath: /etc/tandem/tls, readOnly: true}
        {{- end }}
        {{- if $https }}
        - {name: client-tls, mountPath: /etc/tandem/client-tls, readOnly: true}
        {{- end }}
        {{- if $keys }}
        - {name: api-keys, mountPath: /etc/tandem/api-keys, readOnly: true}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 64Mi}
    {{- if $worker }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.handoff.shmSize }}}
    {{- end }}
    {{- with $root.Values.model.volume }}
    - name: model
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if $root.Values.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ include "tandem.tlsSecret" (dict "root" $root "role" $role) }}
        defaultMode: 0440
    {{- end }}
    {{- with $https }}
    - name: client-tls
      secret: {secretName: {{ . | quote }}, defaultMode: 0440}
    {{- end }}
    {{- with $keys }}
    - name: api-keys
      secret: {secretName: {{ . | quote }}, defaultMode: 0440}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
