//! MPS servers by the supervisor of the node, for the executor, and what containers need of them.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_api::names::env;
use divvy_cdi::{ContainerEdits, Mount};
use divvy_claims::{Cause, ChangeError, MpsSlot, Unwell};
use divvy_executor::{Clock, MpsServers, RunningServer, ServerStart};
use divvy_host::{DriverRoot, HostRoot};
use divvy_model::{
    GpuTarget, GpuUuid, MigUuid, MpsFault, MpsHolder, MpsNamespace, MpsNamespaceName, MpsPriority,
    MpsProtocol, MpsServer, lock,
};
use divvy_proto::mps::v1 as proto;
use divvy_proto::mps::v1::supervisor_client::SupervisorClient;
use divvy_proto::mps::v1::{
    Daemon, Limits, Namespace, ProgramsRequest, PutNamespaceRequest, RemoveNamespaceRequest,
    StartRequest, StateRequest, StopRequest,
};
use tokio::runtime::Handle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::host::pods::of_processes;
use crate::sources::mps_supervisor::SOCKET;

/// NVIDIA's programs for MPS.
const PROGRAMS: [&str; 2] = ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];
/// Folder in containers in which programs find the sockets of their server.
const PIPE: &str = "/run/divvy/mps";
/// A connection to a socket of the node takes no time, unless nothing listens.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// They are tried once, which takes some starts of a daemon.
const PROGRAMS_WITHIN: Duration = Duration::from_secs(5);

/// Returns whether a driver has the programs.
pub(crate) fn has_programs(root: &DriverRoot) -> bool {
    let is_there = |name: &&str| matches!(root.find_program(name), Ok(Some(_)));
    PROGRAMS.iter().all(is_there)
}

/// Returns what a container with a place at a target's server needs: its sockets, or those of its
/// claim's namespace alone, and before protocol v3 the memory that the server shares with its
/// clients. `dir` is the supervisor's folder.
pub(crate) fn edits(dir: &Path, target: &GpuTarget, slot: &MpsSlot) -> ContainerEdits {
    let mount = |host: PathBuf, container: &str| Mount {
        host_path: host.display().to_string(),
        container_path: container.to_owned(),
        options: ["rw", "bind", "nosuid", "nodev"].map(str::to_owned).into(),
    };
    let pipe = dir.join(slot.server.protocol.pipe(target));
    let mut variables = vec![format!("{}={PIPE}", env::MPS_PIPE_DIRECTORY)];
    let memory = || dir.join(MpsServer::memory(target));
    let mounts = match slot.namespace {
        Some(namespace) => vec![mount(pipe.join(namespace.name.folder()), PIPE)],
        None => vec![mount(pipe, PIPE), mount(memory(), "/dev/shm")],
    };
    if let Some(mib) = slot.server.memory_mib {
        // By the number of the GPU, which is 0 for every client: its server sees no other. The
        // server has the same limit; a program that names another GPU here loses both.
        variables.push(format!("{}=0={mib}M", env::MPS_PINNED_MEMORY));
    }
    // The limit of threads is the server's alone, and those of a namespace are all its server's.
    let priority = slot.priority.map(MpsPriority::number);
    variables.extend(priority.map(|number| format!("{}={number}", env::MPS_PRIORITY)));
    ContainerEdits {
        mounts,
        ..ContainerEdits::env(variables)
    }
}

/// The supervisor, on its socket. A connection for each question: after a restart there is another
/// socket under the same path.
pub(crate) struct SupervisedMps {
    socket: PathBuf,
    runtime: Handle,
    clock: Arc<dyn Clock>,
    /// A server that has not served for so long will not by itself.
    wedged_after: Duration,
    host: HostRoot,
    /// Processes that held up a daemon when it was last looked at.
    holders: Mutex<BTreeMap<GpuTarget, MpsHolder>>,
}

impl SupervisedMps {
    /// Makes the client of the supervisor with this folder.
    pub(crate) fn new(
        dir: &Path,
        runtime: Handle,
        clock: Arc<dyn Clock>,
        wedged_after: Duration,
        host: HostRoot,
    ) -> Self {
        Self {
            host,
            socket: dir.join(SOCKET),
            runtime,
            clock,
            wedged_after,
            holders: Mutex::default(),
        }
    }

    /// Returns whether a server can serve programs of all users; `None`: the supervisor does not
    /// say, which may come later than this. On a thread that may wait.
    pub(crate) fn serves_all_users(&self) -> Option<bool> {
        let answer = self.runtime.block_on(async {
            let mut client = self.connect().await?;
            let asked = client.programs(ProgramsRequest {});
            let answer = within_time(PROGRAMS_WITHIN, asked).await;
            answer.map_err(|status| status.message().to_owned())
        });
        match answer {
            Ok(answer) => Some(answer.into_inner().for_all_users),
            Err(why) => {
                tracing::debug!(
                    why,
                    "the MPS supervisor does not say what the driver's MPS can do"
                );
                None
            }
        }
    }

