//! Shares by MPS: the time that a claim takes which is the first of its GPU, so that a daemon with a server
//! is started for it, and that of a later one; and the memory of the supervisor. In the place of NVIDIA's
//! program is the stand-in of the tests, which answers at once.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use divvy_api::names::DRIVER;
use divvy_e2e::gpus::mps::install;
use divvy_fake_cluster::GpuPolicy;
use divvy_fake_cluster::build::mk_result;
use divvy_offer::pool_name;
use divvy_proto::dra::v1::Claim;
use divvy_proto::dra::v1::dra_plugin_client::DraPluginClient;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::json;
use tonic::transport::Channel;

use crate::latency::{WARM_UP, prepare, unprepare};
use crate::process::{Memory, memory};
use crate::rig::{NODE, PATIENCE, Plugin, Programs, Rig};
use crate::stats::Samples;
use crate::table::{Row, Value};

const GPUS: &str = "h100x8";
/// Number of the GPUs.
const COUNT: usize = 8;
/// Pause between looks at what is to come.
const LOOK: Duration = Duration::from_millis(5);

/// A driver, by what its MPS servers can do.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Servers {
    /// Equal slots.
    V2,
    /// A namespace for each claim.
    V3,
}

impl Servers {
    pub(crate) const ALL: [Self; 2] = [Self::V2, Self::V3];

    fn driver(self) -> &'static str {
        match self {
            Self::V2 => "580.95.05",
            Self::V3 => "615.71.09",
        }
    }

    /// Returns it for people.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::V2 => "MPS v2 (R580): equal slots",
            Self::V3 => "MPS v3 (R615): a namespace for each claim",
        }
    }

    /// Returns the amounts of a share.
    fn amounts(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::V2 => &[("slots", "1")],
            Self::V3 => &[("cores", "10"), ("memory", "10Gi"), ("slots", "1")],
        }
    }
}

/// Measures with the records on the filesystem of `parent`.
pub(crate) fn measure(
    programs: &Programs,
    parent: &Path,
    rounds: usize,
    servers: Servers,
) -> Result<Vec<Row>> {
    let mut node = Node::new(programs, parent, servers)?;
    let (mut rows, on_a_full_node) = node.with_all_daemons(rounds)?;
    rows.extend(node.claims(rounds, &on_a_full_node)?);
    Ok(rows)
}

/// A node whose GPUs can be shared by MPS and in time.
struct Node {
    dra: DraPluginClient<Channel>,
    plugin: Plugin,
    supervisor: Supervisor,
    rig: Rig,
    servers: Servers,
    next: usize,
}

impl Node {
    fn new(programs: &Programs, parent: &Path, servers: Servers) -> Result<Self> {
        let rig = Rig::with_driver(programs, parent, GPUS, None, Some(servers.driver()))?;
        install(&rig.host(), &beside(programs, "divvy-mps-stand-in"))?;
        let dir = rig.folder().join("mps");
        let program = beside(programs, "divvy-mps-supervisor");
        let supervisor = Supervisor::start(&program, &dir, &rig.host())?;
        let dir = dir.to_str().context("a path that is no text")?;
        let rig = rig.with_flags(["--mps-dir", dir]);
        let rule = json!({"modes": ["Whole", "TimeSlicing", "Mps"]});
        rig.api
            .put(&GpuPolicy::new("shares", json!({"rules": [rule]})))?;
        let (mut plugin, dra) = rig.ready()?;
        let are_shared = |slices: Vec<ResourceSlice>| {
            let devices = slices.iter().flat_map(|s| s.spec.devices.iter().flatten());
            let by_mps = devices.filter(|device| device.name.ends_with("-mps"));
            (by_mps.count() == COUNT).then_some(())
        };
        let published = rig.api.wait_for(|view| are_shared(view.list()), PATIENCE);
        rig.run(published)
            .map_err(|error| plugin.explain(&format!("no MPS shares: {error}")))?;
        Ok(Self {
            dra,
            plugin,
            supervisor,
            rig,
            servers,
            next: 0,
        })
    }

    /// Measures the supervisor without daemons, with that of a GPU, and with those of all; then further
    /// claims.
    fn with_all_daemons(&mut self, rounds: usize) -> Result<(Vec<Row>, Times)> {
        let none = self.supervisor.memory()?;
        let mut claims = vec![self.by_mps(0)?];
        let one = self.supervisor.memory()?;
        for gpu in 1..COUNT {
            claims.push(self.by_mps(gpu)?);
        }
        let all = self.supervisor.memory()?;
        let mut times = Times::default();
        for _ in 0..rounds {
            let claim = self.mps_claim(0)?;
            times.prepare.push(self.prepare(&claim)?);
            times.unprepare.push(self.end(claim)?);
        }
        for claim in claims {
            self.end(claim)?;
        }
        let resident = |what: &str, memory: Memory| {
            Row::new(
                format!("mps-supervisor, {what}, resident memory"),
                Value::Bytes(memory.resident),
            )
        };
        let daemons = format!("with the daemons of {COUNT} GPUs");
        let rows = vec![
            resident("no daemon", none),
            resident("with the daemon of 1 GPU", one)
                .beside("no daemon", Value::Bytes(none.resident)),
            resident(&daemons, all).beside("no daemon", Value::Bytes(none.resident)),
            Row::new(
                format!("mps-supervisor, {daemons}, anonymous memory"),
                Value::Bytes(all.anonymous),
            )
            .beside("no daemon", Value::Bytes(none.anonymous)),
        ];
        Ok((rows, times))
    }

