//! NVIDIA's program for MPS on an idle GPU. The supervisor starts a server of each protocol that
//! the driver has, and ends it; between the two each command that divvy gives is given once, and
//! what the program answered is captured, to be compared with the stand-in of the tests. No setting
//! of the GPU is changed.

use std::fmt::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use divvy_host::{Driver, DriverAt, HostRoot};
use divvy_model::{GpuTarget, GpuUuid, MpsAbility, MpsProtocol, MpsServer};
use divvy_mps_supervisor::control::Control;
use divvy_mps_supervisor::{Settings, Supervisor};

use crate::report::Outcome;
use crate::smi::see;

/// NVIDIA's programs.
const PROGRAMS: [&str; 2] = ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];
/// Time limit of a command.
const WITHIN: Duration = Duration::from_secs(10);
/// The states of a server that NVIDIA names.
const STATES: [&str; 4] = ["INITIALIZING", "ACTIVE", "READY", "FAULT"];

/// The node with the GPU.
pub(crate) struct Node<'a> {
    pub(crate) host: &'a HostRoot,
    pub(crate) driver: &'a Driver,
    /// Where the driver was asked to be looked for.
    pub(crate) driver_root: Option<&'a Path>,
    pub(crate) driver_version: &'a str,
    /// Where the host is seen.
    pub(crate) prefix: &'a Path,
}

/// Returns whether it went as it should, and the transcripts by file name.
pub(crate) fn outcome(node: &Node<'_>, gpu: &GpuUuid) -> Result<(Outcome, Vec<(String, String)>)> {
    let root = &node.driver.root;
    let is_there = |name: &&str| matches!(root.find_program(name), Ok(Some(_)));
    let has_programs = PROGRAMS.iter().all(is_there);
    let for_all_users = if has_programs {
        let folder = Folder::new(node.prefix)?;
        let tried = supervisor(node, &folder).serves_all_users();
        Some(tried.context("the driver's MPS cannot be tried")?)
    } else {
        None
    };
    let ability = MpsAbility::of_node(node.driver_version, true, has_programs, for_all_users);
    let Some(newest) = ability.protocol() else {
        let why = ability.lack().unwrap_or("it has no MPS");
        return Ok((Outcome::NotTried(why.to_owned()), Vec::new()));
    };
    let mut transcripts = Vec::new();
    let mut said = Vec::new();
    for protocol in [MpsProtocol::V2, MpsProtocol::V3] {
        if protocol.number() > newest.number() {
            continue;
        }
        let begun = Instant::now();
        let text = Folder::new(node.prefix).and_then(|folder| try_it(node, gpu, protocol, &folder));
        let text = text.with_context(|| format!("protocol v{}", protocol.number()))?;
        said.push(format!("v{} in {:.1?}", protocol.number(), begun.elapsed()));
        transcripts.push((format!("mps-v{}.txt", protocol.number()), text));
    }
    let fine = format!("a server was started, asked and ended: {}", said.join(", "));
    Ok((Outcome::Ok(fine), transcripts))
}

/// A folder with one short path here and on the host, as the supervisor needs it.
struct Folder {
    _made: tempfile::TempDir,
    path: PathBuf,
}

impl Folder {
    fn new(prefix: &Path) -> Result<Self> {
        let on_host = see(prefix, Path::new("/tmp"));
        let made = tempfile::Builder::new().prefix("dm").tempdir_in(on_host)?;
        let path = Path::new("/").join(made.path().strip_prefix(prefix)?);
        if path != made.path() {
            fs_err::create_dir_all("/tmp")?;
            symlink(made.path(), &path)?;
        }
        Ok(Self { _made: made, path })
    }
}

fn supervisor(node: &Node<'_>, folder: &Folder) -> Supervisor {
    Supervisor::new(Settings {
        dir: folder.path.clone(),
        host: node.host.clone(),
        driver: DriverAt {
            seen: node.driver_root.map(|root| see(node.prefix, root)),
            host: node.driver_root.map(Path::to_owned),
        },
        cgroup: None,
        memory: None,
    })
}

