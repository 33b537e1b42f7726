{{/* Parts of pods that are the same for all programs of ours. */}}

{{- define "moongate.pod.security" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "moongate.container.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* A pod's spec: ours, and what is given (`pod` of the values), which wins. Takes a dict of root, spec and given. */}}
{{- define "moongate.pod.spec" -}}
{{- $given := .given | default dict }}
{{- $spec := .spec }}
{{- with .root.Values.imagePullSecrets }}
{{- $_ := set $spec "imagePullSecrets" . }}
{{- end }}
{{- /* A Service called moongate-store would set MOONGATE_STORE_PORT to a URL, which is a setting of ours. */}}
{{- $_ := set $spec "enableServiceLinks" false }}
{{- $_ := set $spec "volumes" (concat ($spec.volumes | default list) ($given.volumes | default list)) }}
{{- toYaml (mergeOverwrite $spec (omit $given "volumes")) }}
{{- end }}

{{/* Annotations of pods: ours, where metrics are, and what is given, which wins. Takes a dict of root, port, ours and given. */}}
{{- define "moongate.annotations" -}}
{{- $scraped := dict }}
{{- if .root.Values.monitoring.annotations }}
{{- $scraped = dict "prometheus.io/scrape" "true" "prometheus.io/port" (toString .port) "prometheus.io/path" "/metrics" }}
{{- end }}
{{- toJson (merge (dict) (.given | default dict) (.ours | default dict) $scraped) }}
{{- end }}

{{/* Environment variables that tell a process where it is. */}}
{{- define "moongate.whereabouts" -}}
- name: POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- name: POD_NAMESPACE
  valueFrom: { fieldRef: { fieldPath: metadata.namespace } }
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
{{- end }}

{{/* Environment: headers of exports to a collector of traces. */}}
{{- define "moongate.otlp.env" -}}
{{- with .Values.otlp.headersSecret }}
- name: MOONGATE_OTLP_HEADERS
  valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } }
{{- end }}
{{- end }}

{{/* Environment: where the process is, what is ours, and what is given, which wins. */}}
{{- define "moongate.env" -}}
{{- include "moongate.whereabouts" . }}
{{- $given := dict }}
{{- range .given }}{{ $_ := set $given .name true }}{{ end }}
{{- range .ours }}
{{- if not (hasKey $given .name) }}
{{ toYaml (list .) }}
{{- end }}
{{- end }}
{{- with .given }}
{{ toYaml . }}
{{- end }}
{{- end }}
