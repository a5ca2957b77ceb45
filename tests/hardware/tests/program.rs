//! The program as it is called: on a machine without a GPU, and with simulated GPUs, their
//! libraries and programs in the place of real ones.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

#[path = "../src/testing.rs"]
mod testing;

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use divvy_host::fixture::{Fixture, FixtureGpu};
use divvy_model::{ComputeMode, CudaVersion, GpuProcess, Inventory, MigMode};
use nvidia_ml::MockState;

fn hardware(args: &[&str], env: &[(&str, &str)]) -> Output {
    let program = env!("CARGO_BIN_EXE_divvy-hardware");
    Command::new(program)
        .args(args)
        .env_clear()
        .envs(env.iter().copied())
        .output()
        .unwrap()
}

/// The mock library, which cargo puts beside this test.
fn library() -> PathBuf {
    std::env::current_exe()
        .unwrap()
        .with_file_name("libnvidia_ml.so")
}

/// The hook program. Cargo puts it beside the program, but does not build it for this test, or an
/// old one is there.
fn hook() -> &'static Path {
    static HOOK: LazyLock<PathBuf> = LazyLock::new(|| {
        let program = Path::new(env!("CARGO_BIN_EXE_divvy-hardware"));
        let release = program
            .parent()
            .is_some_and(|folder| folder.ends_with("release"));
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(["build", "--quiet", "--package", "divvy-cdi-hook"])
            .args(release.then_some("--release"));
        assert!(cargo.status().unwrap().success());
        program.with_file_name("divvy-cdi-hook")
    });
    &HOOK
}

/// Returns true if processes may have a mount namespace of their own, as the program needs it.
fn may_have_namespaces() -> bool {
    Command::new("unshare")
        .args(["--mount", "true"])
        .status()
        .is_ok_and(|status| status.success())
}

#[test]
fn without_a_gpu_it_says_so_and_exits_with_3() {
    let empty = tempfile::tempdir().unwrap();
    let out = hardware(&["--driver-root", empty.path().to_str().unwrap()], &[]);
    let said = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(3), "{said}");
    let end =
        "there is no NVIDIA GPU that can be used on this machine: no usable NVIDIA driver found";
    assert!(said.lines().last().unwrap().starts_with(end), "{said}");
}

/// A host with simulated GPUs, in a folder.
struct Machine {
    folder: tempfile::TempDir,
    inventory: Inventory,
    nodes: PathBuf,
    state: MockState,
}

impl Machine {
    fn new(spec: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let host = folder.path().join("host");
        let inventory = testing::inventory(spec);
        let gpus = inventory.gpus.values().map(|gpu| FixtureGpu {
            minor: gpu.facts.minor.unwrap(),
            pci: gpu.facts.pci_address,
            numa_node: gpu.topology.numa_node,
            pcie_root: gpu.topology.pcie_root.clone().unwrap(),
        });
        let made = Fixture::new(gpus.collect()).build(&host).unwrap();
        testing::kernel_files(&host, &inventory);
        let state =
            MockState::open_or_create(folder.path().join("gpus.json"), &spec.parse().unwrap())
                .unwrap();
        Self {
            nodes: made.node_table,
            folder,
            inventory,
            state,
        }
    }

    fn host(&self) -> PathBuf {
        self.folder.path().join("host")
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("gpus.json")
    }

    /// A libcuda that counts the nodes it sees and knows these GPUs.
    fn with_cuda(self) -> Self {
        let built = std::env::current_exe().unwrap();
        let built = built
            .parent()
            .unwrap()
            .with_file_name("examples")
            .join("libfake_cuda.so");
        assert!(
            built.exists(),
            "cargo build -p divvy-hardware --examples makes it"
        );
        let mut bytes = fs_err::read(built).unwrap();
        let mut lines = "\n--- GPUs ---\n".to_owned();
        for (uuid, gpu) in &self.inventory.gpus {
            let facts = &gpu.facts;
            let (minor, sm, memory) = (
                facts.minor.unwrap(),
                facts.multiprocessors.unwrap(),
                facts.memory_bytes.unwrap(),
            );
            let (major, rest) = (
                facts.compute_capability.major,
                facts.compute_capability.minor,
            );
            let (pci, name) = (facts.pci_address, &facts.product_name);
            let smallest = gpu
                .mig
                .iter()
                .flat_map(|mig| mig.capabilities.profiles())
                .map(|p| p.multiprocessors)
                .min();
            let (memory, smallest) = (memory / 100 * 99, smallest.unwrap_or(0));
            writeln!(
                lines,
                "{minor}|{uuid}|{pci}|{name}|{sm}|{memory}|{major}|{rest}|{smallest}"
            )
            .unwrap();
        }
        bytes.extend(lines.into_bytes());
        fs_err::write(
            self.host()
                .join("usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05"),
            bytes,
        )
        .unwrap();
        self
    }

