{{/* Autoscaling of engines, by metrics of the gateway. All take a dict of root, role and engine, as the roles do. */}}

{{- define "moongate.autoscaling.behavior" -}}
# A new engine takes minutes to load its model, and scaling down discards a cache.
scaleDown:
  stabilizationWindowSeconds: 900
  policies: [{ type: Pods, value: 1, periodSeconds: 300 }]
{{- end }}

{{/* Target of a role that sets none. The two roles of a pair have different ones: with one metric for both, a lack of decodes would also
start prefills. */}}
{{- define "moongate.autoscaling.default" -}}
{{- get (dict "prefill" "pendingPrefillTokens: 60000" "decode" "runningRequests: 64" "plain" "queueSeconds: 1") . -}}
{{- end }}

{{/* Targets, as a list of metric (a recording rule), labels, type and value. The autoscaler follows the one that demands most engines. */}}
{{- define "moongate.autoscaling.targets" -}}
{{- $mode := .engine.mode | default "plain" }}
{{- $keys := list "queueSeconds" "ttftSeconds" "pendingPrefillTokens" "runningRequests" "decodeTokens" }}
{{- $autoscaling := dict }}
{{- range $key := $keys }}
{{- with get $.engine.autoscaling $key }}{{ $_ := set $autoscaling $key . }}{{ end }}
{{- end }}
{{- if not $autoscaling }}{{ $autoscaling = include "moongate.autoscaling.default" $mode | fromYaml }}{{ end }}
{{- $job := dict "job" (printf "%s-gateway" (include "moongate.name" .root)) }}
{{- $role := merge (dict "role" $mode) $job }}
{{- $perEngine := dict "pendingPrefillTokens" "moongate_role_pending_prefill_tokens" "runningRequests" "moongate_role_requests_in_flight" "decodeTokens" "moongate_role_active_decode_tokens" }}
{{- $targets := list }}
{{- with $autoscaling.queueSeconds }}
{{- $targets = append $targets (dict "metric" "moongate_queue_seconds" "labels" $job "type" "Value" "value" .) }}
{{- end }}
{{- with $autoscaling.ttftSeconds }}
{{- $targets = append $targets (dict "metric" "moongate:ttft_seconds:p99_5m" "labels" $job "type" "Value" "value" .) }}
{{- end }}
{{- range $key, $metric := $perEngine }}
{{- with get $autoscaling $key }}
{{- $targets = append $targets (dict "metric" $metric "labels" $role "type" "AverageValue" "value" .) }}
{{- end }}
{{- end }}
{{- toJson $targets }}
{{- end }}

{{- define "moongate.autoscaling.hpa" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  labels: {{- include "moongate.labels" (dict "root" .root "component" "engine") | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: workloads.x-k8s.io/v1alpha2
    kind: RoleBasedGroupScalingAdapter
    name: {{ .name }}
  minReplicas: {{ .engine.autoscaling.minReplicas }}
  maxReplicas: {{ .engine.autoscaling.maxReplicas }}
  metrics:
    # Recording rules (monitoring.rules), through a metrics adapter.
    {{- range include "moongate.autoscaling.targets" . | fromJsonArray }}
    - type: External
      external:
        metric:
          name: {{ .metric }}
          selector:
            matchLabels: {{ toJson .labels }}
        target: { type: {{ .type }}, {{ ternary "value" "averageValue" (eq .type "Value") }}: {{ toJson .value | quote }} }
    {{- end }}
  behavior:
    {{- include "moongate.autoscaling.behavior" . | nindent 4 }}
{{- end }}

{{/* KEDA reads Prometheus itself. */}}
{{- define "moongate.autoscaling.keda" -}}
{{- $keda := .root.Values.engineAutoscaling }}
{{- $autoscaling := .engine.autoscaling }}
{{- $release := dict "namespace" .root.Release.Namespace "job" (printf "%s-gateway" (include "moongate.name" .root)) }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .name }}
  labels: {{- include "moongate.labels" (dict "root" .root "component" "engine") | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: workloads.x-k8s.io/v1alpha2
    kind: RoleBasedGroupScalingAdapter
    name: {{ .name }}
  minReplicaCount: {{ $autoscaling.minReplicas }}
  maxReplicaCount: {{ $autoscaling.maxReplicas }}
  cooldownPeriod: {{ $keda.idleSeconds }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- include "moongate.autoscaling.behavior" . | nindent 8 }}
  triggers:
    {{- range include "moongate.autoscaling.targets" . | fromJsonArray }}
    {{- $query := printf "max(%s{%s})" .metric (include "moongate.autoscaling.selector" (merge (dict) .labels $release)) }}
    - {{ include "moongate.autoscaling.trigger" (dict "keda" $keda "type" .type "query" $query "threshold" .value) }}
    {{- end }}
    {{- if not $autoscaling.minReplicas }}
    {{- $selector := include "moongate.autoscaling.selector" $release }}
    {{- $query := printf "sum(rate(moongate_requests_total{%s}[2m])) + sum(moongate_requests_in_flight{%s})" $selector $selector }}
    # Starts the first engine for any request, and keeps it while there are requests. Its threshold is too high to demand a second one.
    - {{ include "moongate.autoscaling.trigger" (dict "keda" $keda "type" "AverageValue" "query" $query "threshold" 1000000) }}
    {{- end }}
{{- end }}

{{- define "moongate.autoscaling.selector" -}}
{{- $matchers := list }}
{{- range $label, $value := . }}{{ $matchers = append $matchers (printf "%s=%q" $label $value) }}{{ end }}
{{- join "," $matchers -}}
{{- end }}

{{- define "moongate.autoscaling.trigger" -}}
{{- $metadata := dict "serverAddress" .keda.prometheus "query" .query "threshold" (toJson .threshold) }}
{{- $trigger := dict "type" "prometheus" "metricType" .type "metadata" $metadata }}
{{- with .keda.triggerAuthentication }}
{{- $_ := set $trigger "authenticationRef" (dict "name" .) }}
{{- end }}
{{- toJson $trigger }}
{{- end }}
