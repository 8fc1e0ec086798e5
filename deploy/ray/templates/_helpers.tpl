{{/* An argument of the entrypoint, which a shell reads; whole numbers without exponents. */}}
{{- define "bulk.word" -}}
{{- $text := toString . -}}
{{- if kindIs "float64" . -}}{{- if eq . (floor .) -}}{{- $text = toString (int64 .) -}}{{- end -}}{{- end -}}
{{- ternary $text (printf "'%s'" (replace "'" "'\\''" $text)) (regexMatch "^[A-Za-z0-9_./:@=,+%-]+$" $text) -}}
{{- end -}}

{{/*
The command. All engines that workers have room for are asked for at once, and translate as their nodes come: Ray Data would ask for more
only where nodes have room already.
*/}}
{{- define "bulk.entrypoint" -}}
{{- $group := get .Values.workers .Values.device -}}
{{- $words := concat (list "dragoman" "bulk") .Values.inputs (list "--output" .Values.output "--model" .Values.model) -}}
{{- range $name, $value := .Values.options -}}
{{- range ternary $value (list $value) (kindIs "slice" $value) -}}
{{- if kindIs "bool" . -}}
{{- if . -}}{{- $words = append $words (printf "--%s" $name) -}}{{- end -}}
{{- else -}}
{{- $words = concat $words (list (printf "--%s" $name) .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $engines := int $group.engines -}}
{{- $words = concat $words (list "--ray" "auto" "--device" (ternary "cuda" "cpu" (eq .Values.device "gpu"))) -}}
{{- $words = concat $words (list "--num-threads" (div $group.cpu $engines) "--engines" (mul $group.maxReplicas $engines)) -}}
{{- with $group.gpus -}}{{- $words = concat $words (list "--num-gpus" (divf . $engines)) -}}{{- end -}}
{{- range $place, $word := $words }}{{ if $place }} {{ end }}{{ include "bulk.word" $word }}{{ end -}}
{{- end -}}

{{/* Pod of the head or a worker: a list of the root, the values of its group, and the group's name. */}}
{{- define "bulk.pod" -}}
{{- $v := (index . 0).Values -}}
{{- $group := index . 1 -}}
{{- $isHead := eq (index . 2) "head" -}}
restartPolicy: Never
enableServiceLinks: false
terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds }}
{{- with $v.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
# The autoscaler beside the head adds workers.
automountServiceAccountToken: {{ $isHead }}
securityContext: {{- toYaml $v.podSecurityContext | nindent 2 }}
{{- with $v.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $group.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $group.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: ray-{{ ternary "head" "worker" $isHead }}
    image: {{ ternary $v.images.gpu $v.images.cpu (hasKey $group "gpus") | quote }}
    imagePullPolicy: {{ $v.images.pullPolicy }}
    env:
      - name: RAY_USAGE_STATS_ENABLED
        value: "0"
      {{- with $v.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with $v.envFrom }}
    envFrom: {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- $resources := dict "cpu" $group.cpu "memory" $group.memory }}
    {{- with $group.gpus }}{{- $_ := set $resources "nvidia.com/gpu" . }}{{- end }}
    resources:
      requests: {{- toYaml $resources | nindent 8 }}
      limits: {{- toYaml $resources | nindent 8 }}
    # Those of KubeRay 1.6; older ones run wget, which the images lack.
    readinessProbe:
      httpGet: {path: /api/healthz, port: 52365}
      initialDelaySeconds: 10
      periodSeconds: 5
      timeoutSeconds: {{ ternary 5 2 $isHead }}
      failureThreshold: 10
    livenessProbe:
      httpGet: {path: /api/healthz, port: 52365}
      initialDelaySeconds: 30
      periodSeconds: 5
      timeoutSeconds: {{ ternary 5 2 $isHead }}
      failureThreshold: 120
    {{- if not $isHead }}
    # The cluster learns at once that the node ends, and gives its shards to others.
    lifecycle:
      preStop:
        exec:
          command: [ray, stop]
    {{- end }}
    securityContext: {{- toYaml $v.securityContext | nindent 6 }}
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      {{- if $v.models }}
      - name: models
        mountPath: /models
        readOnly: true
      {{- end }}
      {{- if $v.data }}
      - name: data
        mountPath: /data
      {{- end }}
volumes:
  # Sessions of Ray, objects for which memory has no room, and weights that engines share.
  - name: tmp
    emptyDir:
      sizeLimit: {{ $v.tmpSizeLimit }}
  {{- range $name, $volume := dict "models" $v.models "data" $v.data }}
  {{- if $volume }}
  - name: {{ $name }}
    {{- toYaml $volume | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}
