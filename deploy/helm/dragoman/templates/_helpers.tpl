{{/* Name of the chart in labels. */}}
{{- define "dragoman.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of what is installed; 40 characters leave room for suffixes and for the pods' own. */}}
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

{{/* A value as the environment has it: numbers without exponents where they are whole, commas between the items of a list. */}}
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

{{/* Resources of what runs before the server: its own, but for what only it can use. */}}
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

{{/* Whether HTTP is answered beside gRPC. Empty for no. */}}
{{- define "dragoman.answersHttp" -}}
{{- $given := get .Values.config "http" -}}
{{- if or (not (hasKey .Values.config "http")) (kindIs "invalid" $given) $given -}}yes{{- end -}}
{{- end -}}

{{/* Whether others than the pod itself reach HTTP. Empty for no. */}}
{{- define "dragoman.hasHttp" -}}
{{- if not (has (get .Values.config "http_host" | default (get .Values.config "host")) (list "127.0.0.1" "::1" "localhost")) -}}
{{- include "dragoman.answersHttp" . -}}
{{- end -}}
{{- end -}}

{{/* Backends of a route's rule; takes root, those that are given, and the port of a Service that names none. */}}
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

{{/* Kind of probe: the kubelet's gRPC probes speak no TLS, so with TLS the plain HTTP port is asked. */}}
{{- define "dragoman.probeType" -}}
{{- if eq .Values.probes.type "auto" -}}
{{- ternary "http" "grpc" .Values.tls.enabled -}}
{{- else -}}
{{- .Values.probes.type -}}
{{- end -}}
{{- end -}}

{{/* One probe; takes root, the probe's values, the gRPC service and the HTTP path. */}}
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
{{- end }}
periodSeconds: {{ .probe.periodSeconds }}
timeoutSeconds: {{ .probe.timeoutSeconds }}
failureThreshold: {{ .probe.failureThreshold }}
{{- end -}}

{{/* Secret with the certificate of the metrics port. */}}
{{- define "dragoman.metricsTlsSecret" -}}
{{- default (ternary .Values.tls.secretName "" .Values.tls.enabled) .Values.metrics.tls.secretName -}}
{{- end -}}

{{/* What an endpoint of a ServiceMonitor or PodMonitor needs beside its port: how to speak, and the token to show. */}}
{{- define "dragoman.scrape" -}}
{{- $metrics := .Values.metrics -}}
{{- if $metrics.tls.enabled }}
scheme: https
tlsConfig:
  serverName: {{ default (printf "%s.%s.svc" (include "dragoman.fullname" .) .Release.Namespace) $metrics.tls.serverName }}
  ca:
    secret:
      name: {{ default (include "dragoman.metricsTlsSecret" .) $metrics.tls.ca.secretName }}
      key: {{ $metrics.tls.ca.key }}
{{- end }}
{{- if $metrics.auth.secretName }}
authorization:
  type: Bearer
  credentials:
    name: {{ $metrics.auth.secretName }}
    key: {{ default $metrics.auth.key $metrics.auth.scrapeKey }}
{{- end }}
{{- end -}}

{{/* Seconds from the deletion of a pod to its SIGKILL: preStop, drain and margin, or more where the values say so. */}}
{{- define "dragoman.gracePeriod" -}}
{{- $drain := .Values.drain -}}
{{- $needed := int (ceil (addf $drain.preStopSeconds $drain.seconds $drain.marginSeconds)) -}}
{{- if kindIs "invalid" $drain.terminationGracePeriodSeconds -}}
{{- $needed -}}
{{- else if lt (int $drain.terminationGracePeriodSeconds) $needed -}}
{{- fail (printf "drain.terminationGracePeriodSeconds: %d is less than preStopSeconds + seconds + marginSeconds = %d: running requests would be cut off" (int $drain.terminationGracePeriodSeconds) $needed) -}}
{{- else -}}
{{- int $drain.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}

{{/* How pods are replaced: a pod more first, but not where that would need a GPU more. */}}
{{- define "dragoman.strategy" -}}
type: {{ .Values.strategy.type }}
{{- if eq .Values.strategy.type "RollingUpdate" }}
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

{{/* Whether the CPU is scaled by: by default where there is no GPU, beside which it says little. Empty for no. */}}
{{- define "dragoman.scalesByCpu" -}}
{{- $enabled := .Values.autoscaling.cpu.enabled -}}
{{- if ternary (not .Values.gpu.enabled) $enabled (kindIs "invalid" $enabled) -}}yes{{- end -}}
{{- end -}}

{{/* Slots in use a pod to scale by: by default three eighths of those that it has; 64 is the server's own default. */}}
{{- define "dragoman.slotsTarget" -}}
{{- $target := .Values.autoscaling.slotsInUse.target -}}
{{- if kindIs "invalid" $target -}}
{{- $slots := mul (int (default 64 (get .Values.config "max_slots"))) (int (default 1 (get .Values.config "replicas"))) -}}
{{- max 1 (div (mul 3 $slots) 8) -}}
{{- else -}}
{{- $target -}}
{{- end -}}
{{- end -}}

{{/* Matchers of this release's series, as the chart's monitors label them: a ServiceMonitor's job is NAME, a PodMonitor's NAMESPACE/NAME. */}}
{{- define "dragoman.matchers" -}}
{{- $name := include "dragoman.fullname" . | regexQuoteMeta -}}
{{- $own := printf "namespace=%q,job=~%q" .Release.Namespace (printf "(%s/)?%s" .Release.Namespace $name) -}}
{{- default $own .Values.metrics.prometheusRule.matchers -}}
{{- end -}}

{{/* What the rules sum by: labels that matchers ask for stay, or nobody would find what is recorded. */}}
{{- define "dragoman.sumLabels" -}}
{{- $bare := regexReplaceAll "\"([^\"\\\\]|\\\\.)*\"" (include "dragoman.matchers" .) "" -}}
{{- $names := without (regexFindAll "[a-zA-Z_][a-zA-Z0-9_]*" $bare -1) "namespace" "job" "model" -}}
{{- join ", " (concat (list "namespace" "job") (uniq $names) (list "model")) -}}
{{- end -}}

{{/* Whether a rule's backends get any call; one without a weight has 1. */}}
{{- define "dragoman.weighs" -}}
{{- range . -}}{{- if or (not (hasKey . "weight")) (gt (int .weight) 0) -}}yes{{- end -}}{{- end -}}
{{- end -}}

{{/* The least number of replicas there will be. */}}
{{- define "dragoman.minReplicas" -}}
{{- ternary .Values.replicaCount .Values.autoscaling.minReplicas (eq .Values.autoscaling.type "none") -}}
{{- end -}}

{{/* What the schema cannot say. */}}
{{- define "dragoman.validate" -}}
{{- $v := .Values -}}
{{- $gone := .Files.Get "files/gone.json" | fromJson -}}
{{- range $name, $_ := $v.config -}}
{{- with get $gone $name -}}{{- fail (printf "config.%s is gone: %s" $name .) -}}{{- end -}}
{{- end -}}
{{- if and (eq $v.models.source "pvc") (not $v.models.pvc.claimName) -}}{{- fail "models.pvc.claimName: needed with models.source: pvc" -}}{{- end -}}
{{- if eq $v.models.source "oci" -}}
{{- if not $v.models.oci.reference -}}{{- fail "models.oci.reference: needed with models.source: oci" -}}{{- end -}}
{{- if semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version -}}{{- fail (printf "models.source: oci needs image volumes, Kubernetes 1.33 or newer; this is %s" .Capabilities.KubeVersion.Version) -}}{{- end -}}
{{- end -}}
{{- if eq $v.models.source "download" -}}
{{- if not $v.models.download.archives -}}{{- fail "models.download.archives: needed with models.source: download" -}}{{- end -}}
{{- end -}}
{{- if eq $v.models.source "store" -}}
{{- if not $v.models.store.addresses -}}{{- fail "models.store.addresses: needed with models.source: store" -}}{{- end -}}
{{- range $v.models.store.addresses -}}
{{- if and (hasPrefix "http://" .address) (not .sha256) (not (include "dragoman.signed" $)) -}}{{- fail (printf "models.store.addresses: %s: without TLS, what comes must have a sha256 or be signed (models.signatures)" .address) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (has $v.models.source (list "download" "store")) $v.networkPolicy.enabled (not $v.networkPolicy.egress) -}}{{- fail (printf "networkPolicy.egress: must allow the download of models (and DNS) with models.source: %s" $v.models.source) -}}{{- end -}}
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
{{- if or $v.metrics.serviceMonitor.enabled $v.metrics.podMonitor.enabled -}}{{- fail "config.metrics_host: nobody can scrape a port that only the pod itself reaches" -}}{{- end -}}
{{- end -}}
{{- if and $v.tls.enabled (eq $v.probes.type "grpc") -}}{{- fail "probes.type: gRPC probes speak no TLS; use auto or http with tls.enabled" -}}{{- end -}}
{{- if and $v.metrics.serviceMonitor.enabled $v.metrics.podMonitor.enabled -}}{{- fail "metrics: enable serviceMonitor or podMonitor, not both, or everything is counted twice" -}}{{- end -}}
{{- if and $v.metrics.serviceMonitor.enabled (ne $v.service.type "ClusterIP") -}}{{- fail "metrics.serviceMonitor: a Service that is reached from outside has no metrics port; use podMonitor" -}}{{- end -}}
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
{{- if eq $v.strategy.type "RollingUpdate" -}}
{{- $limits := get (include "dragoman.strategy" . | fromYaml) "rollingUpdate" -}}
{{- if and (has (toString $limits.maxSurge) (list "0" "0%")) (has (toString $limits.maxUnavailable) (list "0" "0%")) -}}{{- fail "strategy.rollingUpdate: with maxSurge and maxUnavailable 0 nothing could ever be replaced" -}}{{- end -}}
{{- end -}}
{{- if eq (int $v.service.grpcPort) (int $v.service.metricsPort) -}}{{- fail "service: grpcPort and metricsPort are the same" -}}{{- end -}}
{{- if include "dragoman.answersHttp" . -}}
{{- if has (int $v.service.httpPort) (list (int $v.service.grpcPort) (int $v.service.metricsPort)) -}}{{- fail "service: httpPort is that of gRPC or of the metrics" -}}{{- end -}}
{{- end -}}
{{- if ne $v.autoscaling.type "none" -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}{{- fail "autoscaling: minReplicas is more than maxReplicas" -}}{{- end -}}
{{- if not (or $v.autoscaling.queueSeconds.enabled $v.autoscaling.requestsWaiting.enabled $v.autoscaling.slotsInUse.enabled (include "dragoman.scalesByCpu" .)) -}}{{- fail "autoscaling: enable queueSeconds, requestsWaiting, slotsInUse or cpu" -}}{{- end -}}
{{- if and (include "dragoman.scalesByCpu" .) (not (dig "requests" "cpu" "" (include "dragoman.resources" . | fromYaml))) -}}{{- fail (printf "autoscaling.cpu: needs %s.requests.cpu" (ternary "gpu.resources" "resources" $v.gpu.enabled)) -}}{{- end -}}
{{- end -}}
{{- if eq $v.autoscaling.type "keda" -}}
{{- if and (or $v.autoscaling.queueSeconds.enabled $v.autoscaling.requestsWaiting.enabled $v.autoscaling.slotsInUse.enabled) (not $v.autoscaling.keda.serverAddress) -}}{{- fail "autoscaling.keda.serverAddress: needed with autoscaling.type: keda" -}}{{- end -}}
{{- end -}}
{{- if and $v.podDisruptionBudget.enabled (not (kindIs "invalid" $v.podDisruptionBudget.minAvailable)) (not (kindIs "invalid" $v.podDisruptionBudget.maxUnavailable)) -}}{{- fail "podDisruptionBudget: set minAvailable or maxUnavailable, and the other one to null" -}}{{- end -}}
{{- if and $v.podDisruptionBudget.enabled (kindIs "invalid" $v.podDisruptionBudget.minAvailable) (kindIs "invalid" $v.podDisruptionBudget.maxUnavailable) -}}{{- fail "podDisruptionBudget: set minAvailable or maxUnavailable" -}}{{- end -}}
{{- end -}}
