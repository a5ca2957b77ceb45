//! Applies a claim's CDI edits to this program started anew: in a root of its own that has nothing
//! of the driver but what the claim gives, its hooks run as a container runtime runs them; or,
//! where that is not allowed, as a plain process that gets the environment only.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cuda::{self, Allocated, Seen};
use crate::root::{self, Alone, NOT_ALLOWED, PROGRAM, below};
use crate::smi::see;

/// A hook of the claim, to be run once the root is made and before it is entered.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Hook {
    path: PathBuf,
    args: Vec<String>,
    env: Vec<String>,
}

/// Contents of the container, as far as a CUDA program needs them.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Container {
    env: Vec<String>,
    /// Path, major, minor.
    nodes: Vec<(PathBuf, u32, u32)>,
    /// On the host, in the container.
    mounts: Vec<(PathBuf, PathBuf)>,
    hooks: Vec<Hook>,
    /// Where this process sees the host.
    prefix: PathBuf,
    /// Minor numbers of the GPUs that it must not reach.
    others: Vec<u32>,
    /// An empty folder for its root; `None`: it is a plain process, or in its root already.
    root: Option<PathBuf>,
    /// User as whom the program runs; `None`: that of this process.
    user: Option<u32>,
    /// Control group that the program enters, as this process sees it.
    group: Option<PathBuf>,
    /// Bytes that it tries to allocate.
    allocate: Option<u64>,
}

/// Where a container has the sockets of an MPS server.
const SOCKETS: &str = "/mps";

impl Container {
    /// Gives it the sockets of an MPS server, and the memory that it shares with its clients.
    pub(crate) fn with_sockets(mut self, on_host: &Path) -> Self {
        self.env.push(format!("CUDA_MPS_PIPE_DIRECTORY={SOCKETS}"));
        self.mounts.push((on_host.to_owned(), SOCKETS.into()));
        let memory = PathBuf::from("/dev/shm");
        self.mounts.push((memory.clone(), memory));
        self
    }

    pub(crate) fn for_user(mut self, user: u32) -> Self {
        self.user = Some(user);
        self
    }

    pub(crate) fn in_group(mut self, group: &Path) -> Self {
        self.group = Some(group.to_owned());
        self
    }

    pub(crate) fn allocating(mut self, bytes: Option<u64>) -> Self {
        self.allocate = bytes;
        self
    }

    /// Returns the edits of a CDI document of one device.
    pub(crate) fn of(cdi: &Value, prefix: &Path, others: Vec<u32>) -> Result<Self> {
        let mut all = Self {
            prefix: prefix.to_owned(),
            others,
            ..Self::default()
        };
        let device = cdi.pointer("/devices/0/containerEdits");
        for edits in [cdi.get("containerEdits"), device].into_iter().flatten() {
            let list = |name: &str| {
                edits
                    .get(name)
                    .and_then(Value::as_array)
                    .cloned()
                    .unwrap_or_default()
            };
            let text =
                |v: &Value, name: &str| v.get(name).and_then(Value::as_str).map(PathBuf::from);
            let number =
                |v: &Value, name: &str| v.get(name).and_then(Value::as_u64)?.try_into().ok();
            let texts = |v: Option<&Value>| -> Vec<String> {
                let list = v.and_then(Value::as_array).into_iter().flatten();
                list.filter_map(Value::as_str).map(str::to_owned).collect()
            };
            all.env.extend(texts(edits.get("env")));
            for node in list("deviceNodes") {
                let path = text(&node, "path").context("a device node without path")?;
                let numbers = number(&node, "major").zip(number(&node, "minor"));
                let (major, minor) =
                    numbers.with_context(|| format!("{} has no numbers", path.display()))?;
                all.nodes.push((path, major, minor));
            }
            for mount in list("mounts") {
                let ends = text(&mount, "hostPath").zip(text(&mount, "containerPath"));
                all.mounts.push(ends.context("a mount without ends")?);
            }
            for hook in list("hooks") {
                let stage = hook
                    .get("hookName")
                    .and_then(Value::as_str)
                    .unwrap_or_default();
                ensure!(
                    stage == "createContainer",
                    "this program does not run hooks of the stage {stage:?}"
                );
                let path = text(&hook, "path").context("a hook without path")?;
                all.hooks.push(Hook {
                    path,
                    args: texts(hook.get("args")),
                    env: texts(hook.get("env")),
                });
            }
        }
        ensure!(
            !all.nodes.is_empty() && !all.mounts.is_empty(),
            "the CDI file gives no nodes or no files"
        );
        Ok(all)
    }

