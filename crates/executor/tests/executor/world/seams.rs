//! The executor's seams over the machine, but for the driver of its GPUs.

use super::accessors::{not_done, unknown};
use super::*;

/// Locks of one process with one thread: one that is not free would never be.
pub(super) struct TestLocks(World, Arc<Mutex<BTreeSet<LockName>>>);

struct Held(Arc<Mutex<BTreeSet<LockName>>>, LockName, World);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.lock().unwrap().remove(&self.1);
        self.2.lock().locked.remove(&self.1);
    }
}

impl TestLocks {
    pub(super) fn new(world: World) -> Self {
        Self(world, Arc::default())
    }
}

impl Locks for TestLocks {
    fn acquire(&self, name: &LockName, until: Duration) -> Result<LockGuard, LockError> {
        let before = self.0.3.lock().unwrap().take_if(|(before, times, _)| {
            let now = before == name && *times == 0;
            *times -= usize::from(before == name && !now);
            now
        });
        if let Some((.., before)) = before {
            before();
        }
        {
            let mut m = self.0.lock();
            // Only an API that is slow makes a call late.
            assert!(
                until >= m.now || m.api_takes.is_some(),
                "{name} is asked for after its deadline"
            );
            if m.busy.contains(name) {
                m.now = m.now.max(until);
                return Err(LockError::TimedOut {
                    lock: name.to_string(),
                });
            }
        }
        let mut held = self.1.lock().unwrap();
        assert!(
            held.iter().all(|h| h < name),
            "{name} is taken after {held:?}"
        );
        assert!(held.insert(name.clone()), "{name} is locked twice");
        self.0.lock().locked.insert(name.clone());
        Ok(Box::new(Held(self.1.clone(), name.clone(), self.0.clone())))
    }
}

/// From a full disk files can be removed; from a folder that is mounted read-only they cannot.
fn removable(m: &mut Machine, place: Place) -> io::Result<()> {
    match m.write_error {
        Some((_, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)) => Ok(()),
        _ => checked(m, place),
    }
}

fn checked(m: &mut Machine, place: Place) -> io::Result<()> {
    match m.write_error {
        Some((at, kind)) if at == place => Err(kind.into()),
        _ => Ok(()),
    }
}

