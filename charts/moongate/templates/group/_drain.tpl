{{/* Drain of engines before their pod ends or their container restarts: sidecar, preStop hook and grace period. All take a dict of root,
role and engine, as the roles do. */}}

{{/* Grace period: the hook's limit, and the time that the engine needs to exit after it. */}}
{{- define "moongate.drain.grace" -}}
{{- add .root.Values.engineDrain.limitSeconds .root.Values.engineDrain.exitSeconds -}}
{{- end }}

{{/* Rejects values with which a pod would be killed before its drain has ended. */}}
{{- define "moongate.drain.check" -}}
{{- $drain := .root.Values.engineDrain }}
{{- if le (int $drain.limitSeconds) (int $drain.noticeSeconds) }}
{{- fail (printf "engineDrain.limitSeconds is %d, and must be greater than engineDrain.noticeSeconds (%d)" (int $drain.limitSeconds) (int $drain.noticeSeconds)) }}
{{- end }}
{{- with dig "pod" "terminationGracePeriodSeconds" nil .engine }}
{{- if le (int .) (int $drain.limitSeconds) }}
{{- fail (printf "engines.%s.pod.terminationGracePeriodSeconds is %d, and must be greater than engineDrain.limitSeconds (%d): lower engineDrain.limitSeconds, or remove it" $.role (int .) (int $drain.limitSeconds)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Runs before the engine gets SIGTERM, which ends vLLM's requests at once. No proxy: http.client reads no variables. Ends after 15 s without
a sidecar. Takes a dict of root and host, a Python expression for the sidecar's host. */}}
{{- define "moongate.drain.script" -}}
{{- $drain := .root.Values.engineDrain -}}
import http.client, os, time
begin = answered = time.monotonic()
while time.monotonic() - begin < {{ $drain.limitSeconds }} and time.monotonic() - answered < 15:
    try:
        sidecar = http.client.HTTPConnection({{ .host }}, {{ $drain.sidecar.port }}, timeout=5)
        sidecar.request("POST", "/drain")
        drained = sidecar.getresponse().status == 200
        answered = time.monotonic()
    except (OSError, http.client.HTTPException):
        drained = False
    if drained and time.monotonic() - begin >= {{ $drain.noticeSeconds }}:
        break
    time.sleep(1)
{{- end }}

{{- define "moongate.drain.hook" -}}
preStop:
  exec:
    command:
      - python3
      - -c
      - |
        {{- include "moongate.drain.script" . | nindent 8 }}
{{- end }}

{{/* Grace period of an engine whose probe failed: it does not finish its requests, so the kubelet does not wait for them. */}}
{{- define "moongate.drain.failed" -}}
{{- if .root.Values.engineDrain.enabled -}}
terminationGracePeriodSeconds: {{ .root.Values.engineDrain.exitSeconds }}
{{- end }}
{{- end }}

{{/* `lifecycle` of the engine's container. */}}
{{- define "moongate.drain.lifecycle" -}}
{{- if eq .engine.engine "simulated" }}
{{- /* Moongate's image has no interpreter, and has the sidecar's program. */}}
{{- $drain := .root.Values.engineDrain }}
preStop:
  exec:
    command:
      - /moongate
      - sidecar
      - drain
      - --url=http://127.0.0.1:{{ $drain.sidecar.port }}
      - --notice={{ $drain.noticeSeconds }}s
      - --limit={{ $drain.limitSeconds }}s
{{- else }}
{{ include "moongate.drain.hook" (dict "root" .root "host" "\"127.0.0.1\"") }}
{{- end }}
{{- end }}

{{/* A native sidecar: it starts before the engine, and ends after it, so that the hook can use it. It has no readiness probe, because
the pod's readiness is the engine's. */}}
{{- define "moongate.drain.sidecar" -}}
{{- $values := .root.Values }}
{{- $sidecar := $values.engineDrain.sidecar -}}
name: moongate-sidecar
image: {{ $sidecar.repository | default $values.image.repository }}:{{ $sidecar.tag }}
imagePullPolicy: {{ $values.image.pullPolicy }}
restartPolicy: Always
args: [sidecar]
env: {{- include "moongate.env" (dict "base" (include "moongate.drain.env" . | fromYamlArray) "given" $sidecar.env) | nindent 2 }}
ports:
  - { name: sidecar, containerPort: {{ $sidecar.port }} }
livenessProbe:
  httpGet: { path: /healthz, port: sidecar }
resources: {{- toYaml $sidecar.resources | nindent 2 }}
volumeMounts:
  - { name: moongate-pod, mountPath: /etc/moongate-pod, readOnly: true }
  {{- if include "moongate.drain.ca" . }}
  - { name: gateway-ca, mountPath: /etc/moongate-gateway, readOnly: true }
  {{- end }}
# Complete, because the pods of SGLang and vLLM have none.
securityContext:
  {{- (include "moongate.container.security" .root | fromYaml).securityContext | toYaml | nindent 2 }}
  {{- omit (include "moongate.pod.security" .root | fromYaml).securityContext "fsGroup" | toYaml | nindent 2 }}
{{- end }}

{{/* `true` if sidecars register their engines with the release's gateways, else empty. */}}
{{- define "moongate.drain.registers" -}}
{{- $values := .root.Values }}
{{- if and $values.engineDrain.enabled $values.engineDrain.registrationTokenSecret $values.gateway.enabled }}true{{ end }}
{{- end }}

{{/* `true` if they connect to them over TLS, else empty. */}}
{{- define "moongate.drain.ca" -}}
{{- if and (include "moongate.drain.registers" .) .root.Values.gateway.adminTls.secret }}true{{ end }}
{{- end }}

{{/* Settings of the sidecar. Variables, not flags, so that `engineDrain.sidecar.env` can override them. */}}
{{- define "moongate.drain.env" -}}
{{- $values := .root.Values }}
{{- $mode := .engine.mode | default "plain" }}
- { name: POD_UID, valueFrom: { fieldRef: { fieldPath: metadata.uid } } }
- { name: NODE_NAME, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }
- { name: MOONGATE_SIDECAR_ENGINE_URL, value: "http://$(POD_IP):8000" }
- { name: MOONGATE_SIDECAR_LISTEN, value: "0.0.0.0:{{ $values.engineDrain.sidecar.port }}" }
- { name: MOONGATE_SIDECAR_ROLE, value: {{ $mode }} }
# As in the gateways' Kubernetes discovery, so that both mean the same engine.
- { name: MOONGATE_SIDECAR_ID, value: $(POD_NAMESPACE)/$(POD_NAME)@$(POD_UID) }
- { name: MOONGATE_SIDECAR_POD_INFO, value: /etc/moongate-pod/labels /etc/moongate-pod/annotations }
- { name: MOONGATE_LOG_FORMAT, value: {{ $values.log.format }} }
- { name: MOONGATE_LOG_FILTER, value: {{ quote $values.log.filter }} }
{{- if and (eq .engine.engine "vllm") (ne $mode "plain") }}
- { name: MOONGATE_KV_CONNECTOR, value: {{ .engine.connector }} }
{{- end }}
{{- with $values.gateway.access.engineKeySecret }}
- { name: MOONGATE_ENGINE_API_KEY, valueFrom: { secretKeyRef: { name: {{ . }}, key: key } } }
{{- end }}
{{- if include "moongate.drain.registers" . }}
{{- $name := printf "%s-gateway" (include "moongate.name" .root) }}
- { name: MOONGATE_REGISTRATION_TOKEN, valueFrom: { secretKeyRef: { name: {{ $values.engineDrain.registrationTokenSecret }}, key: token } } }
{{- if include "moongate.drain.ca" . }}
- { name: MOONGATE_SIDECAR_GATEWAY, value: "https://{{ $name }}-registration:9000" }
- { name: MOONGATE_SIDECAR_GATEWAY_CA, value: /etc/moongate-gateway/ca.crt }
- { name: MOONGATE_SIDECAR_GATEWAY_TLS_NAME, value: {{ $values.gateway.adminTls.serverName | default $name }} }
{{- else }}
- { name: MOONGATE_SIDECAR_GATEWAY, value: "{{ $name }}-registration:9000" }
{{- end }}
{{- end }}
{{- end }}

{{- define "moongate.drain.volumes" -}}
- name: moongate-pod
  downwardAPI:
    items:
      - { path: labels, fieldRef: { fieldPath: metadata.labels } }
      - { path: annotations, fieldRef: { fieldPath: metadata.annotations } }
{{- if include "moongate.drain.ca" . }}
# Without the private key.
- name: gateway-ca
  secret: { secretName: {{ .root.Values.gateway.adminTls.secret }}, items: [{ key: ca.crt, path: ca.crt }] }
{{- end }}
{{- end }}
