//! A pod with an MPS share that runs as root and means harm, with a stand-in for NVIDIA's programs:
//! what it writes to the folders that it has mounted, and that the node and its neighbours live on.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use divvy_api::names;
use fs_err as fs;
use serde_json::json;

use super::mps::{only_daemon, running, with_mps_of, with_share};
use super::{Policy, create, end, h100, request, wait_for_modes};
use crate::case::{Env, PATIENCE};
use crate::gpus::Gpus;
use crate::objects::{Pod, SAY_AND_STAY, claim_for};
use crate::process::Signal;
use crate::wait::{poll, wait_for};

/// Time in which a daemon that has ended is started again: rounds come every ten seconds, and a
/// start that fails takes as long.
const SOME_ROUNDS: Duration = Duration::from_mins(2);
/// Argument of the process of the node that is to live.
const MARK: &str = "7654321";
/// File in which daemons write their number.
const FILE: &str = "nvidia-cuda-mps-control.pid";

/// Size of the memory that a server shares with its clients: soon full.
const MEMORY_MIB: u64 = 64;

/// Returns what the container does: it fills the memory and the folder of sockets, puts links and a
/// FIFO there, and writes the number of a process of the node in the place of its daemon's, again
/// and again. Later, once a file is there, it puts a FIFO without a writer in that place.
fn attack(victim: u32) -> String {
    format!(
        "cd $CUDA_MPS_PIPE_DIRECTORY || exit 1; echo left > /dev/shm/left; mkfifo fifo; \
         ln -s /dev/zero zero; ln -s / node; \
         dd if=/dev/zero of=/dev/shm/fill bs=1M 2> /dev/null; \
         echo memory: $(stat -c %s /dev/shm/fill); rm /dev/shm/fill; \
         mkdir full; n=0; while echo > full/$n; do n=$((n+1)); done 2> /dev/null; echo files: $n; \
         (while ! test -e /dev/shm/fifo; do printf {victim:015} > {FILE}; done; \
          while true; do test -p {FILE} || mkfifo {FILE} 2>/dev/null || rm -f {FILE}; done) & \
         {SAY_AND_STAY}"
    )
}

/// Two pods share a server, and one of them attacks. It has the daemon quit, whose next one is
/// killed, and the supervisor is replaced. A process of the node whose number it has written lives,
/// another pod gets a share of the GPU after it, `/run` is out of its reach, and the next tenant
/// finds nothing of it.
pub(in crate::cases) fn hostile_mps(env: &Env) -> Result<()> {
    let size = format!("mps.sharedMemory={MEMORY_MIB}Mi");
    with_mps_of(env, &[&size], hostile)
}

/// Commands the daemon through the container's folder, as root in it may: its image has no libc for
/// the program that the CDI file mounts.
fn has_it_quit(env: &Env) -> Result<()> {
    let folder = inside_node(env, "echo left", "/run/divvy/mps")?;
    let program = format!("{}/usr/bin/nvidia-cuda-mps-control", Gpus::DRIVER_ROOT);
    let line = format!("echo quit | CUDA_MPS_PIPE_DIRECTORY={folder} {program}");
    let status = env.cluster.command("sh", &["-c", &line]).status()?;
    ensure!(status.success(), "the daemon got no command: {status}");
    Ok(())
}

/// Returns what the container says it has filled.
fn filled(env: &Env) -> Result<()> {
    let number = |said: &str, label: &str| {
        let mut lines = said.lines();
        lines.find_map(|line| line.strip_prefix(label)?.trim().parse::<u64>().ok())
    };
    let (memory, files) = wait_for("the end of its filling", PATIENCE, || {
        let said = env.log("hostile", "main")?;
        Ok(number(&said, "memory:").zip(number(&said, "files:")))
    })?;
    ensure!(
        (1..=MEMORY_MIB << 20).contains(&memory),
        "it has filled {memory} bytes"
    );
    ensure!((1..4096).contains(&files), "it has made {files} files");
    Ok(())
}

fn hostile(env: &Env) -> Result<()> {
    let gpu = h100(env, 0)?;
    let policy = json!({"rules": [{
        "gpus": {"uuids": [gpu]}, "modes": ["Mps"], "shares": {"slots": 3},
    }]});
    let _policy = Policy::create(env, &env.namespace, &policy)?;
    wait_for_modes(env, &[gpu], &["Mps"])?;
    // In no container, as the kubelet.
    let mut started = env.cluster.command("sleep", &[MARK]).spawn()?;
    let victim = wait_for("the process of the node", PATIENCE, || {
        Ok(victims(env)?.first().copied())
    })?;
    let outcome = under_attack(env, gpu, victim);
    if victims(env)?.contains(&victim) {
        env.cluster.send(victim, Signal::Kill)?;
    }
    started.wait()?;
    outcome
}

