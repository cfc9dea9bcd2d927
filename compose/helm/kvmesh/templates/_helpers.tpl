{{/* Names */}}
{{- define "kvmesh.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvmesh.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvmesh.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvmesh.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvmesh.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{/* Labels: dict "root" $ "component" "gateway". The selector never changes; the rest may. */}}
{{- define "kvmesh.selector" -}}
app.kubernetes.io/name: {{ include "kvmesh.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvmesh.labels" -}}
{{ include "kvmesh.selector" . }}
app.kubernetes.io/part-of: kvmesh
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* HOST:PORT,... of a StatefulSet's pods: dict "root" $ "component" "store" "port" 7002 */}}
{{- define "kvmesh.members" -}}
{{- $name := printf "%s-%s" (include "kvmesh.fullname" .root) .component -}}
{{- $members := list -}}
{{- range $i := until (int (index .root.Values .component).replicas) -}}
{{- $members = append $members (printf "%s-%d.%s:%d" $name $i $name (int $.port)) -}}
{{- end -}}
{{- join "," $members -}}
{{- end -}}

{{/* How many ranks an instance of these values has: the product of its axes, or tensorParallel */}}
{{- define "kvmesh.world" -}}
{{- $world := int .tensorParallel -}}
{{- if .mesh -}}
{{- $world = 1 -}}
{{- range regexFindAll "(^|,)(dp|pp|cp|tp)=[0-9]+" .mesh -1 -}}
{{- $world = mul $world (int (regexReplaceAll "^,?[a-z]+=" . "")) -}}
{{- end -}}
{{- end -}}
{{- $world -}}
{{- end -}}

{{/* Environment. Everybody's: dict "root" $ */}}
{{- define "kvmesh.env" -}}
{{- $values := .root.Values -}}
- {name: KVMESH_HOST, value: 0.0.0.0}
- {name: KVMESH_METRICS_PORT, value: "9100"}
- {name: KVMESH_LOG_LEVEL, value: {{ $values.logLevel }}}
- {name: KVMESH_NODE_ID, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
{{- with $values.otlpEndpoint }}
- {name: KVMESH_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- if include "kvmesh.tls.secret" . }}
- {name: KVMESH_TLS_CERT, value: /etc/kvmesh/tls/tls.crt}
- {name: KVMESH_TLS_KEY, value: /etc/kvmesh/tls/tls.key}
- {name: KVMESH_TLS_CA, value: /etc/kvmesh/tls/ca.crt}
{{- with $values.tls.serverName }}
- {name: KVMESH_TLS_SERVER_NAME, value: {{ . | quote }}}
{{- end }}
{{- end }}
# What is compiled or cached at run time: the root file system is read-only.
- {name: HOME, value: /tmp}
- {name: XDG_CACHE_HOME, value: /tmp/cache}
- {name: TRITON_CACHE_DIR, value: /tmp/triton}
{{- end -}}

{{/* Who the service is, and how peers reach it. */}}
{{- define "kvmesh.env.instance" -}}
- {name: KVMESH_INSTANCE_ID, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{- end -}}

{{- define "kvmesh.env.pod" -}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- end -}}

{{/* Redis of conductor and store, which they need if there are several of them */}}
{{- define "kvmesh.env.redis" -}}
{{- $values := .root.Values -}}
- {name: KVMESH_MESH, value: {{ $values.mesh | quote }}}
{{- if $values.redis.enabled }}
- {name: REDIS_PASSWORD, valueFrom: {secretKeyRef: {name: {{ include "kvmesh.redis.secret" .root }}, key: password}}}
- {name: KVMESH_REDIS, value: "redis://:$(REDIS_PASSWORD)@{{ include "kvmesh.fullname" .root }}-redis:6379/0"}
{{- else if $values.redis.urlSecret }}
- {name: KVMESH_REDIS, valueFrom: {secretKeyRef: {name: {{ $values.redis.urlSecret }}, key: url}}}
{{- else if $values.redis.url }}
- {name: KVMESH_REDIS, value: {{ $values.redis.url | quote }}}
{{- else if or (gt (int $values.conductor.replicas) 1) (gt (int $values.store.replicas) 1) }}
{{- fail "several conductors or store masters need Redis: redis.enabled, redis.url or redis.urlSecret" }}
{{- end }}
{{- end -}}

{{/* The Secret with the password of the mesh's own Redis */}}
{{- define "kvmesh.redis.secret" -}}
{{- default (printf "%s-redis" (include "kvmesh.fullname" .)) .Values.redis.passwordSecret -}}
{{- end -}}

{{/* `config` of a service: dict "config" .Values.prefill.config */}}
{{- define "kvmesh.env.config" -}}
{{- range $key, $value := .config }}
- name: KVMESH_{{ upper $key }}
  value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ toJson $value | quote }}{{ end }}
{{- end }}
{{- end -}}

