//! Shares of a GPU by MPS, with a stand-in for NVIDIA's programs: the chart's second DaemonSet, and
//! what becomes of its daemon when another process dies.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use divvy_model::ComputeMode;
use fs_err as fs;
use serde_json::json;

use super::groups::{CAPPING, exchange};
use super::{
    Policy, create, end, given, gpu_of, h100, part, partition, request, run, share, wait_for_modes,
};
use crate::case::{Env, PATIENCE};
use crate::objects::{Pod, SAY_AND_STAY, claim_for};
use crate::process::{Signal, output};
use crate::wait::{poll, wait_for};

/// Number of shares of the GPU.
const SLOTS: usize = 4;

/// Four pods with a share each beside a time-sliced GPU and a partitioned one: they have one
/// server, which goes on when supervisor and plugin are replaced, comes again when it is killed,
/// and ends with the last of them.
pub(in crate::cases) fn mps(env: &Env) -> Result<()> {
    with_mps(env, switched_on)
}

/// Does something on a node with NVIDIA's programs for MPS and the chart's supervisor.
pub(super) fn with_mps(env: &Env, what: fn(&Env) -> Result<()>) -> Result<()> {
    with_mps_of(env, &[], what)
}

/// The same with further values of the chart.
pub(super) fn with_mps_of(env: &Env, values: &[&str], what: fn(&Env) -> Result<()>) -> Result<()> {
    env.driver.install_mps()?;
    env.driver
        .change(&[&["mps.enabled=true"], values].concat())?;
    let outcome = what(env);
    env.driver.change(&[])?;
    env.driver.wait_until_alone()?;
    env.driver.gpus().remove_mps()?;
    outcome
}

