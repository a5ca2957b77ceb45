//! An MPS server in the state FAULT, with a stand-in for NVIDIA's programs: who learns of it, and
//! when another takes its place.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use fs_err as fs;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use serde_json::{Value, json};

use super::mps::{only_daemon, with_mps, with_share};
use super::{Policy, create, end, h100, request, wait_for_modes};
use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::wait::{poll, wait_for};

/// Longest time until a fault of half a minute is acted on: rounds come every ten seconds.
const HALF_A_MINUTE_AND_ROUNDS: Duration = Duration::from_mins(2);

/// Two pods use a server that gets a fault: the GPU is tainted, both claims have an Event, and a
/// third pod waits. The server is left to its clients. Once they have ended, another takes its
/// place, and the third pod runs. Where the policy says so, that happens under the clients.
pub(in crate::cases) fn wedged_mps(env: &Env) -> Result<()> {
    with_mps(env, |env| {
        let outcome = wedged(env);
        env.driver.gpus().fault_mps(None)?;
        outcome
    })
}

fn wedged(env: &Env) -> Result<()> {
    let gpu = h100(env, 0)?;
    let rules = |health: &Value| {
        json!({"rules": [{
            "gpus": {"uuids": [gpu]}, "modes": ["Mps"], "shares": {"slots": 3}, "health": health,
        }]})
    };
    let policy = Policy::create(env, &env.namespace, &rules(&json!({})))?;
    wait_for_modes(env, &[gpu], &["Mps"])?;
    let mut pods = Vec::new();
    for name in ["one", "two"] {
        pods.push((name, with_share(env, name, gpu)?));
    }
    let server = only_server(env)?;
    let client = connect(env)?;
    env.driver.gpus().fault_mps(Some(server))?;

    // A fault that ends within half a minute concerns no one.
    let is_tainted = || -> Result<bool> {
        let taints = env.driver.taints(gpu)?;
        Ok(taints.iter().any(|key| key == names::taints::MPS))
    };
    poll(
        "taint of the GPU with the wedged server",
        PATIENCE,
        &is_tainted,
    )?;
    for claim in ["one", "two"] {
        poll("Event on each claim", PATIENCE, || {
            let events = env.api().list(&format!(
                "/apis/events.k8s.io/v1/namespaces/{}/events",
                env.namespace
            ))?;
            let is_it = |event: &Value| {
                at(event, "reason") == "MpsServerWedged" && at(event, "regarding.name") == claim
            };
            Ok(events.iter().any(is_it))
        })?;
    }
    let third = create(env, "three", &[request("gpu", names::CLASS_MPS, &[gpu])])?;
    env.wait_until_unschedulable("three")?;
    ensure!(
        only_server(env)? == server,
        "the server was ended under its clients"
    );

    // Its clients end.
    drop(client);
    let next = other_server(env, server)?;
    poll("end of the taint", PATIENCE, || Ok(!is_tainted()?))?;
    env.wait_until_running("three")?;
    pods.push(("three", third));

    // The same with a policy that does not wait for them.
    policy.change(&rules(&json!({"restartWedgedMps": true})))?;
    let _client = connect(env)?;
    env.driver.gpus().fault_mps(Some(next))?;
    other_server(env, next)?;
    poll("end of the taint", PATIENCE, || Ok(!is_tainted()?))?;
    for (pod, uid) in pods {
        end(env, pod, &uid)?;
    }
    poll("end of the MPS daemon", PATIENCE, || {
        Ok(env.driver.mps_daemons()?.is_empty())
    })
}

fn only_server(env: &Env) -> Result<u32> {
    let servers = env.driver.mps_servers()?;
    ensure!(
        servers.len() == 1,
        "there is not one MPS server, but {servers:?}"
    );
    servers.first().copied().context("no MPS server")
}

/// Waits until another server has taken the place of one.
fn other_server(env: &Env, one: u32) -> Result<u32> {
    wait_for("another MPS server", HALF_A_MINUTE_AND_ROUNDS, || {
        let servers = env.driver.mps_servers()?;
        let [now] = servers[..] else {
            return Ok(None);
        };
        Ok((now != one).then_some(now))
    })
}

/// Connects to the daemon as a client does, by the folder of sockets that containers have mounted.
fn connect(env: &Env) -> Result<OwnedFd> {
    let daemon = only_daemon(env)?;
    let environment = fs::read_to_string(env.cluster.node_path(format!("/proc/{daemon}/environ")))?;
    let mut variables = environment.split('\0');
    let pipe = variables.find_map(|line| line.strip_prefix("CUDA_MPS_PIPE_DIRECTORY="));
    let pipe = pipe.context("the MPS daemon has no folder of sockets")?;
    let folder = env.cluster.node_path(format!("/proc/{daemon}/root{pipe}"));
    // The path of a socket is short: it is reached by the number of its folder.
    let folder = fs::File::open(folder)?;
    let socket = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string());
    let address = SocketAddrUnix::new(socket.join("control"))?;
    let client = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    rustix::net::connect(&client, &address)?;
    Ok(client)
}
