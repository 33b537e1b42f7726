{{/* Roles of engines. All take a dict of root, role (its name) and engine (its values). */}}

{{- define "moongate.engine.role" -}}
{{- $engine := .engine }}
{{- $role := .role }}
{{- $autoscaling := $engine.autoscaling | default dict }}
{{- $replicas := hasKey $engine "replicas" | ternary $engine.replicas 1 }}
{{- $scaled := or $autoscaling.enabled .root.Values.planner.enabled }}
{{- if $scaled }}
{{- /* The autoscaler, or the planner, writes its number of replicas to the scaling adapter; the group must be written with the same number. */}}
{{- $name := printf "%s-%s" (include "moongate.name" .root) $role }}
{{- $adapter := lookup "workloads.x-k8s.io/v1alpha2" "RoleBasedGroupScalingAdapter" .root.Release.Namespace $name }}
{{- $replicas = dig "spec" "replicas" (ternary $autoscaling.minReplicas $replicas (eq true $autoscaling.enabled)) ($adapter | default dict) }}
{{- end }}
name: {{ $role }}
replicas: {{ $replicas }}
{{- $store := .root.Values.store.enabled | ternary (list (include "moongate.store.entry" .root)) list }}
{{- with hasKey $engine "dependencies" | ternary $engine.dependencies $store }}
dependencies: {{ toJson . }}
{{- end }}
{{- if $scaled }}
scalingAdapter: { enable: true }
{{- end }}
{{- $drain := .root.Values.engineDrain }}
{{- if $drain.enabled }}
{{- include "moongate.drain.check" . }}
# The operator calls the sidecar's upgrade hooks before and after it restarts the engine in place.
annotations: { moongate.io/upgrade-hooks: "{{ $drain.sidecar.port }}", moongate.io/upgrade-timeout: {{ $drain.limitSeconds }}s }
{{- end }}
{{ include "moongate.rollout" . }}
{{- if include "moongate.multinode" . }}
leaderWorkerPattern:
  {{- include "moongate.multinode.pattern" . | trim | nindent 2 }}
{{- else }}
standalonePattern:
  template:
    {{- include "moongate.engine.template" . | trim | nindent 4 }}
{{- end }}
{{- end }}

{{/* Pod template of an engine; of one that spans several machines, the part that leader and workers have in common. */}}
{{- define "moongate.engine.template" -}}
{{- $engine := .engine }}
{{- $drain := .root.Values.engineDrain }}
metadata:
  labels: {{- include "moongate.selector" (dict "root" .root "component" "engine") | nindent 4 }}
  annotations: {{ include "moongate.engine.annotations" . }}
spec:
  {{- $spec := eq $engine.engine "simulated" | ternary (include "moongate.pod.security" . | fromYaml) dict }}
  {{- $_ := set $spec "automountServiceAccountToken" false }}
  {{- $container := include "moongate.engine.container" . | fromYaml }}
  {{- if include "moongate.multinode" . }}
  {{- $container = omit $container "startupProbe" "readinessProbe" "livenessProbe" "lifecycle" }}
  {{- end }}
  {{- $_ := set $spec "containers" (list $container) }}
  {{- $shared := dict "name" "shared-memory" "emptyDir" (dict "medium" "Memory" "sizeLimit" ($engine.sharedMemory | default "16Gi")) }}
  {{- $volumes := list $shared }}
  {{- if include "moongate.engine.reads" . }}
  {{- $configMap := dict "name" (printf "%s-mooncake" (include "moongate.name" .root)) }}
  {{- $volumes = append $volumes (dict "name" "mooncake" "configMap" $configMap) }}
  {{- end }}
  {{- if include "moongate.engine.authenticated" . }}
  {{- $volumes = concat $volumes (include "moongate.store.tls.volume" .root | fromYamlArray) }}
  {{- end }}
  {{- $volumes = concat $volumes (include "moongate.models.volumes" . | fromYamlArray) }}
  {{- if $drain.enabled }}
  {{- $_ := set $spec "terminationGracePeriodSeconds" (include "moongate.drain.grace" . | int) }}
  {{- if not (include "moongate.multinode" .) }}
  {{- $_ := set $spec "initContainers" (list (include "moongate.drain.sidecar" . | fromYaml)) }}
  {{- end }}
  {{- $volumes = concat $volumes (include "moongate.drain.volumes" . | fromYamlArray) }}
  {{- end }}
  {{- $_ := set $spec "volumes" $volumes }}
  {{- with include "moongate.engine.spread" . | fromYamlArray }}
  {{- $_ := set $spec "topologySpreadConstraints" . }}
  {{- end }}
  {{- include "moongate.pod.spec" (dict "root" .root "spec" $spec "values" $engine) | nindent 2 }}
{{- end }}

{{/* Labels of the pods of one role. */}}
{{- define "moongate.engine.selector" -}}
{{ include "moongate.selector" (dict "root" .root "component" "engine") }}
rbg.workloads.x-k8s.io/role-name: {{ .role }}
{{- end }}

{{- define "moongate.engine.spread" -}}
{{- $selector := dict "matchLabels" (include "moongate.engine.selector" . | fromYaml) }}
{{- $defaults := dict "maxSkew" 1 "whenUnsatisfiable" "ScheduleAnyway" "labelSelector" $selector }}
{{- range .engine.topologySpread }}
- {{ merge (dict) . $defaults | toJson }}
{{- end }}
{{- end }}

{{/* `true` if the engine stores pages in the KV store, else empty. */}}
{{- define "moongate.engine.stores" -}}
{{- $mode := .engine.mode | default "plain" }}
{{- $stores := eq .engine.engine "vllm" | ternary (eq (.engine.connector | default "") "store") (ne $mode "decode") }}
{{- if and .root.Values.store.enabled $stores }}true{{ end }}
{{- end }}

