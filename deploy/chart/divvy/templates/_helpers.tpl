{{- define "divvy.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "divvy.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (printf "%s-node" (include "divvy.name" .)) -}}
{{- end -}}

{{- define "divvy.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: node
{{- end -}}

{{- define "divvy.labels" -}}
{{ include "divvy.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* A path below hostRoot as the plugin sees it: hostRoot is mounted at /host. */}}
{{- define "divvy.inHost" -}}
{{- printf "/host%s" . | trimSuffix "/" -}}
{{- end -}}

{{/* Where the node itself has driverRoot. */}}
{{- define "divvy.hostDriverRoot" -}}
{{- printf "%s%s" (trimSuffix "/" .Values.hostRoot) .Values.driverRoot | trimSuffix "/" | default "/" -}}
{{- end -}}

{{/* `gpu.divvy.dev` has partitions in `mig.divvy.dev`; a driver of another name in `mig.` and its name. */}}
{{- define "divvy.migClass" -}}
{{- if hasPrefix "gpu." .Values.driverName -}}
{{- printf "mig.%s" (trimPrefix "gpu." .Values.driverName) -}}
{{- else -}}
{{- printf "mig.%s" .Values.driverName -}}
{{- end -}}
{{- end -}}