    /// Folders of the container into which the claim puts a libcuda.
    pub(crate) fn library_folders(&self) -> BTreeSet<PathBuf> {
        let is_it = |path: &Path| {
            path.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("libcuda.so"))
        };
        self.mounts
            .iter()
            .filter(|(_, to)| is_it(to))
            .filter_map(|(_, to)| to.parent())
            .map(PathBuf::from)
            .collect()
    }

    pub(crate) fn hooks(&self) -> usize {
        self.hooks.len()
    }

    /// Its environment. A plain process finds the libraries where the host has them.
    fn environment(&self) -> Vec<(String, String)> {
        const LIBRARIES: &str = "LD_LIBRARY_PATH";
        let pairs = self.env.iter().filter_map(|pair| pair.split_once('='));
        let mut all: Vec<_> = pairs
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        if self.root.is_none() {
            let is_library = |file: &Path| file.to_string_lossy().contains(".so");
            let folders = self
                .mounts
                .iter()
                .filter(|(host, _)| is_library(host))
                .filter_map(|(h, _)| h.parent());
            let folders: BTreeSet<_> = folders
                .map(|folder| see(&self.prefix, folder).display().to_string())
                .collect();
            all.retain(|(name, _)| name != LIBRARIES);
            all.push((
                LIBRARIES.to_owned(),
                folders.into_iter().collect::<Vec<_>>().join(":"),
            ));
        }
        all
    }
}

/// Answer of the program in the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) seen: Seen,
    /// Nodes of other GPUs that it could make.
    pub(crate) reached: Vec<PathBuf>,
    /// Memory that it got, if it was to allocate some.
    pub(crate) allocated: Option<Allocated>,
}

/// Progress of the program in the container.
#[derive(Debug, Default)]
pub(crate) struct Ran {
    /// True if it had a root of its own; `None`: that root could not be made, or a hook failed.
    pub(crate) apart: Option<bool>,
    /// Its answer, or the reason why there is none.
    pub(crate) answer: Option<Answer>,
    pub(crate) error: String,
}

/// The line that the program prints once it is in its root.
const ENTERED: &str = "entered";

/// Runs the CUDA program as the claim's container would. `held` is called with its process id while
/// its context is on the GPU.
pub(crate) fn run(container: &Container, held: &mut dyn FnMut(u32)) -> Result<Ran> {
    let folder = tempfile::tempdir()?;
    let root = folder.path().join("root");
    fs_err::create_dir(&root)?;
    let apart = Container {
        root: Some(root),
        ..container.clone()
    };
    match start(&apart, folder.path(), held)? {
        Some(ran) => Ok(ran),
        None => start(
            &Container {
                others: Vec::new(),
                ..container.clone()
            },
            folder.path(),
            held,
        )?
        .context("the program in the container did not run"),
    }
}

/// `None` if it may not have a root of its own.
fn start(container: &Container, folder: &Path, held: &mut dyn FnMut(u32)) -> Result<Option<Ran>> {
    let file = folder.join("container.json");
    fs_err::write(&file, serde_json::to_vec(container)?)?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg("--inside")
        .arg(&file)
        .env_clear()
        .envs(container.environment())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting the program in the container")?;
    let mut said = BufReader::new(child.stdout.take().context("no stdout")?);
    let mut ran = Ran {
        apart: container.root.is_none().then_some(false),
        ..Ran::default()
    };
    let mut line = next_line(&mut said)?;
    if line == ENTERED {
        ran.apart = Some(true);
        line = next_line(&mut said)?;
    }
    ran.answer = serde_json::from_str(&line).ok();
    if ran.answer.is_some() {
        held(child.id());
    } else {
        ran.error = line;
    }
    drop(child.stdin.take());
    let mut rest = String::new();
    said.read_to_string(&mut rest)?;
    let status = child.wait()?;
    if status.code() == Some(NOT_ALLOWED.into()) {
        return Ok(None);
    }
    if !status.success() {
        (ran.answer, ran.error) = (None, format!("{}{} ({status})", ran.error, rest.trim()));
    }
    Ok(Some(ran))
}

