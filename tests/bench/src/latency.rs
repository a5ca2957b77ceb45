//! Prepare, unprepare and hand-over of whole GPUs over the plugin's socket, beside what they cannot
//! do without: a GET of the claim and a synced write of a record. Every round measures every shape
//! and its reference in turn, so that whatever else the machine does falls on all of them.

mod rows;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use divvy_api::names::DRIVER;
use divvy_fake_cluster::build::mk_result;
use divvy_offer::pool_name;
use divvy_proto::dra::v1::dra_plugin_client::DraPluginClient;
use divvy_proto::dra::v1::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use fs_err as fs;
use futures::future::try_join_all;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::Api;
use tonic::transport::Channel;

use self::rows::rows;
use crate::process::{Switches, switches};
use crate::rig::{NAMESPACE, NODE, PATIENCE, Plugin, Programs, Rig};
use crate::stats::Samples;
use crate::table::{Row, Value};

/// GPUs for the largest shape.
pub(crate) const GPUS: &str = "h100x16";
/// Rounds before those that count: connections are opened, caches filled, threads started.
pub(crate) const WARM_UP: usize = 5;

/// Calls in which claims come to the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// So many in one call.
    OneCall(usize),
    /// Each in a call of its own, all at once.
    AtOnce(usize),
}

impl Shape {
    fn claims(self) -> usize {
        match self {
            Self::OneCall(n) | Self::AtOnce(n) => n,
        }
    }

    fn name(self) -> String {
        match self {
            Self::OneCall(1) => "1 claim".to_owned(),
            Self::OneCall(n) => format!("{n} claims, one call"),
            Self::AtOnce(n) => format!("{n} calls at once"),
        }
    }
}

const SHAPES: [Shape; 4] = [
    Shape::OneCall(1),
    Shape::OneCall(8),
    Shape::OneCall(16),
    Shape::AtOnce(16),
];

/// Times of a shape.
#[derive(Default)]
pub(crate) struct Times {
    get: Samples,
    pub(crate) write: Samples,
    /// GET and write of the same round.
    pub(crate) reference: Samples,
    remove: Samples,
    pub(crate) prepare: Samples,
    pub(crate) unprepare: Samples,
    /// Context switches of the plugin in all prepares.
    switches: Switches,
}

impl Times {
    /// Returns a row with the context switches of a prepare.
    pub(crate) fn switches_row(&self, name: &str) -> Row {
        let rounds = u64::try_from(self.prepare.len()).unwrap_or(1).max(1);
        let each = |count: u64| Value::Count(count.div_ceil(rounds));
        Row::new(
            format!("threads of the plugin that waited, prepare, {name}, mean"),
            each(self.switches.waits),
        )
        .beside(
            "threads that lost their core",
            each(self.switches.preempted),
        )
    }
}

/// Names of the devices of the claims of a round, by their position and the claim's number, and
/// their shares' ids where they have such.
pub(crate) type Devices = fn(usize, usize) -> (String, Option<String>);

fn whole(gpu: usize, _: usize) -> (String, Option<String>) {
    (format!("gpu-{gpu}"), None)
}

/// A plugin to call, and what it is compared with.
pub(crate) struct Bench {
    pub(crate) rig: Rig,
    plugin: Plugin,
    dra: DraPluginClient<Channel>,
    api: Api<ResourceClaim>,
    devices: Devices,
    /// Where bare files are written, and how long they are.
    bare: PathBuf,
    bytes: Vec<u8>,
    next: usize,
}

/// Measures with the records on the filesystem of `parent`.
/// `real`: see [`Rig::new`].
pub(crate) fn measure(
    programs: &Programs,
    parent: &Path,
    rounds: usize,
    real: Option<&Path>,
) -> Result<Vec<Row>> {
    let mut bench = Bench::new(Rig::new(programs, parent, GPUS, real)?, whole)?;

    let mut empty = Samples::default();
    let mut shapes = SHAPES.map(|shape| (shape, Times::default()));
    for round in 0..WARM_UP + rounds {
        if round == WARM_UP {
            empty = Samples::default();
            shapes = SHAPES.map(|shape| (shape, Times::default()));
        }
        empty.push(bench.empty_call()?);
        for (shape, times) in &mut shapes {
            bench.round(*shape, times)?;
        }
    }
    let mut hand_overs = Samples::default();
    // The fake server shows when the prepare waits; a real one does not.
    for _ in 0..if bench.rig.is_real() {
        0
    } else {
        rounds.div_ceil(5)
    } {
        hand_overs.push(bench.hand_over()?);
    }
    let (memory, claims) = (crate::process::memory(bench.plugin.pid())?, bench.next);
    let mut rows = rows(&shapes, &empty, &hand_overs, real.is_some());
    rows.push(Row::new(
        format!("anonymous memory after {claims} claims"),
        Value::Bytes(memory.anonymous),
    ));
    rows.push(Row::new(
        "resident memory then",
        Value::Bytes(memory.resident),
    ));
    let threads = crate::process::threads(bench.plugin.pid())?.len();
    rows.push(Row::new("threads then", Value::Count(threads as u64)));
    Ok(rows)
}

