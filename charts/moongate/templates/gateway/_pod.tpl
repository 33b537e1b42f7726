{{/* The gateway's configuration file. JSON's strings, numbers, booleans and lists are TOML too. */}}
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
{{- $_ := set $config "mooncake-admin" (printf "%s:9003" (include "moongate.master" .)) }}
{{- $_ := set $config "mooncake-events" (printf "tcp://%s:5557" (include "moongate.master" .)) }}
{{- end }}
{{- with $values.otlp.endpoint }}
{{- $_ := set $config "otlp-endpoint" . }}
{{- $_ := set $config "trace-sample-ratio" $values.otlp.sampleRatio }}
{{- end }}
{{- range $key, $value := merge (dict) $values.gateway.config $config }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}

{{- define "moongate.gateway.pod" -}}
metadata:
  labels: {{- include "moongate.selector" (dict "root" . "component" "gateway") | nindent 4 }}
  {{- $config := dict "moongate.io/config" (include "moongate.gateway.config" . | sha256sum) }}
  annotations: {{ include "moongate.annotations" (dict "root" . "port" 9000 "ours" $config "given" .Values.gateway.podAnnotations) }}
spec:
  {{- $spec := include "moongate.pod.security" . | fromYaml }}
  {{- $_ := set $spec "serviceAccountName" (printf "%s-gateway" (include "moongate.name" .)) }}
  {{- $_ := set $spec "terminationGracePeriodSeconds" .Values.gateway.terminationGracePeriodSeconds }}
  {{- $_ := set $spec "containers" (list (include "moongate.gateway.container" . | fromYaml)) }}
  {{- $configMap := dict "name" (printf "%s-gateway" (include "moongate.name" .)) }}
  {{- $_ := set $spec "volumes" (list (dict "name" "config" "configMap" $configMap)) }}
  {{- include "moongate.pod.spec" (dict "root" . "spec" $spec "given" .Values.gateway.pod) | nindent 2 }}
{{- end }}

{{- define "moongate.gateway.container" -}}
name: gateway
image: {{ include "moongate.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [gateway, --config=/etc/moongate/gateway.toml]
env: {{- toYaml .Values.gateway.env | nindent 2 }}
ports:
  - { name: http, containerPort: 8000 }
  - { name: admin, containerPort: 9000 }
livenessProbe:
  httpGet: { path: /health, port: admin }
readinessProbe:
  httpGet: { path: /ready, port: admin }
  periodSeconds: 2
resources: {{- toYaml .Values.gateway.resources | nindent 2 }}
volumeMounts:
  - { name: config, mountPath: /etc/moongate, readOnly: true }
  {{- with .Values.gateway.volumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{ include "moongate.container.security" . }}
{{- end }}
