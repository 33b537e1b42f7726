{{/* The gateway's configuration file. JSON strings, numbers, booleans and lists are valid TOML. */}}
{{- define "moongate.gateway.config" -}}
{{- $values := .Values }}
{{- $config := dict
  "listen" "0.0.0.0:8000"
  "admin-listen" "0.0.0.0:9000"
  "discovery" "kubernetes"
  "group" (include "moongate.name" .)
  "drain-delay" "5s"
  "log-format" $values.log.format
  "log-filter" $values.log.filter }}
{{- if $values.store.enabled }}
{{- if include "moongate.store.sharded" . }}
{{- /* Of the masters themselves: a router has no KV events and no list of locations. */}}
{{- $admins := list }}
{{- $events := list }}
{{- range $shard := until (include "moongate.store.shards" . | int) }}
{{- $host := include "moongate.shard.host" (dict "root" $ "shard" $shard) }}
{{- $admins = append $admins (printf "%s:9003" $host) }}
{{- $events = append $events (printf "tcp://%s:5557" $host) }}
{{- end }}
{{- $_ := set $config "mooncake-admin" $admins }}
{{- $_ := set $config "mooncake-events" $events }}
{{- else }}
{{- $_ := set $config "mooncake-admin" (printf "%s:9003" (include "moongate.master" .)) }}
{{- $_ := set $config "mooncake-events" (printf "tcp://%s:5557" (include "moongate.master" .)) }}
{{- end }}
{{- end }}
{{- range $flag, $value := include "moongate.store.tls" (dict "root" . "dash" "-") | fromYaml }}
{{- $_ := set $config $flag $value }}
{{- end }}
{{- with $values.otlp.endpoint }}
{{- $_ := set $config "otlp-endpoint" . }}
{{- $_ := set $config "otlp-protocol" $values.otlp.protocol }}
{{- $_ := set $config "trace-sample-ratio" $values.otlp.sampleRatio }}
{{- $_ := set $config "trace-slow" $values.otlp.slow }}
{{- end }}
{{- if $values.gateway.access.secret }}
{{- $_ := set $config "access-file" "/etc/moongate-access/access.toml" }}
{{- end }}
{{- if $values.gateway.access.jwksConfigMap }}
{{- $_ := set $config "jwks-file" "/etc/moongate-jwks/jwks.json" }}
{{- end }}
{{- if or $values.gateway.access.secret $values.gateway.access.adminTokenSecret $values.gateway.adminTls.clientCertificates }}
{{- $_ := set $config "admin-open" $values.gateway.access.adminOpen }}
{{- end }}
{{- if $values.gateway.tls.secret }}
{{- $_ := set $config "tls-cert" "/etc/moongate-tls/tls.crt" }}
{{- $_ := set $config "tls-key" "/etc/moongate-tls/tls.key" }}
{{- if $values.gateway.tls.clientCertificates }}
{{- $_ := set $config "tls-client-ca" "/etc/moongate-tls/ca.crt" }}
{{- end }}
{{- end }}
{{- if $values.gateway.adminTls.secret }}
{{- $_ := set $config "admin-tls-cert" "/etc/moongate-admin-tls/tls.crt" }}
{{- $_ := set $config "admin-tls-key" "/etc/moongate-admin-tls/tls.key" }}
{{- if $values.gateway.adminTls.clientCertificates }}
{{- $_ := set $config "admin-tls-client-ca" "/etc/moongate-admin-tls/ca.crt" }}
{{- end }}
{{- end }}
{{- if include "moongate.drain.registers" (dict "root" .) }}
{{- $_ := set $config "registration" true }}
{{- end }}
{{- if $values.gateway.sharedQueue }}
{{- $name := printf "%s-gateway" (include "moongate.name" .) }}
{{- $scheme := ternary "https" "http" (not (empty $values.gateway.adminTls.secret)) }}
{{- $_ := set $config "queue-peer" (list (printf "%s://%s-peers:9000" $scheme $name)) }}
{{- if $values.gateway.adminTls.secret }}
{{- $_ := set $config "queue-peer-ca" "/etc/moongate-admin-tls/ca.crt" }}
{{- $_ := set $config "queue-peer-tls-name" ($values.gateway.adminTls.serverName | default $name) }}
{{- if $values.gateway.adminTls.clientCertificates }}
{{- $_ := set $config "queue-peer-tls-cert" "/etc/moongate-admin-tls/tls.crt" }}
{{- $_ := set $config "queue-peer-tls-key" "/etc/moongate-admin-tls/tls.key" }}
{{- end }}
{{- end }}
{{- end }}
{{- range $key, $value := merge (dict) $values.gateway.config $config }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}

