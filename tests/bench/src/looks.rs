//! The command line on a large cluster: time to the first answer, and memory, over the fake API
//! server with nodes of eight H100 that offer everything, and four claims on each.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use divvy_api::names::{CLASS_GPU, DRIVER};
use divvy_api::node::GpuNode;
use divvy_fake_cluster::FakeApi;
use divvy_fake_cluster::build::{
    allocated, mk_claim, mk_class, mk_node, mk_pod, mk_result, reserved,
};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use serde_json::json;

use crate::offered::{everything, slices};

const NAMESPACE: &str = "team";
/// GPUs of a node that claims hold, from the last one on.
const HELD: [usize; 4] = [7, 6, 5, 4];

/// Measures `divvy status`, `top`, `ui` and `explain`.
#[derive(Debug, Parser)]
#[command(name = "divvy-bench looks")]
pub(crate) struct Args {
    /// The program `divvy`, built as it is shipped
    #[arg(long)]
    program: PathBuf,
    /// Numbers of nodes
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1000])]
    nodes: Vec<usize>,
    /// Times that each command runs
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

/// Measures, and prints a line for each command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let mut out = std::io::stdout();
    for &nodes in &args.nodes {
        let api = FakeApi::new();
        fill(&api, nodes)?;
        let server = runtime.block_on(api.serve_http())?;
        let folder = tempfile::tempdir()?;
        let kubeconfig = folder.path().join("kubeconfig");
        fs_err::write(&kubeconfig, server.kubeconfig())?;
        for command in [
            &["status"][..],
            &["status", "node", "node-0"],
            &["status", "pod", "node-0-7", "-n", NAMESPACE],
            &["top", "nodes"],
            &["explain", "--want", "8*gpu"],
        ] {
            let mut all = Vec::new();
            for _ in 0..args.rounds {
                all.push(command_line(&args.program, &kubeconfig, command)?);
            }
            all.sort_unstable();
            let (took, memory) = all.swap_remove(all.len() / 2);
            writeln!(
                out,
                "{nodes} nodes: {:28} {took:8.2?}, {:4} MiB",
                command.join(" "),
                memory >> 20
            )?;
        }
        let (took, memory) = page(&args.program, &kubeconfig)?;
        writeln!(
            out,
            "{nodes} nodes: {:28} {took:8.2?}, {:4} MiB",
            "ui",
            memory >> 20
        )?;
    }
    Ok(())
}

fn fill(api: &FakeApi, nodes: usize) -> Result<()> {
    api.register::<PodDisruptionBudget>(true, true);
    api.put(&mk_class(CLASS_GPU, DRIVER))?;
    let pool = everything("h100x8", "node-0")?;
    let of_one = slices(&pool, "node-0", "uid-node-0");
    let template = serde_json::to_string(&of_one)?;
    for number in 0..nodes {
        let name = format!("node-{number}");
        api.put(&mk_node(&name))?;
        // Other names, and other UUIDs.
        let own = template.replace("node-0", &name).replace(
            "12345678-1234-1234-0000",
            &format!("12345678-1234-1234-{number:04}"),
        );
        let own: Vec<k8s_openapi::api::resource::v1::ResourceSlice> = serde_json::from_str(&own)?;
        for slice in &own {
            api.put(slice)?;
        }
        for gpu in HELD {
            let pod = format!("{name}-{gpu}");
            let stored = api.put(&mk_pod(NAMESPACE, &pod, Some(&name), &[&pod]))?;
            let uid = stored.metadata.uid.context("a stored pod has a UID")?;
            let device = mk_result(
                "gpu",
                DRIVER,
                &format!("{name}/divvy"),
                &format!("gpu-{gpu}"),
            );
            let claim = allocated(mk_claim(NAMESPACE, &pod, CLASS_GPU, 1), vec![device]);
            api.put(&reserved(claim, &pod, &uid))?;
        }
        api.put(&gpu_node(&name)?)?;
    }
    Ok(())
}