    async fn connect(&self) -> Result<SupervisorClient<Channel>, String> {
        let endpoint = Endpoint::from_shared(format!("unix:{}", self.socket.display()));
        let connected = match endpoint {
            Ok(endpoint) => endpoint.connect_timeout(CONNECT_WITHIN).connect().await,
            Err(error) => Err(error),
        };
        connected.map(SupervisorClient::new).map_err(|error| {
            format!(
                "the MPS supervisor does not answer on {} (check its pod on this node, which is to be deleted once after a change of driverName): {}",
                self.socket.display(),
                crate::chain(&error)
            )
        })
    }

    /// Keeps which process holds up the daemon of a target.
    fn keep_holder(&self, target: &GpuTarget, said: Option<&proto::Unwell>) {
        let pid = said.and_then(|said| said.holder_pid);
        // Looked for now: the process may be gone when its pod is asked for.
        let holder = pid.map(|pid| MpsHolder {
            pid,
            pod: of_processes(&self.host, &[pid], &BTreeMap::new()).remove(&pid),
        });
        let mut holders = lock(&self.holders);
        match holder {
            Some(holder) => drop(holders.insert(target.clone(), holder)),
            None => drop(holders.remove(target)),
        }
    }

    /// Reads the state of a server that serves no new program.
    fn unwell(&self, said: &proto::Unwell) -> Unwell {
        // A fault of a later supervisor, whose name is not known, is one all the same.
        let fault = MpsFault::parse(&said.fault).unwrap_or(MpsFault::Fault);
        Unwell {
            fault,
            is_idle: said.clients == Some(0),
            is_lasting: Duration::from_millis(said.lasts_ms) >= self.wedged_after,
        }
    }

    /// Makes a change, on a thread of the executor.
    fn change<T>(
        &self,
        until: Duration,
        call: impl AsyncFnOnce(SupervisorClient<Channel>) -> Result<T, Status>,
    ) -> Result<(), ChangeError> {
        let within = until.saturating_sub(self.clock.now());
        self.runtime.block_on(async {
            let client = self.connect().await;
            let client = client.map_err(|what| ChangeError::NotDone(Cause::new(what).passing()))?;
            match within_time(within, call(client)).await {
                Ok(_) => Ok(()),
                Err(status) => Err(of_status(&status)),
            }
        })
    }
}

/// Returns the error of a call. A supervisor that answers has undone what it began.
fn of_status(status: &Status) -> ChangeError {
    match status.code() {
        Code::FailedPrecondition => ChangeError::NotDone(Cause::new(status.message()).passing()),
        Code::InvalidArgument => ChangeError::NotDone(Cause::unsupported(status.message())),
        _ => ChangeError::Unknown(Cause::new(format!(
            "the MPS supervisor has not answered: {}",
            status.message()
        ))),
    }
}

async fn within_time<T>(
    within: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    let late = |_| Status::deadline_exceeded(format!("not within {within:.1?}"));
    tokio::time::timeout(within, call).await.map_err(late)?
}

impl MpsServers for SupervisedMps {
    fn running(
        &self,
        of: Option<&GpuUuid>,
        until: Duration,
    ) -> Result<BTreeMap<GpuTarget, RunningServer>, String> {
        let asked = StateRequest {
            gpu_uuid: of.map(GpuUuid::to_string).unwrap_or_default(),
        };
        let within = until.saturating_sub(self.clock.now());
        let state = self.runtime.block_on(async {
            let mut client = self.connect().await?;
            let asked = within_time(within, client.state(asked)).await;
            asked.map_err(|status| status.message().to_owned())
        })?;
        let state = state.into_inner();
        for proto::Unknown { target, why } in state.unknown {
            let why = format!("the MPS server of {target} is not known: {why}");
            // An answer about all is no answer about this one's GPU, which is then asked about.
            if of.is_some() {
                return Err(why);
            }
            tracing::warn!(why, "left out of the MPS servers that run");
        }
        let daemon = |daemon: Daemon| {
            let Limits {
                slots,
                cores,
                memory_mib,
                protocol,
            } = daemon.limits?;
            let server = MpsServer {
                slots: Some(slots).filter(|slots| *slots > 0),
                cores,
                memory_mib: Some(memory_mib).filter(|mib| *mib > 0),
                protocol: MpsProtocol::of_number(protocol)?,
            };
            let pids = daemon.pids.into_iter().collect();
            let namespace = |one: Namespace| {
                let name: MpsNamespaceName = one.name.parse().ok()?;
                let memory_mib = Some(one.memory_mib).filter(|mib| *mib > 0);
                let cores = one.cores;
                Some((
                    name,
                    MpsNamespace {
                        name,
                        cores,
                        memory_mib,
                    },
                ))
            };
            let namespaces = daemon.namespaces.into_iter().filter_map(namespace);
            let partition = Some(daemon.partition_uuid).filter(|uuid| !uuid.is_empty());
            let partition = partition.map(|uuid| uuid.parse()).transpose().ok()?;
            let target: GpuTarget = daemon.target.parse().ok()?;
            self.keep_holder(&target, daemon.unwell.as_ref());
            let unwell = daemon.unwell.map(|said| self.unwell(&said));
            Some((
                target,
                RunningServer {
                    server,
                    partition,
                    pids,
                    namespaces: namespaces.collect(),
                    unwell,
                },
            ))
        };
        let daemons = state.daemons.into_iter();
        Ok(daemons.filter_map(daemon).collect())
    }

