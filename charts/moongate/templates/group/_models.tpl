{{/* Models of engines: where they come from, and where they are kept. All take a dict of root, role and engine, as the roles do. */}}

{{/* `true` if the engine keeps downloaded models in the common cache, else empty. */}}
{{- define "moongate.models.cached" -}}
{{- if and (ne .engine.engine "simulated") .root.Values.models.cache.volume }}true{{ end }}
{{- end }}

{{- define "moongate.models.volumes" -}}
{{- if include "moongate.models.cached" . }}
- {{ merge (dict "name" "model-cache") .root.Values.models.cache.volume | toJson }}
{{- end }}
{{- with .engine.modelVolume }}
{{- if not (hasPrefix "/" ($.engine.model | default "")) }}
{{- fail (printf "engines.%s.modelVolume is mounted at engines.%s.model, which must be an absolute path" $.role $.role) }}
{{- end }}
- {{ merge (dict "name" "model") . | toJson }}
{{- end }}
{{- end }}

{{- define "moongate.models.mounts" -}}
{{- if include "moongate.models.cached" . }}
- { name: model-cache, mountPath: {{ .root.Values.models.cache.mountPath }} }
{{- end }}
{{- if .engine.modelVolume }}
- { name: model, mountPath: {{ .engine.model }}, readOnly: true }
{{- end }}
{{- end }}

{{- define "moongate.models.env" -}}
{{- if include "moongate.models.cached" . }}
- { name: HF_HOME, value: {{ .root.Values.models.cache.mountPath }} }
{{- end }}
{{- if ne .engine.engine "simulated" }}
{{- with .root.Values.models.huggingFaceTokenSecret }}
- { name: HF_TOKEN, valueFrom: { secretKeyRef: { name: {{ . }}, key: token } } }
{{- end }}
{{- end }}
{{- end }}
