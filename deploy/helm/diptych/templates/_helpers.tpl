{{/* Names: release-diptych-component, or release-component where the release is called diptych. */}}
{{- define "diptych.name" -}}
{{- $release := .Release.Name -}}
{{- if contains .Chart.Name $release -}}{{ $release | trunc 45 | trimSuffix "-" }}{{- else -}}{{ printf "%s-%s" $release .Chart.Name | trunc 45 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{/* Call with (dict "root" $ "component" "gateway"). */}}
{{- define "diptych.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "diptych.labels" -}}
{{ include "diptych.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "diptych.image" -}}
{{ .root.Values.images.prefix }}diptych-{{ .component }}:{{ .root.Values.images.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* What is the same for every pod: who it runs as, where it may run, how it is replaced. */}}
{{- define "diptych.pod" -}}
{{- $root := .root }}
serviceAccountName: {{ include "diptych.name" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add $root.Values.drainSeconds 15 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: { type: RuntimeDefault }
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "diptych.selector" . | nindent 8 }}
{{- end -}}

{{- define "diptych.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{- define "diptych.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $limits := merge (dict "nvidia.com/gpu" .gpus) ($resources.limits | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/*
Start-up takes as long as a download may; being alive and being ready are asked separately. Over TLS the kubelet checks no
certificate and shows none: these paths are open to it. Call with startFailures and scheme.
*/}}
{{- define "diptych.probes" -}}
startupProbe:
  httpGet: { path: /health, port: http, scheme: {{ .scheme }} }
  periodSeconds: 5
  failureThreshold: {{ .startFailures }}
livenessProbe:
  httpGet: { path: /health, port: http, scheme: {{ .scheme }} }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: { path: /ready, port: http, scheme: {{ .scheme }} }
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{- define "diptych.token-env" -}}
{{- with .Values.serviceToken }}
{{- if .secretName }}
- name: DIPTYCH_SERVICE_TOKEN
  valueFrom: { secretKeyRef: { name: {{ .secretName }}, key: {{ .key }} } }
{{- end }}
{{- end }}
{{- end -}}

{{/* The secret with a component's certificate. Call with root and key, its name in the values. */}}
{{- define "diptych.tls-secret" -}}
{{- $names := dict "gateway" "gateway" "visionEncoder" "vision-encoder" "textEngine" "text-engine" "redis" "redis" -}}
{{- index .root.Values.tls.secretNames .key | default (printf "%s-%s-tls" (include "diptych.name" .root) (index $names .key)) -}}
{{- end -}}

{{- define "diptych.tls-env" -}}
{{- if .Values.tls.enabled }}
- name: DIPTYCH_TLS_CERT_FILE
  value: /tls/tls.crt
- name: DIPTYCH_TLS_KEY_FILE
  value: /tls/tls.key
- name: DIPTYCH_TLS_CA_FILE
  value: /tls/ca.crt
{{- end }}
{{- end -}}

{{- define "diptych.tls-mount" -}}
{{- if .Values.tls.enabled }}
- { name: tls, mountPath: /tls, readOnly: true }
{{- end }}
{{- end -}}

{{/* Readable by the pod's group; renewed certificates appear in it and are taken up. Call as diptych.tls-secret. */}}
{{- define "diptych.tls-volume" -}}
{{- if .root.Values.tls.enabled }}
- { name: tls, secret: { secretName: {{ include "diptych.tls-secret" . }}, defaultMode: 288 } } # 0440
{{- end }}
{{- end -}}

{{- define "diptych.redis-env" -}}
{{- $redis := .Values.redis -}}
{{- if $redis.enabled }}
- name: REDIS_URL
  value: {{ ternary "rediss" "redis" .Values.tls.enabled }}://{{ include "diptych.name" . }}-redis:6379/0
{{- else if $redis.external.secretName }}
- name: REDIS_URL
  valueFrom: { secretKeyRef: { name: {{ $redis.external.secretName }}, key: {{ $redis.external.key }} } }
{{- end }}
{{- end -}}

{{- define "diptych.extra-env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}