fn next_line(from: &mut BufReader<ChildStdout>) -> Result<String> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

/// The program in the container.
pub(crate) fn inside(file: &Path) -> Result<u8> {
    let container: Container = serde_json::from_slice(&fs_err::read(file)?)?;
    if let Some(group) = &container.group {
        let own = std::process::id().to_string();
        fs_err::write(group.join("cgroup.procs"), own).context("entering the control group")?;
    }
    if let Some(root) = &container.root {
        let Some(alone) = Alone::new()? else {
            return Ok(NOT_ALLOWED);
        };
        enter(&container, &alone, root).context("making the container's root")?;
        say(ENTERED)?;
        let user = container.user;
        let entered = Container {
            root: None,
            group: None,
            ..container
        };
        fs_err::write(Path::new(FILE), serde_json::to_vec(&entered)?)?;
        // Started anew: the loader has looked for its cache where there was none.
        let mut program = Command::new(PROGRAM);
        program.arg("--inside").arg(FILE);
        if let Some(user) = user {
            program.uid(user).gid(user);
        }
        return Err(program.exec().into());
    }
    let reached = container
        .others
        .iter()
        .map(|minor| (PathBuf::from(format!("/dev/divvy-other{minor}")), *minor));
    let reached: Vec<_> = reached
        .filter(|(path, minor)| node(path, NVIDIA, *minor).is_ok())
        .map(|(p, _)| p)
        .collect();
    cuda::check(container.allocate, |seen, allocated| {
        say(&serde_json::to_string(&Answer {
            seen: seen.clone(),
            reached,
            allocated,
        })?)?;
        // Until the parent has looked at the GPU.
        std::io::stdin().read_to_end(&mut Vec::new())?;
        Ok(())
    })?;
    Ok(0)
}

