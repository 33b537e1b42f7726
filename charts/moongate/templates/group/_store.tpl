{{/* Roles of the KV store. */}}

{{/* `true` if the store's programs authenticate each other, else empty. */}}
{{- define "moongate.store.authenticated" -}}
{{- if and .Values.store.enabled .Values.store.authentication.secretName }}true{{ end }}
{{- end }}

{{/* Scheme of probes of the store's programs, after the port. Probes have no client certificate; their paths require none. */}}
{{- define "moongate.store.scheme" -}}
{{- if include "moongate.store.authenticated" . }}, scheme: HTTPS{{ end }}
{{- end }}

{{/* TLS flags of the store's programs, with `.dash` between the words of their names. Takes a dict of root and dash. */}}
{{- define "moongate.store.tls" -}}
{{- if include "moongate.store.authenticated" .root }}
{{- $files := dict "cert" "tls.crt" "key" "tls.key" "ca" "ca.crt" }}
{{- range $setting, $file := $files }}
{{ list "store" "tls" $setting | join $.dash }}: /etc/moongate-store-tls/{{ $file }}
{{- end }}
{{ list "store" "tls" "name" | join .dash }}: {{ .root.Values.store.authentication.serverName }}
{{- end }}
{{- end }}

{{- define "moongate.store.tls.volume" -}}
{{- if include "moongate.store.authenticated" . }}
- { name: store-tls, secret: { secretName: {{ .Values.store.authentication.secretName }} } }
{{- end }}
{{- end }}

{{- define "moongate.store.tls.mount" -}}
{{- if include "moongate.store.authenticated" . }}
- { name: store-tls, mountPath: /etc/moongate-store-tls, readOnly: true }
{{- end }}
{{- end }}

{{- define "moongate.rollout" -}}
rolloutStrategy:
  type: RollingUpdate
  rollingUpdate:
    type: InPlaceIfPossible
    maxUnavailable: 1
    inPlaceUpdateStrategy: { gracePeriodSeconds: 5 }
{{- end }}

{{/* Labels that select the masters of a shard. Takes a dict of root and shard, its index. */}}
{{- define "moongate.master.selector" -}}
{{ include "moongate.selector" (dict "root" .root "component" "master") }}
{{- if include "moongate.store.sharded" .root }}
moongate.io/shard: {{ .shard | quote }}
{{- end }}
{{- end }}

{{/* Takes a dict of root and shard, its index: 0 if the store has one. */}}
{{- define "moongate.master.role" -}}
{{- $root := .root }}
{{- $master := $root.Values.store.master }}
{{- $name := include "moongate.master" $root }}
{{- $store := include "moongate.name" $root }}
{{- $suffix := include "moongate.shard.suffix" . }}
{{- $several := gt (int $master.replicas) 1 }}
{{- $config := dict
  "rpc_address" "$(POD_IP)"
  "rpc_port" 50051
  "metrics_port" 9003
  "data_dir" "/var/lib/moongate"
  "enable_kv_events" true
  "kv_events_bind_endpoint" "tcp://0.0.0.0:5557"
  "kv_events_backend_id" $store
  "cluster_id" $store
  "log_format" $root.Values.log.format
  "log_filter" $root.Values.log.filter }}
{{- if include "moongate.store.sharded" $root }}
{{- $_ := set $config "shard" (printf "%d/%s" .shard (include "moongate.store.shards" $root)) }}
{{- /* Masters of several shards on one machine may have the same hostPath. */}}
{{- $_ := set $config "data_dir" (printf "/var/lib/moongate/shard%s" $suffix) }}
{{- end }}
{{- if $several }}
{{- $lease := dict "enable_ha" true "ha_backend_type" "k8s" "ha_backend_connstring" (printf "%s/%s%s" $root.Release.Namespace $name $suffix) }}
{{- $config = merge $config $lease (dict "ha_address" "$(POD_IP):50051") }}
{{- $_ := set $config "cluster_id" (print $store $suffix) }}
{{- end }}
{{- $config = merge $config (include "moongate.store.tls" (dict "root" $root "dash" "_") | fromYaml) }}
{{- if $root.Values.store.nodes.tier.size }}
{{- $config = merge $config (dict "enable_offload" true "offload_on_evict" true "promotion_on_hit" true) }}
{{- end }}
name: mooncake-master{{ $suffix }}
replicas: {{ $master.replicas }}
{{ include "moongate.rollout" $root }}
standalonePattern:
  template:
    metadata:
      labels: {{- include "moongate.master.selector" . | nindent 8 }}
      annotations: {{ include "moongate.annotations" (dict "root" $root "port" 9003 "given" $master.podAnnotations) }}
    spec:
      {{- $spec := include "moongate.pod.security" $root | fromYaml }}
      {{- $_ := set $spec "automountServiceAccountToken" $several }}
      {{- if $several }}{{ $_ := set $spec "serviceAccountName" $name }}{{ end }}
      {{- $container := include "moongate.master.container" (dict "root" $root "config" (merge (dict) $master.config $config)) | fromYaml }}
      {{- $_ := set $spec "containers" (list $container) }}
      {{- $data := merge (dict "name" "data") ($master.volume | default (dict "emptyDir" dict)) }}
      {{- $_ := set $spec "volumes" (prepend (include "moongate.store.tls.volume" $root | fromYamlArray) $data) }}
      {{- include "moongate.pod.spec" (dict "root" $root "spec" $spec "values" $master) | nindent 6 }}
{{- end }}