/// Starts a server, asks it everything, and ends it.
fn try_it(
    node: &Node<'_>,
    gpu: &GpuUuid,
    protocol: MpsProtocol,
    folder: &Folder,
) -> Result<String> {
    let target = GpuTarget::whole(gpu.clone());
    let supervisor = supervisor(node, folder);
    let server = match protocol {
        MpsProtocol::V2 => MpsServer::equal(2, Some(2 << 10)).context("no slots")?,
        MpsProtocol::V3 => MpsServer::NAMESPACES,
    };
    supervisor.start(&target, None, server, false)?;
    let asked = ask(node, &supervisor, &target, protocol, folder);
    // Whatever came of it, nothing is left.
    let ended = supervisor.stop(&target);
    let text = asked?;
    ended?;
    ensure!(
        supervisor.state(None)?.is_empty(),
        "the daemon runs although it was ended"
    );
    Ok(text)
}

/// Gives each command once, and writes down what was answered.
fn ask(
    node: &Node<'_>,
    supervisor: &Supervisor,
    target: &GpuTarget,
    protocol: MpsProtocol,
    folder: &Folder,
) -> Result<String> {
    let state = supervisor.state(None)?;
    let running = state.get(target).context("the server is not listed")?;
    ensure!(
        running.unwell.is_none(),
        "a server without a client does not serve: {:?}",
        running.unwell
    );
    let found = node.driver.root.find_program("nvidia-cuda-mps-control")?;
    let program = found.context("the program is gone")?;
    let control = Control {
        driver: node.driver,
        program: &program,
        pipe: &folder.path.join(protocol.pipe(target)),
        log: &folder.path.join(target.to_string()).join("log"),
        memory: None,
        device: target.gpu.as_str(),
    };
    let mut text = String::new();
    let mut give = |args: &[&str], input: &str| -> Result<String> {
        let begun = Instant::now();
        let answer = control.run(args, input, WITHIN);
        let took = begun.elapsed();
        let said = answer.unwrap_or_else(|error| divvy_model::chain(&error));
        let command = [&args.join(" "), input].concat();
        writeln!(text, "$ {command}\n{said}\n# {took:.1?}\n")?;
        Ok(said)
    };
    let state = match protocol {
        MpsProtocol::V2 => {
            for command in [
                "get_default_active_thread_percentage",
                "set_default_active_thread_percentage 30",
                "set_default_device_pinned_mem_limit 0 1044M",
                "get_default_device_pinned_mem_limit 0",
                "ps",
                "no_such_command",
            ] {
                give(&[], command)?;
            }
            let listed = give(&[], "get_server_list")?;
            let pid = listed.lines().next().context("no server is listed")?;
            give(&[], &format!("get_client_list {pid}"))?;
            give(&[], &format!("get_server_status {pid}"))?
        }
        MpsProtocol::V3 => {
            let (name, csv) = ("c_0000000000000001", "--format=csv,noheader");
            let of = "--server=s";
            for words in [
                &["namespace", "create", name, of][..],
                &[
                    "namespace",
                    "set",
                    name,
                    of,
                    "--active-thread-percentage=30",
                ],
                &["namespace", "set", name, of, "--pinned-memory-limit=1044M"],
                &["namespace", "list", csv],
                &["namespace", "get", name, "s", "pipe-directory"],
                &["client", "list", csv],
                &["namespace", "delete", name, of],
                &["no", "such", "command"],
            ] {
                give(&[&["-p", "3"], words].concat(), "")?;
            }
            give(&["-p", "3", "server", "list", csv], "")?
        }
    };
    let mut words = state.split(|c: char| !c.is_ascii_alphanumeric());
    ensure!(
        words.any(|word| STATES.iter().any(|known| word.eq_ignore_ascii_case(known))),
        "none of {STATES:?} is in the answer about the server's state: {state:?}"
    );
    Ok(text)
}