/// Returns the report of a node.
fn gpu_node(name: &str) -> Result<GpuNode> {
    let gpus = (0..8).map(|gpu| {
        let held = HELD.contains(&gpu);
        let claim = format!("{name}-{gpu}");
        let holder = json!({
            "namespace": NAMESPACE, "name": claim, "uid": claim, "device": format!("gpu-{gpu}"),
            "phase": "Prepared", "pods": [claim],
        });
        json!({
            "name": format!("gpu-{gpu}"), "uuid": format!("GPU-{name}-{gpu}"),
            "product": "NVIDIA H100 80GB HBM3", "memoryMib": 81559, "architecture": "Hopper",
            "mode": if held { "Whole" } else { "Free" },
            "offered": ["Whole", "Mig", "TimeSlicing", "Mps"],
            "holders": if held { vec![holder] } else { vec![] },
        })
    });
    let node = json!({
        "metadata": {"name": name},
        "spec": {},
        "status": {
            "driverName": DRIVER,
            "summary": {"gpus": 8, "free": 4, "claims": 4, "modes": "whole, mig, share", "trouble": ""},
            "versions": {"divvy": "0.1.0", "driver": "570.124.06", "cuda": "12.8", "kubernetes": "1.37.1"},
            "gpus": gpus.collect::<Vec<_>>(),
        },
    });
    Ok(serde_json::from_value(node)?)
}

fn started(program: &Path, kubeconfig: &Path, args: &[&str]) -> Result<Child> {
    let mut command = Command::new(program);
    command
        .args(args)
        .env("KUBECONFIG", kubeconfig)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
        .spawn()
        .with_context(|| format!("{} cannot be started", program.display()))
}

/// Returns the time and the most memory of a command.
fn command_line(program: &Path, kubeconfig: &Path, args: &[&str]) -> Result<(Duration, u64)> {
    let start = Instant::now();
    let child = started(program, kubeconfig, args)?;
    let pid = child.id();
    let (most, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let output = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                most.fetch_max(peak(pid), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let output = child.wait_with_output();
        ended.store(true, Ordering::Relaxed);
        output
    })?;
    let took = start.elapsed();
    ensure!(
        output.status.code() == Some(0) && !output.stdout.is_empty(),
        "divvy {}: {}{}",
        args.join(" "),
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok((took, most.into_inner()))
}

/// Returns the time until the page's server has sent its first view, and its most memory by then.
fn page(program: &Path, kubeconfig: &Path) -> Result<(Duration, u64)> {
    let start = Instant::now();
    let mut child = started(program, kubeconfig, &["ui", "--no-open"])?;
    let outcome = first_view(&mut child, start);
    child.kill()?;
    child.wait()?;
    outcome
}

fn first_view(child: &mut Child, start: Instant) -> Result<(Duration, u64)> {
    let mut said = BufReader::new(child.stderr.take().context("no standard error")?);
    let mut out = BufReader::new(child.stdout.take().context("no standard output")?);
    let mut line = String::new();
    out.read_line(&mut line)?;
    if !line.contains("http://") {
        said.read_line(&mut line)?;
    }
    let (_, url) = line
        .split_once("http://")
        .with_context(|| format!("no address in {line:?}"))?;
    let (address, path) = url
        .trim()
        .split_once('/')
        .context("no path in the address")?;
    // The link is exchanged for a cookie, which is for the folder of all that is served.
    let mut stream = TcpStream::connect(address)?;
    write!(
        stream,
        "GET /{path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut entered = String::new();
    stream.read_to_string(&mut entered)?;
    let cookie = entered
        .lines()
        .find_map(|line| line.strip_prefix("set-cookie: "))
        .with_context(|| format!("no cookie: {entered}"))?;
    let part = |name: &str| {
        let mut parts = cookie.split(';').map(str::trim);
        parts.find_map(|part| part.strip_prefix(name))
    };
    let folder = part("Path=").context("a cookie without a folder")?;
    let value = cookie.split(';').next().unwrap_or_default();
    let mut stream = TcpStream::connect(address)?;
    write!(
        stream,
        "GET {folder}events HTTP/1.1\r\nHost: {address}\r\nCookie: {value}\r\n\r\n"
    )?;
    let (mut seen, mut bytes) = (Vec::new(), vec![0; 65536]);
    // A view ends with an empty line.
    while !(contains(&seen, b"data:") && contains(&seen, b"\n\n")) {
        let read = stream.read(&mut bytes)?;
        ensure!(
            read > 0,
            "the page's server closed: {}",
            String::from_utf8_lossy(&seen)
        );
        seen.extend(bytes.iter().take(read));
    }
    Ok((start.elapsed(), peak(child.id())))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Returns the most memory that a process had; 0 once it has ended.
fn peak(pid: u32) -> u64 {
    let status = fs_err::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}
