{{/* The planner's file of deployments: the release's engines, and planner.deployments. */}}

{{/* The engines that the planner scales, as a dict of role and name of the engine; empty without engines. */}}
{{- define "moongate.planner.roles" -}}
{{- $roles := dict }}
{{- range $name, $engine := .Values.engines }}
{{- if $engine }}
{{- $mode := $engine.mode | default "plain" }}
{{- if dig "autoscaling" "enabled" false $engine }}
{{- fail (printf "engines.%s.autoscaling and planner.enabled would both scale the role %s: disable one of them" $name $name) }}
{{- end }}
{{- if hasKey $roles $mode }}
{{- fail (printf "planner.enabled: engines.%s and engines.%s have the mode %s, and a deployment has one role of each: disable the planner, or install them as two releases" (get $roles $mode) $name $mode) }}
{{- end }}
{{- $_ := set $roles $mode $name }}
{{- end }}
{{- end }}
{{- if and $roles (not (has (keys $roles | sortAlpha | join ",") (list "plain" "decode,prefill"))) }}
{{- fail (printf "planner.enabled: a deployment has engines of the modes prefill and decode, or only plain ones, and this one has %s" (keys $roles | sortAlpha | join " and ")) }}
{{- end }}
{{- toJson $roles }}
{{- end }}

{{- define "moongate.planner.deployments" -}}
{{- $root := . }}
{{- $name := include "moongate.name" . }}
{{- $deployments := list }}
{{- $roles := include "moongate.planner.roles" . | fromJson }}
{{- if $roles }}
{{- $settings := deepCopy .Values.planner.settings }}
{{- $scale := dict }}
{{- range $mode, $role := $roles }}
{{- $engine := get $root.Values.engines $role }}
{{- $bounds := merge (dict) ($engine.planner | default dict) (dict "gpus_per_replica" ($engine.tensorParallel | default 1)) }}
{{- range eq $mode "plain" | ternary (list "prefill" "decode") (list $mode) }}
{{- $_ := set $settings . (merge (dict) (get $settings . | default dict) $bounds) }}
{{- end }}
{{- $_ := set $scale $mode (printf "rolebasedgroupscalingadapters.v1alpha2.workloads.x-k8s.io/%s-%s" $name $role) }}
{{- end }}
{{- $scheme := ternary "https" "http" (not (empty .Values.gateway.adminTls.secret)) }}
{{- $gateway := printf "%s://%s-planner-gateways:9000/metrics" $scheme $name }}
{{- $deployment := dict "name" $name "namespace" .Release.Namespace "gateways" (list $gateway) "scale" $scale "settings" $settings }}
{{- with .Values.planner.decodeKvTokens }}
{{- $_ := set $deployment "decode_kv_tokens" (int64 .) }}
{{- end }}
{{- $deployments = append $deployments $deployment }}
{{- end }}
{{- toYaml (dict "deployments" (concat $deployments .Values.planner.deployments)) }}
{{- end }}

{{/* Namespaces with targets, as a list. */}}
{{- define "moongate.planner.namespaces" -}}
{{- $namespaces := list .Release.Namespace }}
{{- range .Values.planner.deployments }}{{ $namespaces = append $namespaces .namespace }}{{ end }}
{{- toJson (uniq $namespaces) }}
{{- end }}
