{{/* A store with several shards: masters that divide its metadata, and routers that make them look like one. */}}

{{- define "moongate.store.shards" -}}
{{- .Values.store.master.shards | default 1 | int -}}
{{- end }}

{{/* `true` if the store has several shards, else empty. */}}
{{- define "moongate.store.sharded" -}}
{{- if and .Values.store.enabled (gt (include "moongate.store.shards" . | int) 1) }}true{{ end }}
{{- end }}

{{/* Role that clients of the store depend on: that of the pods behind their Service. */}}
{{- define "moongate.store.entry" -}}
{{- if include "moongate.store.sharded" . }}mooncake-router{{ else }}mooncake-master{{ end }}
{{- end }}

{{/* End of the names of a shard's role and objects; empty if the store has one shard. Takes a dict of root and shard, its index. */}}
{{- define "moongate.shard.suffix" -}}
{{- if include "moongate.store.sharded" .root }}-{{ .shard }}{{ end }}
{{- end }}

{{/* Address of a shard's masters, without the port. With the namespace, as routers give it to clients, which can be in another one. */}}
{{- define "moongate.shard.host" -}}
{{- printf "%s-%d.%s.svc" (include "moongate.master" .root) .shard .root.Release.Namespace -}}
{{- end }}

{{/* Rejects values that several shards exclude. */}}
{{- define "moongate.shards.check" -}}
{{- if include "moongate.store.sharded" . }}
{{- $master := .Values.store.master }}
{{- $shards := printf "store.master.shards is %s" (include "moongate.store.shards" .) }}
{{- if include "moongate.store.authenticated" . }}
{{- fail (printf "store.authentication.secretName: %s, and the router of several shards has no TLS. Leave store.authentication.secretName empty, or set store.master.shards to 1" $shards) }}
{{- end }}
{{- if hasKey ($master.volume | default dict) "persistentVolumeClaim" }}
{{- fail (printf "store.master.volume: %s, and a persistentVolumeClaim is for one master. Set store.master.volume.ephemeral, which creates a claim for each pod, or set store.master.shards to 1" $shards) }}
{{- end }}
{{- $own := list "shard" "cluster_id" }}
{{- if ne (get ($master.config | default dict) "ha_backend_type" | default "k8s") "etcd" }}{{ $own = append $own "ha_backend_connstring" }}{{ end }}
{{- range $flag := $own }}
{{- if hasKey ($master.config | default dict) $flag }}
{{- fail (printf "store.master.config.%s: %s, and each shard needs its own value, which the chart sets. Remove it from store.master.config" $flag $shards) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "moongate.router.role" -}}
{{- $router := .Values.store.router }}
{{- $masters := list }}
{{- range $shard := until (include "moongate.store.shards" . | int) }}{{ $masters = append $masters (printf "mooncake-master-%d" $shard) }}{{ end }}
name: mooncake-router
replicas: {{ $router.replicas }}
dependencies: {{ toJson $masters }}
{{ include "moongate.rollout" . }}
standalonePattern:
  template:
    metadata:
      labels: {{- include "moongate.selector" (dict "root" . "component" "store-router") | nindent 8 }}
      {{- /* Not those for scraping: a router also serves the sums of its masters' metrics, which would then count twice. */}}
      {{- with $router.podAnnotations }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- $spec := include "moongate.pod.security" . | fromYaml }}
      {{- $_ := set $spec "automountServiceAccountToken" false }}
      {{- $_ := set $spec "containers" (list (include "moongate.router.container" . | fromYaml)) }}
      {{- include "moongate.pod.spec" (dict "root" . "spec" $spec "values" $router) | nindent 6 }}
{{- end }}

{{- define "moongate.router.container" -}}
{{- $hosts := list }}
{{- range $shard := until (include "moongate.store.shards" . | int) }}
{{- $hosts = append $hosts (include "moongate.shard.host" (dict "root" $ "shard" $shard)) }}
{{- end -}}
name: router
image: {{ include "moongate.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - store-router
  - --listen=0.0.0.0:50051
  - --admin-listen=0.0.0.0:9003
  - --shards={{ join ":50051," $hosts }}:50051
  - --shard-admins={{ join ":9003," $hosts }}:9003
  - --log-format={{ .Values.log.format }}
  - --log-filter={{ .Values.log.filter }}
{{- with .Values.store.router.env }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - { name: rpc, containerPort: 50051 }
  - { name: admin, containerPort: 9003 }
# Not /health, which fails without masters: a restart of the router would not help.
livenessProbe:
  tcpSocket: { port: admin }
# Longer than the router waits for a master that hangs, which must not make every router unready.
readinessProbe:
  httpGet: { path: /health, port: admin }
  periodSeconds: 2
  timeoutSeconds: 15
resources: {{- toYaml .Values.store.router.resources | nindent 2 }}
{{ include "moongate.container.security" . }}
{{- end }}