/// A GPU in MPS shares, beside one that is time-sliced and one that is partitioned, both in use.
struct Beside<'a> {
    by_mps: &'a str,
    pods: [(&'static str, String); 2],
    _policy: Policy<'a>,
}

impl<'a> Beside<'a> {
    fn new(env: &'a Env<'a>, slots: usize) -> Result<Self> {
        let [by_mps, sliced, cut] = [h100(env, 0)?, h100(env, 1)?, h100(env, 2)?];
        let mps_slots = json!({"slots": slots});
        let policy = Policy::create(
            env,
            &env.namespace,
            &json!({"rules": [
                {"gpus": {"uuids": [by_mps]}, "modes": ["Mps"], "shares": mps_slots},
                {"gpus": {"uuids": [sliced]}, "modes": ["TimeSlicing"]},
                {"gpus": {"uuids": [cut]}, "modes": ["Mig"]},
            ]}),
        )?;
        wait_for_modes(env, &[by_mps], &["Mps"])?;
        wait_for_modes(env, &[sliced], &["TimeSlicing"])?;
        wait_for_modes(env, &[cut], &["Mig"])?;
        let a_share = share("gpu", &[sliced], &[("memory", "10Gi")]);
        let a_partition = partition("gpu", &[cut], "1g.10gb");
        Ok(Self {
            by_mps,
            pods: [
                ("sliced", run(env, "sliced", &[a_share])?),
                ("cut", run(env, "cut", &[a_partition])?),
            ],
            _policy: policy,
        })
    }

    /// Ends what is beside it. Fails unless nothing of MPS is left.
    fn end(self, env: &Env) -> Result<()> {
        poll("end of the MPS daemon", PATIENCE, || {
            Ok(env.driver.mps_daemons()?.is_empty())
        })?;
        ensure!(
            compute_mode(env, self.by_mps)? == ComputeMode::Default,
            "the compute mode is not back"
        );
        for (pod, uid) in self.pods {
            end(env, pod, &uid)?;
        }
        Ok(())
    }
}

/// With a driver from R615 on, pods have MPS shares of different sizes, each a namespace of the
/// GPU's one server: they outlive supervisor and plugin, come again with a daemon that was killed,
/// and end with their claims.
pub(in crate::cases) fn mps_of_any_size(env: &Env) -> Result<()> {
    with_capping_driver(env, with_namespaces)
}

/// Does something on a node with a driver of R615, its programs for MPS and the supervisor.
pub(super) fn with_capping_driver(env: &Env, what: fn(&Env) -> Result<()>) -> Result<()> {
    let first = env.driver.gpus().driver_version();
    env.driver.stop()?;
    env.driver.gpus().remove_driver()?;
    env.driver.gpus().install_driver(CAPPING)?;
    env.driver.install_mps()?;
    env.driver.change(&["mps.enabled=true"])?;
    env.driver.start()?;
    let outcome = what(env);
    exchange(env, first, &[])?;
    outcome
}

fn with_namespaces(env: &Env) -> Result<()> {
    let beside = Beside::new(env, 16)?;
    let by_mps = beside.by_mps;
    let size = |cores: u32, memory: &str| {
        let amounts = [("cores", &*cores.to_string()), ("memory", memory)];
        let request = part(("gpu", names::CLASS_MPS), &[by_mps], &amounts);
        json!({"devices": {"requests": [request]}})
    };
    let mut pods = Vec::new();
    let sizes = [
        ("one", 50, "20Gi"),
        ("two", 20, "10Gi"),
        ("three", 20, "5Gi"),
        ("four", 10, "5Gi"),
    ];
    for (name, cores, memory) in sizes {
        let uid = Env::uid(&env.create(&claim_for(name, &size(cores, memory)))?)?;
        let mut pod = Pod::new(name)
            .claim(name)
            .container_running("main", &[name], &client());
        match name {
            "two" => pod = pod.container_running("other", &[name], &client()),
            "three" => pod = pod.in_user_namespace(),
            _ => {}
        }
        env.create(&pod.build())?;
        running(env, name)?;
        reaches_its_server(env, name, "main")?;
        pods.push((name, uid));
    }
    reaches_its_server(env, "two", "other")?;
    ensure!(
        compute_mode(env, by_mps)? == ComputeMode::ExclusiveProcess,
        "others can get past the server"
    );
    let daemon = only_daemon(env)?;
    let expected = ["1.00", "10.00", "20.00", "20.00", "50.00"];
    let four = namespaces(env, daemon)?;
    ensure!(sizes_of(&four) == expected, "{four:?}");

    // All of the threads are given out.
    let fifth = claim_for("five", &size(10, "5Gi"));
    let fifth = Env::uid(&env.create(&fifth)?)?;
    env.create(&Pod::new("five").claim("five").build())?;
    env.wait_until_unschedulable("five")?;

    // Nothing changes for programs that run when supervisor and plugin are replaced.
    env.driver.replace_mps_pod()?;
    env.driver.kill()?;
    ensure!(
        only_daemon(env)? == daemon && namespaces(env, daemon)? == four,
        "namespaces have changed with another process: {:?}",
        namespaces(env, daemon)
    );
    let (last, uid) = pods.pop().context("no pod")?;
    end(env, last, &uid)?;
    running(env, "five")?;
    pods.push(("five", fifth));
    let now = namespaces(env, daemon)?;
    ensure!(sizes_of(&now) == expected, "{now:?}");
    let kept = now.iter().filter(|row| four.contains(row)).count();
    ensure!(
        kept == 4,
        "a claim has another namespace: {four:?}, {now:?}"
    );

    // The namespaces die with the daemon, and each claim gets its own again.
    env.cluster.send(daemon, Signal::Kill)?;
    wait_for("namespaces of another MPS daemon", PATIENCE, || {
        let daemons = env.driver.mps_daemons()?;
        let [next] = daemons[..] else {
            return Ok(None);
        };
        // It may be about to start.
        let found = namespaces(env, next).unwrap_or_default();
        Ok((next != daemon && found == now).then_some(()))
    })?;
    for (pod, uid) in pods {
        end(env, pod, &uid)?;
    }
    beside.end(env)
}

/// Returns the namespaces of a daemon that runs: a line for each, in order.
pub(super) fn namespaces(env: &Env, daemon: u32) -> Result<Vec<String>> {
    let environment = fs::read_to_string(env.cluster.node_path(format!("/proc/{daemon}/environ")))?;
    let mut variables = environment.split('\0');
    let pipe = variables.find_map(|line| line.strip_prefix("CUDA_MPS_PIPE_DIRECTORY="));
    let pipe = pipe.context("the MPS daemon has no folder of sockets")?;
    // Its own program gives it commands, and its folder is as it sees it.
    let pipe = format!("CUDA_MPS_PIPE_DIRECTORY=/proc/{daemon}/root{pipe}");
    let program = format!("/proc/{daemon}/exe");
    let list = ["-p", "3", "namespace", "list", "--format=csv,noheader"];
    let args: Vec<&str> = [&*pipe, &*program].into_iter().chain(list).collect();
    let text = output(&mut env.cluster.command("env", &args))?;
    // Without its folder.
    let row = |line: &str| {
        let fields: Vec<&str> = line.split(',').take(5).collect();
        fields.join(",")
    };
    let mut rows: Vec<String> = text.lines().map(row).collect();
    rows.sort();
    Ok(rows)
}

/// Returns the percents of the threads that namespaces have, in order.
pub(super) fn sizes_of(rows: &[String]) -> Vec<&str> {
    let mut sizes: Vec<&str> = rows
        .iter()
        .filter_map(|row| row.split(',').nth(4))
        .collect();
    sizes.sort_unstable();
    sizes
}

fn switched_on(env: &Env) -> Result<()> {
    let beside = Beside::new(env, SLOTS)?;
    let by_mps = beside.by_mps;
    // All four, with one daemon, and no fifth.
    let mut pods = Vec::new();
    for name in ["one", "two", "three", "four"] {
        pods.push((name, with_share(env, name, by_mps)?));
    }
    let daemon = only_daemon(env)?;
    ensure!(
        compute_mode(env, by_mps)? == ComputeMode::ExclusiveProcess,
        "others can get past the server"
    );
    let fifth = create(env, "five", &[request("gpu", names::CLASS_MPS, &[by_mps])])?;
    env.wait_until_unschedulable("five")?;

    // The daemon is in no container: who started it may go, and so may the plugin.
    env.driver.replace_mps_pod()?;
    ensure!(
        only_daemon(env)? == daemon,
        "the daemon ended with the pod of its supervisor"
    );
    env.driver.kill()?;
    ensure!(
        only_daemon(env)? == daemon,
        "the daemon ended with the plugin"
    );
    let (first, uid) = pods.remove(0);
    end(env, first, &uid)?;
    running(env, "five")?;
    pods.push(("five", fifth));
    ensure!(
        only_daemon(env)? == daemon,
        "the daemon ended with one of its users"
    );

    // Killed, it comes again: the clients that it had are lost, and their pods stay.
    env.cluster.send(daemon, Signal::Kill)?;
    let next = wait_for("another MPS daemon", PATIENCE, || {
        let now = env.driver.mps_daemons()?;
        Ok((now.len() == 1 && now != [daemon]).then_some(now))
    })?;

    for (pod, uid) in pods {
        ensure!(
            env.driver.mps_daemons()? == next,
            "it was replaced once more"
        );
        end(env, pod, &uid)?;
    }
    beside.end(env)
}

/// The command of a container that looks for its server: a client finds it by the variable.
pub(super) fn client() -> String {
    format!("test -S $CUDA_MPS_PIPE_DIRECTORY/control && echo server is there; {SAY_AND_STAY}")
}

/// A running pod with an MPS share of a GPU. Returns the UID of its claim.
pub(super) fn with_share(env: &Env, name: &str, gpu: &str) -> Result<String> {
    let spec = json!({"devices": {"requests": [request("gpu", names::CLASS_MPS, &[gpu])]}});
    let uid = Env::uid(&env.create(&claim_for(name, &spec))?)?;
    let pod = Pod::new(name)
        .claim(name)
        .container_running("main", &[name], &client());
    env.create(&pod.build())?;
    running(env, name)?;
    reaches_its_server(env, name, "main")?;
    Ok(uid)
}

pub(super) fn reaches_its_server(env: &Env, pod: &str, container: &str) -> Result<()> {
    let said = env.log(pod, container)?;
    ensure!(
        said.contains("server is there"),
        "container {container} of pod {pod} does not reach its server: {said}"
    );
    Ok(())
}

pub(super) fn running(env: &Env, pod: &str) -> Result<()> {
    runs_with(env, pod, pod)
}

/// Waits until a pod runs, and checks that it sees the GPUs of a claim.
pub(super) fn runs_with(env: &Env, pod: &str, claim: &str) -> Result<()> {
    env.wait_until_running(pod)?;
    let mut expected = BTreeSet::new();
    for one in given(env, claim)? {
        expected.insert(env.driver.gpus().get(&gpu_of(env, &one.device)?)?.minor);
    }
    let seen = env.seen(pod, "main")?;
    ensure!(
        seen == expected,
        "pod {pod} sees GPUs {seen:?}; its claim has {expected:?}"
    );
    Ok(())
}

/// Returns the one daemon that runs, once it is alone: a supervisor that has just started tries the
/// programs with another.
pub(super) fn only_daemon(env: &Env) -> Result<u32> {
    let mut seen = Vec::new();
    let one = wait_for("one MPS daemon", PATIENCE, || {
        seen = env.driver.mps_daemons()?;
        Ok(match seen[..] {
            [daemon] => Some(daemon),
            _ => None,
        })
    });
    one.with_context(|| format!("the MPS daemons are {seen:?}"))
}

pub(super) fn compute_mode(env: &Env, gpu: &str) -> Result<ComputeMode> {
    let mode = env.driver.gpus().edit(gpu, |engine, uuid| {
        engine.gpu(uuid).map(|gpu| gpu.facts.compute_mode)
    })?;
    mode.flatten().context("the GPU has no compute mode")
}
