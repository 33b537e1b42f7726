{{/* Command lines of engines: the flags that the gateway's cache index and the KV transfer require, and the engine's values. */}}

{{- define "moongate.sglang.args" -}}
{{- $mode := .engine.mode | default "plain" }}
- --model-path={{ required (printf "engines.%s.model is needed" .role) .engine.model }}
- --served-model-name={{ .engine.servedModelName | default .engine.model }}
- --host=0.0.0.0
- --port=8000
- --tp-size={{ .engine.tensorParallel | default 1 }}
- --enable-metrics
- --enable-cache-report
- '--kv-events-config={"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'
{{- if ne $mode "plain" }}
- --disaggregation-mode={{ $mode }}
- --disaggregation-transfer-backend={{ .engine.connector | default "mooncake" }}
{{- end }}
{{- if eq $mode "prefill" }}
- --disaggregation-bootstrap-port=8998
{{- end }}
{{- if and .root.Values.store.enabled (ne $mode "decode") }}
- --enable-hierarchical-cache
- --hicache-storage-backend=mooncake
{{- end }}
{{- end }}

{{- define "moongate.vllm.args" -}}
{{- $mode := .engine.mode | default "plain" }}
{{- $connectors := dict "nixl" "NixlConnector" "mooncake" "MooncakeConnector" "store" "MooncakeStoreConnector" }}
{{- $roles := dict "prefill" "kv_producer" "decode" "kv_consumer" "plain" "kv_both" }}
- {{ required (printf "engines.%s.model is needed" .role) .engine.model }}
- --served-model-name={{ .engine.servedModelName | default .engine.model }}
- --host=0.0.0.0
- --port=8000
- --tensor-parallel-size={{ .engine.tensorParallel | default 1 }}
- --enable-prompt-tokens-details
- --prefix-caching-hash-algo=sha256_cbor
- '--kv-events-config={"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'
{{- with .engine.connector }}
{{- $role := ternary "kv_both" (get $roles $mode) (ne . "mooncake") }}
- '--kv-transfer-config={{ dict "kv_connector" (get $connectors .) "kv_role" $role "kv_load_failure_policy" "recompute" | toJson }}'
{{- end }}
{{- end }}

{{- define "moongate.simulated.args" -}}
{{- $mode := .engine.mode | default "plain" }}
- loadtest
- engine
- --role={{ $mode }}
- --listen=$(POD_IP):8000
- --model={{ .engine.servedModelName | default .engine.model | default "moongate-sim" }}
- --kv-events=$(POD_IP):5557
{{- if eq $mode "prefill" }}
- --bootstrap-listen=$(POD_IP):8998
{{- end }}
{{- if and .root.Values.store.enabled (ne $mode "decode") }}
- --store-master={{ include "moongate.master" .root }}:50051
- --store-metadata={{ .root.Values.store.metadata }}
{{- range $flag, $value := include "moongate.store.tls" (dict "root" .root "dash" "-") | fromYaml }}
- --{{ $flag }}={{ $value }}
{{- end }}
{{- end }}
{{- end }}
