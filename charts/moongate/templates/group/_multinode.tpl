{{/* Engines that span several machines: a leader with the HTTP server, and workers. All take a dict of root, role and engine. */}}

{{/* `true` for such an engine, else empty. */}}
{{- define "moongate.multinode" -}}
{{- if gt (int (.engine.nodes | default 1)) 1 }}
{{- if eq .engine.engine "simulated" }}
{{- fail (printf "engines.%s.nodes: a simulated engine has one machine" .role) }}
{{- end -}}
true
{{- end }}
{{- end }}

{{/* Flags of all pods of an engine. The operator sets the variables; the leader's index is 0. */}}
{{- define "moongate.multinode.args" -}}
{{- if include "moongate.multinode" . }}
- --nnodes={{ .engine.nodes }}
- --node-rank=$(RBG_LWP_WORKER_INDEX)
{{- if eq .engine.engine "sglang" }}
- --dist-init-addr=$(RBG_LWP_LEADER_ADDRESS):20000
{{- else }}
- --master-addr=$(RBG_LWP_LEADER_ADDRESS)
- --master-port=29501
{{- end }}
{{- end }}
{{- end }}

{{/* The patches only add to the common template: a null, which would remove a field, does not survive each way of applying an object. */}}
{{- define "moongate.multinode.pattern" -}}
{{- $container := include "moongate.engine.container" . | fromYaml }}
{{- $drain := .root.Values.engineDrain }}
size: {{ .engine.nodes }}
template:
  {{- include "moongate.engine.template" . | trim | nindent 2 }}
# Workers have no HTTP server.
leaderTemplatePatch:
  spec:
    containers:
      - {{ pick $container "name" "startupProbe" "readinessProbe" "livenessProbe" "lifecycle" | toJson }}
    {{- if $drain.enabled }}
    initContainers:
      - {{ include "moongate.drain.sidecar" . | fromYaml | toJson }}
    {{- end }}
workerTemplatePatch:
  metadata:
    # So that they are not scraped, and their evictions are not counted.
    labels: { app.kubernetes.io/component: engine-worker }
  spec:
    containers:
      - name: {{ $container.name }}
        {{- if and (eq .engine.engine "vllm") (not .engine.command) }}
        args: {{ append $container.args "--headless" | toJson }}
        {{- end }}
        {{- if $drain.enabled }}
        # Without the workers the leader could not finish its requests.
        lifecycle:
          {{- include "moongate.drain.hook" (dict "root" .root "host" "os.environ[\"RBG_LWP_LEADER_ADDRESS\"]") | nindent 10 }}
        {{- end }}
{{- end }}