impl Store for World {
    fn list(&self, folder: Folder) -> io::Result<Vec<Entry>> {
        let m = self.lock();
        if m.dead {
            return Err(Dead.into());
        }
        let here = m.disk.iter().filter(|((f, _), _)| *f == folder);
        let entry = |((_, name), file): (&(Folder, String), &File)| {
            Some(Entry {
                name: name.clone(),
                stamp: Stamp(file.seen.as_ref()?.1, (0, 0), 0),
            })
        };
        let listed = here.filter_map(entry).collect();
        drop(m);
        let after = self.4.lock().unwrap().take_if(|(times, _)| {
            let now = folder == Folder::Claims && *times == 0;
            *times -= usize::from(folder == Folder::Claims && !now);
            now
        });
        if let Some((_, after)) = after {
            after();
        }
        Ok(listed)
    }
    fn stamp(&self, _folder: Folder) -> io::Result<Stamp> {
        Ok(Stamp(self.lock().writes, (0, 0), 0))
    }
    fn read(&self, folder: Folder, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut m = self.lock();
        if m.bad_blocks.contains(&(folder, name.to_owned())) {
            return Err(io::Error::from_raw_os_error(m.bad_disk.unwrap_or(5)));
        }
        Ok(m.call(&format!("read {}/{name}", folder.name()), |m, _| {
            m.file(folder, name)
        })?)
    }
    fn write(
        &self,
        folder: Folder,
        name: &str,
        bytes: &[u8],
        durability: Durability,
    ) -> io::Result<Stamp> {
        let mut m = self.lock();
        m.needs_for_file(folder, name, Some(bytes));
        checked(&mut m, Place::Store)?;
        Ok(
            m.call(&format!("write {}/{name}", folder.name()), |m, whole| {
                // Cut short: only the temporary file is there, or it has its name but the folder is
                // not synced.
                if whole || m.chance.one_in(2) {
                    m.change(
                        folder,
                        name,
                        Some(bytes),
                        whole && durability == Durability::Synced,
                    );
                }
                Stamp(m.writes, (0, 0), 0)
            })?,
        )
    }
    fn overwrite(&self, folder: Folder, name: &str, bytes: &[u8]) -> io::Result<Stamp> {
        let mut m = self.lock();
        m.needs_for_file(folder, name, Some(bytes));
        removable(&mut m, Place::Store)?;
        if m.file(folder, name).is_none() {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(m.call(
            &format!("overwrite {}/{name}", folder.name()),
            |m, whole| {
                // Cut short: nothing is written yet, or a part.
                if whole || m.chance.one_in(2) {
                    let part = &bytes[..bytes.len() / 2];
                    m.change(folder, name, Some(if whole { bytes } else { part }), true);
                }
                Stamp(m.writes, (0, 0), 0)
            },
        )?)
    }
    fn remove(&self, folder: Folder, name: &str, durability: Durability) -> io::Result<bool> {
        let mut m = self.lock();
        m.needs_for_file(folder, name, None);
        removable(&mut m, Place::Store)?;
        Ok(
            m.call(&format!("remove {}/{name}", folder.name()), |m, whole| {
                let was_there = m.file(folder, name).is_some();
                m.change(
                    folder,
                    name,
                    None,
                    whole && durability == Durability::Synced,
                );
                was_there
            })?,
        )
    }
}

impl CdiDir for World {
    fn list(&self) -> io::Result<Vec<String>> {
        let listed = self
            .lock()
            .call("list cdi", |m, _| m.cdi.keys().cloned().collect())?;
        let after = self.2.lock().unwrap().take();
        if let Some(after) = after {
            after();
        }
        Ok(listed)
    }
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut m = self.lock();
        Ok(m.call("read cdi", |m, _| m.cdi.get(name).cloned())?)
    }
    fn exists(&self, name: &str) -> io::Result<bool> {
        let mut m = self.lock();
        Ok(m.call("look at cdi", |m, _| m.cdi.contains_key(name))?)
    }
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut m = self.lock();
        m.needs_for_cdi(name);
        if std::mem::take(&mut m.fills_up) {
            m.write_error = Some((Place::Store, io::ErrorKind::StorageFull));
            return Err(io::ErrorKind::StorageFull.into());
        }
        checked(&mut m, Place::Cdi)?;
        for (claim, request) in mounted(bytes) {
            assert!(
                m.metadata.contains_key(&(claim, request)),
                "{name} mounts what is not there"
            );
        }
        Ok(m.call(&format!("write {name}"), |m, whole| {
            if whole {
                m.cdi.insert(name.to_owned(), bytes.to_vec());
            }
        })?)
    }
    fn remove(&self, name: &str) -> io::Result<bool> {
        let mut m = self.lock();
        m.needs_for_cdi(name);
        removable(&mut m, Place::Cdi)?;
        Ok(m.call(&format!("remove {name}"), |m, _| {
            m.cdi.remove(name).is_some()
        })?)
    }
    fn place(&self) -> String {
        "/var/run/cdi".to_owned()
    }
}

/// The metadata that a CDI file mounts.
fn mounted(cdi: &[u8]) -> Vec<(ClaimUid, String)> {
    let spec: divvy_cdi::Spec = serde_json::from_slice(cdi).unwrap();
    let mounts = spec
        .devices
        .iter()
        .flat_map(|device| &device.container_edits.mounts);
    let of = |path: &str| {
        let rest = path
            .strip_prefix("/plugin/metadata/")?
            .strip_suffix(".json")?;
        let (claim, request) = rest.split_once('/')?;
        Some((claim.parse().ok()?, request.to_owned()))
    };
    mounts.filter_map(|mount| of(&mount.host_path)).collect()
}