impl Bench {
    /// Starts a plugin and waits until it has published its devices.
    pub(crate) fn new(rig: Rig, devices: Devices) -> Result<Self> {
        let (plugin, dra) = rig.ready()?;
        let api = Api::namespaced(rig.client(), NAMESPACE);
        // Where the plugin's files are: what makes files slow there makes these slow too.
        let bare = rig.plugin_dir().join("bare");
        fs::create_dir(&bare)?;
        let mut bench = Self {
            rig,
            plugin,
            dra,
            api,
            devices,
            bare,
            bytes: Vec::new(),
            next: 0,
        };
        bench.bytes = vec![b' '; bench.record_size()?];
        Ok(bench)
    }

    /// Stores new claims, each with the device of its position.
    fn claims(&mut self, count: usize) -> Result<Vec<Claim>> {
        (0..count).map(|position| self.claim(position)).collect()
    }

    fn claim(&mut self, position: usize) -> Result<Claim> {
        self.next += 1;
        let name = format!("claim-{}", self.next);
        let (device, share_id) = (self.devices)(position, self.next);
        let result = DeviceRequestAllocationResult {
            share_id,
            ..mk_result("gpu", DRIVER, &pool_name(NODE), &device)
        };
        let pod = format!("pod-{}", self.next);
        self.rig.claim(&name, result, (&pod, &pod))
    }

    fn forget(&self, claims: &[Claim]) -> Result<()> {
        claims
            .iter()
            .try_for_each(|claim| self.rig.delete(&claim.name))
    }

    /// Returns the size of a claim's record, after checking that a prepare does what it should.
    fn record_size(&mut self) -> Result<usize> {
        let claims = self.claims(1)?;
        self.prepare(&claims, Shape::OneCall(1))?;
        let uid = claims
            .first()
            .map(|claim| claim.uid.clone())
            .unwrap_or_default();
        let record = fs::metadata(
            self.rig
                .plugin_dir()
                .join("claims")
                .join(format!("{uid}.json")),
        )?;
        let cdi = fs::read_dir(self.rig.cdi_dir())?.filter_map(Result::ok);
        let named = cdi
            .filter(|file| file.file_name().to_string_lossy().contains(&uid))
            .count();
        ensure!(
            named == 1,
            "{named} CDI files name the prepared claim, expected one"
        );
        self.unprepare(&claims, Shape::OneCall(1))?;
        self.forget(&claims)?;
        Ok(usize::try_from(record.len())?)
    }

    /// Measures new claims in this shape, from the bare reads and writes to the last unprepare.
    pub(crate) fn round(&mut self, shape: Shape, times: &mut Times) -> Result<()> {
        let claims = self.claims(shape.claims())?;
        let get = self.get(&claims)?;
        let write = self.files(claims.len(), write_synced)?;
        times.get.push(get);
        times.write.push(write);
        times.reference.push(get + write);
        let before = switches(self.plugin.pid())?;
        times.prepare.push(self.prepare(&claims, shape)?);
        times.switches.add(before, switches(self.plugin.pid())?);
        times.unprepare.push(self.unprepare(&claims, shape)?);
        times
            .remove
            .push(self.files(claims.len(), |folder, name, _| remove_synced(folder, name))?);
        self.forget(&claims)
    }

    /// Takes the time of bare GETs of the claims, at once.
    fn get(&self, claims: &[Claim]) -> Result<Duration> {
        self.rig.run(async {
            let start = Instant::now();
            try_join_all(claims.iter().map(|claim| self.api.get(&claim.name))).await?;
            Ok(start.elapsed())
        })
    }

    /// Does something to so many files, each on its thread, at once.
    fn files(&self, count: usize, work: fn(&Path, &str, &[u8]) -> Result<()>) -> Result<Duration> {
        let start = Instant::now();
        if count == 1 {
            work(&self.bare, "0", &self.bytes)?;
            return Ok(start.elapsed());
        }
        self.rig.run(async {
            let start = Instant::now();
            let all = (0..count).map(|n| {
                let (folder, bytes) = (self.bare.clone(), self.bytes.clone());
                tokio::task::spawn_blocking(move || work(&folder, &n.to_string(), &bytes))
            });
            for done in try_join_all(all).await? {
                done?;
            }
            Ok(start.elapsed())
        })
    }

    fn empty_call(&mut self) -> Result<Duration> {
        self.prepare(&[], Shape::OneCall(0))
    }

