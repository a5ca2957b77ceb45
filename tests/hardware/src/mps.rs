//! NVIDIA's program for MPS on an idle GPU. The supervisor starts a server of each protocol that
//! the driver has, and ends it; between the two each command that divvy gives is given once, and
//! the answers are captured, to be compared with the stand-in of the tests, and programs
//! are clients of the server. The compute mode is changed only if that is allowed.

use std::fmt::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use divvy_host::{Driver, DriverAt, HostRoot};
use divvy_model::{
    GpuDriver, GpuFacts, GpuTarget, GpuUuid, MpsAbility, MpsNamespace, MpsNamespaceName,
    MpsProtocol, MpsServer,
};
use divvy_mps_supervisor::control::Control;
use divvy_mps_supervisor::{Settings, Supervisor};

use crate::apply::Container;
use crate::clients::{self, Limits};
use crate::report::{Allow, Check, Outcome};
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
    pub(crate) nvml: &'a dyn GpuDriver,
    pub(crate) facts: &'a GpuFacts,
    /// The container of a claim of the GPU, for clients; `None`: there is none.
    pub(crate) container: Option<&'a Container>,
    /// Set if the compute mode may be changed.
    pub(crate) may_be_alone: bool,
}

/// Answers about MPS.
#[derive(Default)]
pub(crate) struct Answers {
    pub(crate) outcomes: Vec<(Check, Outcome)>,
    /// Transcripts by name.
    pub(crate) transcripts: Vec<(String, String)>,
}

/// Asks. The newest protocol that the driver has comes first: what its clients show counts.
pub(crate) fn answers(node: &Node<'_>, gpu: &GpuUuid) -> Result<Answers> {
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
        let not_tried = |check: Check| (check, Outcome::NotTried(why.to_owned()));
        let outcomes = Check::that_need(Allow::Mps).map(not_tried);
        return Ok(Answers {
            outcomes: outcomes.chain([not_tried(Check::MpsAlone)]).collect(),
            transcripts: Vec::new(),
        });
    };
    let mut answers = Answers::default();
    let mut said = Vec::new();
    for protocol in [MpsProtocol::V3, MpsProtocol::V2] {
        if protocol.number() > newest.number() {
            continue;
        }
        let begun = Instant::now();
        let folder = Folder::new(node.prefix)?;
        let tried = try_it(node, gpu, protocol, &folder, &mut answers);
        let (text, ready) = tried.with_context(|| format!("protocol v{}", protocol.number()))?;
        said.push(format!(
            "v{}, ready in {ready:.1?}, all in {:.1?}",
            protocol.number(),
            begun.elapsed()
        ));
        let name = format!("mps-v{}", protocol.number());
        answers.transcripts.push((name, text));
    }
    let fine = format!("a server was started, asked and ended: {}", said.join("; "));
    answers.outcomes.push((Check::Mps, Outcome::Ok(fine)));
    Ok(answers)
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
    answers: &mut Answers,
) -> Result<(String, Duration)> {
    let target = GpuTarget::whole(gpu.clone());
    let supervisor = supervisor(node, folder);
    // A half of the GPU.
    let memory = node.facts.memory_bytes.map(|bytes| bytes >> 20);
    let half = MpsServer::equal(2, memory).context("no slots")?;
    let server = match protocol {
        MpsProtocol::V2 => half,
        MpsProtocol::V3 => MpsServer::NAMESPACES,
    };
    let begun = Instant::now();
    supervisor.start(&target, None, server, false)?;
    let ready = begun.elapsed();
    let asked = attend(node, &supervisor, &target, half, folder, answers, protocol);
    let asked = asked.and_then(|()| ask(node, &supervisor, &target, protocol, folder));
    // Whatever came of it, nothing is left.
    let ended = supervisor.stop(&target);
    let text = asked?;
    ended?;
    let left = supervisor.state(None)?;
    ensure!(
        left.running.is_empty() && left.unknown.is_empty(),
        "the daemon runs although it was ended"
    );
    Ok((text, ready))
}

/// Runs programs as clients of a server that was started.
fn attend(
    node: &Node<'_>,
    supervisor: &Supervisor,
    target: &GpuTarget,
    half: MpsServer,
    folder: &Folder,
    answers: &mut Answers,
    protocol: MpsProtocol,
) -> Result<()> {
    let Some(container) = node.container else {
        return Ok(());
    };
    let mut sockets = folder.path.join(protocol.pipe(target));
    if protocol == MpsProtocol::V3 {
        let name: MpsNamespaceName = "c_00000000000000ff".parse()?;
        supervisor.put_namespace(
            target,
            MpsNamespace {
                name,
                cores: half.cores,
                memory_mib: half.memory_mib,
            },
        )?;
        sockets = sockets.join(name.folder());
    }
    let limits = Limits {
        cores: half.cores,
        memory_mib: half.memory_mib,
    };
    let found = clients::of_server(container, &sockets, limits, node.facts);
    answers.outcomes.extend(found);
    if node.may_be_alone {
        let (mode, gpu) = (node.facts.compute_mode, &target.gpu);
        let alone = clients::alone(node.nvml, gpu, mode, container, &sockets);
        answers
            .outcomes
            .push((Check::MpsAlone, Outcome::from(alone)));
    }
    Ok(())
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
    let running = state.running.get(target);
    let running = running.context("the server is not listed")?;
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
    let server = running.pids.first().map(ToString::to_string);
    let (pipe, log) = (
        control.pipe.display().to_string(),
        control.log.display().to_string(),
    );
    // Names that are others in each run.
    let plain = |text: &str| {
        let text = text.replace(&pipe, "PIPE").replace(&log, "LOG");
        server
            .iter()
            .fold(text, |text, pid| text.replace(pid.as_str(), "SERVER"))
    };
    let mut text = String::new();
    let mut give = |args: &[&str], input: &str| -> Result<String> {
        let begun = Instant::now();
        let answer = control.run(args, input, WITHIN);
        let took = begun.elapsed();
        let said = answer.unwrap_or_else(|error| divvy_model::chain(&error));
        let command = plain(&[&args.join(" "), input].concat());
        writeln!(text, "$ {command}\n{}\n# {took:.1?}\n", plain(&said))?;
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
