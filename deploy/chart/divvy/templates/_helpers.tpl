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

{{/* Of its own for each driver: two releases may be of different versions. */}}
{{- define "divvy.hookDir" -}}
{{- printf "%s/%s" .Values.hookDir .Values.driverName -}}
{{- end -}}

{{/* The domain of the other classes: `divvy.dev` of the driver `gpu.divvy.dev`; of any other name the name itself. */}}
{{- define "divvy.classDomain" -}}
{{- trimPrefix "gpu." .Values.driverName -}}
{{- end -}}

{{- define "divvy.migClass" -}}
{{- printf "mig.%s" (include "divvy.classDomain" .) -}}
{{- end -}}

{{- define "divvy.shareClass" -}}
{{- printf "share.%s" (include "divvy.classDomain" .) -}}
{{- end -}}

{{- define "divvy.adminClass" -}}
{{- printf "admin.%s" (include "divvy.classDomain" .) -}}
{{- end -}}
