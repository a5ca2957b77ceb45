//! The plugin's life without claims: from its start to the first slices, and how little it does
//! when idle.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::{WatchEvent, WatchParams};

use crate::process::{Threads, memory, ran, threads};
use crate::rig::{NODE, Programs, Rig, client};
use crate::stats::Samples;
use crate::table::{Budget, Row, Value};

const GPUS: &str = "h100x8";
/// Log message of the plugin once it has read all GPUs.
const READ: &str = "read the node's GPUs";
/// Time after which a fresh plugin counts as idle.
const SETTLE: Duration = Duration::from_secs(3);

const MIB: u64 = 1 << 20;

/// Measures starts on a node with eight GPUs, in turns with those of the program for `--version`.
pub(crate) fn start(programs: &Programs, parent: &Path, rounds: usize) -> Result<Vec<Row>> {
    let rig = Rig::new(programs, parent, GPUS, None)?;
    let [mut bare, mut all, mut read, mut after] = [(); 4].map(|()| Samples::default());
    for _ in 0..rounds {
        bare.push(bare_start(programs)?);
        rig.forget_plugin()?;
        let mut plugin = rig.start()?;
        let took = rig
            .wait_until_published(&mut plugin)?
            .duration_since(plugin.started.0);
        let known = plugin.logged(READ)?;
        all.push(took);
        read.push(known);
        after.push(took.saturating_sub(known));
        plugin.kill()?;
    }
    let gpus = rig.gpus();
    let all = Row::new(
        format!("start to first slices, {gpus} GPUs, p50 of {rounds}"),
        all.p50(),
    );
    let after = Row::new("of it after all GPUs were read through NVML", after.p50());
    Ok(vec![
        all.beside("start of the same program for --version", bare.p50()),
        Row::new("of it until all GPUs were read through NVML", read.p50()),
        after
            .budget(Budget::AtMost(Value::Seconds(0.1)))
            .theirs("1.05 s, with MIG"),
    ])
}

/// Returns the size of the program.
pub(crate) fn size(programs: &Programs) -> Result<Row> {
    let bytes = fs_err::metadata(&programs.plugin)?.len();
    let row = Row::new("released program", Value::Bytes(bytes));
    Ok(row
        .budget(Budget::AtMost(Value::Bytes(16 * MIB)))
        .theirs("81 MiB, not stripped"))
}

fn bare_start(programs: &Programs) -> Result<Duration> {
    let start = Instant::now();
    let status = Command::new(&programs.plugin)
        .arg("--version")
        .stdout(Stdio::null())
        .status()?;
    ensure!(
        status.success(),
        "{} --version failed",
        programs.plugin.display()
    );
    Ok(start.elapsed())
}

/// Measures a plugin that has published eight GPUs and has nothing to do, beside a process that
/// only watches slices.
pub(crate) fn idle(programs: &Programs, parent: &Path, interval: Duration) -> Result<Vec<Row>> {
    let rig = Rig::new(programs, parent, GPUS, None)?;
    let mut plugin = rig.start()?;
    rig.wait_until_published(&mut plugin)?;
    let bare = Bare::start(&rig.kubeconfig())?;
    sleep(SETTLE);
    rig.api.forget_requests();
    let (mut plugin_cpu, mut bare_cpu) = (Cpu::new(plugin.pid())?, Cpu::new(bare.0.id())?);
    let end = Instant::now() + interval;
    while Instant::now() < end {
        // Short looks, because the time of a thread is gone with it.
        sleep(Duration::from_millis(500));
        plugin_cpu.look()?;
        bare_cpu.look()?;
    }
    let requests = rig.api.count("*", "*");
    let writes: u64 = ["create", "update", "patch", "delete", "deletecollection"]
        .iter()
        .map(|verb| rig.api.count(verb, "*"))
        .sum();
    let used = memory(plugin.pid())?;
    let bare_used = memory(bare.0.id())?;
    let count = |threads: &Threads| Value::Count(threads.len() as u64);
    let reference = "bare client with one watch";
    let resident = Row::new("resident memory", Value::Bytes(used.resident));
    let resident = resident.beside(reference, Value::Bytes(bare_used.resident));
    let anonymous = Row::new("anonymous memory", Value::Bytes(used.anonymous));
    let cpu = Row::new(
        format!("CPU over {} s, of one core", interval.as_secs()),
        plugin_cpu.share(),
    );
    let rows = vec![
        anonymous
            .beside(reference, Value::Bytes(bare_used.anonymous))
            .budget(Budget::AtMost(Value::Bytes(10 * MIB))),
        resident
            .budget(Budget::AtMost(Value::Bytes(20 * MIB)))
            .theirs("75 MiB"),
        cpu.beside(reference, bare_cpu.share())
            .budget(Budget::AtMost(Value::Percent(0.1))),
        Row::new("writes to the API meanwhile", Value::Count(writes))
            .budget(Budget::AtMost(Value::Count(0))),
        Row::new("requests to the API meanwhile", Value::Count(requests)),
        Row::new("threads", count(&plugin_cpu.last)).beside(reference, count(&bare_cpu.last)),
    ];
    // Still running, as it should be.
    plugin.kill()?;
    Ok(rows)
}

/// Processor time of a process since it was first looked at.
struct Cpu {
    pid: u32,
    since: Instant,
    ran: Duration,
    last: Threads,
}

impl Cpu {
    fn new(pid: u32) -> Result<Self> {
        Ok(Self {
            pid,
            since: Instant::now(),
            ran: Duration::ZERO,
            last: threads(pid)?,
        })
    }

    fn look(&mut self) -> Result<()> {
        let now = threads(self.pid)?;
        self.ran += ran(&self.last, &now);
        self.last = now;
        Ok(())
    }

    fn share(&self) -> Value {
        Value::Percent(self.ran.as_secs_f64() / self.since.elapsed().as_secs_f64() * 100.0)
    }
}

/// The bare client in a process of its own; ended when dropped.
struct Bare(Child);

impl Bare {
    fn start(kubeconfig: &Path) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("--bare-client")
            .arg(kubeconfig)
            .stdin(Stdio::null());
        Ok(Self(
            command.spawn().context("cannot start the bare client")?,
        ))
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // Ended already is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the process that an idle plugin is compared with: the same runtime and client, one watch.
/// Never returns well.
pub(crate) fn bare_client(kubeconfig: &Path) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let slices: Api<ResourceSlice> = Api::all(client(kubeconfig).await?);
        let ours = WatchParams::default()
            .fields(&format!("spec.nodeName={NODE}"))
            .timeout(290);
        let events = slices.watch(&ours, "0").await?;
        futures::pin_mut!(events);
        while let Some(event) = futures::StreamExt::next(&mut events).await {
            if let WatchEvent::Error(error) = event? {
                anyhow::bail!("the watch failed: {}", error.message);
            }
        }
        Ok(())
    })
}
