package main

import (
	"fmt"
	"math/rand/v2"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	driver = "gpu.divvy.dev"
	node   = "n1"
)

// generator makes one world; the same seed and number give the same.
type generator struct{ *rand.Rand }

func (g generator) chance(percent int) bool { return g.IntN(100) < percent }

func pick[T any](g generator, of ...T) T { return of[g.IntN(len(of))] }

// generate makes a node of GPUs, each offered whole, in partitions and in shares, and pods that ask for some of it.
func generate(seed, number uint64) *World {
	g := generator{rand.New(rand.NewPCG(seed, number))}
	world := &World{
		ID: fmt.Sprintf("%d-%d", seed, number),
		Features: Features{
			AdminAccess: true, PrioritizedList: true, DeviceTaints: true, Partitionable: true,
			DeviceBinding: true, ConsumableCapacity: true, FractionalCapacity: true, ListAttributes: g.chance(10),
		},
		Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: node, Labels: map[string]string{"zone": "a", "rank": "5"},
		}},
		Classes: []*resourceapi.DeviceClass{
			class("gpu", "gpu"), class("mig", "mig"), class("share", "gpu-share"),
			{ObjectMeta: metav1.ObjectMeta{Name: "any"}},
		},
	}
	for pool := range 1 + g.IntN(2) {
		world.Slices = append(world.Slices, g.pool(fmt.Sprintf("%s/%c", node, 'a'+pool))...)
	}
	for pod := range 1 + g.IntN(5) {
		var claims []*resourceapi.ResourceClaim
		for claim := range 1 + g.IntN(2) {
			claims = append(claims, g.claim(fmt.Sprintf("c%d-%d", pod, claim)))
		}
		world.Pods = append(world.Pods, claims)
	}
	return world
}

func class(name, kind string) *resourceapi.DeviceClass {
	expression := fmt.Sprintf(`device.driver == %q && device.attributes[%q].type == %q`, driver, driver, kind)
	return &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{selector(expression)}},
	}
}

func selector(expression string) resourceapi.DeviceSelector {
	return resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}
}

func quantity(units int) resource.Quantity { return resource.MustParse(fmt.Sprintf("%dGi", units)) }

// pool makes the slices of a pool: one of counters, and devices in one or two others.
func (g generator) pool(name string) []*resourceapi.ResourceSlice {
	gpus := 1 + g.IntN(4)
	counters := &resourceapi.ResourceSlice{}
	var devices []resourceapi.Device
	for gpu := range gpus {
		set := fmt.Sprintf("gpu-%d", gpu)
		counters.Spec.SharedCounters = append(counters.Spec.SharedCounters, resourceapi.CounterSet{
			Name:     set,
			Counters: map[string]resourceapi.Counter{"memory": {Value: quantity(80)}, "engines": {Value: resource.MustParse("7")}},
		})
		devices = append(devices, g.device(set, "gpu", gpu, 80, 7))
		for part := range g.IntN(5) {
			size := pick(g, 1, 2, 3)
			devices = append(devices, g.device(fmt.Sprintf("%s-mig-%d", set, part), "mig", gpu, size*10, size))
		}
		for share := range g.IntN(3) {
			device := g.device(fmt.Sprintf("%s-ts-%d", set, share), "gpu-share", gpu, 80, 7)
			allow := true
			device.AllowMultipleAllocations = &allow
			device.Capacity["memory"] = g.capacity()
			devices = append(devices, device)
		}
	}
	if g.chance(30) {
		g.Shuffle(len(devices), func(i, j int) { devices[i], devices[j] = devices[j], devices[i] })
	}
	slices := []*resourceapi.ResourceSlice{counters}
	cut := len(devices)
	if g.chance(50) {
		cut = g.IntN(len(devices) + 1)
	}
	for _, part := range [][]resourceapi.Device{devices[:cut], devices[cut:]} {
		if len(part) > 0 {
			slices = append(slices, &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: part}})
		}
	}
	names := g.Perm(len(slices))
	for i, slice := range slices {
		slice.Name = fmt.Sprintf("%c-%d-%s", name[len(name)-1], names[i], "s")
		slice.Spec.Driver = driver
		slice.Spec.Pool = resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(slices))}
		g.place(slice)
	}
	if g.chance(3) {
		slices[0].Spec.Pool.ResourceSliceCount++
	}
	return slices
}

