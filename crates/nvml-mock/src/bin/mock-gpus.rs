//! Looks at and changes the state of mock GPUs, for scripts and end-to-end tests.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use divvy_gpu_sim::{Engine, Fault, MigLatency, SimGroup, SimInstance, profile, profiles};
use divvy_model::health::{FabricState, GpuEventKind, GpuVitals, RecoveryAction, RowRemap};
use divvy_model::mig::{GpuInstance, GpuInstanceProfileId};
use divvy_model::{GpuErrorCode, GpuProcess, GpuUuid, MigActivation};
use nvidia_ml::MockState;

const USAGE: &str = "usage: mock-gpus STATE-FILE COMMAND
  create MODELxCOUNT[,…]   make the file if it is absent
  show                     the whole state, as JSON
  boot-id                  the simulated boot id
  list                     index, UUID, minor, model, lost
  lose GPU | restore GPU   a GPU falls off the bus, comes back (GPU: index or UUID)
  remove GPU | add MODEL   a GPU is taken out, put in
  fault JSON               set a fault, such as {\"op\":\"facts\",\"times\":2,\"effect\":{\"fail\":999}} or {\"effect\":{\"hang\":{\"then\":null}}}
  release | clear          let hanging calls go on; forget all faults
  driver loaded|unloaded   load or unload the kernel module
  process GPU PID [GI]     a process opens a context on a GPU, in a GPU instance
  end PID                  a process ends
  usage GPU PID BYTES PERCENT  a process has so much memory (-: NVML does not say) and computes so much of the time
  allocate GPU GROUP BYTES  a program in a control group (its folder; `own ROOT`: the group of this process below that folder)
                           allocates, as CUDA does: in steps of 256 MiB, against the limits of its group; fails if it is out of memory
  instances                MIG: index of the GPU, GPU instance, profile, placement, UUIDs of compute instances
  mig GPU on|off           MIG: ask for the mode, as an admin; says what became of it
  xid GPU NUMBER [GI]      a GPU sends an Xid, of a GPU instance
  recovery GPU ACTION      none, reset, reboot, drain-peers, drain-and-reset, recover-imex-domain: the action that the GPU requests; unreported: as with older drivers
  remap GPU STATE          none, pending, failed: replacement of memory rows
  fabric GPU STATE         ready, not-started, in-progress, failed, unhealthy: registration with the NVLink fabric; none: as without one
  ecc GPU COUNT            uncorrected ECC errors since the last reset
  reset GPU                reset a GPU: a pending MIG mode takes effect
  foreign GPU PROFILE START  MIG: an admin makes an instance, by profile id; says its UUID
  client GPU NAME          something opens the GPU, so that MIG mode cannot change
  leave GPU NAME           … and closes it
  latency CREATE DESTROY MODE  MIG: how many milliseconds changes take
  reboot                   switch the node off and on";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (text, code) = match run(&args) {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(message) => (format!("mock-gpus: {message}\n"), ExitCode::FAILURE),
    };
    let written = if code == ExitCode::SUCCESS {
        std::io::stdout().write_all(text.as_bytes())
    } else {
        std::io::stderr().write_all(text.as_bytes())
    };
    if written.is_err() {
        ExitCode::FAILURE
    } else {
        code
    }
}

fn run(args: &[&str]) -> Result<String, String> {
    let (file, command, rest) = match args {
        [file, command, rest @ ..] => (*file, *command, rest),
        _ => return Err(USAGE.to_owned()),
    };
    let explain = |error: nvidia_ml::StateError| {
        let cause = std::error::Error::source(&error)
            .map(|c| format!(": {c}"))
            .unwrap_or_default();
        format!("{error}{cause}")
    };
    if command == "create" {
        let [gpus] = rest else {
            return Err(USAGE.to_owned());
        };
        let gpus = gpus
            .parse()
            .map_err(|e: divvy_gpu_sim::SpecError| e.to_string())?;
        return MockState::open_or_create(file, &gpus)
            .map(|_| String::new())
            .map_err(explain);
    }
    let state = MockState::open(file).map_err(explain)?;
    match (command, rest) {
        ("show", []) => {
            let engine = state.read().map_err(explain)?;
            Ok(serde_json::to_string_pretty(&*engine).map_err(|e| e.to_string())? + "\n")
        }
        ("boot-id", []) => Ok(format!("{}\n", state.read().map_err(explain)?.boot_id())),
        ("list", []) => Ok(list(&*state.read().map_err(explain)?)),
        ("instances", []) => Ok(instances(&*state.read().map_err(explain)?)),
        _ => state
            .edit(|engine| change(engine, command, rest))
            .map_err(explain)?,
    }
}

fn list(engine: &Engine) -> String {
    let line = |(index, gpu): (usize, &divvy_gpu_sim::SimGpu)| {
        let minor = gpu
            .facts
            .minor
            .map_or_else(|| "-".to_owned(), |m| m.to_string());
        let lost = if gpu.lost { " lost" } else { "" };
        format!("{index} {} {minor} {}{lost}\n", gpu.facts.uuid, gpu.model)
    };
    engine.gpus().iter().enumerate().map(line).collect()
}