impl MetadataDir for World {
    fn claims(&self) -> io::Result<Vec<ClaimUid>> {
        let mut m = self.lock();
        Ok(m.call("list metadata", |m, _| {
            m.metadata.keys().map(|(claim, _)| claim.clone()).collect()
        })?)
    }
    fn read(&self, claim: &ClaimUid, request: &str) -> io::Result<Option<Vec<u8>>> {
        let mut m = self.lock();
        Ok(m.call("read metadata", |m, _| {
            m.metadata
                .get(&(claim.clone(), request.to_owned()))
                .cloned()
        })?)
    }
    fn write(&self, claim: &ClaimUid, request: &str, bytes: &[u8]) -> io::Result<()> {
        let mut m = self.lock();
        m.needs(&LockName::Claim(claim.clone()), "metadata is written");
        assert!(
            m.records().contains_key(claim),
            "metadata of {claim} is written before its record"
        );
        checked(&mut m, Place::Metadata)?;
        Ok(
            m.call(&format!("write metadata {claim}/{request}"), |m, whole| {
                if whole {
                    m.metadata
                        .insert((claim.clone(), request.to_owned()), bytes.to_vec());
                }
            })?,
        )
    }
    fn remove(&self, claim: &ClaimUid) -> io::Result<()> {
        let mut m = self.lock();
        m.needs(&LockName::Claim(claim.clone()), "metadata is removed");
        removable(&mut m, Place::Metadata)?;
        let whole = |m: &mut Machine, whole: bool| {
            // Cut short: one of them, the first.
            let mut left = usize::from(!whole);
            m.metadata
                .retain(|(of, _), _| of != claim || std::mem::take(&mut left) == 1);
        };
        Ok(m.call(&format!("remove metadata {claim}"), whole)?)
    }
    fn path(&self, claim: &ClaimUid, request: &str) -> PathBuf {
        PathBuf::from(format!("/plugin/metadata/{claim}/{request}.json"))
    }
}

fn without_time_slices(gpu: &GpuUuid) -> TimeSliceError {
    TimeSliceError::Unsupported(format!("{gpu} (a Tesla P4) has none"))
}

impl TimeSlices for World {
    fn read(&self, gpu: &GpuUuid, until: Duration) -> Result<Option<TimeSlice>, TimeSliceError> {
        let mut m = self.lock();
        m.has_time(until, "a time slice is read");
        if m.slices.is_none() {
            // One that refuses to be read says that it has none only when it is set.
            return m
                .slice_fault
                .take()
                .map_or_else(|| Err(without_time_slices(gpu)), |_| Ok(None));
        }
        let read = m.call("read the time slice", |m, _| {
            m.slices.as_ref()?.get(gpu).copied()
        });
        read.map(|slice| Some(slice.unwrap_or(TimeSlice::Default)))
            .map_err(|dead| ChangeError::from(dead).into())
    }
    fn set(&self, gpu: &GpuUuid, to: TimeSlice, until: Duration) -> Result<(), TimeSliceError> {
        let mut m = self.lock();
        m.has_time(until, "a time slice is set");
        m.needs(&LockName::Gpu(gpu.clone()), "a time slice is set");
        if m.slices.is_none() {
            return Err(without_time_slices(gpu));
        }
        m.harms_no_other(gpu, &Harm::Slice(to));
        let fault = m.slice_fault.take();
        let done = |m: &mut Machine| {
            let slices = m.slices.as_mut().unwrap();
            slices.remove(gpu);
            slices.extend((to != TimeSlice::Default).then(|| (gpu.clone(), to)));
        };
        let refused = || not_done("nvidia-smi has no permission");
        let unknown = || unknown("nvidia-smi did not come back within 10 s");
        let answer = m.call("set the time slice", |m, whole| match fault {
            None if !whole && m.chance.one_in(2) => Err(ChangeError::from(Dead)),
            None => {
                done(m);
                Ok(())
            }
            Some(HardwareFault::Refuses) => Err(refused()),
            Some(HardwareFault::Late {
                succeeds: false, ..
            }) => Err(unknown()),
            Some(HardwareFault::Lies | HardwareFault::Late { .. }) => {
                done(m);
                Err(unknown())
            }
        });
        Ok(answer.unwrap_or_else(|dead| Err(dead.into()))?)
    }
}

