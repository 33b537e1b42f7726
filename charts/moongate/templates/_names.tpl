{{/* Names and labels. Most take a dict of `root` (the chart's $) and `component`. */}}

{{- define "moongate.name" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "moongate.selector" -}}
app.kubernetes.io/name: moongate
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "moongate.labels" -}}
{{ include "moongate.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "moongate.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end }}

{{- define "moongate.master" -}}
{{- printf "%s-master" (include "moongate.name" .) -}}
{{- end }}

{{/* Namespace of the engines that the gateway discovers. */}}
{{- define "moongate.engines.namespace" -}}
{{- .Values.gateway.config.namespace | default .Release.Namespace -}}
{{- end }}

{{/* Name in requests of the first engine's model; empty without engines. */}}
{{- define "moongate.model" -}}
{{- $models := list }}
{{- range .Values.engines }}
{{- if . }}{{ $models = append $models (.servedModelName | default .model | default "moongate-sim") }}{{ end }}
{{- end }}
{{- first $models | default "" -}}
{{- end }}