    /// Programs for MPS.
    fn with_mps(self) -> Self {
        for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
            fs_err::copy(
                divvy_mps_stand_in::program(),
                self.host().join("usr/bin").join(name),
            )
            .unwrap();
        }
        self
    }

    /// An `nvidia-smi` that answers as the real one, and a root file system in which it can run.
    fn with_smi(self) -> Self {
        let host = self.host();
        fs_err::write(host.join("said.xml"), testing::xml(&self.inventory)).unwrap();
        let script = "#!/bin/sh\n\
            show() { while read -r line; do echo \"$line\"; done; }\n\
            case \"$1 $4\" in\n\
            '-q '*) show </said.xml ;;\n\
            'compute-policy --list') echo \"| 0 Timeslice $(show </run/slice) |\" ;;\n\
            'compute-policy --set-timeslice'*)\n\
                n=${4#*=}; [ \"$n\" = \"$4\" ] && n=$5\n\
                case $n in 0) n=Default ;; 1) n=Short ;; 2) n=Medium ;; 3) n=Long ;; esac; echo $n >/run/slice ;;\n\
            esac\n";
        let smi = host.join("usr/bin/nvidia-smi");
        fs_err::write(&smi, script).unwrap();
        fs_err::set_permissions(&smi, std::fs::Permissions::from_mode(0o755)).unwrap();
        fs_err::write(host.join("run/slice"), "Medium\n").unwrap();
        // The shell, its loader and its libc.
        let maps = fs_err::read_to_string("/proc/self/maps").unwrap();
        let mapped = maps
            .lines()
            .filter_map(|line| line.find('/').map(|at| line[at..].to_owned()));
        let libraries = mapped.filter(|path| path.ends_with("/libc.so.6")).take(1);
        for file in libraries.chain(["/bin/sh".into(), "/lib64/ld-linux-x86-64.so.2".into()]) {
            let to = host.join(file.strip_prefix('/').unwrap());
            fs_err::create_dir_all(to.parent().unwrap()).unwrap();
            fs_err::copy(file, to).unwrap();
        }
        self
    }

    /// Runs the program; exit status and what came of each check, as "name outcome".
    fn run(&self, flags: &[&str], prefix: &str) -> (Option<i32>, Vec<String>, String) {
        self.run_by(
            Command::new(env!("CARGO_BIN_EXE_divvy-hardware")),
            flags,
            prefix,
        )
    }

    /// By way of another program.
    fn run_by(
        &self,
        mut command: Command,
        flags: &[&str],
        prefix: &str,
    ) -> (Option<i32>, Vec<String>, String) {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let (library, host, nodes) = (text(&library()), text(&self.host()), text(&self.nodes));
        let args = [
            "--json",
            "--nvml-library",
            &library,
            "--driver-root",
            &host,
            "--host-root",
            &host,
        ];
        let hook = text(hook());
        let args = [
            &args[..],
            &["--device-nodes", &nodes, "--hook", &hook],
            flags,
        ]
        .concat();
        // The mock library takes the path as it is.
        let state = format!("{prefix}{}", text(&self.state()));
        let out = command
            .args(&args)
            .env_clear()
            .env("DIVVY_MOCK_STATE", &state)
            .output()
            .unwrap();
        let said = String::from_utf8(out.stdout).unwrap() + &String::from_utf8(out.stderr).unwrap();
        let lines = said
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let of = |line: serde_json::Value| {
            let field = |name: &str| {
                line.get(name)
                    .and_then(|value| value.as_str())
                    .unwrap()
                    .to_owned()
            };
            format!("{} {}", field("check"), field("outcome"))
        };
        (out.status.code(), lines.map(of).collect(), said)
    }

    /// Does what a driver does: lists the process that computes in a container, until it has ended.
    fn list_the_program(&self, ended: &AtomicBool) {
        let mut listed: Option<u32> = None;
        while !ended.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(20));
            match listed {
                None => {
                    listed = in_a_container(&self.state());
                    let process = listed.map(|pid| GpuProcess::new(pid, None));
                    self.state
                        .edit(|e| e.gpu_at(0).unwrap().processes.extend(process))
                        .unwrap();
                }
                Some(pid) if !Path::new(&format!("/proc/{pid}")).exists() => {
                    return self.state.edit(|engine| engine.end_process(pid)).unwrap();
                }
                Some(_) => {}
            }
        }
    }
}

