// Answers worlds with the allocator of the real scheduler.
//
// Without arguments it reads worlds from standard input, one JSON object a line; `generate COUNT SEED` makes them.
// Either way it writes each world with its answers, one a line.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// timeout of one call; the scheduler's is ten seconds.
const timeout = 2 * time.Second

// Features are the gates by the names that divvy-allocator uses.
type Features struct {
	AdminAccess        bool `json:"admin_access"`
	PrioritizedList    bool `json:"prioritized_list"`
	DeviceTaints       bool `json:"device_taints"`
	Partitionable      bool `json:"partitionable_devices"`
	DeviceBinding      bool `json:"device_binding"`
	ConsumableCapacity bool `json:"consumable_capacity"`
	FractionalCapacity bool `json:"fractional_capacity"`
	ListAttributes     bool `json:"list_attributes"`
}

// World is a state of the cluster and pods that are placed one after another.
type World struct {
	ID        string                         `json:"id"`
	Features  Features                       `json:"features"`
	Node      *corev1.Node                   `json:"node"`
	Slices    []*resourceapi.ResourceSlice   `json:"slices"`
	Classes   []*resourceapi.DeviceClass     `json:"classes"`
	Allocated []*resourceapi.ResourceClaim   `json:"allocated"`
	Pods      [][]*resourceapi.ResourceClaim `json:"pods"`
	Answers   []Answer                       `json:"answers,omitempty"`
}

// Answer of one pod: `fits` with results, `none`, `error` (of the pod), `node-error` or `timeout`.
type Answer struct {
	Kind    string                         `json:"kind"`
	Text    string                         `json:"text,omitempty"`
	Results []resourceapi.AllocationResult `json:"results,omitempty"`
}

type classes []*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return c, nil }

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("device class %q not found", name)
}

// hold enters an allocated claim into the state, as the scheduler's plugin does.
func hold(state *structured.AllocatedState, claim *resourceapi.ResourceClaim) {
	if claim.Status.Allocation == nil {
		return
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.AdminAccess != nil && *result.AdminAccess {
			continue
		}
		id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
		if result.ShareID == nil {
			state.AllocatedDevices.Insert(id)
			continue
		}
		state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
		state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
	}
}

func place(world *World, state structured.AllocatedState, pod []*resourceapi.ResourceClaim) (answer Answer) {
	defer func() {
		if problem := recover(); problem != nil {
			answer = Answer{Kind: "panic", Text: fmt.Sprint(problem)}
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	on := world.Features
	cache := cel.NewCache(128, cel.Features{
		EnableConsumableCapacity: on.ConsumableCapacity, EnableListTypeAttributes: on.ListAttributes,
	})
	allocator, err := structured.NewAllocator(ctx, structured.Features{
		AdminAccess:             on.AdminAccess,
		ConsumableCapacity:      on.ConsumableCapacity,
		DeviceBindingAndStatus:  on.DeviceBinding,
		DeviceTaints:            on.DeviceTaints,
		FractionalCapacityRange: on.FractionalCapacity,
		ListTypeAttributes:      on.ListAttributes,
		PartitionableDevices:    on.Partitionable,
		PrioritizedList:         on.PrioritizedList,
	}, state, classes(world.Classes), world.Slices, cache)
	if err != nil {
		return Answer{Kind: "error", Text: err.Error()}
	}
	results, err := allocator.Allocate(ctx, world.Node, pod)
	switch {
	case ctx.Err() != nil:
		return Answer{Kind: "timeout"}
	case errors.Is(err, structured.ErrFailedAllocationOnNode):
		return Answer{Kind: "node-error", Text: err.Error()}
	case err != nil:
		return Answer{Kind: "error", Text: err.Error()}
	case len(results) < len(pod):
		return Answer{Kind: "none"}
	}
	return Answer{Kind: "fits", Results: results}
}

func answer(world *World) {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range world.Allocated {
		hold(&state, claim)
	}
	for _, pod := range world.Pods {
		answer := place(world, state, pod)
		world.Answers = append(world.Answers, answer)
		for i := range answer.Results {
			held := pod[i].DeepCopy()
			held.Status.Allocation = &answer.Results[i]
			hold(&state, held)
		}
	}
}

func run() error {
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	encoder := json.NewEncoder(out)
	if len(os.Args) == 4 && os.Args[1] == "generate" {
		count, err := strconv.Atoi(os.Args[2])
		if err != nil {
			return err
		}
		seed, err := strconv.ParseUint(os.Args[3], 10, 64)
		if err != nil {
			return err
		}
		for i := range count {
			world := generate(seed, uint64(i))
			answer(world)
			if err := encoder.Encode(world); err != nil {
				return err
			}
		}
		return nil
	}
	decoder := json.NewDecoder(bufio.NewReader(os.Stdin))
	for decoder.More() {
		world := &World{}
		if err := decoder.Decode(world); err != nil {
			return err
		}
		answer(world)
		if err := encoder.Encode(world); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
