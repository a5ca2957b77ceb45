//! What it costs to measure who uses what: a plugin whose GPUs have as many processes as a full node has, beside the same
//! plugin while no claim holds anything. The mock library's own work counts as the plugin's: it is loaded into it.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use divvy_api::names::DRIVER;
use divvy_fake_cluster::build::mk_result;
use divvy_model::GpuProcess;
use divvy_offer::pool_name;
use divvy_proto::dra::v1::Claim;
use fs_err as fs;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::latency::{GPUS, prepare, unprepare};
use crate::life::Cpu;
use crate::process::memory;
use crate::rig::{NODE, PATIENCE, Plugin, Programs, Rig};
use crate::table::{Row, Value};

/// On each GPU.
pub(crate) const PROCESSES: u32 = 50;
/// How long a plugin is left alone after something has changed.
const SETTLE: Duration = Duration::from_secs(5);
/// What the plugin logs with the address of its metrics.
const SERVES: &str = "serving /metrics";

/// How the GPUs are held: a name, and the claims of each GPU.
const MODES: [(&str, u32); 2] = [("held whole", 1), ("held as five shares each", 5)];

/// What a plugin took in a while.
struct Took {
    per_minute: f64,
    cpu: Duration,
    /// Calls about use, by name.
    calls: BTreeMap<String, u64>,
    memory: crate::process::Memory,
    requests: u64,
}

/// Measures for `interval` each.
pub(crate) fn measure(programs: &Programs, parent: &Path, interval: Duration) -> Result<Vec<Row>> {
    let rig = Rig::new(programs, parent, GPUS, None)?.offering_everything();
    let (mut plugin, dra) = rig.ready()?;
    let nothing = watch(&rig, &plugin, interval)?;
    let mut rows = Vec::new();
    for (name, per_gpu) in MODES {
        let claims = claims(&rig, per_gpu)?;
        for claim in &claims {
            let held = rig.run(prepare(dra.clone(), vec![claim.clone()]));
            held.map_err(|error| plugin.explain(&format!("{error:#}")))?;
        }
        start_processes(&rig, per_gpu)?;
        let took = watch(&rig, &plugin, interval)?;
        rows.extend(compared(name, &took, &nothing));
        rig.mock()?.edit(|engine| {
            for uuid in engine.list().unwrap_or_default() {
                if let Some(gpu) = engine.gpu(&uuid) {
                    gpu.processes.clear();
                }
            }
        })?;
        rig.run(unprepare(dra.clone(), claims.clone()))?;
        for claim in &claims {
            rig.delete(&claim.name)?;
        }
    }
    plugin.kill()?;
    Ok(rows)
}

fn watch(rig: &Rig, plugin: &Plugin, interval: Duration) -> Result<Took> {
    sleep(SETTLE);
    rig.api.forget_requests();
    let (began, before) = (Instant::now(), calls(plugin)?);
    let mut cpu = Cpu::new(plugin.pid())?;
    while began.elapsed() < interval {
        // Short looks, because the time of a thread is gone with it.
        sleep(Duration::from_millis(500));
        cpu.look()?;
    }
    let mut calls = calls(plugin)?;
    for (name, count) in &mut calls {
        *count -= before.get(name).copied().unwrap_or_default();
    }
    let per_minute = 60.0 / began.elapsed().as_secs_f64();
    Ok(Took {
        per_minute,
        cpu: cpu.ran(),
        calls,
        memory: memory(plugin.pid())?,
        requests: rig.api.count("*", "*"),
    })
}

