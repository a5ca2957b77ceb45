{{/* The value of app.kubernetes.io/name. */}}
{{- define "divvy.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* The beginning of every object's name; the longest end is `-configs`, and pods get a hash. */}}
{{- define "divvy.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "divvy.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (printf "%s-node" (include "divvy.fullname" .)) -}}
{{- end -}}

{{/* Never with more labels: those of a DaemonSet's selector cannot change. */}}
{{- define "divvy.selector" -}}
app.kubernetes.io/name: {{ include "divvy.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: node
{{- end -}}

{{- define "divvy.labels" -}}
{{ include "divvy.selector" . }}
app.kubernetes.io/part-of: divvy
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A digest names one image whatever the tag says. */}}
{{- define "divvy.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
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

{{/* Not empty if divvy stands in for NVIDIA's driver, under its name (docs/migrate/stand-in.md). */}}
{{- define "divvy.standsIn" -}}
{{- if eq .Values.driverName "gpu.nvidia.com" -}}true{{- end -}}
{{- end -}}

{{/* The domain of the attributes and capacities that NVIDIA's driver does not have. */}}
{{- define "divvy.ownDomain" -}}
{{- if include "divvy.standsIn" . -}}gpu.divvy.dev{{- else -}}{{ .Values.driverName }}{{- end -}}
{{- end -}}

{{/* The domain of the other classes: `divvy.dev` of the drivers `gpu.divvy.dev` and `gpu.nvidia.com`, which has none of them; of any
other name the name itself. */}}
{{- define "divvy.classDomain" -}}
{{- trimPrefix "gpu." (include "divvy.ownDomain" .) -}}
{{- end -}}

{{- define "divvy.migClass" -}}
{{- if include "divvy.standsIn" . -}}mig.nvidia.com{{- else -}}{{- printf "mig.%s" (include "divvy.classDomain" .) -}}{{- end -}}
{{- end -}}

{{- define "divvy.shareClass" -}}
{{- printf "share.%s" (include "divvy.classDomain" .) -}}
{{- end -}}

{{- define "divvy.migShareClass" -}}
{{- printf "mig-share.%s" (include "divvy.classDomain" .) -}}
{{- end -}}

{{- define "divvy.mpsClass" -}}
{{- printf "mps.%s" (include "divvy.classDomain" .) -}}
{{- end -}}

{{- define "divvy.migMpsClass" -}}
{{- printf "mig-mps.%s" (include "divvy.classDomain" .) -}}
{{- end -}}

{{- define "divvy.adminClass" -}}
{{- printf "admin.%s" (include "divvy.classDomain" .) -}}
{{- end -}}

{{/* A MIG profile as a part of names: `1g.10gb+me` is `1g.10gb.me`, as NVIDIA's device plugin has it. */}}
{{- define "divvy.profileName" -}}
{{- replace "+" "." . -}}
{{- end -}}

{{/*
The MIG profiles that have classes, as JSON. With auto they are those of the boards in the README (A30, A100, H100, H200 and B200), and those
of the slices that there are; `helm template` reads no cluster and has the boards alone.
*/}}
{{- define "divvy.classProfiles" -}}
{{- $all := .Values.migClasses -}}
{{- if kindIs "string" $all -}}
{{- $all = list "1g.5gb" "2g.10gb" "3g.20gb" "4g.20gb" "7g.40gb" "1g.10gb" "1g.20gb" "2g.20gb" "3g.40gb" "4g.40gb" "7g.80gb" "1g.6gb" "2g.12gb" "4g.24gb" "1g.18gb" "1g.35gb" "2g.35gb" "3g.71gb" "4g.71gb" "7g.141gb" "1g.23gb" "1g.45gb" "2g.45gb" "3g.90gb" "4g.90gb" "7g.180gb" -}}
{{- range $slice := (lookup "resource.k8s.io/v1" "ResourceSlice" "" "").items -}}
{{- if eq $slice.spec.driver $.Values.driverName -}}
{{- range $device := $slice.spec.devices -}}
{{- with (($device.attributes | default dict).profile | default dict).string -}}
{{- $all = append $all . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $all = $all | uniq | sortAlpha -}}
{{- end -}}
{{- dict "profiles" $all | toJson -}}
{{- end -}}

{{/* The classes of single MIG profiles, as JSON: name of the class to profile. */}}
{{- define "divvy.profileClasses" -}}
{{- $all := dict -}}
{{- if .Values.deviceClass.enabled -}}
{{- range $profile := (include "divvy.classProfiles" . | fromJson).profiles -}}
{{- $_ := set $all (printf "mig-%s.%s" (include "divvy.profileName" $profile) (include "divvy.classDomain" $)) $profile -}}
{{- end -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* The extended resources of the classes by mode, as JSON. With profile shared, that of whole GPUs stands for shares: no GPU is whole. */}}
{{- define "divvy.resourceNames" -}}
{{- $names := deepCopy .Values.deviceClass.extendedResourceNames -}}
{{- if and (eq .Values.profile "shared") (not $names.share) -}}
{{- $_ := set $names "share" $names.gpu -}}
{{- $_ := set $names "gpu" "" -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/*
The extended resources of the classes, as JSON: a list of resource, class, and the value that names it.
*/}}
{{- define "divvy.extendedResources" -}}
{{- $all := list -}}
{{- if .Values.deviceClass.enabled -}}
{{- $classes := dict "gpu" .Values.driverName "mig" (include "divvy.migClass" .) "share" (include "divvy.shareClass" .) -}}
{{- range $mode, $resource := include "divvy.resourceNames" . | fromJson -}}
{{- $all = append $all (dict "resource" $resource "class" (get $classes $mode) "value" (printf "set deviceClass.extendedResourceNames.%s to \"\"" $mode)) -}}
{{- end -}}
{{- range $class, $profile := include "divvy.profileClasses" . | fromJson -}}
{{- $resource := printf "nvidia.com/mig-%s" (include "divvy.profileName" $profile) -}}
{{- $all = append $all (dict "resource" $resource "class" $class "value" (printf "take %s out of migClasses" $profile)) -}}
{{- end -}}
{{- end -}}
{{- if .Values.nvidiaDeviceClasses.enabled -}}
{{- $all = append $all (dict "resource" .Values.nvidiaDeviceClasses.extendedResourceName "class" "gpu.nvidia.com" "value" "set nvidiaDeviceClasses.extendedResourceName to \"\"") -}}
{{- end -}}
{{- range $class := .Values.extraDeviceClasses -}}
{{- $all = append $all (dict "resource" ($class.extendedResourceName | default "") "class" $class.name "value" (printf "take extendedResourceName out of extraDeviceClasses, %s" $class.name)) -}}
{{- end -}}
{{- $named := list -}}
{{- range $all -}}{{- if .resource -}}{{- $named = append $named . -}}{{- end -}}{{- end -}}
{{- toJson (dict "all" $named) -}}
{{- end -}}

{{/* The kind of config that devices of a mode take. */}}
{{- define "divvy.configKind" -}}
{{- get (dict "gpu" "GpuConfig" "mig" "MigConfig" "share" "ShareConfig" "mig-share" "ShareConfig" "mps" "MpsConfig" "mig-mps" "MpsConfig" "admin" "GpuConfig") . -}}
{{- end -}}

{{/* The CEL expression that selects the devices of a mode. */}}
{{- define "divvy.devicesOf" -}}
{{- $type := get (dict "gpu" "gpu" "mig" "mig" "share" "gpu-share" "mig-share" "mig-share" "mps" "gpu-mps" "mig-mps" "mig-mps" "admin" "gpu-admin") .mode -}}
device.driver == '{{ .driver }}' && device.attributes['{{ .driver }}'].type == '{{ $type }}'
{{- end -}}

{{/* The folder of the MPS supervisor, the same path on the node and in the pods. */}}
{{- define "divvy.mpsDir" -}}
{{- printf "/run/divvy/%s/mps" .Values.driverName -}}
{{- end -}}

{{/* Where pods of a node are: the nodes of the plugin. */}}
{{- define "divvy.onNodes" -}}
{{- if eq .Values.nodeSelection "discovered" }}
{{- with omit .Values.nodeSelector "divvy.dev/gpu" }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
# Nodes on which Node Feature Discovery, GPU Feature Discovery or the GPU Operator saw a GPU, but for those that opt out.
affinity:
  {{- with .Values.affinity }}{{ toYaml . | nindent 2 }}{{ end }}
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
      {{- range $label := list "nvidia.com/gpu.present" "feature.node.kubernetes.io/pci-10de.present" "feature.node.kubernetes.io/pci-0302_10de.present" "feature.node.kubernetes.io/pci-0300_10de.present" }}
      - matchExpressions:
        - {key: {{ $label }}, operator: In, values: ["true"]}
        - {key: divvy.dev/gpu, operator: NotIn, values: ["false"]}
      {{- end }}
{{- else }}
nodeSelector: {{- toYaml .Values.nodeSelector | nindent 2 }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
tolerations: {{- toYaml .Values.tolerations | nindent 2 }}
{{- end -}}

{{/* The labels that select the nodes, as kubectl -l takes them. */}}
{{- define "divvy.nodeSelectorText" -}}
{{- $discovered := eq .Values.nodeSelection "discovered" -}}
{{- $terms := list -}}
{{- range $key, $value := .Values.nodeSelector -}}
{{- if not (and $discovered (eq $key "divvy.dev/gpu")) -}}
{{- $terms = append $terms (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- end -}}
{{- if $discovered -}}
{{- $terms = append $terms "divvy.dev/gpu!=false" -}}
{{- end -}}
{{- join "," $terms -}}
{{- end }}
