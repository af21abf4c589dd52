{{/*
One panel: vision encoders or text engines. Call with root, component, values, port, prefix (of its settings' variables),
key (its name in the values), addressed (whether others must reach this very pod) and triggers (what KEDA watches).
*/}}
{{- define "diptych.panel" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $name := printf "%s-%s" (include "diptych.name" $root) .component -}}
{{- $scheme := ternary "https" "http" $root.Values.tls.enabled -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- include "diptych.labels" . | nindent 4 }}
spec:
  {{- if not $values.autoscaling.enabled }}
  replicas: {{ $values.replicas }}
  {{- end }}
  # One more before one less: a model takes long to load, and on GPUs there has to be room for it.
  strategy: { type: RollingUpdate, rollingUpdate: { maxUnavailable: 0, maxSurge: 1 } }
  progressDeadlineSeconds: 2400
  selector:
    matchLabels: {{- include "diptych.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "diptych.labels" . | nindent 8 }}
      {{- with $values.podAnnotations }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "diptych.pod" . | nindent 6 }}
      containers:
        - name: {{ .component }}
          image: {{ include "diptych.image" . }}
          imagePullPolicy: {{ $root.Values.images.pullPolicy }}
          ports: [{ name: http, containerPort: {{ .port }} }]
          env:
            - name: MODEL
              value: {{ $root.Values.model | quote }}
            {{- if .addressed }}
            # Engines pull an embedding from the very encoder that made it.
            - name: POD_IP
              valueFrom: { fieldRef: { fieldPath: status.podIP } }
            - name: {{ .prefix }}PUBLIC_URL
              value: {{ $scheme }}://$(POD_IP):{{ .port }}
            {{- end }}
            - name: {{ .prefix }}DRAIN_TIMEOUT_S
              value: {{ $root.Values.drainSeconds | quote }}
            {{- with $root.Values.huggingFaceToken }}
            {{- if .secretName }}
            - name: HF_TOKEN
              valueFrom: { secretKeyRef: { name: {{ .secretName }}, key: {{ .key }} } }
            {{- end }}
            {{- end }}
            {{- include "diptych.token-env" $root | nindent 12 }}
            {{- include "diptych.tls-env" $root | nindent 12 }}
            {{- if $root.Values.tls.enabled }}
            - name: DIPTYCH_TLS_REQUIRE_CLIENT_CERT
              value: {{ $root.Values.tls.requireClientCertificates | quote }}
            {{- if not .addressed }}
            # It asks encoders by their addresses, and their certificates have a name.
            - name: DIPTYCH_TLS_SERVER_NAME
              value: {{ include "diptych.name" $root }}-vision-encoder
            {{- end }}
            {{- end }}
            {{- include "diptych.redis-env" $root | nindent 12 }}
            {{- include "diptych.extra-env" $values.env | nindent 12 }}
          {{- include "diptych.probes" (dict "startFailures" 360 "scheme" (upper $scheme)) | nindent 10 }}
          # The gateway asks for the panel's addresses every 3 s and probes every second; a pod goes on serving till it knows.
          lifecycle: { preStop: { exec: { command: [sleep, "5"] } } }
          resources: {{- include "diptych.resources" $values | nindent 12 }}
          securityContext: {{- include "diptych.container-security" $root | nindent 12 }}
          volumeMounts:
            - { name: tmp, mountPath: /tmp }
            - { name: models, mountPath: /cache }
            {{- include "diptych.tls-mount" $root | nindent 12 }}
      volumes:
        - { name: tmp, emptyDir: {} }
        {{- if $root.Values.modelCache.existingClaim }}
        - { name: models, persistentVolumeClaim: { claimName: {{ $root.Values.modelCache.existingClaim }} } }
        {{- else }}
        - { name: models, emptyDir: { sizeLimit: {{ $root.Values.modelCache.sizeLimit }} } }
        {{- end }}
        {{- include "diptych.tls-volume" . | nindent 8 }}
---
# Headless: the gateway balances by itself and has to see every replica, those that are starting included.
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels: {{- include "diptych.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{- include "diptych.selector" . | nindent 4 }}
  ports: [{ name: http, port: {{ .port }}, targetPort: http }]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels: {{- include "diptych.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "diptych.selector" . | nindent 6 }}
{{- if $values.autoscaling.enabled }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}
  labels: {{- include "diptych.labels" . | nindent 4 }}
spec:
  scaleTargetRef: { name: {{ $name }} }
  minReplicaCount: {{ $values.autoscaling.minReplicas }}
  maxReplicaCount: {{ $values.autoscaling.maxReplicas }}
  cooldownPeriod: {{ $values.autoscaling.cooldownSeconds }}
  pollingInterval: 10
  # A gap in the metrics must not take replicas away.
  fallback: { failureThreshold: 3, replicas: {{ max 1 $values.autoscaling.minReplicas }}, behavior: currentReplicasIfHigher }
  triggers:
    {{- range .triggers }}
    - type: prometheus
      metricType: {{ .type | default "AverageValue" }}
      metadata:
        serverAddress: {{ $root.Values.prometheus.address }}
        query: {{ .query | quote }}
        threshold: {{ .threshold | quote }}
        {{- with .activation }}
        activationThreshold: {{ . | quote }}
        {{- end }}
    {{- end }}
{{- end }}
{{- end -}}