impl World {
    fn stop_server(&self, target: &GpuTarget, until: Duration) -> Result<(), ChangeError> {
        let mut m = self.lock();
        m.has_time(until, "an MPS server is stopped");
        m.needs(
            &LockName::Gpu(target.gpu.clone()),
            "an MPS server is stopped",
        );
        m.mps_call("stop an MPS server", |m| match target.target {
            Target::Gpu => m.server_dies(&target.gpu),
            Target::Partition(_) => {
                m.mps_in.remove(target);
                m.wedged.remove(target);
            }
        })
    }
}

/// Process of every MPS server.
const SERVER_PID: u32 = 9000;

/// The supervisor. It outlives the executor's process, and what it was asked for is done before the
/// next question, whether the asker lives or not.
impl MpsServers for World {
    fn running(
        &self,
        of: Option<&GpuUuid>,
        until: Duration,
    ) -> Result<BTreeMap<GpuTarget, RunningServer>, String> {
        let mut m = self.lock();
        m.mps_looks += 1;
        m.has_time(until, "the servers are asked for");
        if m.dead {
            return Err("dead".to_owned());
        }
        if m.no_supervisor {
            return Err("the MPS supervisor does not answer".to_owned());
        }
        let pids = BTreeSet::from([SERVER_PID]);
        let whole = m.mps.iter().map(|(gpu, server)| {
            let running = RunningServer {
                server: *server,
                partition: None,
                pids: pids.clone(),
                namespaces: m.namespaces.get(gpu).cloned().unwrap_or_default(),
                unwell: m.wedged.get(&GpuTarget::whole(gpu.clone())).copied(),
            };
            (GpuTarget::whole(gpu.clone()), running)
        });
        let parts = m.mps_in.iter().map(|(target, (server, partition))| {
            let running = RunningServer {
                server: *server,
                partition: Some(partition.clone()),
                pids: pids.clone(),
                namespaces: BTreeMap::new(),
                unwell: m.wedged.get(target).copied(),
            };
            (target.clone(), running)
        });
        let is_asked = |target: &GpuTarget| of.is_none_or(|gpu| target.gpu == *gpu);
        let all = whole.chain(parts).filter(|(target, _)| is_asked(target));
        Ok(all.collect())
    }

    fn start(
        &self,
        target: &GpuTarget,
        start: ServerStart<'_>,
        until: Duration,
    ) -> Result<(), ChangeError> {
        let ServerStart {
            server,
            partition,
            anew,
        } = start;
        if anew {
            assert!(self.lock().wedged.contains_key(target), "it serves");
            self.stop_server(target, until)?;
        }
        let (mut m, gpu) = (self.lock(), &target.gpu);
        m.has_time(until, "an MPS server is started");
        m.needs(&LockName::Gpu(gpu.clone()), "an MPS server is started");
        assert_eq!(target.target.place().is_some(), partition.is_some());
        let facts = m.sim.edit(|e| e.gpu(gpu).map(|gpu| gpu.facts.clone()));
        if let Some(facts) = facts.filter(|_| partition.is_none()) {
            let exclusive = Some(divvy_model::ComputeMode::ExclusiveProcess);
            assert!(
                facts.compute_mode == exclusive && !facts.mig_mode.is_on(),
                "a program can get round the server: {facts:?}"
            );
        }
        m.mps_call("start an MPS server", |m| {
            // Stopped first, where another is wanted.
            if let Some(partition) = partition {
                let wanted = (server, partition.clone());
                assert!(m.mps_in.get(target).is_none_or(|runs| *runs == wanted));
                m.mps_in.insert(target.clone(), wanted);
            } else {
                assert!(m.mps.get(gpu).is_none_or(|runs| *runs == server));
                m.mps.insert(gpu.clone(), server);
            }
        })
    }

