{{/* Name of the chart in labels. */}}
{{- define "dragoman.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of the objects; 40 characters leave room for suffixes and for those of pods. */}}
{{- define "dragoman.fullname" -}}
{{- $name := include "dragoman.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "dragoman.selectorLabels" -}}
app.kubernetes.io/name: {{ include "dragoman.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of every object; the chart's own win over commonLabels. */}}
{{- define "dragoman.labels" -}}
{{- $own := include "dragoman.selectorLabels" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" (.Values.image.tag | default .Chart.AppVersion | replace "+" "_" | trunc 63) -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63) -}}
{{- toYaml (merge $own .Values.commonLabels) -}}
{{- end -}}

{{- define "dragoman.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "dragoman.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The image; GPU nodes get the tag with CUDA unless a tag is given. */}}
{{- define "dragoman.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- $default := ternary (printf "%s-cuda" .Chart.AppVersion) .Chart.AppVersion .Values.gpu.enabled -}}
{{- printf "%s:%s" .Values.image.repository (default $default .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* A setting as an environment variable: whole numbers without exponents, commas between the items of a list. */}}
{{- define "dragoman.settingValue" -}}
{{- if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . -}}{{- $items = append $items (include "dragoman.settingValue" .) -}}{{- end -}}
{{- join "," $items -}}
{{- else if kindIs "float64" . -}}
{{- if eq . (floor .) -}}{{- int64 . -}}{{- else -}}{{- . -}}{{- end -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* A model's file, as TOML: tables of values and of lists. */}}
{{- define "dragoman.modelFile" -}}
{{- range $table, $fields := . }}
{{- if $fields }}
[{{ $table }}]
{{- range $name, $value := $fields }}
{{- if not (kindIs "invalid" $value) }}
{{ toJson $name }} = {{ include "dragoman.tomlValue" $value }}
{{- end }}
{{- end }}
{{ end }}
{{- end -}}
{{- end -}}

{{- define "dragoman.tomlValue" -}}
{{- if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . -}}{{- $items = append $items (include "dragoman.tomlValue" .) -}}{{- end -}}
[{{ join ", " $items }}]
{{- else if kindIs "string" . -}}
{{- toJson . -}}
{{- else -}}
{{- include "dragoman.settingValue" . -}}
{{- end -}}
{{- end -}}

{{/* Merge `from` into `into`, recursively: a list replaces a list, null removes a field. Renders nothing. */}}
{{- define "dragoman.merge" -}}
{{- range $key, $value := .from -}}
{{- $old := get $.into $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $old) -}}
{{- include "dragoman.merge" (dict "into" $old "from" $value) -}}
{{- else if kindIs "invalid" $value -}}
{{- $_ := unset $.into $key -}}
{{- else -}}
{{- $_ := set $.into $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Resources of init containers: CPU and memory of the server's container. */}}
{{- define "dragoman.initResources" -}}
{{- $all := include "dragoman.resources" . | fromYaml -}}
{{- $ours := dict -}}
{{- range $kind := list "limits" "requests" -}}
{{- $_ := set $ours $kind (pick (default (dict) (get $all $kind)) "cpu" "memory") -}}
{{- end -}}
{{- toYaml $ours -}}
{{- end -}}

{{/* Whether bundles must be signed. Empty for no. */}}
{{- define "dragoman.signed" -}}
{{- if or .Values.models.signatures.configMapName .Values.models.signatures.secretName -}}yes{{- end -}}
{{- end -}}

{{/* Whether HTTP is served. Empty for no. */}}
{{- define "dragoman.answersHttp" -}}
{{- $given := get .Values.config "http" -}}
{{- if or (not (hasKey .Values.config "http")) (kindIs "invalid" $given) $given -}}yes{{- end -}}
{{- end -}}

{{/* Whether HTTP is reachable from outside the pod. Empty for no. */}}
{{- define "dragoman.hasHttp" -}}
{{- if not (has (get .Values.config "http_host" | default (get .Values.config "host")) (list "127.0.0.1" "::1" "localhost")) -}}
{{- include "dragoman.answersHttp" . -}}
{{- end -}}
{{- end -}}

{{/* Backends of a route's rule; takes root, the given backends, and the default port. */}}
{{- define "dragoman.backends" -}}
{{- $backends := list -}}
{{- range default (list (dict)) .given -}}
{{- $backend := dict "name" (default (include "dragoman.fullname" $.root) .name) "port" (int (default $.port .port)) -}}
{{- with .namespace -}}{{- $_ := set $backend "namespace" . -}}{{- end -}}
{{- if hasKey . "weight" -}}{{- $_ := set $backend "weight" (int .weight) -}}{{- end -}}
{{- $backends = append $backends $backend -}}
{{- end -}}
{{- toYaml $backends -}}
{{- end -}}

{{/* Kind of probe: the kubelet's gRPC probes speak no TLS, so with TLS they request the metrics port. */}}
{{- define "dragoman.probeType" -}}
{{- if eq .Values.probes.type "auto" -}}
{{- ternary "http" "grpc" .Values.tls.enabled -}}
{{- else -}}
{{- .Values.probes.type -}}
{{- end -}}
{{- end -}}

{{/* Handler of a probe; takes root, the gRPC service and the HTTP path. */}}
{{- define "dragoman.probe" -}}
{{- if eq (include "dragoman.probeType" .root) "grpc" -}}
grpc:
  port: {{ .root.Values.service.grpcPort }}
  service: {{ .service }}
{{- else -}}
httpGet:
  port: metrics
  path: {{ .path }}
  {{- if .root.Values.metrics.tls.enabled }}
  scheme: HTTPS
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Secret with the certificate of the metrics port. */}}
{{- define "dragoman.metricsTlsSecret" -}}
{{- default (ternary .Values.tls.secretName "" .Values.tls.enabled) .Values.metrics.tls.secretName -}}
{{- end -}}

{{/* Endpoint of a ServiceMonitor or PodMonitor. */}}
{{- define "dragoman.endpoint" -}}
{{- $metrics := .Values.metrics -}}
port: metrics
path: /metrics
interval: 15s
scrapeTimeout: 10s
{{- if $metrics.tls.enabled }}
scheme: https
tlsConfig:
  serverName: {{ include "dragoman.fullname" . }}.{{ .Release.Namespace }}.svc
  ca:
    secret:
      name: {{ include "dragoman.metricsTlsSecret" . }}
      key: ca.crt
{{- end }}
{{- if $metrics.auth.secretName }}
authorization:
  type: Bearer
  credentials:
    name: {{ $metrics.auth.secretName }}
    key: {{ $metrics.auth.key }}
{{- end }}
{{- end -}}

{{/* Seconds from the deletion of a pod to its SIGKILL: preStop, drain and margin. */}}
{{- define "dragoman.gracePeriod" -}}
{{- int (ceil (addf .Values.drain.preStopSeconds .Values.drain.seconds .Values.drain.marginSeconds)) -}}
{{- end -}}

{{/* Deployment strategy: one pod is added first, but on GPU nodes one is removed first. */}}
{{- define "dragoman.strategy" -}}
{{- $type := default "RollingUpdate" .Values.strategy.type -}}
type: {{ $type }}
{{- if eq $type "RollingUpdate" }}
{{- $given := default (dict) .Values.strategy.rollingUpdate -}}
{{- $surge := get $given "maxSurge" -}}
{{- $unavailable := get $given "maxUnavailable" -}}
{{- if or (not (hasKey $given "maxSurge")) (kindIs "invalid" $surge) -}}
{{- $surge = ternary 0 1 (and .Values.gpu.enabled (not (has (toString $unavailable) (list "0" "0%")))) -}}
{{- end -}}
{{- if or (not (hasKey $given "maxUnavailable")) (kindIs "invalid" $unavailable) -}}
{{- $unavailable = ternary 1 0 (has (toString $surge) (list "0" "0%")) -}}
{{- end }}
rollingUpdate:
  maxSurge: {{ $surge }}
  maxUnavailable: {{ $unavailable }}
{{- end }}
{{- end -}}

{{/* Resources of the server's container, without the GPU. */}}
{{- define "dragoman.resources" -}}
{{- toYaml (ternary .Values.gpu.resources .Values.resources .Values.gpu.enabled) -}}
{{- end -}}

{{/* CPU target in percent: by default 80, on GPU nodes 0, which is off. */}}
{{- define "dragoman.cpuPercent" -}}
{{- $target := .Values.autoscaling.targets.cpuPercent -}}
{{- ternary (ternary 0 80 .Values.gpu.enabled) $target (eq (toString $target) "auto") -}}
{{- end -}}

{{/* Metrics to scale by: the name, the aggregation over a pod's models, and the target per pod. */}}
{{- define "dragoman.scalingMetrics" -}}
{{- $targets := .Values.autoscaling.targets -}}
{{- $slots := $targets.slotsInUse -}}
{{- if eq (toString $slots) "auto" -}}
{{- /* Three eighths of a pod's slots; 64 is the server's default. */ -}}
{{- $all := mul (int (default 64 (get .Values.config "max_slots"))) (int (default 1 (get .Values.config "replicas"))) -}}
{{- $slots = max 1 (div (mul 3 $all) 8) -}}
{{- end -}}
{{- $metrics := list -}}
{{- if $targets.queueSeconds -}}
{{- $metrics = append $metrics (dict "name" "dragoman_estimated_queue_seconds" "of" "max by (pod) (%s)" "target" $targets.queueSeconds) -}}
{{- end -}}
{{- if $targets.requestsWaiting -}}
{{- $metrics = append $metrics (dict "name" "dragoman_num_requests_waiting" "of" "%s" "target" $targets.requestsWaiting) -}}
{{- end -}}
{{- if $slots -}}
{{- $metrics = append $metrics (dict "name" "dragoman_slots_in_use" "of" "%s" "target" $slots) -}}
{{- end -}}
{{- toYaml $metrics -}}
{{- end -}}

{{/* A route; takes root, kind, name, its values, the port of backends, and its rules without backends. */}}
{{- define "dragoman.route" -}}
{{- $rules := list -}}
{{- range $number, $rule := .rules -}}
{{- $given := index (default (list (dict)) $.values.rules) $number -}}
{{- $backends := include "dragoman.backends" (dict "root" $.root "given" $given.backends "port" $.port) | fromYamlArray -}}
{{- $rules = append $rules (set $rule "backendRefs" $backends) -}}
{{- end -}}
apiVersion: gateway.networking.k8s.io/v1
kind: {{ .kind }}
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "dragoman.labels" .root | nindent 4 }}
  {{- with .values.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  parentRefs: {{- toYaml .values.parentRefs | nindent 4 }}
  {{- with .values.hostnames }}
  hostnames: {{- toYaml . | nindent 4 }}
  {{- end }}
  rules: {{- toYaml $rules | nindent 4 }}
{{- end -}}

{{/* Matchers of this release's series, as the chart's monitors label them: a ServiceMonitor's job is NAME, a PodMonitor's NAMESPACE/NAME. */}}
{{- define "dragoman.matchers" -}}
{{- $name := include "dragoman.fullname" . | regexQuoteMeta -}}
{{- $own := printf "namespace=%q,job=~%q" .Release.Namespace (printf "(%s/)?%s" .Release.Namespace $name) -}}
{{- default $own .Values.metrics.prometheusRule.matchers -}}
{{- end -}}

{{/* Labels that the rules sum by: those in matchers are kept, so that recorded series match them too. */}}
{{- define "dragoman.sumLabels" -}}
{{- $bare := regexReplaceAll "\"([^\"\\\\]|\\\\.)*\"" (include "dragoman.matchers" .) "" -}}
{{- $names := without (regexFindAll "[a-zA-Z_][a-zA-Z0-9_]*" $bare -1) "namespace" "job" "model" -}}
{{- join ", " (concat (list "namespace" "job") (uniq $names) (list "model")) -}}
{{- end -}}

{{/* Whether any of a rule's backends has a weight above 0, the default being 1. Empty for no. */}}
{{- define "dragoman.weighs" -}}
{{- range . -}}{{- if or (not (hasKey . "weight")) (gt (int .weight) 0) -}}yes{{- end -}}{{- end -}}
{{- end -}}

{{/* Lowest number of replicas. */}}
{{- define "dragoman.minReplicas" -}}
{{- ternary .Values.replicaCount .Values.autoscaling.minReplicas (eq .Values.autoscaling.type "none") -}}
{{- end -}}

{{/* Checks beyond the schema. */}}
{{- define "dragoman.validate" -}}
{{- $v := .Values -}}
{{- if eq $v.models.source "volume" -}}
{{- if not $v.models.volume -}}{{- fail "models.volume: needed with models.source: volume" -}}{{- end -}}
{{- if hasKey $v.models.volume "image" -}}
{{- if not (regexMatch "^[^@\\s]+@sha256:[0-9a-f]{64}$" (default "" $v.models.volume.image.reference)) -}}{{- fail "models.volume.image.reference: must be NAME@sha256:…, or pods of one release could have different models" -}}{{- end -}}
{{- if semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version -}}{{- fail (printf "models.volume.image needs image volumes, Kubernetes 1.33 or newer; this is %s" .Capabilities.KubeVersion.Version) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq $v.models.source "store" -}}
{{- if not $v.models.store.addresses -}}{{- fail "models.store.addresses: needed with models.source: store" -}}{{- end -}}
{{- range $v.models.store.addresses -}}
{{- if and (hasPrefix "http://" .address) (not .sha256) (not (include "dragoman.signed" $)) -}}{{- fail (printf "models.store.addresses: %s: without TLS, what comes must have a sha256 or be signed (models.signatures)" .address) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.models.source "store") $v.networkPolicy.enabled (not $v.networkPolicy.egress) -}}{{- fail "networkPolicy.egress: must allow the store of models (and DNS) with models.source: store" -}}{{- end -}}
{{- if and $v.models.signatures.configMapName $v.models.signatures.secretName -}}{{- fail "models.signatures: set configMapName or secretName, not both" -}}{{- end -}}
{{- range $name, $file := $v.models.files -}}
{{- $versions := default (dict) (get (default (dict) $file) "versions") -}}
{{- if and (get $versions "latest") (get $versions "only") -}}{{- fail (printf "models.files.%s.versions: latest and only are both set" $name) -}}{{- end -}}
{{- $sum := 0.0 -}}
{{- range default (dict) (get (default (dict) $file) "weights") -}}{{- $sum = addf $sum (default 0.0 .) -}}{{- end -}}
{{- if gt $sum 1.000000001 -}}{{- fail (printf "models.files.%s.weights: are %v together, more than 1" $name $sum) -}}{{- end -}}
{{- end -}}
{{- if and $v.tls.enabled (not $v.tls.secretName) -}}{{- fail "tls.secretName: needed with tls.enabled" -}}{{- end -}}
{{- if and $v.tls.clientCA.secretName (not $v.tls.enabled) -}}{{- fail "tls.clientCA.secretName: needs tls.enabled" -}}{{- end -}}
{{- if and $v.metrics.tls.enabled (not (include "dragoman.metricsTlsSecret" .)) -}}{{- fail "metrics.tls.secretName: needed with metrics.tls.enabled, where gRPC has no certificate" -}}{{- end -}}
{{- if has (get $v.config "metrics_host" | default (get $v.config "host")) (list "127.0.0.1" "::1" "localhost") -}}
{{- if eq (include "dragoman.probeType" .) "http" -}}{{- fail "config.metrics_host: the kubelet cannot probe a port that only the pod itself reaches" -}}{{- end -}}
{{- if ne $v.metrics.monitor.kind "none" -}}{{- fail "config.metrics_host: nobody can scrape a port that only the pod itself reaches" -}}{{- end -}}
{{- end -}}
{{- with $v.podSpec.terminationGracePeriodSeconds -}}
{{- $needed := int (include "dragoman.gracePeriod" $) -}}
{{- if lt (int .) $needed -}}{{- fail (printf "podSpec.terminationGracePeriodSeconds: %d is less than preStopSeconds + seconds + marginSeconds = %d: running requests would be cut off" (int .) $needed) -}}{{- end -}}
{{- end -}}
{{- if and $v.tls.enabled (eq $v.probes.type "grpc") -}}{{- fail "probes.type: gRPC probes speak no TLS; use auto or http with tls.enabled" -}}{{- end -}}
{{- if and (eq $v.metrics.monitor.kind "ServiceMonitor") (ne $v.service.type "ClusterIP") -}}{{- fail "metrics.monitor: a Service that is reached from outside has no metrics port; use kind: PodMonitor" -}}{{- end -}}
{{- if and $v.httpRoute.enabled (not (include "dragoman.hasHttp" .)) -}}{{- fail "httpRoute: nobody outside of the pod reaches HTTP; see config.http and config.http_host" -}}{{- end -}}
{{- range $route, $port := dict "grpcRoute" $v.service.grpcPort "httpRoute" $v.service.httpPort -}}
{{- $given := get $v $route -}}
{{- if and $given.enabled (not $given.parentRefs) -}}{{- fail (printf "%s.parentRefs: needed with %s.enabled" $route $route) -}}{{- end -}}
{{- range $given.rules -}}
{{- if and .timeouts (eq (default "" $given.kind) "GRPCRoute") -}}{{- fail "grpcRoute.rules: a GRPCRoute has no timeouts; use grpcRoute.kind: HTTPRoute, or a policy of your gateway's own" -}}{{- end -}}
{{- if and .backends (not (include "dragoman.weighs" .backends)) -}}{{- fail (printf "%s.rules: a rule whose backends all have the weight 0 answers nobody" $route) -}}{{- end -}}
{{- $known := list -}}
{{- range .backends -}}
{{- $key := printf "%s/%s:%d" (default $.Release.Namespace .namespace) (default (include "dragoman.fullname" $) .name) (int (default $port .port)) -}}
{{- if has $key $known -}}{{- fail (printf "%s.rules: a rule has the backend %s twice; one without a name is this release" $route $key) -}}{{- end -}}
{{- $known = append $known $key -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with get (include "dragoman.strategy" . | fromYaml) "rollingUpdate" -}}
{{- $limits := . -}}
{{- if and (has (toString $limits.maxSurge) (list "0" "0%")) (has (toString $limits.maxUnavailable) (list "0" "0%")) -}}{{- fail "strategy.rollingUpdate: with maxSurge and maxUnavailable 0 nothing could ever be replaced" -}}{{- end -}}
{{- end -}}
{{- if eq (int $v.service.grpcPort) (int $v.service.metricsPort) -}}{{- fail "service: grpcPort and metricsPort are the same" -}}{{- end -}}
{{- if include "dragoman.answersHttp" . -}}
{{- if has (int $v.service.httpPort) (list (int $v.service.grpcPort) (int $v.service.metricsPort)) -}}{{- fail "service: httpPort is that of gRPC or of the metrics" -}}{{- end -}}
{{- end -}}
{{- if ne $v.autoscaling.type "none" -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}{{- fail "autoscaling: minReplicas is more than maxReplicas" -}}{{- end -}}
{{- $metrics := include "dragoman.scalingMetrics" . | fromYamlArray -}}
{{- $cpu := int (include "dragoman.cpuPercent" .) -}}
{{- if not (or $metrics $cpu) -}}{{- fail "autoscaling.targets: at least one must be above 0" -}}{{- end -}}
{{- if and $cpu (not (dig "requests" "cpu" "" (include "dragoman.resources" . | fromYaml))) -}}{{- fail (printf "autoscaling.targets.cpuPercent: needs %s.requests.cpu" (ternary "gpu.resources" "resources" $v.gpu.enabled)) -}}{{- end -}}
{{- if and (eq $v.autoscaling.type "keda") $metrics (not $v.autoscaling.keda.serverAddress) -}}{{- fail "autoscaling.keda.serverAddress: needed with autoscaling.type: keda" -}}{{- end -}}
{{- end -}}
{{- if and $v.podDisruptionBudget.enabled (not (kindIs "invalid" $v.podDisruptionBudget.minAvailable)) (not (kindIs "invalid" $v.podDisruptionBudget.maxUnavailable)) -}}{{- fail "podDisruptionBudget: set minAvailable or maxUnavailable, and the other one to null" -}}{{- end -}}
{{- if and $v.podDisruptionBudget.enabled (kindIs "invalid" $v.podDisruptionBudget.minAvailable) (kindIs "invalid" $v.podDisruptionBudget.maxUnavailable) -}}{{- fail "podDisruptionBudget: set minAvailable or maxUnavailable" -}}{{- end -}}
{{- end -}}