/// The process that runs as the program in a claim's container, of the run with this state.
fn in_a_container(state: &Path) -> Option<u32> {
    let processes = fs_err::read_dir("/proc").unwrap().filter_map(Result::ok);
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        let of =
            |pid: &str, file: &str| fs_err::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let is_it = of(&pid.to_string(), "cmdline")
            .starts_with(b"/usr/bin/divvy-hardware\0--inside\0/tmp/");
        let stat = String::from_utf8_lossy(&of(&pid.to_string(), "stat")).into_owned();
        let parent = stat.split_whitespace().nth(3).unwrap_or_default();
        is_it && String::from_utf8_lossy(&of(parent, "environ")).contains(state.to_str().unwrap())
    })
}

#[test]
fn what_only_reads_runs_on_any_nvml_and_becomes_fixtures() {
    let machine = Machine::new("h100x2").with_smi();
    let captured = machine.folder.path().join("captured");
    let flags = ["--as-host", "--capture", captured.to_str().unwrap()];
    let (status, checks, said) = machine.run(&flags, "");
    assert_eq!(status, Some(4), "{said}");
    for check in [
        "inventory",
        "conformance",
        "nvidia-smi",
        "sysfs",
        "time-slice-is-read",
    ] {
        assert!(checks.contains(&format!("{check} ok")), "{check}: {said}");
    }
    // The driver is too old for the last one.
    for check in ["as-the-image", "claim", "cuda", "mig-mode", "memory-caps"] {
        assert!(
            checks.contains(&format!("{check} not-tried")),
            "{check}: {said}"
        );
    }
    assert_eq!(checks.len(), CHECKS, "{said}");
    let read = |name: &str| fs_err::read_to_string(captured.join(name)).unwrap();
    let inventory: serde_json::Value = serde_json::from_str(&read("inventory.json")).unwrap();
    assert_eq!(inventory["gpus"].as_object().unwrap().len(), 2);
    assert!(read("nvidia-smi.xml").contains("<product_name>NVIDIA H100 80GB HBM3<"));

    machine
        .state
        .edit(|e| e.gpu_at(1).unwrap().facts.minor = Some(7))
        .unwrap();
    let (status, checks, said) = machine.run(&["--as-host"], "");
    assert_eq!(status, Some(1), "{said}");
    assert!(
        checks.contains(&"nvidia-smi failed".to_owned())
            && checks.contains(&"sysfs failed".to_owned()),
        "{said}"
    );
}

/// Number of checks.
const CHECKS: usize = 26;
/// Everything that can be allowed.
const ALL: [&str; 2] = [
    "--allow",
    "program,mps,compute-mode,memory-limit,time-slice,mig",
];
/// Where a comparison of two reports ends.
const MEASURED: &str = "## measured";