    fn stop(&self, target: &GpuTarget, until: Duration) -> Result<(), ChangeError> {
        let harm = Harm::Server(target.target);
        self.lock().harms_no_other(&target.gpu, &harm);
        self.stop_server(target, until)
    }

    fn put_namespace(
        &self,
        target: &GpuTarget,
        namespace: MpsNamespace,
        _: Duration,
    ) -> Result<(), ChangeError> {
        let (mut m, gpu) = (self.lock(), &target.gpu);
        m.needs(&LockName::Gpu(gpu.clone()), "a namespace is made");
        if !m.mps.get(gpu).is_some_and(|runs| runs.has_namespaces()) {
            return Err(not_done("no server with namespaces runs"));
        }
        m.mps_call("make a namespace", |m| {
            let all = m.namespaces.entry(gpu.clone()).or_default();
            all.insert(namespace.name, namespace);
        })
    }

    fn remove_namespace(
        &self,
        target: &GpuTarget,
        name: MpsNamespaceName,
        _: Duration,
    ) -> Result<(), ChangeError> {
        let (mut m, gpu) = (self.lock(), &target.gpu);
        m.needs(&LockName::Gpu(gpu.clone()), "a namespace is ended");
        m.harms_no_other(gpu, &Harm::Namespace(name));
        m.mps_call("end a namespace", |m| {
            if let Some(all) = m.namespaces.get_mut(gpu) {
                all.remove(&name);
            }
        })
    }
}

impl Machine {
    /// An MPS server dies or is stopped: its namespaces go with it.
    pub(crate) fn server_dies(&mut self, gpu: &GpuUuid) {
        self.mps.remove(gpu);
        self.wedged.remove(&GpuTarget::whole(gpu.clone()));
        self.namespaces.remove(gpu);
    }

    fn mps_call(&mut self, what: &str, does: impl FnOnce(&mut Self)) -> Result<(), ChangeError> {
        if self.no_supervisor {
            return Err(not_done("the MPS supervisor does not answer"));
        }
        let fault = self.mps_fault.take();
        let refused = || not_done("the MPS daemon cannot be started");
        let late = || unknown("the MPS supervisor has not answered");
        let answer = self.call(what, |m, whole| match fault {
            None if !whole && m.chance.one_in(2) => Err(ChangeError::from(Dead)),
            None => {
                does(m);
                Ok(())
            }
            Some(HardwareFault::Refuses) => Err(refused()),
            Some(HardwareFault::Late {
                succeeds: false, ..
            }) => Err(late()),
            Some(HardwareFault::Lies | HardwareFault::Late { .. }) => {
                does(m);
                Err(late())
            }
        });
        answer.unwrap_or_else(|dead| Err(dead.into()))
    }
}

/// Edits that containers get; [`DeviceEdits`] itself is among the accessors.
impl World {
    pub(super) fn common_edits(&self) -> Result<Arc<CommonEdits>, EditsError> {
        if self.lock().edits_missing {
            let what = "libcuda.so is not below the driver root (is the driver installed? see --driver-root)"
                .to_owned();
            return Err(EditsError { what, source: None });
        }
        Ok(Arc::new(
            CommonEdits::new(ContainerEdits::env(["NVIDIA_VISIBLE_DEVICES=void"])).unwrap(),
        ))
    }

    /// UUIDs of partitions are new at every creation: only that there is one is said of them.
    pub(super) fn edits_of(gpu: &Gpu, partition: Option<&MigUuid>) -> ContainerEdits {
        let made = usize::from(partition.is_some());
        ContainerEdits::env([
            format!("GPU={}", gpu.facts.uuid),
            format!("PARTITIONS={made}"),
        ])
    }

