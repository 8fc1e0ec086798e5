{{/* Parts of the Deployment, as YAML into which values are merged. */}}

{{/* Secrets that the server reads as files in /etc/dragoman/NAME, as a list of names and Secrets. */}}
{{- define "dragoman.secrets" -}}
{{- $v := .Values -}}
{{- $found := list -}}
{{- if $v.tls.enabled -}}
{{- $found = append $found (list "tls" $v.tls.secretName) -}}
{{- with $v.tls.clientCA.secretName -}}{{- $found = append $found (list "client-ca" .) -}}{{- end -}}
{{- end -}}
{{- with $v.auth.secretName -}}{{- $found = append $found (list "auth" .) -}}{{- end -}}
{{- with $v.metrics.auth.secretName -}}{{- $found = append $found (list "metrics-auth" .) -}}{{- end -}}
{{- if $v.metrics.tls.enabled -}}{{- $found = append $found (list "metrics-tls" (include "dragoman.metricsTlsSecret" .)) -}}{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* Pod spec without containers. */}}
{{- define "dragoman.pod" -}}
{{- $v := .Values -}}
serviceAccountName: {{ include "dragoman.serviceAccountName" . }}
automountServiceAccountToken: false
# A Service called dragoman would become variables that look like settings.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "dragoman.gracePeriod" . }}
securityContext: {{- toYaml $v.podSecurityContext | nindent 2 }}
{{- with $v.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $taint := dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule" }}
{{- with ternary (append $v.tolerations $taint) $v.tolerations $v.gpu.enabled }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml . | nindent 4 }}
    labelSelector:
      matchLabels: {{- include "dragoman.selectorLabels" $ | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
  {{- end }}
{{- end }}
volumes:
  # Sockets between the server and its engines.
  - name: tmp
    emptyDir: {{- toYaml $v.tmp | nindent 6 }}
  - name: model-files
    configMap:
      name: {{ include "dragoman.fullname" . }}-model-files
  {{- with $v.models.signatures.configMapName }}
  - name: keys
    configMap:
      name: {{ . }}
  {{- end }}
  {{- with $v.models.signatures.secretName }}
  - name: keys
    secret:
      secretName: {{ . }}
      defaultMode: 0440
  {{- end }}
  {{- if $v.weightsCache.enabled }}
  - name: weights
    emptyDir:
      sizeLimit: {{ $v.weightsCache.sizeLimit }}
  {{- end }}
  {{- if eq $v.models.source "volume" }}
  {{- $defaults := dict "persistentVolumeClaim" (dict "readOnly" true) "image" (dict "pullPolicy" "IfNotPresent") }}
  {{- $volume := merge (dict) $v.models.volume (pick $defaults (keys $v.models.volume | first)) }}
  - name: models
    {{- toYaml $volume | nindent 4 }}
  {{- else if eq $v.models.source "store" }}
  - name: models
    {{- if $v.models.store.claimName }}
    persistentVolumeClaim:
      claimName: {{ $v.models.store.claimName }}
    {{- else }}
    emptyDir:
      sizeLimit: {{ $v.models.store.sizeLimit }}
    {{- end }}
  {{- with $v.models.store.secretName }}
  - name: store
    secret:
      secretName: {{ . }}
      defaultMode: 0440
  {{- end }}
  {{- end }}
  {{- range include "dragoman.secrets" . | fromYamlArray }}
  - name: {{ first . }}
    secret:
      secretName: {{ last . }}
      defaultMode: 0440
  {{- end }}
  {{- with $v.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Init containers that pull models from a store, one per address. */}}
{{- define "dragoman.pulls" -}}
{{- $v := .Values -}}
{{- $pulls := list -}}
{{- range $number, $place := ternary $v.models.store.addresses (list) (eq $v.models.source "store") -}}
{{- $pull := include "dragoman.pull" (dict "root" $ "number" $number "place" $place) | fromYaml -}}
{{- include "dragoman.merge" (dict "into" $pull "from" $v.models.store.containerSpec) -}}
{{- $pulls = append $pulls $pull -}}
{{- end -}}
{{- toYaml $pulls -}}
{{- end -}}

{{- define "dragoman.pull" -}}
{{- $v := .root.Values -}}
name: models-{{ .number }}
image: {{ include "dragoman.image" .root | quote }}
imagePullPolicy: {{ $v.image.pullPolicy }}
args:
  - pull
  - {{ .place.address | quote }}
  - /models
  - --cache-gib={{ $v.models.store.cacheGib }}
  - --silence={{ $v.models.store.silenceSeconds }}
  {{- with .place.sha256 }}
  - --sha256={{ . }}
  {{- end }}
  {{- if include "dragoman.signed" .root }}
  - --require-signatures=/etc/dragoman/keys
  {{- end }}
securityContext: {{- toYaml $v.securityContext | nindent 2 }}
resources: {{- include "dragoman.initResources" .root | nindent 2 }}
volumeMounts:
  - name: models
    mountPath: /models
  - name: tmp
    mountPath: /tmp
  {{- if include "dragoman.signed" .root }}
  - name: keys
    mountPath: /etc/dragoman/keys
    readOnly: true
  {{- end }}
  {{- if $v.models.store.secretName }}
  - name: store
    mountPath: /etc/dragoman/store
    readOnly: true
  {{- end }}
{{- end -}}

{{/* The server's container. */}}
{{- define "dragoman.container" -}}
{{- $v := .Values -}}
name: dragoman
image: {{ include "dragoman.image" . | quote }}
imagePullPolicy: {{ $v.image.pullPolicy }}
args: [serve]
ports:
  - name: grpc
    containerPort: {{ $v.service.grpcPort }}
  {{- if include "dragoman.hasHttp" . }}
  - name: http
    containerPort: {{ $v.service.httpPort }}
  {{- end }}
  - name: metrics
    containerPort: {{ $v.service.metricsPort }}
env:
  - name: DRAGOMAN_MODELS
    value: /models
  # Not in the folder of models, which may be read-only.
  - name: DRAGOMAN_MODEL_FILES
    value: /etc/dragoman/model-files
  {{- if include "dragoman.signed" . }}
  - name: DRAGOMAN_REQUIRE_SIGNATURES
    value: /etc/dragoman/keys
  {{- end }}
  - name: DRAGOMAN_HOST
    value: {{ default "0.0.0.0" (get $v.config "host") | quote }}
  - name: DRAGOMAN_PORT
    value: {{ $v.service.grpcPort | quote }}
  {{- if include "dragoman.answersHttp" . }}
  - name: DRAGOMAN_HTTP_PORT
    value: {{ $v.service.httpPort | quote }}
  {{- end }}
  - name: DRAGOMAN_METRICS_PORT
    value: {{ $v.service.metricsPort | quote }}
  - name: DRAGOMAN_DRAIN_SECONDS
    value: {{ $v.drain.seconds | quote }}
  # Not auto, which would fill /tmp.
  - name: DRAGOMAN_WEIGHTS_CACHE
    value: {{ ternary "/weights" "off" $v.weightsCache.enabled | quote }}
  {{- if $v.tls.enabled }}
  - name: DRAGOMAN_TLS_CERTIFICATE
    value: /etc/dragoman/tls/tls.crt
  - name: DRAGOMAN_TLS_KEY
    value: /etc/dragoman/tls/tls.key
  {{- if $v.tls.clientCA.secretName }}
  - name: DRAGOMAN_TLS_CLIENT_CA
    value: /etc/dragoman/client-ca/{{ $v.tls.clientCA.key }}
  {{- end }}
  {{- end }}
  {{- if $v.auth.secretName }}
  - name: DRAGOMAN_AUTH_TOKENS_FILE
    value: /etc/dragoman/auth/{{ $v.auth.key }}
  {{- end }}
  {{- if $v.metrics.auth.secretName }}
  - name: DRAGOMAN_METRICS_TOKEN_FILE
    value: /etc/dragoman/metrics-auth/{{ $v.metrics.auth.key }}
  {{- end }}
  {{- if $v.metrics.tls.enabled }}
  - name: DRAGOMAN_METRICS_TLS_CERTIFICATE
    value: /etc/dragoman/metrics-tls/tls.crt
  - name: DRAGOMAN_METRICS_TLS_KEY
    value: /etc/dragoman/metrics-tls/tls.key
  {{- end }}
  {{- if and $v.gpu.enabled (not (get $v.config "device")) }}
  # Not auto: a pod without its GPU must fail, not compute on the CPU.
  - name: DRAGOMAN_DEVICE
    value: cuda
  {{- end }}
  {{- range $name, $value := omit $v.config "host" }}
  {{- if not (kindIs "invalid" $value) }}
  - name: DRAGOMAN_{{ upper $name }}
    value: {{ include "dragoman.settingValue" $value | quote }}
  {{- end }}
  {{- end }}
  {{- with $v.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $v.extraEnvFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
startupProbe:
  {{- include "dragoman.probe" (dict "root" . "service" "readiness" "path" "/readyz") | nindent 2 }}
  # Ten minutes to load and warm up.
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 120
readinessProbe:
  {{- include "dragoman.probe" (dict "root" . "service" "readiness" "path" "/readyz") | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  {{- include "dragoman.probe" (dict "root" . "service" "liveness" "path" "/healthz") | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- if gt (int $v.drain.preStopSeconds) 0 }}
# Serve while load balancers learn that this pod ends.
lifecycle:
  preStop:
    {{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}
    sleep:
      seconds: {{ $v.drain.preStopSeconds }}
    {{- else }}
    exec:
      command: [sleep, {{ $v.drain.preStopSeconds | quote }}]
    {{- end }}
{{- end }}
securityContext: {{- toYaml $v.securityContext | nindent 2 }}
{{- $resources := include "dragoman.resources" . | fromYaml }}
{{- with ternary (merge (dict "limits" (dict $v.gpu.resource 1)) $resources) $resources $v.gpu.enabled }}
resources: {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: model-files
    mountPath: /etc/dragoman/model-files
    readOnly: true
  {{- if include "dragoman.signed" . }}
  - name: keys
    mountPath: /etc/dragoman/keys
    readOnly: true
  {{- end }}
  {{- if $v.weightsCache.enabled }}
  - name: weights
    mountPath: /weights
  {{- end }}
  {{- if ne $v.models.source "image" }}
  - name: models
    mountPath: /models
    readOnly: true
    {{- with $v.models.subPath }}
    subPath: {{ . }}
    {{- end }}
  {{- end }}
  {{- range include "dragoman.secrets" . | fromYamlArray }}
  - name: {{ first . }}
    mountPath: /etc/dragoman/{{ first . }}
    readOnly: true
  {{- end }}
  {{- with $v.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
