//! Neighbours: GPUs that a device plugin or another DRA driver has allocated, or on which processes
//! compute that belong to no claim of ours. They stay published, tainted, and an Event has the
//! reason (see `divvy_offer::Finding`).
//!
//! The kubelet's PodResources list the devices of pods, the API has the GPU of another driver's
//! device and the claims with it, and NVML lists the processes that compute. `decide` derives the
//! uses from these.

mod decide;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_claims::Phase;
use divvy_executor::{Executor, HeldDevice};
use divvy_model::{DeviceKind, GpuDriver, GpuUuid, Inventory};
use divvy_offer::{Fact, Uses};
use divvy_proto::podresources::v1::PodResources;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::ListParams;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::app::config::Config;
use crate::claims::api::KubeClaims;
use crate::grpc::pod_resources;
use crate::node::facts::{Facts, GpusSeen};

use decide::{DriverDevice, GivenOut, Giver, Observations};

/// Looks for neighbours.
pub(crate) struct Neighbours {
    pub(crate) gpus: Arc<dyn GpuDriver>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) claims: Arc<KubeClaims>,
    pub(crate) config: Config,
    pub(crate) seen: watch::Receiver<GpusSeen>,
    /// True while this instance publishes: no other needs to know.
    pub(crate) publishes: watch::Receiver<bool>,
    pub(crate) facts: Facts,
}

/// The processes that compute on each GPU.
type Processes = BTreeMap<GpuUuid, BTreeSet<u32>>;

/// The memory from one look to the next.
#[derive(Default)]
struct Remembered {
    /// The last fact that was sent.
    uses: Option<Uses>,
    processes: Processes,
    /// Devices of pods outside of divvy, by the last answer.
    given: BTreeSet<GivenOut>,
    /// GPUs behind devices of other drivers, and what their claims have allocated; as of when.
    drivers: Option<(Instant, Drivers)>,
    /// Devices of other drivers that pods hold and that were no GPUs of ours when last asked
    /// (network cards, say).
    no_gpus: BTreeSet<DriverDevice>,
    /// GPUs behind devices that divvy gave to pods under another name of its driver.
    other_names: BTreeMap<DriverDevice, GpuUuid>,
}

#[derive(Debug, Clone, Default)]
struct Drivers {
    /// Devices that slices have.
    published: BTreeMap<DriverDevice, GpuUuid>,
    /// The same, and those of NVIDIA's driver that claims or pods have, in whose place we stand:
    /// its slices go away with its plugin, and its pods stay.
    devices: BTreeMap<DriverDevice, GpuUuid>,
    /// The devices that claims have of these, by namespace and name.
    allocated: BTreeMap<(String, String), BTreeSet<GivenOut>>,
    /// When all claims were asked for.
    listed: Option<Instant>,
}