// place says which node a slice is for.
func (g generator) place(slice *resourceapi.ResourceSlice) {
	if g.chance(85) {
		name := node
		slice.Spec.NodeName = &name
		return
	}
	requirement := pick(g,
		corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{"a", "b"}},
		corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpExists},
		corev1.NodeSelectorRequirement{Key: "rank", Operator: corev1.NodeSelectorOpGt, Values: []string{"4"}},
		corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"a"}},
	)
	slice.Spec.NodeSelector = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
		{MatchExpressions: []corev1.NodeSelectorRequirement{requirement}},
	}}
}

func (g generator) device(name, kind string, gpu, memory, engines int) resourceapi.Device {
	number, model, version, healthy := int64(gpu%2), pick(g, "NVIDIA H100 80GB", "NVIDIA L4"), pick(g, "580.95.5", "570.1.0"), true
	root := fmt.Sprintf("pci000%d:00", gpu/2)
	device := resourceapi.Device{
		Name: name,
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"type": {StringValue: &kind}, "numa": {IntValue: &number}, "model": {StringValue: &model},
			"driverVersion": {VersionValue: &version}, "resource.kubernetes.io/pcieRoot": {StringValue: &root},
		},
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: quantity(memory)}},
		ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
			CounterSet: fmt.Sprintf("gpu-%d", gpu),
			Counters: map[string]resourceapi.Counter{
				"memory": {Value: quantity(memory)}, "engines": {Value: resource.MustParse(fmt.Sprint(engines))},
			},
		}},
	}
	if g.chance(50) {
		device.Attributes["healthy"] = resourceapi.DeviceAttribute{BoolValue: &healthy}
	}
	if g.chance(5) {
		effect := pick(g, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNone)
		device.Taints = []resourceapi.DeviceTaint{{Key: "sick", Value: pick(g, "", "a"), Effect: effect}}
	}
	if g.chance(4) {
		device.BindingConditions, device.BindingFailureConditions = []string{"Attached"}, []string{"Failed"}
	}
	return device
}

// capacity is that of a share, with or without a policy.
func (g generator) capacity() resourceapi.DeviceCapacity {
	capacity := resourceapi.DeviceCapacity{Value: quantity(80)}
	one, two, step, most := quantity(10), quantity(20), quantity(5), quantity(60)
	switch g.IntN(4) {
	case 0:
		capacity.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: &one}
	case 1:
		capacity.RequestPolicy = &resourceapi.CapacityRequestPolicy{
			Default: &one, ValidValues: []resource.Quantity{one, two, most},
		}
	case 2:
		capacity.RequestPolicy = &resourceapi.CapacityRequestPolicy{
			Default: &one, ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &step, Step: &step, Max: &most},
		}
	}
	return capacity
}

func (g generator) claim(name string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: "u"}}
	devices := &claim.Spec.Devices
	for i := range 1 + g.IntN(3) {
		request := resourceapi.DeviceRequest{Name: fmt.Sprintf("r%d", i)}
		if g.chance(75) {
			exact := g.exact()
			request.Exactly = &exact
		} else {
			for sub := range 1 + g.IntN(3) {
				exact := g.exact()
				request.FirstAvailable = append(request.FirstAvailable, resourceapi.DeviceSubRequest{
					Name: fmt.Sprintf("s%d", sub), DeviceClassName: exact.DeviceClassName, Selectors: exact.Selectors,
					AllocationMode: exact.AllocationMode, Count: exact.Count, Tolerations: exact.Tolerations,
					Capacity: exact.Capacity,
				})
			}
		}
		devices.Requests = append(devices.Requests, request)
	}
	if g.chance(25) {
		attribute := resourceapi.FullyQualifiedName(pick(g, driver+"/numa", driver+"/model", "resource.kubernetes.io/pcieRoot"))
		constraint := resourceapi.DeviceConstraint{MatchAttribute: &attribute}
		if g.chance(40) {
			constraint = resourceapi.DeviceConstraint{DistinctAttribute: &attribute}
		}
		devices.Constraints = append(devices.Constraints, constraint)
	}
	return claim
}