    /// Measures claims on a GPU that no claim has at the begin of a round: a time-sliced share, then two MPS
    /// shares one after the other.
    fn claims(&mut self, rounds: usize, on_a_full_node: &Times) -> Result<Vec<Row>> {
        let [mut sliced, mut first, mut later] = [(); 3].map(|()| Times::default());
        for round in 0..WARM_UP + rounds {
            if round == WARM_UP {
                [sliced, first, later] = [(); 3].map(|()| Times::default());
            }
            let by_time = self.claim("gpu-0-ts", &[])?;
            sliced.prepare.push(self.prepare(&by_time)?);
            sliced.unprepare.push(self.end(by_time)?);
            let (one, two) = (self.mps_claim(0)?, self.mps_claim(0)?);
            first.prepare.push(self.prepare(&one)?);
            later.prepare.push(self.prepare(&two)?);
            later.unprepare.push(self.end(two)?);
            first.unprepare.push(self.end(one)?);
        }
        // Still running, as it should be.
        self.plugin.kill()?;
        let mut rows = Vec::new();
        for (call, of) in [
            (
                "prepare",
                &(|times: &Times| times.prepare.clone()) as &dyn Fn(&Times) -> Samples,
            ),
            ("unprepare", &|times| times.unprepare.clone()),
        ] {
            let sliced = of(&sliced).p50();
            rows.push(Row::new(
                format!("{call}, 1 time-sliced share claim, p50 of {rounds}"),
                sliced,
            ));
            let [alone, beside] = match call {
                "prepare" => ["first", "later"],
                _ => ["last", "earlier"],
            };
            let full = format!("{beside} MPS share claim of one of {COUNT} GPUs in use");
            let [alone, beside] =
                [alone, beside].map(|which| format!("{which} MPS share claim of a GPU"));
            for (which, times) in [(alone, &first), (beside, &later), (full, on_a_full_node)] {
                let times = of(times);
                for (what, measured) in [("p50", times.p50()), ("p99", times.p99())] {
                    let name = format!("{call}, {which}, {what}");
                    rows.push(Row::new(name, measured).beside("time-sliced", sliced));
                }
            }
        }
        Ok(rows)
    }

    /// Stores a new claim for a device with these amounts.
    fn claim(&mut self, device: &str, amounts: &[(&str, &str)]) -> Result<Claim> {
        self.next += 1;
        let name = format!("claim-{}", self.next);
        let amount =
            |(name, amount): &(&str, &str)| ((*name).to_owned(), Quantity((*amount).to_owned()));
        let result = DeviceRequestAllocationResult {
            share_id: Some(format!("00000000-0000-4000-8000-{:012}", self.next)),
            consumed_capacity: Some(amounts.iter().map(amount).collect()),
            ..mk_result("gpu", DRIVER, &pool_name(NODE), device)
        };
        let pod = format!("pod-{}", self.next);
        self.rig.claim(&name, result, (&pod, &pod))
    }

    fn mps_claim(&mut self, gpu: usize) -> Result<Claim> {
        self.claim(&format!("gpu-{gpu}-mps"), self.servers.amounts())
    }

    /// Stores and prepares a claim for an MPS share of a GPU.
    fn by_mps(&mut self, gpu: usize) -> Result<Claim> {
        let claim = self.mps_claim(gpu)?;
        self.prepare(&claim)?;
        Ok(claim)
    }

    /// Takes the time of a prepare.
    fn prepare(&mut self, claim: &Claim) -> Result<Duration> {
        self.timed(prepare(self.dra.clone(), vec![claim.clone()]))
    }

    /// Takes the time of an unprepare, and deletes the claim.
    fn end(&mut self, claim: Claim) -> Result<Duration> {
        let name = claim.name.clone();
        let took = self.timed(unprepare(self.dra.clone(), vec![claim]))?;
        self.rig.delete(&name)?;
        Ok(took)
    }

    fn timed(&mut self, call: impl Future<Output = Result<()>>) -> Result<Duration> {
        let took = self.rig.run(async {
            let start = Instant::now();
            call.await?;
            Ok::<_, anyhow::Error>(start.elapsed())
        });
        took.map_err(|error| self.plugin.explain(&format!("{error:#}")))
    }
}

#[derive(Debug, Default)]
struct Times {
    prepare: Samples,
    unprepare: Samples,
}

/// Returns a program that was built with the plugin.
fn beside(programs: &Programs, name: &str) -> PathBuf {
    programs.plugin.with_file_name(name)
}

/// The supervisor in a process of its own; ended when dropped. Its daemons end with their folder.
struct Supervisor(Child);

impl Supervisor {
    /// Starts it, and waits until it answers.
    fn start(program: &Path, dir: &Path, host: &Path) -> Result<Self> {
        let mut command = Command::new(program);
        command.arg("--mps-dir").arg(dir);
        command.arg("--host-root").arg(host);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::null());
        let started = command.spawn();
        let started = started.with_context(|| format!("cannot start {}", program.display()))?;
        let mut supervisor = Self(started);
        let socket = dir.join("supervisor.sock");
        let until = Instant::now() + PATIENCE;
        while UnixStream::connect(&socket).is_err() {
            if let Some(status) = supervisor.0.try_wait()? {
                anyhow::bail!("the mps-supervisor has ended ({status})");
            }
            anyhow::ensure!(Instant::now() < until, "the mps-supervisor does not answer");
            sleep(LOOK);
        }
        Ok(supervisor)
    }

    fn memory(&self) -> Result<Memory> {
        memory(self.0.id())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Ended already is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