{{- define "moongate.gateway.pod" -}}
metadata:
  labels: {{- include "moongate.selector" (dict "root" . "component" "gateway") | nindent 4 }}
  {{- $config := dict "moongate.io/config" (include "moongate.gateway.config" . | sha256sum) }}
  {{- if and .Values.monitoring.annotations .Values.gateway.adminTls.secret }}
  {{- $_ := set $config "prometheus.io/scheme" "https" }}
  {{- end }}
  annotations: {{ include "moongate.annotations" (dict "root" . "port" 9000 "base" $config "given" .Values.gateway.podAnnotations) }}
spec:
  {{- $spec := include "moongate.pod.security" . | fromYaml }}
  {{- $_ := set $spec "serviceAccountName" (printf "%s-gateway" (include "moongate.name" .)) }}
  {{- $_ := set $spec "terminationGracePeriodSeconds" .Values.gateway.terminationGracePeriodSeconds }}
  {{- $_ := set $spec "containers" (list (include "moongate.gateway.container" . | fromYaml)) }}
  {{- $configMap := dict "name" (printf "%s-gateway" (include "moongate.name" .)) }}
  {{- $_ := set $spec "volumes" (prepend (include "moongate.gateway.guards" . | fromYamlArray) (dict "name" "config" "configMap" $configMap)) }}
  {{- include "moongate.pod.spec" (dict "root" . "spec" $spec "values" .Values.gateway) | nindent 2 }}
{{- end }}

{{/* Volumes of the Secrets and ConfigMaps with keys and certificates. */}}
{{- define "moongate.gateway.guards" -}}
{{- $gateway := .Values.gateway }}
{{- with $gateway.access.secret }}
- { name: access, secret: { secretName: {{ . }} } }
{{- end }}
{{- with $gateway.access.jwksConfigMap }}
- { name: jwks, configMap: { name: {{ . }} } }
{{- end }}
{{- with $gateway.tls.secret }}
- { name: tls, secret: { secretName: {{ . }} } }
{{- end }}
{{- with $gateway.adminTls.secret }}
- { name: admin-tls, secret: { secretName: {{ . }} } }
{{- end }}
{{- with include "moongate.store.tls.volume" . }}
{{ . }}
{{- end }}
{{- end }}

{{/* Tokens and keys as environment variables; those of `gateway.env` come last and take precedence. */}}
{{- define "moongate.gateway.env" -}}
{{- with .Values.gateway.access.adminTokenSecret }}
- { name: MOONGATE_ADMIN_TOKEN, valueFrom: { secretKeyRef: { name: {{ . }}, key: token } } }
{{- if $.Values.gateway.sharedQueue }}
- { name: MOONGATE_QUEUE_PEER_TOKEN, valueFrom: { secretKeyRef: { name: {{ . }}, key: token } } }
{{- end }}
{{- end }}
{{- with .Values.gateway.access.engineKeySecret }}
- { name: MOONGATE_ENGINE_API_KEY, valueFrom: { secretKeyRef: { name: {{ . }}, key: key } } }
{{- end }}
{{- if include "moongate.drain.registers" (dict "root" .) }}
- { name: MOONGATE_REGISTRATION_TOKEN, valueFrom: { secretKeyRef: { name: {{ .Values.engineDrain.registrationTokenSecret }}, key: token } } }
{{- end }}
{{- with .Values.gateway.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "moongate.gateway.container" -}}
name: gateway
image: {{ include "moongate.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [gateway, --config=/etc/moongate/gateway.toml]
{{- with concat (include "moongate.otlp.env" . | fromYamlArray) (include "moongate.gateway.env" . | fromYamlArray) }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - { name: http, containerPort: 8000 }
  - { name: admin, containerPort: 9000 }
{{- $scheme := ternary "HTTPS" "HTTP" (not (empty .Values.gateway.adminTls.secret)) }}
livenessProbe:
  httpGet: { path: /health, port: admin, scheme: {{ $scheme }} }
readinessProbe:
  httpGet: { path: /ready, port: admin, scheme: {{ $scheme }} }
  periodSeconds: 2
resources: {{- toYaml .Values.gateway.resources | nindent 2 }}
volumeMounts:
  - { name: config, mountPath: /etc/moongate, readOnly: true }
  {{- range include "moongate.gateway.guards" . | fromYamlArray }}
  - { name: {{ .name }}, mountPath: /etc/moongate-{{ .name }}, readOnly: true }
  {{- end }}
{{ include "moongate.container.security" . }}
{{- end }}