fn instances(engine: &Engine) -> String {
    let line = |index: usize, living: &SimInstance| {
        let GpuInstance {
            id,
            profile,
            placement,
        } = living.instance;
        let fixed = format!("{index} {} {profile} {placement}", id.0);
        let uuids = living.compute.iter().map(|c| c.uuid.to_string());
        [fixed]
            .into_iter()
            .chain(uuids)
            .collect::<Vec<_>>()
            .join(" ")
            + "\n"
    };
    let gpus = engine.gpus().iter().enumerate();
    gpus.flat_map(|(index, gpu)| gpu.instances.iter().map(move |living| line(index, living)))
        .collect()
}

fn change(engine: &mut Engine, command: &str, rest: &[&str]) -> Result<String, String> {
    let mut said = String::new();
    match (command, rest) {
        ("lose" | "restore", [gpu]) => {
            let uuid = find(engine, gpu)?;
            if let Some(gpu) = engine.gpu(&uuid) {
                gpu.lost = command == "lose";
            }
        }
        ("remove", [gpu]) => {
            let uuid = find(engine, gpu)?;
            engine.remove_gpu(&uuid);
        }
        ("add", [model]) => {
            let known = || {
                profiles()
                    .iter()
                    .map(|p| p.key)
                    .collect::<Vec<_>>()
                    .join(", ")
            };
            let board =
                profile(model).ok_or_else(|| format!("no model {model:?}; known: {}", known()))?;
            said = format!("{}\n", engine.add_gpu(board).ok_or("the node is full")?);
        }
        ("fault", [json]) => {
            let fault: Fault =
                serde_json::from_str(json).map_err(|e| format!("not a fault: {e}"))?;
            said = format!("{}\n", engine.set_fault(fault).0);
        }
        ("release", []) => engine.release(None),
        ("clear", []) => engine.clear_faults(None),
        ("driver", ["loaded"]) => engine.set_driver_loaded(true),
        ("driver", ["unloaded"]) => engine.set_driver_loaded(false),
        ("end", [pid]) => {
            let pid: u32 = pid
                .parse()
                .map_err(|_| format!("{pid:?} is not a process id"))?;
            engine.end_process(pid);
        }
        ("allocate", [gpu, group @ .., bytes]) => {
            let uuid = find(engine, gpu)?;
            let bytes: u64 = bytes
                .parse()
                .map_err(|_| format!("{bytes:?} is not a number of bytes"))?;
            let groups = groups(group)?;
            said = allocate(engine, &uuid, &groups, bytes)?;
        }
        ("reboot", []) => engine.reboot(),
        ("mig" | "reset" | "foreign" | "client" | "leave" | "latency", _) => {
            return change_mig(engine, command, rest);
        }
        _ => change_gpu(engine, command, rest)?,
    }
    Ok(said)
}

/// Changes of MIG, and of what decides whether it can change.
fn change_mig(engine: &mut Engine, command: &str, rest: &[&str]) -> Result<String, String> {
    let mut said = String::new();
    match (command, rest) {
        ("mig", [gpu, mode @ ("on" | "off")]) => {
            let uuid = find(engine, gpu)?;
            said = match engine
                .set_mig_mode(&uuid, *mode == "on")
                .map_err(|e| e.to_string())?
            {
                MigActivation::Active => format!("{mode}\n"),
                MigActivation::Pending(code) => format!("pending: {code}\n"),
            };
        }
        ("reset", [gpu]) => {
            let uuid = find(engine, gpu)?;
            engine.reset_gpu(&uuid).map_err(|e| e.to_string())?;
        }
        ("foreign", [gpu, profile, start]) => {
            let uuid = find(engine, gpu)?;
            let profile = GpuInstanceProfileId(number(profile)?);
            let made = engine.make_foreign_instance(&uuid, profile, number(start)?);
            said = format!("{}\n", made.map_err(|e| e.to_string())?.uuid);
        }
        ("client" | "leave", [gpu, name]) => {
            let uuid = find(engine, gpu)?;
            if let Some(gpu) = engine.gpu(&uuid) {
                if command == "client" {
                    gpu.clients.insert((*name).to_owned());
                } else {
                    gpu.clients.remove(*name);
                }
            }
        }
        ("latency", [create, destroy, mode]) => {
            let millis = |text: &str| number(text).map(u64::from);
            engine.latency = MigLatency {
                create_ms: millis(create)?,
                destroy_ms: millis(destroy)?,
                mode_ms: millis(mode)?,
            };
        }
        _ => return Err(USAGE.to_owned()),
    }
    Ok(said)
}