/// Whatever may be there to be used: programs for MPS, a libcuda, an idle GPU.
#[test]
fn without_permission_nothing_is_changed_and_each_reason_is_said() {
    let machine = Machine::new("h100x2").with_smi().with_cuda().with_mps();
    let files = || {
        let (state, slice) = (machine.state(), machine.host().join("run/slice"));
        [state, slice].map(|file| fs_err::read(file).unwrap())
    };
    let before = files();
    let mut reports = Vec::new();
    for number in 0..2 {
        let file = machine.folder.path().join(format!("report{number}"));
        let flags = ["--as-host", "--report", file.to_str().unwrap()];
        let (status, checks, said) = machine.run(&flags, "");
        assert_eq!((status, checks.len()), (Some(4), CHECKS), "{said}");
        reports.push(fs_err::read_to_string(file).unwrap());
    }
    assert_eq!(files(), before, "GPUs and time slice");
    let [first, second] = [0, 1].map(|at: usize| reports[at].split_once(MEASURED).unwrap().0);
    assert_eq!(first, second, "a report can be compared");
    assert!(
        first.contains("allowed: nothing: it only read\n"),
        "{first}"
    );
    assert!(
        first.contains("\nGPU-0 at PCI-0: NVIDIA H100 80GB HBM3, "),
        "{first}"
    );
    let part = |title: &str| {
        let (_, rest) = first.split_once(&format!("## {title}\n")).unwrap();
        rest.split("\n\n").next().unwrap().to_owned()
    };
    for (allow, check) in [
        ("program", "claim"),
        ("mps", "mps"),
        ("mps", "mps-users"),
        ("compute-mode", "mps-alone"),
        ("memory-limit", "memory-limit"),
        ("mig", "partition-claim"),
        ("time-slice", "time-slice"),
    ] {
        let line = format!("{check}: not allowed (--allow {allow}: ");
        assert!(part("not asked").contains(&line), "{line}: {first}");
    }
    assert_eq!(part("asked").lines().count(), 6, "{first}");
    assert!(
        part("never asked by this program").contains("FAULT"),
        "{first}"
    );
}

/// The others are not: each permission is for what it names.
#[test]
fn a_permission_changes_what_it_names_and_nothing_else() {
    let machine = Machine::new("h100x1").with_smi().with_cuda().with_mps();
    let before = fs_err::read(machine.state()).unwrap();
    for allow in ["mps", "compute-mode", "memory-limit", "time-slice"] {
        let (_, checks, said) = machine.run(&["--as-host", "--allow", allow], "");
        let done = |check: &str| checks.contains(&format!("{check} ok"));
        assert_eq!(done("mps"), allow == "mps", "{allow}: {said}");
        assert_eq!(done("time-slice"), allow == "time-slice", "{allow}: {said}");
        assert!(
            !done("claim") && !done("mps-alone") && !done("mig-mode"),
            "{said}"
        );
        assert_eq!(fs_err::read(machine.state()).unwrap(), before, "{allow}");
    }
}

#[test]
fn a_libcuda_without_functions_fails_one_check_and_the_claim_is_let_go() {
    // A claim is prepared, and libcuda is the fixture's, which has a name and nothing else.
    let machine = Machine::new("l4x1").with_smi();
    let (status, checks, said) = machine.run(&["--as-host", "--allow", "program"], "");
    assert_eq!(status, Some(1), "{said}");
    assert!(
        checks.contains(&"claim ok".to_owned()) && checks.contains(&"let-go ok".to_owned()),
        "{said}"
    );
    assert!(said.contains("cuInit is not in libcuda"), "{said}");
    assert_eq!(
        checks
            .iter()
            .filter(|check| check.ends_with("failed"))
            .collect::<Vec<_>>(),
        ["cuda failed"],
        "{said}"
    );
}

/// A driver from R615 on has both protocols.
#[test]
fn the_program_for_mps_is_asked_by_each_protocol_that_it_has() {
    let machine = Machine::new("h100x1").with_smi().with_mps();
    let cuda = CudaVersion {
        major: 13,
        minor: 2,
    };
    machine
        .state
        .edit(|engine| engine.set_driver_version("615.71.09", cuda))
        .unwrap();
    let captured = machine.folder.path().join("captured");
    let captured_to = captured.to_str().unwrap();
    let flags = ["--as-host", "--allow", "mps", "--capture", captured_to];
    let (_, checks, said) = machine.run(&flags, "");
    assert!(checks.contains(&"mps ok".to_owned()), "{said}");
    let read = |name: &str| fs_err::read_to_string(captured.join(name)).unwrap();
    assert!(read("mps-v2.txt").contains("$ get_server_list\n"));
    let asked = read("mps-v3.txt");
    for answer in [
        "$ -p 3 namespace delete c_0000000000000001 --server=s\n\n",
        "c_0000000000000001,s,Ready,1G,30.00,0,",
        "$ -p 3 no such command\nUnknown command\n",
    ] {
        assert!(asked.contains(answer), "{asked}");
    }
}