    fn holder(&self, target: &GpuTarget) -> Option<MpsHolder> {
        lock(&self.holders).get(target).cloned()
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
        tracing::info!(%target, ?server, anew, "starting the MPS server");
        let asked = StartRequest {
            anew,
            target: target.to_string(),
            partition_uuid: partition.map(MigUuid::to_string).unwrap_or_default(),
            limits: Some(Limits {
                slots: server.slots.unwrap_or(0),
                cores: server.cores,
                memory_mib: server.memory_mib.unwrap_or(0),
                protocol: server.protocol.number(),
            }),
        };
        self.change(until, async move |mut client| client.start(asked).await)
    }

    fn stop(&self, target: &GpuTarget, until: Duration) -> Result<(), ChangeError> {
        tracing::info!(%target, "stopping the MPS server");
        let asked = StopRequest {
            target: target.to_string(),
        };
        self.change(until, async move |mut client| client.stop(asked).await)
    }

    fn put_namespace(
        &self,
        target: &GpuTarget,
        namespace: MpsNamespace,
        until: Duration,
    ) -> Result<(), ChangeError> {
        tracing::info!(%target, ?namespace, "making a namespace of the MPS server");
        let asked = PutNamespaceRequest {
            target: target.to_string(),
            namespace: Some(Namespace {
                name: namespace.name.to_string(),
                cores: namespace.cores,
                memory_mib: namespace.memory_mib.unwrap_or(0),
            }),
        };
        self.change(until, async move |mut client| {
            client.put_namespace(asked).await
        })
    }

    fn remove_namespace(
        &self,
        target: &GpuTarget,
        name: MpsNamespaceName,
        until: Duration,
    ) -> Result<(), ChangeError> {
        tracing::info!(%target, %name, "ending a namespace of the MPS server");
        let asked = RemoveNamespaceRequest {
            target: target.to_string(),
            name: name.to_string(),
        };
        self.change(until, async move |mut client| {
            client.remove_namespace(asked).await
        })
    }
}

#[cfg(test)]
mod tests {
    use divvy_executor::SystemClock;

    use super::*;

    const POD: &str = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";
    const NESTED: &str = "ffffffff-9b1f-4a8e-b3f1-0123456789ab";

    /// The Event names the pod whose process holds up a daemon, and forgets it once it serves.
    #[tokio::test]
    async fn a_process_that_holds_up_a_daemon_is_known_by_its_pod() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Handle::current();
        let mps = SupervisedMps::new(
            dir.path(),
            runtime,
            Arc::new(SystemClock),
            Duration::ZERO,
            HostRoot::under(dir.path()),
        );
        let group = |pid: u32, path: &str| {
            let folder = dir.path().join(format!("proc/{pid}"));
            fs_err::create_dir_all(&folder).unwrap();
            fs_err::write(folder.join("cgroup"), format!("0::/{path}\n")).unwrap();
        };
        group(7, &format!("kubepods/burstable/pod{POD}/4f1c"));
        group(8, "system.slice/sshd.service");
        // A container that names a group of its own after another pod.
        group(9, &format!("kubepods/pod{POD}/4f1c/pod{NESTED}/x"));
        let logs = dir.path().join(format!("var/log/pods/team_train_{POD}"));
        fs_err::create_dir_all(logs).unwrap();
        let target = GpuTarget::whole("GPU-12345678-1234-1234-1234-123456780001".parse().unwrap());
        let held = |pid| proto::Unwell {
            fault: "held".to_owned(),
            holder_pid: Some(pid),
            ..proto::Unwell::default()
        };
        for (pid, pod) in [(7, Some(POD)), (8, None), (9, Some(POD)), (10, None)] {
            mps.keep_holder(&target, Some(&held(pid)));
            let pod = pod.map(str::to_owned);
            assert_eq!(mps.holder(&target), Some(MpsHolder { pid, pod }));
        }
        let other = proto::Unwell {
            fault: "no-answer".to_owned(),
            ..proto::Unwell::default()
        };
        mps.keep_holder(&target, Some(&other));
        assert_eq!(mps.holder(&target), None, "it waits for no process");
        mps.keep_holder(&target, Some(&held(7)));
        mps.keep_holder(&target, None);
        assert_eq!(mps.holder(&target), None, "it serves again");
    }
}