func (g generator) exact() resourceapi.ExactDeviceRequest {
	exact := resourceapi.ExactDeviceRequest{
		DeviceClassName: pick(g, "gpu", "gpu", "mig", "mig", "share", "share", "any"),
		AllocationMode:  resourceapi.DeviceAllocationModeExactCount,
		Count:           int64(pick(g, 1, 1, 1, 2, 3)),
	}
	if g.chance(7) {
		exact.AllocationMode, exact.Count = resourceapi.DeviceAllocationModeAll, 0
	}
	if g.chance(30) {
		exact.Selectors = append(exact.Selectors, selector(pick(g, expressions...)))
	}
	if g.chance(15) {
		exact.Tolerations = []resourceapi.DeviceToleration{{Key: "sick", Operator: resourceapi.DeviceTolerationOpExists}}
	}
	if exact.DeviceClassName == "share" && g.chance(60) {
		exact.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
			"memory": quantity(pick(g, 1, 7, 10, 20, 41, 80)),
		}}
	}
	return exact
}

// expressions are what people write, and some of their mistakes. Those of `docs/contributing/allocator.md` are not among them.
var expressions = []string{
	`true`,
	`device.attributes["gpu.divvy.dev"].model.matches("^NVIDIA H")`,
	`device.attributes["gpu.divvy.dev"].numa == 0`,
	`device.attributes["gpu.divvy.dev"].numa in [1, 2]`,
	`device.capacity["gpu.divvy.dev"].memory.compareTo(quantity("20Gi")) >= 0`,
	`device.capacity["gpu.divvy.dev"].?memory.orValue(quantity("0")).isGreaterThan(quantity("15Gi"))`,
	`device.attributes["gpu.divvy.dev"].driverVersion.isGreaterThan(semver("575.0.0"))`,
	`device.attributes["gpu.divvy.dev"].driverVersion != "580.95.5"`,
	`device.attributes["gpu.divvy.dev"].driverVersion == "580.95.5"`,
	`has(device.attributes["gpu.divvy.dev"].healthy) && device.attributes["gpu.divvy.dev"].healthy`,
	`device.attributes["gpu.divvy.dev"].?healthy.orValue(false)`,
	`device.attributes["gpu.divvy.dev"].?numa.orValue(device.attributes["gpu.divvy.dev"].numaNode) == 1`,
	`device.attributes["gpu.divvy.dev"].healthy`,
	`device.attributes["resource.kubernetes.io"].pcieRoot == "pci0000:00"`,
	`device.attributes["gpu.divvy.dev"]["resource.kubernetes.io/pcieRoot"] == "pci0000:00"`,
	`["gpu", "mig"].exists(t, t == device.attributes["gpu.divvy.dev"].type)`,
	`[device.attributes["gpu.divvy.dev"].type, "mig"].exists(t, t == "mig")`,
	`device.attributes["gpu.divvy.dev"].exists(k, v, k == "numa" && v == 1)`,
	`cel.bind(a, device.attributes["gpu.divvy.dev"], a.type == "mig" && a.numa == 0)`,
	`device.allowMultipleAllocations`,
	`device.capacity["gpu.divvy.dev"].memory == "80Gi"`,
	`sign(device.capacity["gpu.divvy.dev"].memory) == 1`,
	`"%s-%d".format(["gpu", 1]) == "gpu-1"`,
	`device.attributes["other.example.com"].x == 1`,
	`device.driver == 1`,
}
