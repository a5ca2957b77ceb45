{{/* Parts of the policies about configs, for `driverName: gpu.nvidia.com`: configs of NVIDIA's group. */}}

{{- define "divvy.nvidiaVariables" }}
  - name: theirs # configs of NVIDIA's group
    expression: >-
      (request.resource.resource == 'deviceclasses' ? variables.spec.?config.orValue([]) : variables.spec.?devices.?config.orValue([]))
      .filter(c, has(c.opaque) && c.opaque.driver == '{{ . }}' && c.opaque.parameters.?apiVersion.orValue('') == 'resource.nvidia.com/v1beta1')
  - name: sharings # of them
    expression: variables.theirs.filter(c, has(c.opaque.parameters.sharing)).map(c, c.opaque.parameters.sharing)
{{- end }}

{{/* Faults that NVIDIA's driver refuses as well as divvy. The argument: kinds by class. */}}
{{- define "divvy.nvidiaConfigs" }}
  {{- $kinds := dict }}
  {{- range $class, $kind := . }}{{ $_ := set $kinds $class (get (dict "GpuConfig" "GpuConfig" "MigConfig" "MigDeviceConfig") $kind) }}{{ end }}
  - expression: variables.theirs.all(c, c.opaque.parameters.?kind.orValue('') in ['GpuConfig', 'MigDeviceConfig', 'VfioDeviceConfig'])
    message: "config[].opaque.parameters.kind of resource.nvidia.com/v1beta1 is GpuConfig or MigDeviceConfig; kinds of ComputeDomains are for the driver compute-domain.nvidia.com"
  - expression: >-
      variables.theirs.all(c, c.opaque.parameters.all(field, field in ['apiVersion', 'kind'] || field == 'sharing' && c.opaque.parameters.?kind.orValue('') in ['GpuConfig', 'MigDeviceConfig'] || field == 'iommu' && c.opaque.parameters.?kind.orValue('') == 'VfioDeviceConfig'))
    message: "config[].opaque.parameters of resource.nvidia.com/v1beta1 has unknown fields"
    messageExpression: >-
      'config[].opaque.parameters has unknown fields: ' + variables.theirs.map(c, c.opaque.parameters.filter(field, !(field in ['apiVersion', 'kind', 'sharing', 'iommu'])).join(', ')).filter(fields, fields != '').join('; ')
      + ' (GpuConfig and MigDeviceConfig of resource.nvidia.com/v1beta1 have sharing; the fields of divvy.dev/v1beta1 are of that group)'
  - expression: variables.sharings.all(s, s.?strategy.orValue('') in ['TimeSlicing', 'MPS'] && s.all(field, field in ['strategy', 'timeSlicingConfig', 'mpsConfig']))
    message: config[].opaque.parameters.sharing has strategy, which is TimeSlicing or MPS, and timeSlicingConfig or mpsConfig
  - expression: variables.theirs.all(c, c.opaque.parameters.?kind.orValue('') != 'MigDeviceConfig' || !has(c.opaque.parameters.sharing) || !has(c.opaque.parameters.sharing.timeSlicingConfig))
    message: "config[].opaque.parameters.sharing of a MigDeviceConfig has no timeSlicingConfig: a partition has no time slice of its own"
  - expression: variables.sharings.all(s, !(has(s.timeSlicingConfig) && s.?strategy.orValue('') == 'MPS') && !(has(s.mpsConfig) && s.?strategy.orValue('') == 'TimeSlicing'))
    message: "config[].opaque.parameters.sharing: timeSlicingConfig is for strategy TimeSlicing, mpsConfig for strategy MPS"
  - expression: variables.sharings.all(s, !has(s.timeSlicingConfig) || s.timeSlicingConfig.all(field, field == 'interval') && s.timeSlicingConfig.?interval.orValue('Default') in ['Default', 'Short', 'Medium', 'Long'])
    message: config[].opaque.parameters.sharing.timeSlicingConfig has one field, interval, which is Default, Short, Medium or Long
  - expression: >-
      variables.sharings.all(s, !has(s.mpsConfig) || s.mpsConfig.all(field, field in ['defaultActiveThreadPercentage', 'defaultPinnedDeviceMemoryLimit', 'defaultPerDevicePinnedMemoryLimit', 'multiUser'])
      && (!has(s.mpsConfig.defaultActiveThreadPercentage) || type(s.mpsConfig.defaultActiveThreadPercentage) == int && s.mpsConfig.defaultActiveThreadPercentage >= 0 && s.mpsConfig.defaultActiveThreadPercentage <= 100)
      && (!has(s.mpsConfig.defaultPinnedDeviceMemoryLimit) || isQuantity(string(s.mpsConfig.defaultPinnedDeviceMemoryLimit))))
    message: config[].opaque.parameters.sharing.mpsConfig has defaultActiveThreadPercentage, a whole number from 0 to 100, and defaultPinnedDeviceMemoryLimit, an amount with its unit, as 10Gi
  - expression: >-
      variables.theirs.all(c, variables.ours.all(r, !(r.name in c.?requests.orValue([])) || c.opaque.parameters.?kind.orValue('') == {{ toJson $kinds | replace "\"" "'" }}[r.exactly.deviceClassName]))
    message: "a config is of another kind than the class of a request that it names takes"
    messageExpression: >-
      variables.ours.filter(r, variables.theirs.exists(c, r.name in c.?requests.orValue([]) && c.opaque.parameters.?kind.orValue('') != {{ toJson $kinds | replace "\"" "'" }}[r.exactly.deviceClassName]))
      .map(r, 'request ' + r.name + ' of class ' + r.exactly.deviceClassName + ' takes a ' + variables.kinds[r.exactly.deviceClassName] + ' of divvy.dev/v1beta1' + (variables.kinds[r.exactly.deviceClassName] == 'GpuConfig' ? ' or a GpuConfig of resource.nvidia.com/v1beta1' : variables.kinds[r.exactly.deviceClassName] == 'MigConfig' ? ' or a MigDeviceConfig of resource.nvidia.com/v1beta1' : '') + ', and a config of another kind names it').join('; ')
{{- end }}