{{- define "moongate.master.container" -}}
name: master
image: {{ include "moongate.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
  - master
  {{- range $flag, $value := .config }}
  - {{ printf "--%s=%s" $flag (kindIs "float64" $value | ternary (toJson $value) (toString $value)) | quote }}
  {{- end }}
env: {{- include "moongate.env" (dict "base" list "given" .root.Values.store.master.env) | nindent 2 }}
ports:
  - { name: rpc, containerPort: 50051 }
  - { name: admin, containerPort: 9003 }
  - { name: events, containerPort: 5557 }
livenessProbe:
  httpGet: { path: /health, port: admin{{ include "moongate.store.scheme" .root }} }
  periodSeconds: 5
readinessProbe:
  httpGet: { path: /role, port: admin{{ include "moongate.store.scheme" .root }} }
  periodSeconds: 2
resources: {{- toYaml .root.Values.store.master.resources | nindent 2 }}
volumeMounts:
  - { name: data, mountPath: /var/lib/moongate }
  {{- include "moongate.store.tls.mount" .root | nindent 2 }}
{{ include "moongate.container.security" . }}
{{- end }}

{{- define "moongate.node.role" -}}
{{- $nodes := .Values.store.nodes }}
name: mooncake-store
replicas: {{ $nodes.replicas }}
dependencies: [{{ include "moongate.store.entry" . }}]
{{- /* The operator has no certificate for these requests. */}}
{{- if not (include "moongate.store.authenticated" .) }}
# The operator calls the node's upgrade hooks before and after it restarts the node in place, and before it removes the node.
annotations: { moongate.io/upgrade-hooks: "8080", moongate.io/upgrade-timeout: {{ $nodes.drainLimitSeconds }}s }
{{- end }}
{{ include "moongate.rollout" . }}
standalonePattern:
  template:
    metadata:
      labels: {{- include "moongate.selector" (dict "root" . "component" "store") | nindent 8 }}
      {{- $container := dict "kubectl.kubernetes.io/default-container" "store" }}
      annotations: {{ include "moongate.annotations" (dict "root" . "port" 8080 "base" $container "given" $nodes.podAnnotations) }}
    spec:
      {{- $spec := include "moongate.pod.security" . | fromYaml }}
      {{- $_ := set $spec "automountServiceAccountToken" false }}
      {{- $containers := list (include "moongate.node.container" . | fromYaml) }}
      {{- $volumes := list }}
      {{- if eq $nodes.memory "holder" }}
      {{- $containers = prepend $containers (include "moongate.holder.container" . | fromYaml) }}
      {{- $volumes = append $volumes (dict "name" "holder" "emptyDir" dict) }}
      {{- else if eq $nodes.memory "folder" }}
      {{- $volumes = append $volumes (merge (dict "name" "memory") ($nodes.volume | default (dict "emptyDir" (dict "medium" "Memory")))) }}
      {{- end }}
      {{- if $nodes.tier.size }}
      {{- $volumes = append $volumes (merge (dict "name" "tier") ($nodes.tier.volume | default (dict "emptyDir" dict))) }}
      {{- end }}
      {{- $volumes = concat $volumes (include "moongate.store.tls.volume" . | fromYamlArray) }}
      {{- $_ := set $spec "containers" $containers }}
      {{- $_ := set $spec "volumes" $volumes }}
      {{- include "moongate.pod.spec" (dict "root" . "spec" $spec "values" $nodes) | nindent 6 }}
{{- end }}

{{/* Starts before the store: kubelets start containers in the order of the list. */}}
{{- define "moongate.holder.container" -}}
name: holder
image: {{ .Values.store.nodes.holder.repository | default .Values.image.repository }}:{{ .Values.store.nodes.holder.tag }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [store-holder, --socket=/run/moongate/holder]
resources:
  requests: { cpu: 10m, memory: 16Mi }
  limits: { memory: 64Mi }
volumeMounts:
  - { name: holder, mountPath: /run/moongate }
{{ include "moongate.container.security" . }}
{{- end }}

{{- define "moongate.node.container" -}}
{{- $nodes := .Values.store.nodes }}
{{- $where := dict "holder" "holder:/run/moongate/holder" "folder" "folder:/var/lib/moongate/memory" "process" "process" -}}
name: store
image: {{ include "moongate.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - store
  - --port=8080
  - --data-port=13100
  - --memory={{ get $where $nodes.memory }}
  - --allow-peers={{ join "," $nodes.allowPeers }}
  - --log-format={{ .Values.log.format }}
  - --log-filter={{ .Values.log.filter }}
  {{- with $nodes.tier.size }}
  - --tier-size={{ . }}
  {{- end }}
  {{- range $flag, $value := include "moongate.store.tls" (dict "root" $ "dash" "-") | fromYaml }}
  - --{{ $flag }}={{ $value }}
  {{- end }}
{{- $env := list
  (dict "name" "MOONCAKE_LOCAL_HOSTNAME" "value" "$(POD_IP)")
  (dict "name" "MOONCAKE_MASTER" "value" (printf "%s:50051" (include "moongate.master" .)))
  (dict "name" "MOONCAKE_TE_META_DATA_SERVER" "value" .Values.store.metadata)
  (dict "name" "MOONCAKE_GLOBAL_SEGMENT_SIZE" "value" $nodes.segment) }}
{{- if $nodes.tier.size }}
{{- $env = append $env (dict "name" "MOONCAKE_OFFLOAD_ENABLED" "value" "true") }}
{{- $env = append $env (dict "name" "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH" "value" "/var/lib/moongate/tier") }}
{{- end }}
env: {{- include "moongate.env" (dict "base" $env "given" $nodes.env) | nindent 2 }}
ports:
  - { name: http, containerPort: 8080 }
  - { name: data, containerPort: 13100 }
livenessProbe:
  tcpSocket: { port: http }
readinessProbe:
  httpGet: { path: /health, port: http{{ include "moongate.store.scheme" . }} }
  periodSeconds: 2
resources: {{- toYaml $nodes.resources | nindent 2 }}
volumeMounts:
  {{- if eq $nodes.memory "holder" }}
  - { name: holder, mountPath: /run/moongate }
  {{- else if eq $nodes.memory "folder" }}
  - { name: memory, mountPath: /var/lib/moongate/memory }
  {{- end }}
  {{- if $nodes.tier.size }}
  - { name: tier, mountPath: /var/lib/moongate/tier }
  {{- end }}
  {{- include "moongate.store.tls.mount" . | nindent 2 }}
{{ include "moongate.container.security" . }}
{{- end }}