/// Changes of what runs on a GPU and of how it is.
fn change_gpu(engine: &mut Engine, command: &str, rest: &[&str]) -> Result<(), String> {
    let inside = |inside: &[&str]| match inside {
        [] => Ok(None),
        [id] => number(id).map(Some),
        _ => Err(USAGE.to_owned()),
    };
    match (command, rest) {
        ("process", [gpu, pid, more @ ..]) => {
            let gpu_instance = inside(more)?;
            let pid = pid
                .parse()
                .map_err(|_| format!("{pid:?} is not a process id"))?;
            let uuid = find(engine, gpu)?;
            if let Some(gpu) = engine.gpu(&uuid) {
                gpu.processes.insert(GpuProcess::new(pid, gpu_instance));
            }
        }
        ("usage", [gpu, pid, bytes, percent]) => {
            let bytes = match *bytes {
                "-" => None,
                bytes => Some(
                    bytes
                        .parse()
                        .map_err(|_| format!("{bytes:?} is not a number"))?,
                ),
            };
            let uuid = find(engine, gpu)?;
            engine.set_usage(&uuid, number(pid)?, bytes, number(percent)?);
        }
        ("xid", [gpu, xid, more @ ..]) => {
            let gpu_instance = inside(more)?;
            let uuid = find(engine, gpu)?;
            engine.send_event(&uuid, GpuEventKind::Xid(number(xid)?), gpu_instance);
        }
        ("recovery" | "remap" | "fabric" | "ecc", [gpu, what]) => {
            let uuid = find(engine, gpu)?;
            if let Some(gpu) = engine.gpu(&uuid) {
                ail(&mut gpu.vitals, command, what)?;
            }
        }
        _ => return Err(USAGE.to_owned()),
    }
    Ok(())
}

fn ail(vitals: &mut GpuVitals, command: &str, what: &str) -> Result<(), String> {
    match (command, what) {
        ("recovery", "unreported") => vitals.recovery = None,
        ("recovery", "none") => vitals.recovery = Some(RecoveryAction::Nothing),
        ("recovery", name) => {
            let action = (1..=5)
                .map(RecoveryAction::from_nvml)
                .find(|action| action.name() == name);
            vitals.recovery = Some(action.ok_or_else(|| USAGE.to_owned())?);
        }
        ("remap", "none") => vitals.remap = Some(RowRemap::default()),
        ("remap", "pending") => {
            vitals.remap = Some(RowRemap {
                pending: true,
                failed: false,
            });
        }
        ("remap", "failed") => {
            vitals.remap = Some(RowRemap {
                pending: false,
                failed: true,
            });
        }
        ("fabric", "none") => vitals.fabric = None,
        ("fabric", state) => vitals.fabric = Some(fabric(state)?),
        ("ecc", count) => vitals.uncorrected_ecc = Some(number(count)?.into()),
        _ => return Err(USAGE.to_owned()),
    }
    Ok(())
}

fn fabric(text: &str) -> Result<FabricState, String> {
    let ready = FabricState::READY;
    let (state, status, health) = match text {
        "ready" => return Ok(ready),
        "not-started" => (FabricState::NOT_STARTED, 0, 0),
        "in-progress" => (FabricState::IN_PROGRESS, 0, 0),
        "failed" => (FabricState::COMPLETED, GpuErrorCode::UNKNOWN.0, 0),
        "unhealthy" => (FabricState::COMPLETED, 0, FabricState::UNHEALTHY),
        _ => return Err(USAGE.to_owned()),
    };
    Ok(FabricState {
        state,
        status,
        health,
    })
}

fn number(text: &str) -> Result<u32, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not a number"))
}

/// Returns the group that is named, and those above it.
fn groups(named: &[&str]) -> Result<Vec<SimGroup>, String> {
    let folder = match named {
        ["own", root] => {
            let own = fs_err::read_to_string("/proc/self/cgroup").map_err(|e| e.to_string())?;
            let path = own.lines().find_map(|line| line.strip_prefix("0::/"));
            Path::new(root).join(path.ok_or("this process has no group of version 2")?)
        }
        [folder] => PathBuf::from(folder),
        _ => return Err(USAGE.to_owned()),
    };
    SimGroup::chain(&folder).map_err(|error| format!("{}: {error}", folder.display()))
}

/// Allocates in the steps of CUDA's allocator, as far as the group may. Returns what it got.
fn allocate(
    engine: &mut Engine,
    gpu: &GpuUuid,
    groups: &[SimGroup],
    bytes: u64,
) -> Result<String, String> {
    const STEP: u64 = 256 << 20;
    let mut got = 0;
    while got < bytes {
        let next = STEP.min(bytes - got);
        if let Err(code) = engine.allocate(gpu, groups, next) {
            return Err(format!("out of memory after {got} bytes ({code})"));
        }
        got += next;
    }
    Ok(format!("{got}\n"))
}

fn find(engine: &Engine, gpu: &str) -> Result<GpuUuid, String> {
    let uuids = || engine.gpus().iter().map(|g| &g.facts.uuid);
    let by_index = gpu.parse().ok().and_then(|index: usize| uuids().nth(index));
    by_index
        .or_else(|| uuids().find(|u| u.as_str() == gpu))
        .cloned()
        .ok_or_else(|| format!("no GPU {gpu:?}"))
}