fn victims(env: &Env) -> Result<Vec<u32>> {
    env.cluster.processes(|args| {
        let [program, argument] = args else {
            // The text ends with a zero byte.
            return matches!(args, [program, argument, _] if is_victim(program, argument));
        };
        is_victim(program, argument)
    })
}

fn is_victim(program: &str, argument: &str) -> bool {
    program.ends_with("sleep") && argument == MARK
}

fn lives(env: &Env, victim: u32) -> Result<()> {
    ensure!(
        victims(env)?.contains(&victim),
        "a process of the node was ended, since a container has written its number"
    );
    Ok(())
}

/// Returns a file of the container that runs a script with this in it.
fn inside(env: &Env, script: &str, path: &str) -> Result<PathBuf> {
    Ok(env.cluster.node_path(inside_node(env, script, path)?))
}

/// Returns the same as the node names it.
fn inside_node(env: &Env, script: &str, path: &str) -> Result<String> {
    let found = wait_for("the process of the container", PATIENCE, || {
        let found = env.cluster.processes(|args| {
            args.first().is_some_and(|program| program == "/bin/sh")
                && args.iter().any(|arg| arg.contains(script))
        })?;
        Ok(found.first().copied())
    })?;
    Ok(format!("/proc/{found}/root{path}"))
}

fn under_attack(env: &Env, gpu: &str, victim: u32) -> Result<()> {
    let beside = with_share(env, "beside", gpu)?;
    let spec = json!({"devices": {"requests": [request("gpu", names::CLASS_MPS, &[gpu])]}});
    let with_script = |name: &str, script: &str| -> Result<String> {
        let uid = Env::uid(&env.create(&claim_for(name, &spec))?)?;
        let pod = Pod::new(name)
            .claim(name)
            .container_running("main", &[name], script);
        env.create(&pod.build())?;
        running(env, name)?;
        Ok(uid)
    };
    let hostile = with_script("hostile", &attack(victim))?;

    // A number that is not its own, while a daemon is started in this folder.
    let before = only_daemon(env)?;
    filled(env)?;
    has_it_quit(env)?;
    wait_for("another MPS daemon", SOME_ROUNDS, || {
        let daemons = env.driver.mps_daemons()?;
        Ok(daemons.into_iter().find(|pid| *pid != before))
    })?;
    let third = create(env, "third", &[request("gpu", names::CLASS_MPS, &[gpu])])?;
    env.wait_until_running("third")?;
    lives(env, victim)?;
    end(env, "third", &third)?;

    // A FIFO, while a daemon and then a supervisor is.
    fs::write(inside(env, "echo left", "/dev/shm/fifo")?, "")?;
    let file = inside(env, "echo left", &format!("/run/divvy/mps/{FILE}"))?;
    poll("the FIFO", PATIENCE, || {
        Ok(fs::symlink_metadata(&file).is_ok_and(|of| of.file_type().is_fifo()))
    })?;
    for daemon in env.driver.mps_daemons()? {
        env.cluster.send(daemon, Signal::Kill)?;
    }
    env.driver.replace_mps_pod()?;
    end(env, "hostile", &hostile)?;
    wait_for("a daemon after the attack", SOME_ROUNDS, || {
        Ok(env.driver.mps_daemons()?.first().copied())
    })?;
    let third = create(env, "fourth", &[request("gpu", names::CLASS_MPS, &[gpu])])?;
    env.wait_until_running("fourth")?;

    // The end of all, and of nothing else.
    for (pod, uid) in [("beside", beside), ("fourth", third)] {
        end(env, pod, &uid)?;
    }
    poll("end of the MPS daemon", PATIENCE, || {
        Ok(env.driver.mps_daemons()?.is_empty())
    })?;
    lives(env, victim)?;

    // The next tenant.
    let looks = format!("echo files: $(ls /dev/shm | wc -l); {SAY_AND_STAY}");
    let after = with_script("after", &looks)?;
    let said = env.log("after", "main")?;
    ensure!(
        said.lines().any(|line| line.trim() == "files: 0"),
        "the next tenant finds files of the one before: {said}"
    );
    let memory = fs::metadata(inside(env, "echo files", "/dev/shm")?)?;
    let of_node = fs::metadata(env.cluster.node_path("/run"))?;
    ensure!(
        memory.dev() != of_node.dev(),
        "a tenant can fill the node's /run"
    );
    end(env, "after", &after)
}