    fn prepare(&mut self, claims: &[Claim], shape: Shape) -> Result<Duration> {
        let calls = calls(claims, shape).into_iter();
        self.call(
            calls
                .map(|claims| prepare(self.dra.clone(), claims))
                .collect(),
        )
    }

    fn unprepare(&mut self, claims: &[Claim], shape: Shape) -> Result<Duration> {
        let calls = calls(claims, shape).into_iter();
        self.call(
            calls
                .map(|claims| unprepare(self.dra.clone(), claims))
                .collect(),
        )
    }

    /// Takes the time until the last call is answered.
    fn call(&mut self, calls: Vec<impl Future<Output = Result<()>>>) -> Result<Duration> {
        let took = self.rig.run(async {
            let start = Instant::now();
            try_join_all(calls).await?;
            Ok::<_, anyhow::Error>(start.elapsed())
        });
        took.map_err(|error| self.plugin.explain(&format!("{error:#}")))
    }

    /// Measures a claim on a GPU whose holder, deleted by force, is still prepared: from the
    /// unprepare of the one to the answer for the other, which waits already.
    fn hand_over(&mut self) -> Result<Duration> {
        let (holder, next) = (self.claim(0)?, self.claim(0)?);
        self.prepare(std::slice::from_ref(&holder), Shape::OneCall(1))?;
        self.forget(std::slice::from_ref(&holder))?;
        self.rig.api.forget_requests();
        let waiting = prepare(self.dra.clone(), vec![next.clone()]);
        let took = self.rig.run(async {
            let api = self.rig.api.clone();
            let letting_go = async {
                // The waiting prepare asks for the holder when it finds the GPU held.
                let asked = |verb: &str, name: &str| verb == "get" && name == holder.name;
                let waits = |seen: &divvy_fake_cluster::View<'_>| {
                    seen.requests()
                        .iter()
                        .any(|request| asked(&request.verb, &request.name))
                };
                api.wait_until(waits, PATIENCE).await?;
                let start = Instant::now();
                unprepare(self.dra.clone(), vec![holder.clone()]).await?;
                Ok::<_, anyhow::Error>(start)
            };
            let answered = async {
                waiting.await?;
                Ok(Instant::now())
            };
            let (start, answered) = futures::future::try_join(letting_go, answered).await?;
            Ok::<_, anyhow::Error>(answered.duration_since(start))
        });
        let took = took.map_err(|error| self.plugin.explain(&format!("{error:#}")))?;
        self.unprepare(std::slice::from_ref(&next), Shape::OneCall(1))?;
        self.forget(std::slice::from_ref(&next))?;
        Ok(took)
    }
}

fn calls(claims: &[Claim], shape: Shape) -> Vec<Vec<Claim>> {
    match shape {
        Shape::OneCall(_) => vec![claims.to_vec()],
        Shape::AtOnce(_) => claims.iter().map(|claim| vec![claim.clone()]).collect(),
    }
}

pub(crate) async fn prepare(mut dra: DraPluginClient<Channel>, claims: Vec<Claim>) -> Result<()> {
    let asked = claims.len();
    let answer = dra
        .node_prepare_resources(NodePrepareResourcesRequest { claims })
        .await?
        .into_inner();
    ensure!(
        answer.claims.len() == asked,
        "{} of {asked} claims answered",
        answer.claims.len()
    );
    for (uid, one) in answer.claims {
        match one.devices.as_slice() {
            _ if !one.error.is_empty() => bail!("{}", one.error),
            [device] if device.cdi_device_ids.len() == 1 => {}
            devices => {
                bail!(
                    "claim {uid} was answered with {devices:?}, expected one device with one CDI id"
                )
            }
        }
    }
    Ok(())
}

pub(crate) async fn unprepare(mut dra: DraPluginClient<Channel>, claims: Vec<Claim>) -> Result<()> {
    let asked = claims.len();
    let answer = dra
        .node_unprepare_resources(NodeUnprepareResourcesRequest { claims })
        .await?
        .into_inner();
    ensure!(
        answer.claims.len() == asked,
        "{} of {asked} claims answered",
        answer.claims.len()
    );
    match answer
        .claims
        .into_values()
        .find(|one| !one.error.is_empty())
    {
        Some(one) => bail!("{}", one.error),
        None => Ok(()),
    }
}

/// Writes as a record is written at least: temp file, fsync, rename, fsync of the folder.
fn write_synced(folder: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    use std::io::Write as _;
    let temp = folder.join(format!(".{name}.tmp"));
    let mut file = fs::File::create(&temp)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&temp, folder.join(name))?;
    Ok(fs::File::open(folder)?.sync_all()?)
}

fn remove_synced(folder: &Path, name: &str) -> Result<()> {
    fs::remove_file(folder.join(name))?;
    Ok(fs::File::open(folder)?.sync_all()?)
}
