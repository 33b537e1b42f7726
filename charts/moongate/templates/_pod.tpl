{{/* Common parts of the pods of all Moongate programs. */}}

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

{{/* A pod's spec: the chart's, with the component's `volumeMounts`, `securityContext`, `extraContainers` and `pod`, which takes precedence.
The last container in `spec` is the component's own. Takes a dict of root, spec and values, those of the component. */}}
{{- define "moongate.pod.spec" -}}
{{- $given := .values.pod | default dict }}
{{- $spec := .spec }}
{{- $main := last $spec.containers }}
{{- with .values.volumeMounts }}
{{- $_ := set $main "volumeMounts" (concat ($main.volumeMounts | default list) .) }}
{{- end }}
{{- with .values.securityContext }}
{{- $_ := set $main "securityContext" (mergeOverwrite ($main.securityContext | default dict) .) }}
{{- end }}
{{- with .values.extraContainers }}
{{- $_ := set $spec "containers" (concat $spec.containers .) }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
{{- $_ := set $spec "imagePullSecrets" . }}
{{- end }}
{{- /* For a Service named moongate-store, Kubernetes would set MOONGATE_STORE_PORT, a setting of `moongate store`, to a URL. */}}
{{- $_ := set $spec "enableServiceLinks" false }}
{{- $_ := set $spec "volumes" (concat ($spec.volumes | default list) ($given.volumes | default list)) }}
{{- with concat ($spec.initContainers | default list) ($given.initContainers | default list) }}
{{- $_ := set $spec "initContainers" . }}
{{- end }}
{{- toYaml (mergeOverwrite $spec (omit $given "volumes" "initContainers")) }}
{{- end }}

{{/* Annotations of pods: the chart's, those for scraping, and `given`, which takes precedence. Takes a dict of root, port, base and given. */}}
{{- define "moongate.annotations" -}}
{{- $scraped := dict }}
{{- if .root.Values.monitoring.annotations }}
{{- $scraped = dict "prometheus.io/scrape" "true" "prometheus.io/port" (toString .port) "prometheus.io/path" "/metrics" }}
{{- end }}
{{- toJson (merge (dict) (.given | default dict) (.base | default dict) $scraped) }}
{{- end }}

{{/* Environment variables with the pod's name, namespace and address. */}}
{{- define "moongate.identity" -}}
- name: POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- name: POD_NAMESPACE
  valueFrom: { fieldRef: { fieldPath: metadata.namespace } }
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
{{- end }}

{{/* Environment variables with the headers of trace exports. */}}
{{- define "moongate.otlp.env" -}}
{{- with .Values.otlp.headersSecret }}
- name: MOONGATE_OTLP_HEADERS
  valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } }
{{- end }}
{{- end }}

{{/* Environment variables: the pod's identity, the chart's variables, and `given`, which takes precedence. */}}
{{- define "moongate.env" -}}
{{- include "moongate.identity" . }}
{{- $given := dict }}
{{- range .given }}{{ $_ := set $given .name true }}{{ end }}
{{- range .base }}
{{- if not (hasKey $given .name) }}
{{ toYaml (list .) }}
{{- end }}
{{- end }}
{{- with .given }}
{{ toYaml . }}
{{- end }}
{{- end }}