impl Neighbours {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut memory = Remembered::default();
        let mut looked = false;
        loop {
            // Only the instance that publishes looks: a fact of the other would lead to nothing.
            let seen = self.seen.borrow_and_update().clone();
            let look = *self.publishes.borrow_and_update() && seen.released.is_none();
            if let Some(inventory) = seen.inventory.filter(|_| look) {
                self.look(&mut memory, inventory).await;
                looked = true;
            }
            tokio::select! {
                () = tokio::time::sleep(self.config.timing.neighbours) => {}
                Ok(()) = self.publishes.changed() => {}
                // Only before the first look, which needs an inventory. Later the interval decides.
                Ok(()) = self.seen.changed(), if !looked => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Looks once. A source that does not answer counts as it last did.
    async fn look(&self, memory: &mut Remembered, inventory: Arc<Inventory>) {
        match pod_resources::pods(&self.config.pod_resources_socket).await {
            Ok(pods) => memory.given = given_by_others(&pods, &self.config),
            Err(error) => {
                tracing::debug!(error = %crate::chain(&error), "failed to list device plugin allocations from the kubelet");
            }
        }
        // After the kubelet: it says which devices of other drivers pods hold, and so which have to
        // be looked up.
        self.look_at_drivers(memory, &inventory).await;
        self.look_at_other_names(memory);
        // Last, since processes and holds change fastest.
        let before = memory.processes.clone();
        let Some((processes, held)) = self.processes(inventory.clone(), before).await else {
            return;
        };
        // The first offer waits for this (`neighbours_first`), and claims may be known that only
        // the API has.
        if self.config.naming().stands_in() && memory.drivers.is_none() {
            return;
        }
        let nothing = Drivers::default();
        let drivers = memory.drivers.as_ref().map_or(&nothing, |(_, known)| known);
        let allocated = drivers.allocated.values().flatten();
        let mut devices = memory.other_names.clone();
        devices.extend(drivers.devices.clone());
        let uses = decide::decide(&Observations {
            inventory: &inventory,
            given: &memory.given.iter().chain(allocated).cloned().collect(),
            devices: &devices,
            pool: &self.config.pool(),
            nvidias: self.config.naming().stands_in().then_some((
                self.config.driver_name.as_str(),
                self.config.node_name.as_str(),
            )),
            processes: &processes,
            before: &memory.processes,
            held: &held,
        });
        memory.processes = processes;
        if memory.uses.as_ref() != Some(&uses) {
            memory.uses = Some(uses.clone());
            // Without a brain the plugin ends.
            drop(self.facts.send(Fact::Neighbours(uses).into()));
        }
    }

    /// Learns which GPUs are behind devices of other drivers, and which claims have them: anew at
    /// intervals and for devices that are not known, else only the claims found before.
    async fn look_at_drivers(&self, memory: &mut Remembered, inventory: &Inventory) {
        let theirs: BTreeSet<DriverDevice> = memory
            .given
            .iter()
            .filter_map(GivenOut::driver_device)
            .collect();
        let known = memory
            .drivers
            .as_ref()
            .filter(|(at, _)| at.elapsed() < self.config.timing.neighbour_drivers);
        let is_known = |device: &DriverDevice| {
            memory.no_gpus.contains(device)
                || known.is_some_and(|(_, known)| known.devices.contains_key(device))
        };
        if known.is_some() && theirs.iter().all(is_known) {
            if let Some((_, known)) = &mut memory.drivers {
                self.look_at_claims(known, &theirs).await;
            }
            return;
        }
        let before = memory.drivers.as_ref();
        let before = before.map(|(_, before)| before.clone()).unwrap_or_default();
        match self.drivers(inventory, &theirs, before).await {
            Ok(found) => {
                memory.no_gpus = theirs
                    .into_iter()
                    .filter(|device| !found.devices.contains_key(device))
                    .collect();
                memory.drivers = Some((Instant::now(), found));
            }
            // The first offer waits for it.
            Err(error) if memory.drivers.is_none() && self.config.naming().stands_in() => {
                tracing::warn!(
                    error = crate::chain(&error),
                    "failed to list claims of NVIDIA's plugin; nothing is published until they are known, will retry"
                );
            }
            Err(error) => {
                tracing::debug!(
                    error = crate::chain(&error),
                    "failed to list devices of other drivers; using the last result"
                );
            }
        }
    }

    /// Learns which GPUs pods have that divvy gave out under another name of its driver. After a
    /// change of the name nothing publishes them any more, and the kubelet removes their slices:
    /// what these said is kept, and the number in a device's name says the rest, since GPUs are
    /// numbered alike under each name.
    fn look_at_other_names(&self, memory: &mut Remembered) {
        let pool = self.config.pool();
        let devices = memory.given.iter().filter_map(GivenOut::driver_device);
        let devices: Vec<_> = devices.filter(|(_, of, _)| *of == pool).collect();
        if devices.is_empty() {
            return memory.other_names.clear();
        }
        let numbers = self.executor.ordinals().unwrap_or_default();
        let before = std::mem::take(&mut memory.other_names);
        let published = memory.drivers.as_ref().map(|(_, known)| &known.devices);
        let gpu = |device: &DriverDevice| {
            let said = published.and_then(|published| published.get(device));
            let known = said.or_else(|| before.get(device));
            let kind = DeviceKind::parse(&device.2.parse().ok()?);
            known.or_else(|| numbers.gpu(kind.ok()?.ordinal())).cloned()
        };
        let found = devices
            .into_iter()
            .filter_map(|device| Some((device.clone(), gpu(&device)?)));
        memory.other_names = found.collect();
    }

    /// Returns the processes that compute on GPUs that no claim holds, and the GPUs that claims
    /// hold; `None` if the records cannot be read. `before`: the processes of the last look.
    async fn processes(
        &self,
        inventory: Arc<Inventory>,
        before: Processes,
    ) -> Option<(Processes, BTreeSet<GpuUuid>)> {
        let (gpus, executor) = (self.gpus.clone(), self.executor.clone());
        let read = tokio::task::spawn_blocking(move || {
            // Processes on a GPU that a claim holds are no neighbours, whosever they are: only
            // their use is measured (`sources::usage`), and no list is read twice.
            let read = || Some(in_use(executor.held().ok()?));
            let known = read()?;
            let mut processes = Processes::new();
            for gpu in inventory.gpus.keys().filter(|gpu| !known.contains(*gpu)) {
                let found: BTreeSet<u32> = match gpus.processes(gpu) {
                    Ok(found) => found.iter().map(|process| process.pid).collect(),
                    // A list that fails is no empty list: what was there counts as there.
                    Err(_) => before.get(gpu).cloned().unwrap_or_default(),
                };
                if !found.is_empty() {
                    processes.insert(gpu.clone(), found);
                }
            }
            // Again after the processes: a claim that came meanwhile accounts for them.
            Some((processes, read()?))
        });
        read.await.ok().flatten()
    }

    /// Devices of other drivers on this node that are our GPUs, and claims that have them
    /// allocated.
    ///
    /// The node's slices cost the server little. A list of all claims of the cluster does not: it
    /// is read only if another driver publishes one of our GPUs, when that begins and then at
    /// intervals, and from the server's cache. In between, the claims found are read by name; the
    /// kubelet lists the devices of pods all the time.
    async fn drivers(
        &self,
        inventory: &Inventory,
        held: &BTreeSet<DriverDevice>,
        before: Drivers,
    ) -> Result<Drivers, kube::Error> {
        let of_node = format!("spec.nodeName={}", self.config.node_name);
        // From the server's cache: this is not urgent.
        let params = ListParams::default().fields(&of_node).match_any();
        let slices = Api::<ResourceSlice>::all(self.claims.client.clone())
            .list(&params)
            .await?;
        let published = their_devices(&slices.items, &self.config, inventory);
        if published.is_empty() && !self.config.naming().stands_in() {
            return Ok(Drivers::default());
        }
        let lasts = self.config.timing.neighbour_claims;
        // A list of all claims costs the server much. The last one counts while the devices are the
        // same.
        let listed = before
            .listed
            .filter(|at| published == before.published && at.elapsed() < lasts);
        let mut claims = Vec::new();
        if listed.is_some() {
            for (namespace, name) in before.allocated.keys() {
                claims.extend(self.claim(namespace, name).await?);
            }
        } else {
            let all = Api::<ResourceClaim>::all(self.claims.client.clone());
            claims = all.list(&ListParams::default().match_any()).await?.items;
        }
        let mut devices = published.clone();
        let named = claims.iter().flat_map(results).map(device_of);
        for device in named.chain(held.iter().cloned()) {
            let (driver, pool, name) = &device;
            if self.config.is_nvidias(driver, pool)
                && let Some(gpu) = decide::by_minor(name, inventory)
            {
                devices.entry(device).or_insert(gpu);
            }
        }
        let mut allocated = BTreeMap::new();
        for claim in claims {
            let name = [
                claim.metadata.namespace.clone(),
                claim.metadata.name.clone(),
            ];
            let [namespace, name] = name.map(Option::unwrap_or_default);
            let given = allocated_to(&claim, &devices);
            if !given.is_empty() {
                allocated.insert((namespace, name), given);
            }
        }
        Ok(Drivers {
            published,
            devices,
            allocated,
            listed: listed.or_else(|| Some(Instant::now())),
        })
    }

    async fn claim(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<ResourceClaim>, kube::Error> {
        Api::<ResourceClaim>::namespaced(self.claims.client.clone(), namespace)
            .get_opt(name)
            .await
    }

    /// Looks at the claims that have GPUs allocated, so that one that let go is noticed at once;
    /// those whose devices pods hold (`held`) have not. Without an answer they are as last known.
    async fn look_at_claims(&self, known: &mut Drivers, held: &BTreeSet<DriverDevice>) {
        let Drivers {
            devices, allocated, ..
        } = known;
        let all_held = |given: &BTreeSet<GivenOut>| {
            given
                .iter()
                .filter_map(GivenOut::driver_device)
                .all(|device| held.contains(&device))
        };
        let asked = async {
            for ((namespace, name), given) in
                allocated.iter_mut().filter(|(_, given)| !all_held(given))
            {
                let found = self.claim(namespace, name).await?;
                *given = found
                    .map(|claim| allocated_to(&claim, devices))
                    .unwrap_or_default();
            }
            Ok::<(), kube::Error>(())
        };
        if let Err(error) = asked.await {
            tracing::debug!(
                error = crate::chain(&error),
                "failed to list claims of other drivers; using the last result"
            );
        }
        allocated.retain(|_, given| !given.is_empty());
    }
}

/// Returns the GPUs of claims whose programs may run there. A claim that is not prepared in this
/// boot has none, and a process on its GPU is a neighbour.
fn in_use(held: Vec<HeldDevice>) -> BTreeSet<GpuUuid> {
    let may_run = held
        .into_iter()
        .filter(|held| held.phase != Phase::Preparing);
    may_run.map(|held| held.hold.gpu).collect()
}

/// Returns everything that a claim has allocated.
fn results(claim: &ResourceClaim) -> &[DeviceRequestAllocationResult] {
    let allocation = claim.status.as_ref().and_then(|s| s.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices
        .and_then(|devices| devices.results.as_deref())
        .unwrap_or_default()
}

fn device_of(result: &DeviceRequestAllocationResult) -> DriverDevice {
    (
        result.driver.clone(),
        result.pool.clone(),
        result.device.clone(),
    )
}

/// Returns the devices that a claim has of these.
fn allocated_to(
    claim: &ResourceClaim,
    devices: &BTreeMap<DriverDevice, GpuUuid>,
) -> BTreeSet<GivenOut> {
    let name = [&claim.metadata.namespace, &claim.metadata.name]
        .map(|part| part.as_deref().unwrap_or_default())
        .join("/");
    let theirs = results(claim)
        .iter()
        .filter(|result| result.admin_access != Some(true))
        .filter(|result| devices.contains_key(&device_of(result)));
    theirs
        .map(|result| GivenOut {
            by: Giver::Driver {
                name: result.driver.clone(),
                pool: result.pool.clone(),
            },
            to: format!("claim {name}"),
            device: result.device.clone(),
        })
        .collect()
}

/// Devices that pods hold and that are not ours.
fn given_by_others(pods: &[PodResources], config: &Config) -> BTreeSet<GivenOut> {
    let mut given = BTreeSet::new();
    for pod in pods {
        let to = format!("pod {}/{}", pod.namespace, pod.name);
        for container in &pod.containers {
            // Any vendor's: another plugin may give NVIDIA's GPUs out under its own name.
            for devices in &container.devices {
                given.extend(devices.device_ids.iter().map(|id| GivenOut {
                    by: Giver::DevicePlugin(devices.resource_name.clone()),
                    to: to.clone(),
                    device: id.clone(),
                }));
            }
            let theirs = container
                .dynamic_resources
                .iter()
                .flat_map(|claim| &claim.claim_resources);
            given.extend(
                theirs
                    .filter(|used| !config.owns(&used.driver_name, &used.pool_name))
                    .filter(|used| used.pool_name != config.pool() || holds(&used.device_name))
                    .map(|used| GivenOut {
                        by: Giver::Driver {
                            name: used.driver_name.clone(),
                            pool: used.pool_name.clone(),
                        },
                        to: to.clone(),
                        device: used.device_name.clone(),
                    }),
            );
        }
    }
    given
}

/// Returns whether a device of divvy keeps others off its GPU, by its name.
fn holds(device: &str) -> bool {
    let name = device.parse().ok();
    let kind = name.and_then(|name| DeviceKind::parse(&name).ok());
    kind.is_none_or(|kind| kind.sharing.holds())
}

/// Devices of other drivers that say, in an attribute, that they are one of our GPUs or a part of
/// it.
fn their_devices(
    slices: &[ResourceSlice],
    config: &Config,
    inventory: &Inventory,
) -> BTreeMap<DriverDevice, GpuUuid> {
    let mut found = BTreeMap::new();
    let is_theirs =
        |slice: &&ResourceSlice| !config.owns(&slice.spec.driver, &slice.spec.pool.name);
    for slice in slices.iter().filter(is_theirs) {
        for device in slice.spec.devices.iter().flatten() {
            // Each driver has its own name for the attribute, so any text that is the UUID of a GPU
            // here counts.
            let mut values = device
                .attributes
                .iter()
                .flatten()
                .filter_map(|(_, value)| value.string.as_deref());
            let gpu =
                values.find_map(|value| inventory.gpus.keys().find(|uuid| uuid.as_str() == value));
            if let Some(gpu) = gpu {
                let name = (
                    slice.spec.driver.clone(),
                    slice.spec.pool.name.clone(),
                    device.name.clone(),
                );
                found.insert(name, gpu.clone());
            }
        }
    }
    found
}