{{/* Parts of claims that NVIDIA's driver keeps and divvy does not. */}}
{{- define "divvy.nvidiaWarnings" }}
{{- include "divvy.nvidiaVariables" . }}
  validations:
  - expression: >-
      !variables.requests.exists(r, has(r.exactly) && r.exactly.deviceClassName == 'vfio.gpu.nvidia.com' || has(r.firstAvailable) && r.firstAvailable.exists(s, s.deviceClassName == 'vfio.gpu.nvidia.com'))
      && variables.theirs.all(c, c.opaque.parameters.?kind.orValue('') != 'VfioDeviceConfig')
    message: "class vfio.gpu.nvidia.com and VfioDeviceConfig are passthrough to virtual machines, which divvy does not have: only nodes of NVIDIA's driver can run this"
  - expression: variables.theirs.all(c, c.opaque.parameters.?kind.orValue('') != 'MigDeviceConfig' || c.opaque.parameters.?sharing.?strategy.orValue('') != 'MPS')
    message: "config[].opaque.parameters.sharing.strategy MPS of a MigDeviceConfig is refused on divvy's nodes: MPS is for whole GPUs (a GpuConfig for class gpu.nvidia.com), or leave out sharing"
  - expression: variables.sharings.all(s, s.?mpsConfig.?defaultActiveThreadPercentage.orValue(1) != 0)
    message: "config[].opaque.parameters.sharing.mpsConfig.defaultActiveThreadPercentage is refused on divvy's nodes if it is 0: leave it out"
  - expression: variables.sharings.all(s, size(s.?mpsConfig.?defaultPerDevicePinnedMemoryLimit.orValue({})) == 0)
    message: "config[].opaque.parameters.sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit is refused on divvy's nodes: write defaultPinnedDeviceMemoryLimit, in a config entry for each request"
{{- end }}