/// Everything, as the image.
#[test]
fn all_of_it_runs_as_the_image_and_leaves_the_gpu_as_it_was() {
    if !may_have_namespaces() {
        return;
    }
    let machine = Machine::new("h100x2").with_smi().with_cuda().with_mps();
    let captured = machine.folder.path().join("captured");
    let report = machine.folder.path().join("report.txt");
    let flags = ["--capture", captured.to_str().unwrap()];
    let flags = [&flags[..], &["--report", report.to_str().unwrap()], &ALL].concat();
    let ended = AtomicBool::new(false);
    let (status, checks, said) = std::thread::scope(|scope| {
        let driver = scope.spawn(|| machine.list_the_program(&ended));
        let ran = machine.run(&flags, "/host");
        ended.store(true, Ordering::Relaxed);
        driver.join().unwrap();
        ran
    });
    let other: Vec<&str> = checks
        .iter()
        .map(String::as_str)
        .filter(|check| !check.ends_with(" ok"))
        .collect();
    // The driver is too old for them.
    let too_old = ["memory-caps not-tried", "memory-limit not-tried"];
    assert_eq!(other, too_old, "{said}");
    assert_eq!((status, checks.len()), (Some(4), CHECKS), "{said}");
    let report = fs_err::read_to_string(report).unwrap();
    for part in [
        "allowed: program, mps, compute-mode, memory-limit, time-slice, mig\n",
        "mps-client ok: of 132 multiprocessors a client of 50 % has 66\n",
        "mps-memory ok: 39936 of 40779 MiB were allocated, and more was refused with code 2\n",
        "mps-users ok: ",
        "mps-alone ok: a program beside the server was refused: cuDevicePrimaryCtxRetain failed with code 46",
    ] {
        assert!(report.contains(part), "{part}: {report}");
    }
    let engine = machine.state.read().unwrap();
    let gpu = &engine.gpus()[0];
    assert_eq!(gpu.facts.compute_mode, Some(ComputeMode::Default));
    assert_eq!(
        gpu.facts.mig_mode,
        MigMode::Supported {
            current: false,
            pending: false
        }
    );
    assert!(gpu.instances.is_empty() && gpu.processes.is_empty());
    let asked = fs_err::read_to_string(captured.join("mps-v2.txt")).unwrap();
    for answer in [
        "$ get_default_active_thread_percentage\n50.0\n",
        "$ get_default_device_pinned_mem_limit 0\n1G\n",
        "$ no_such_command\nUnknown command \"no_such_command\"\n",
    ] {
        assert!(asked.contains(answer), "{asked}");
    }
    assert!(asked.contains("\nACTIVE\n"), "{asked}");
    assert_eq!(
        fs_err::read_to_string(machine.host().join("run/slice")).unwrap(),
        "Medium\n"
    );
}

#[test]
fn without_the_right_to_namespaces_the_untried_rest_is_named() {
    let machine = Machine::new("h100x2").with_smi().with_cuda();
    let mut command = Command::new("setpriv");
    command.args([
        "--bounding-set",
        "-sys_admin",
        env!("CARGO_BIN_EXE_divvy-hardware"),
    ]);
    let (status, checks, said) = machine.run_by(command, &["--allow", "program"], "");
    if said.contains("setpriv: ") {
        // Not as root.
        return;
    }
    for check in ["as-the-image", "hook", "libcuda", "isolation", "mig-mode"] {
        assert!(
            checks.contains(&format!("{check} not-tried")),
            "{check}: {said}"
        );
    }
    // The plain process looks for GPUs on this machine itself.
    assert!(said.contains("cuInit failed with code 100"), "{said}");
    assert_eq!(status, Some(1), "{said}");
}