    pub(super) fn attributes_of(inventory: &Inventory, gpu: &GpuUuid) -> Attributes {
        let pci = inventory.gpus[gpu].facts.pci_address.to_string();
        [(
            "resource.kubernetes.io/pciBusID".to_owned(),
            AttributeValue::String(pci),
        )]
        .into()
    }
}

impl ProcessSource for World {
    fn on_gpu(&self, gpu: &GpuUuid) -> Result<Vec<ProcessOnGpu>, GpuError> {
        let mut m = self.lock();
        let error = |code| GpuError::on_gpu(GpuOp::Processes, code, gpu);
        if m.dead {
            return Err(error(GpuErrorCode::UNKNOWN));
        }
        if let Some(code) = m.odd_processes.take().or(m.process_error) {
            Err(error(code))
        } else {
            let found = match &m.driver {
                Some(driver) => driver.processes(gpu)?,
                None => m.sim.engine().processes(gpu)?,
            };
            let process = |p: divvy_model::GpuProcess| ProcessOnGpu {
                pid: p.pid,
                gpu_instance: p.gpu_instance,
                pod: m.pods.get(&p.pid).cloned(),
            };
            let listed = m.processes.get(gpu).into_iter().flatten().cloned();
            let server = m.mps.get(gpu).map(|_| ProcessOnGpu {
                pid: SERVER_PID,
                gpu_instance: None,
                pod: None,
            });
            let listed = listed.chain(server);
            Ok(found.into_iter().map(process).chain(listed).collect())
        }
    }
}

impl InventorySource for World {
    fn inventory(&self) -> Option<Arc<Inventory>> {
        self.lock().inventory.clone()
    }

    fn changed(&self, gpu: &GpuUuid) -> Result<(), GpuError> {
        let mut m = self.lock();
        let facts = m.driver().facts(gpu)?;
        let known = m.inventory.as_mut().map(Arc::make_mut);
        if let Some(known) = known.and_then(|all| all.gpus.get_mut(gpu)) {
            known.facts.compute_mode = facts.compute_mode;
        }
        Ok(())
    }
}

impl ClaimsApi for World {
    fn look_up(&self, uid: &ClaimUid, _: Option<&ClaimRef>, until: Duration) -> Lookup {
        let mut m = self.lock();
        m.look_ups += 1;
        if let Some(takes) = m.api_takes {
            let late = m.now + takes > until;
            m.now = (m.now + takes).min(until.max(m.now));
            if late {
                return Lookup::Unknown("timed out".to_owned());
            }
        }
        if m.api_down {
            return Lookup::Unknown("connection refused".to_owned());
        }
        m.api
            .get(uid)
            .or_else(|| m.asked.get(uid))
            .map_or(Lookup::Gone, |claim| Lookup::Found(Box::new(claim.clone())))
    }

    fn published_numbers(&self) -> Result<Vec<(u32, GpuUuid)>, String> {
        let m = self.lock();
        if m.api_down {
            Err("connection refused".to_owned())
        } else {
            Ok(m.published.clone())
        }
    }

    fn allocated_numbers(&self) -> Result<Vec<u32>, String> {
        let m = self.lock();
        let devices = m.api.values().flat_map(|claim| &claim.allocation.results);
        Ok(devices
            .map(|d| DeviceKind::parse(&d.device).unwrap().ordinal())
            .collect())
    }
}

impl Clock for World {
    fn now(&self) -> Duration {
        self.lock().now
    }
    fn sleep(&self, time: Duration) {
        self.pass(time);
        let now = self.lock().now;
        let due: Vec<_> = self
            .1
            .lock()
            .unwrap()
            .extract_if(.., |(at, _)| *at <= now)
            .collect();
        for (_, what) in due {
            what();
        }
    }
}