fn say(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// Its instructions, in the container.
const FILE: &str = "/tmp/divvy-hardware.json";
/// Major number of GPUs' nodes.
const NVIDIA: u32 = 195;

fn node(path: &Path, major: u32, minor: u32) -> Result<()> {
    fs_err::create_dir_all(path.parent().unwrap_or(path))?;
    Ok(mknodat(
        CWD,
        path,
        FileType::CharacterDevice,
        Mode::from_raw_mode(0o666),
        makedev(major, minor),
    )?)
}

/// Makes a root with the claim's files and nodes, runs its hooks on it, and enters it.
fn enter(container: &Container, alone: &Alone, at: &Path) -> Result<()> {
    alone.make(at)?;
    for system in ["/proc", "/sys"].map(Path::new) {
        root::bind(system, &below(at, system))?;
    }
    for (host, path) in &container.mounts {
        let seen = see(&container.prefix, host);
        // A socket that is gone, say.
        if seen.exists() {
            root::bind(&seen, &below(at, path))?;
        }
    }
    for (path, major, minor) in &container.nodes {
        node(&below(at, path), *major, *minor)?;
    }
    let bundle = tempfile::tempdir()?;
    let config = serde_json::json!({ "root": { "path": at } });
    fs_err::write(
        bundle.path().join("config.json"),
        serde_json::to_vec(&config)?,
    )?;
    let state = serde_json::json!({ "ociVersion": "1.2.0", "id": "divvy-hardware", "bundle": bundle.path() });
    for hook in &container.hooks {
        run_hook(hook, &container.prefix, &state)?;
    }
    root::enter(at)?;
    // As the device cgroup of a container: what the claim does not give cannot be made. Gone with
    // the next exec.
    remove_capability_from_bounding_set(CapabilitySet::MKNOD)?;
    Ok(())
}

fn run_hook(hook: &Hook, prefix: &Path, state: &Value) -> Result<()> {
    let called = hook.args.join(" ");
    let mut command = Command::new(see(prefix, &hook.path));
    if let Some(name) = hook.args.first() {
        command.arg0(name);
    }
    let env = hook.env.iter().filter_map(|pair| pair.split_once('='));
    command.args(hook.args.iter().skip(1)).env_clear().envs(env);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .with_context(|| format!("starting the hook {}", hook.path.display()))?;
    // One that reads nothing and ends says why.
    let _written = child
        .stdin
        .take()
        .map(|mut stdin| stdin.write_all(state.to_string().as_bytes()));
    let out = child.wait_with_output()?;
    if !out.status.success() {
        bail!(
            "the hook {called:?}: {} ({})",
            String::from_utf8_lossy(&out.stderr).trim(),
            out.status
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claims_document_becomes_a_container() {
        let cdi = serde_json::json!({
            "containerEdits": {
                "env": ["NVIDIA_VISIBLE_DEVICES=void", "LD_LIBRARY_PATH=/usr/local/nvidia/lib64"],
                "deviceNodes": [{ "path": "/dev/nvidiactl", "major": 195, "minor": 255 }],
                "mounts": [{ "hostPath": "/usr/lib/libcuda.so.1", "containerPath": "/usr/local/nvidia/lib64/libcuda.so.1" }],
                "hooks": [{ "hookName": "createContainer", "path": "/h", "args": ["h", "update-ldcache"], "env": ["A=b"] }],
            },
            "devices": [{ "name": "a", "containerEdits": { "deviceNodes": [{ "path": "/dev/nvidia0", "major": 195, "minor": 0 }] } }],
        });
        let expected = Container {
            env: vec![
                "NVIDIA_VISIBLE_DEVICES=void".into(),
                "LD_LIBRARY_PATH=/usr/local/nvidia/lib64".into(),
            ],
            nodes: vec![
                ("/dev/nvidiactl".into(), 195, 255),
                ("/dev/nvidia0".into(), 195, 0),
            ],
            mounts: vec![(
                "/usr/lib/libcuda.so.1".into(),
                "/usr/local/nvidia/lib64/libcuda.so.1".into(),
            )],
            hooks: vec![Hook {
                path: "/h".into(),
                args: vec!["h".into(), "update-ldcache".into()],
                env: vec!["A=b".into()],
            }],
            prefix: "/none".into(),
            others: vec![1],
            ..Container::default()
        };
        let of = |cdi: &Value| Container::of(cdi, Path::new("/none"), vec![1]);
        let container = of(&cdi).unwrap();
        assert_eq!(container, expected);
        assert_eq!(
            container.library_folders(),
            BTreeSet::from(["/usr/local/nvidia/lib64".into()])
        );
        let path = |container: &Container| container.environment().pop().unwrap();
        assert_eq!(
            path(&container),
            ("LD_LIBRARY_PATH".into(), "/usr/lib".into()),
            "as the host has them"
        );
        let apart = Container {
            root: Some("/r".into()),
            ..container
        };
        assert_eq!(
            path(&apart),
            ("LD_LIBRARY_PATH".into(), "/usr/local/nvidia/lib64".into())
        );
        let no_numbers = serde_json::json!({ "devices": [{ "containerEdits": { "deviceNodes": [{ "path": "/dev/nvidia0" }] } }] });
        assert_eq!(
            of(&no_numbers).unwrap_err().to_string(),
            "/dev/nvidia0 has no numbers"
        );
        let other_stage = serde_json::json!({ "containerEdits": { "hooks": [{ "hookName": "poststop", "path": "/h" }] } });
        assert!(
            of(&other_stage)
                .unwrap_err()
                .to_string()
                .contains("poststop")
        );
        assert!(of(&serde_json::json!({})).is_err());
    }
}