{{/* `true` if the engine has a certificate for the KV store, else empty. */}}
{{- define "moongate.engine.authenticated" -}}
{{- if and (include "moongate.store.authenticated" .root) (include "moongate.engine.stores" .) }}true{{ end }}
{{- end }}

{{/* `true` if the engine reads the store's settings from a file, as vLLM's MooncakeStoreConnector does, else empty. */}}
{{- define "moongate.engine.reads" -}}
{{- if and .root.Values.store.enabled (eq (.engine.connector | default "") "store") }}true{{ end }}
{{- end }}

{{/* Annotations that the gateway's discovery reads. */}}
{{- define "moongate.engine.annotations" -}}
{{- $mode := .engine.mode | default "plain" }}
{{- $base := dict "moongate.io/role" $mode "moongate.io/port" "8000" }}
{{- if and (eq $mode "prefill") (or (ne .engine.engine "vllm") (eq (.engine.connector | default "") "mooncake")) }}
{{- $_ := set $base "moongate.io/bootstrap-port" "8998" }}
{{- end }}
{{- if ne .engine.engine "simulated" }}
{{- $_ := set $base "moongate.io/engine" .engine.engine }}
{{- end }}
{{- if and (eq .engine.engine "vllm") (ne $mode "plain") }}
{{- $_ := set $base "moongate.io/kv-connector" .engine.connector }}
{{- end }}
{{- include "moongate.annotations" (dict "root" .root "port" 8000 "base" $base "given" .engine.podAnnotations) }}
{{- end }}

{{- define "moongate.engine.container" -}}
{{- $engine := .engine }}
{{- $images := dict "sglang" "lmsysorg/sglang:v0.5.23" "vllm" "vllm/vllm-openai:v0.32.0" "simulated" (include "moongate.image" .root) -}}
name: engine
image: {{ $engine.image | default (get $images $engine.engine) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- if $engine.command }}
command: {{- toYaml $engine.command | nindent 2 }}
{{- else if eq $engine.engine "sglang" }}
command: [python3, -m, sglang.launch_server]
{{- else if eq $engine.engine "vllm" }}
command: [vllm, serve]
{{- end }}
args:
  {{- if not $engine.command }}{{ include (printf "moongate.%s.args" $engine.engine) . | trim | nindent 2 }}
  {{- with include "moongate.multinode.args" . | trim }}{{ . | nindent 2 }}{{ end }}
  {{- end }}
  {{- range $engine.args }}
  - {{ quote . }}
  {{- end }}
env: {{- include "moongate.env" (dict "base" (include "moongate.engine.env" . | fromYamlArray) "given" $engine.env) | nindent 2 }}
ports:
  - { name: http, containerPort: 8000 }
  - { name: bootstrap, containerPort: 8998 }
  - { name: kv-events, containerPort: 5557 }
  - { name: kv-replay, containerPort: 5657 }
# One hour for loading the model.
startupProbe:
  httpGet: { path: /health, port: http }
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 720
  {{- include "moongate.drain.failed" . | nindent 2 }}
readinessProbe:
  httpGet: { path: /health, port: http }
  timeoutSeconds: 5
livenessProbe:
  httpGet: { path: /health, port: http }
  periodSeconds: 30
  timeoutSeconds: 20
  failureThreshold: 5
  {{- include "moongate.drain.failed" . | nindent 2 }}
{{- if .root.Values.engineDrain.enabled }}
{{- with include "moongate.drain.lifecycle" . | trim }}
lifecycle: {{- . | nindent 2 }}
{{- end }}
{{- end }}
resources: {{- toYaml ($engine.resources | default dict) | nindent 2 }}
volumeMounts:
  - { name: shared-memory, mountPath: /dev/shm }
  {{- if include "moongate.engine.reads" . }}
  - { name: mooncake, mountPath: /etc/mooncake, readOnly: true }
  {{- end }}
  {{- if include "moongate.engine.authenticated" . }}
  {{- include "moongate.store.tls.mount" .root | nindent 2 }}
  {{- end }}
  {{- with include "moongate.models.mounts" . | trim }}{{ . | nindent 2 }}{{ end }}
{{- if eq $engine.engine "simulated" }}
{{ include "moongate.container.security" . }}
{{- end }}
{{- end }}

{{/* Environment variables with the addresses of the store, and of the model's source. */}}
{{- define "moongate.engine.env" -}}
{{- $values := .root.Values }}
{{- include "moongate.models.env" . }}
{{- if and $values.store.enabled (ne .engine.engine "simulated") }}
- { name: MOONCAKE_MASTER, value: "{{ include "moongate.master" .root }}:50051" }
- { name: MOONCAKE_TE_META_DATA_SERVER, value: {{ quote $values.store.metadata }} }
- { name: MOONCAKE_LOCAL_HOSTNAME, value: $(POD_IP) }
- { name: MOONCAKE_GLOBAL_SEGMENT_SIZE, value: "0" }
- { name: MOONCAKE_PROTOCOL, value: tcp }
# Without it, clients wait 30 s if the master's machine hangs.
- { name: MC_RPC_TIMEOUT_MS, value: "1000" }
{{- end }}
{{- if eq .engine.engine "vllm" }}
- { name: VLLM_MOONCAKE_BOOTSTRAP_PORT, value: "8998" }
- { name: VLLM_NIXL_SIDE_CHANNEL_HOST, value: $(POD_IP) }
{{- if include "moongate.multinode" . }}
- { name: VLLM_HOST_IP, value: $(POD_IP) }
{{- end }}
{{- if include "moongate.engine.reads" . }}
- { name: MOONCAKE_CONFIG_PATH, value: /etc/mooncake/mooncake.json }
{{- end }}
{{- end }}
{{- end }}