fn compared(name: &str, took: &Took, nothing: &Took) -> Vec<Row> {
    let reference = "nothing held";
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "small counts"
    )]
    let minute = |count: u64, of: &Took| Value::Count((count as f64 * of.per_minute).round() as u64);
    let time = |of: &Took| Value::Seconds(of.cpu.as_secs_f64() * of.per_minute);
    let row = |what: &str, of: &dyn Fn(&Took) -> Value| {
        Row::new(format!("{name}: {what}"), of(took)).beside(reference, of(nothing))
    };
    let mut rows = vec![
        row("processor time a minute", &time),
        row("resident memory", &|of| Value::Bytes(of.memory.resident)),
        row("anonymous memory", &|of| Value::Bytes(of.memory.anonymous)),
        row("requests to the API a minute", &|of| minute(of.requests, of)),
        row("driver calls about use a minute", &|of| minute(of.calls.values().sum(), of)),
    ];
    for call in
        took.calls.keys().filter(|call| [took, nothing].iter().any(|of| of.calls.get(*call) > Some(&0)))
    {
        rows.push(row(&format!("of them {call}"), &|of| {
            minute(of.calls.get(call).copied().unwrap_or_default(), of)
        }));
    }
    rows
}

fn pod_uid(number: u32) -> String {
    format!("00000000-0000-4000-8000-{number:012}")
}

/// Allocated claims: so many of each GPU.
fn claims(rig: &Rig, per_gpu: u32) -> Result<Vec<Claim>> {
    let gpus = u32::try_from(rig.gpus())?;
    let mut claims = Vec::new();
    for number in 0..gpus * per_gpu {
        let gpu = number / per_gpu;
        let mut result = mk_result("gpu", DRIVER, &pool_name(NODE), &format!("gpu-{gpu}"));
        if per_gpu > 1 {
            result.device = format!("gpu-{gpu}-ts");
            result.share_id = Some(format!("00000000-0000-4000-9000-{number:012}"));
            let granted = [("memory", "12Gi"), ("cores", "20"), ("slots", "1")];
            let granted = granted.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned())));
            result.consumed_capacity = Some(granted.into());
        }
        let name = format!("held-{per_gpu}-{number}");
        claims.push(rig.claim(&name, result, (&format!("pod-{number}"), &pod_uid(number)))?);
    }
    Ok(claims)
}

/// Each GPU's processes belong to its claims' pods in turn, compute, and have control groups as a kubelet makes them.
fn start_processes(rig: &Rig, per_gpu: u32) -> Result<()> {
    let uuids = rig.mock()?.read()?.list()?;
    let mut started = Vec::new();
    for (gpu, uuid) in (0_u32..).zip(uuids) {
        for number in 0..PROCESSES {
            let pid = 4_000_000 + gpu * PROCESSES + number;
            let folder = rig.host().join(format!("proc/{pid}"));
            fs::create_dir_all(&folder)?;
            let pod = pod_uid(gpu * per_gpu + number % per_gpu);
            fs::write(folder.join("cgroup"), format!("0::/kubepods/burstable/pod{pod}/4f1c\n"))?;
            started.push((uuid.clone(), pid));
        }
    }
    rig.mock()?.edit(|engine| {
        for (uuid, pid) in &started {
            if let Some(gpu) = engine.gpu(uuid) {
                gpu.processes.insert(GpuProcess::new(*pid, None));
            }
            engine.set_usage(uuid, *pid, Some(1 << 30), 1);
        }
    })?;
    Ok(())
}

/// How often the plugin has asked the driver about use so far, by the name of the call.
fn calls(plugin: &Plugin) -> Result<BTreeMap<String, u64>> {
    let address = plugin.said(SERVES, "address")?;
    let mut stream = TcpStream::connect(&address).with_context(|| format!("no metrics at {address}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let mut calls = BTreeMap::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("divvy_usage_read_seconds_count{")) {
        let call = line.split("call=\"").nth(1).and_then(|rest| rest.split('"').next());
        let count: u64 = line.rsplit(' ').next().unwrap_or_default().parse()?;
        *calls.entry(call.context("a call without a name")?.to_owned()).or_insert(0) += count;
    }
    anyhow::ensure!(!calls.is_empty(), "the plugin at {address} does not count its calls");
    Ok(calls)
}
