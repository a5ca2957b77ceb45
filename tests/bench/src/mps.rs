//! Shares by MPS: the time that a claim takes which is the first of its GPU, so that a daemon with
//! a server is started for it, and that of a later one; and the memory of the supervisor. In the
//! place of NVIDIA's program is the stand-in of the tests, which answers at once.

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
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::latency::{WARM_UP, prepare, unprepare};
use crate::process::{Memory, memory};
use crate::rig::{NODE, PATIENCE, Plugin, Programs, Rig};
use crate::stats::Samples;
use crate::table::{Row, Value as Figure};

const GPUS: &str = "h100x8";
/// Number of the GPUs.
const COUNT: usize = 8;
/// A profile of these GPUs, the places of it on one, and the first of the partitions in it.
const PROFILE: &str = "1g.10gb";
const PARTITIONS: usize = 7;
const PARTITION: &str = "gpu-0-mig-1g10gb-19-0";
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
    let rule = json!({"modes": ["Whole", "TimeSlicing", "Mps"]});
    let mut node = Node::new(programs, parent, servers, (&rule, COUNT))?;
    let (mut rows, on_a_full_node) = node.with_all_daemons(rounds)?;
    rows.extend(node.claims(rounds, &on_a_full_node)?);
    Ok(rows)
}

/// Measures shares of a MIG partition, which have equal slots with any driver, beside those in
/// time. The partition is made with the first share and removed with the last; the mock library
/// does that at once.
pub(crate) fn measure_in_partitions(
    programs: &Programs,
    parent: &Path,
    rounds: usize,
) -> Result<Vec<Row>> {
    let mig = json!({"profiles": [PROFILE], "sharing": ["TimeSlicing", "Mps"]});
    let rule = json!({"modes": ["Whole", "Mig"], "mig": mig});
    let mut node = Node::new(programs, parent, Servers::V2, (&rule, COUNT * PARTITIONS))?;
    let [mut by_time, mut by_mps] = [(); 2].map(|()| Pair::default());
    for round in 0..WARM_UP + rounds {
        if round == WARM_UP {
            [by_time, by_mps] = [(); 2].map(|()| Pair::default());
        }
        node.pair(&mut by_time, |node| {
            node.claim(&format!("{PARTITION}-ts"), &[])
        })?;
        let amounts = Servers::V2.amounts();
        node.pair(&mut by_mps, |node| {
            node.claim(&format!("{PARTITION}-mps"), amounts)
        })?;
    }
    node.plugin.kill()?;
    let mut rows = Vec::new();
    for (name, mps, time) in [
        (
            "prepare, first",
            &by_mps.first.prepare,
            &by_time.first.prepare,
        ),
        (
            "prepare, later",
            &by_mps.later.prepare,
            &by_time.later.prepare,
        ),
        (
            "unprepare, last",
            &by_mps.first.unprepare,
            &by_time.first.unprepare,
        ),
        (
            "unprepare, earlier",
            &by_mps.later.unprepare,
            &by_time.later.unprepare,
        ),
    ] {
        let beside = time.p50();
        for (what, measured) in [("p50", mps.p50()), ("p99", mps.p99())] {
            let name = format!("{name} MPS share claim of a partition, {what} of {rounds}");
            rows.push(Row::new(name, measured).beside("time-sliced", beside));
        }
    }
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
    /// Starts a node with this rule of a policy, and waits until so many devices are MPS shares.
    fn new(
        programs: &Programs,
        parent: &Path,
        servers: Servers,
        (rule, count): (&Value, usize),
    ) -> Result<Self> {
        let rig = Rig::with_driver(programs, parent, GPUS, None, Some(servers.driver()))?;
        install(&rig.host(), &beside(programs, "divvy-mps-stand-in"))?;
        let dir = rig.folder().join("mps");
        let program = beside(programs, "divvy-mps-supervisor");
        let supervisor = Supervisor::start(&program, &dir, &rig.host())?;
        let dir = dir.to_str().context("a path that is no text")?;
        let rig = rig.with_flags(["--mps-dir", dir]);
        rig.api
            .put(&GpuPolicy::new("shares", json!({"rules": [rule]})))?;
        let (mut plugin, dra) = rig.ready()?;
        let are_shared = |slices: Vec<ResourceSlice>| {
            let devices = slices.iter().flat_map(|s| s.spec.devices.iter().flatten());
            let by_mps = devices.filter(|device| device.name.ends_with("-mps"));
            (by_mps.count() == count).then_some(())
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

    /// Measures the supervisor without daemons, with that of a GPU, and with those of all; then
    /// further claims.
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
                Figure::Bytes(memory.resident),
            )
        };
        let daemons = format!("with the daemons of {COUNT} GPUs");
        let rows = vec![
            resident("no daemon", none),
            resident("with the daemon of 1 GPU", one)
                .beside("no daemon", Figure::Bytes(none.resident)),
            resident(&daemons, all).beside("no daemon", Figure::Bytes(none.resident)),
            Row::new(
                format!("mps-supervisor, {daemons}, anonymous memory"),
                Figure::Bytes(all.anonymous),
            )
            .beside("no daemon", Figure::Bytes(none.anonymous)),
        ];
        Ok((rows, times))
    }

    /// Measures claims on a GPU that no claim has at the begin of a round: a time-sliced share,
    /// then two MPS shares one after the other.
    fn claims(&mut self, rounds: usize, on_a_full_node: &Times) -> Result<Vec<Row>> {
        let (mut sliced, mut by_mps) = (Times::default(), Pair::default());
        for round in 0..WARM_UP + rounds {
            if round == WARM_UP {
                (sliced, by_mps) = (Times::default(), Pair::default());
            }
            let by_time = self.claim("gpu-0-ts", &[])?;
            sliced.prepare.push(self.prepare(&by_time)?);
            sliced.unprepare.push(self.end(by_time)?);
            self.pair(&mut by_mps, |node| node.mps_claim(0))?;
        }
        let Pair { first, later } = by_mps;
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

    /// Measures two claims that hold one thing together, one after the other.
    fn pair(&mut self, times: &mut Pair, claim: impl Fn(&mut Self) -> Result<Claim>) -> Result<()> {
        let (one, two) = (claim(self)?, claim(self)?);
        times.first.prepare.push(self.prepare(&one)?);
        times.later.prepare.push(self.prepare(&two)?);
        times.later.unprepare.push(self.end(two)?);
        times.first.unprepare.push(self.end(one)?);
        Ok(())
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

/// The first claim of a thing and a later one.
#[derive(Debug, Default)]
struct Pair {
    first: Times,
    later: Times,
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
        command.arg("--mps-unbounded");
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