{{/* The model: where it lies in the pod, its volume, its mount, who fetches it */}}
{{- define "kvmesh.model.path" -}}
{{- if eq .Values.model.source "download" -}}
/models/{{ regexReplaceAll "[^A-Za-z0-9._-]" .Values.model.name "-" }}
{{- else -}}
/models{{ with .Values.model.folder }}/{{ trimAll "/" . }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "kvmesh.model.volume" -}}
{{- $model := .Values.model -}}
- name: models
{{- if eq $model.source "hostPath" }}
  hostPath: {path: {{ required "model.hostPath: say which folder holds the model on the nodes" $model.hostPath }}, type: Directory}
{{- else if eq $model.source "pvc" }}
  persistentVolumeClaim: {claimName: {{ required "model.claim: say which claim holds the model" $model.claim }}, readOnly: true}
{{- else if $model.claim }}
  persistentVolumeClaim: {claimName: {{ $model.claim }}}
{{- else }}
  emptyDir: {sizeLimit: {{ $model.sizeLimit }}}
{{- end }}
{{- end -}}

{{- define "kvmesh.model.fetch" -}}
{{- if eq .root.Values.model.source "download" -}}
initContainers:
  - name: model
    image: {{ include "kvmesh.image" .root }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [python, -c]
    args:
      - {{ .root.Files.Get "files/fetch_model.py" | toJson }}
      - {{ .root.Values.model.id | quote }}
      - {{ include "kvmesh.model.path" .root }}
    env:
      - {name: HOME, value: /tmp}
      - {name: HF_HOME, value: /models/hub}
      {{- with .root.Values.model.tokenSecret }}
      - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
      {{- end }}
    securityContext:
      {{- include "kvmesh.security.container" . | nindent 6 }}
    resources:
      requests: {cpu: 500m, memory: 512Mi}
      limits: {cpu: "2", memory: 2Gi}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
{{- end -}}
{{- end -}}

{{/* Security */}}
{{- define "kvmesh.security.pod" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* dict "rdma" true where memory is pinned for network cards */}}
{{- define "kvmesh.security.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .rdma }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{/* Probes of port 9100: dict "startSeconds" 120 "tls" true. With a certificate the port speaks TLS, and the kubelet verifies none. A start that waits for peers is no reason to kill: only /live counts. */}}
{{- define "kvmesh.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" .tls -}}
startupProbe:
  httpGet: {path: /live, port: metrics, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 6 (ceil (divf (float64 .startSeconds) 5.0)) }}
livenessProbe:
  httpGet: {path: /live, port: metrics, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /ready, port: metrics, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{/* What is alike in all pods' specs: dict "root" $ "component" "store" "values" .Values.store "grace" 30 */}}
{{- define "kvmesh.pod.spec" -}}
serviceAccountName: {{ include "kvmesh.serviceAccount" .root }}
automountServiceAccountToken: false
# Services of this namespace would come as KVMESH_..._PORT, which the services refuse as unknown settings.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  {{- include "kvmesh.security.pod" . | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- if .values.affinity }}
  {{- toYaml .values.affinity | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "kvmesh.selector" . | nindent 14 }}
  {{- end }}
{{- end -}}

{{/* Of a pod: dict "root" $ "component" "store" "annotations" {} */}}
{{- define "kvmesh.pod.metadata" -}}
labels:
  {{- include "kvmesh.labels" . | nindent 2 }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge dict (default dict .annotations) .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The Secret with the certificate of a component's role, "" without TLS: dict "root" $ "component" "pool" */}}
{{- define "kvmesh.tls.secret" -}}
{{- $tls := .root.Values.tls -}}
{{- $role := get (dict "gateway" "gateway" "picker" "gateway" "conductor" "conductor" "store" "store" "pool" "store") .component | default "instance" -}}
{{- $found := index $tls.secrets $role | default $tls.secretName -}}
{{- if and (not $found) (or $tls.secrets.instance $tls.secrets.store $tls.secrets.conductor $tls.secrets.gateway) -}}
{{- fail (printf "tls.secrets.%s: is needed, as others have one (or tls.secretName, for all that have none)" $role) -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{- define "kvmesh.tls.mount" -}}
{{- if include "kvmesh.tls.secret" . -}}
- {name: tls, mountPath: /etc/kvmesh/tls, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "kvmesh.tls.volume" -}}
{{- with include "kvmesh.tls.secret" . -}}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end -}}
{{- end -}}
