//! Changes of a container by which the driver works in it, as CDI has it.

use divvy_cdi::{ContainerEdits, Hook, Mount, Stage};

use crate::files::{DriverFile, DriverFiles, LIBRARY_DIR};
use crate::mig::MigNodes;
use crate::nodes::{ControlNodes, DRM_LINKS, DeviceNode, GpuNodes};

/// Seconds that a runtime gives the hook. Its work takes milliseconds; what may hold it up is a
/// volume of the pod on a server that does not answer.
const HOOK_TIMEOUT: u32 = 30;

/// Variable with the node plugin's socket, in the environment of the hook program.
const HOOK_SOCKET: &str = "DIVVY_HOOK_SOCKET";

/// Way in which libraries become findable in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LibraryDelivery {
    /// Links and the loader's cache are made by the hook program. Works in every image.
    Hook(HookProgram),
    /// No program is called: each library is mounted under every name it is asked for, and
    /// `LD_LIBRARY_PATH` leads to it. Replaces an image's own `LD_LIBRARY_PATH`; for hosts that do
    /// not let runtimes call programs.
    MountsOnly,
}

/// The hook program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookProgram {
    /// Path on the host.
    pub path: String,
    /// Socket of the node plugin, which the program asks for caps, and to which it reports why it
    /// failed.
    pub socket: String,
}

const READ_ONLY: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
/// Connecting to a socket writes nothing to its file system.
const SOCKET: [&str; 6] = ["ro", "nosuid", "nodev", "rbind", "rprivate", "noexec"];
/// The value in NVIDIA's own CUDA images.
const LIBRARY_PATH: &str = "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64";

/// Returns the edits for every container with any GPU of this driver.
pub fn driver_edits(
    files: &DriverFiles,
    control: &ControlNodes,
    delivery: &LibraryDelivery,
) -> ContainerEdits {
    let mut edits = ContainerEdits {
        // Keeps NVIDIA's own runtime hook, where a host has it, from adding all GPUs a second time.
        env: vec!["NVIDIA_VISIBLE_DEVICES=void".to_owned()],
        ..ContainerEdits::default()
    };
    add_nodes(&mut edits, &control.nodes);
    edits.mounts.extend(
        files
            .libraries
            .iter()
            .map(|library| mount(&library.file, &READ_ONLY)),
    );
    match delivery {
        LibraryDelivery::Hook(program) => edits.hooks = hooks(files, program),
        LibraryDelivery::MountsOnly => {
            edits.mounts.extend(names_as_mounts(files));
            edits.env.push(LIBRARY_PATH.to_owned());
        }
    }
    // Found by their paths and not by a loader, so they are mounted in either way of delivery.
    for list in [&files.binaries, &files.configs, &files.firmware] {
        edits
            .mounts
            .extend(list.iter().map(|file| mount(file, &READ_ONLY)));
    }
    edits
        .mounts
        .extend(files.sockets.iter().map(|file| mount(file, &SOCKET)));
    edits
}

/// Returns the edits for one GPU, on top of [`driver_edits`].
pub fn gpu_edits(nodes: &GpuNodes) -> ContainerEdits {
    let mut edits = ContainerEdits::default();
    add_nodes(&mut edits, std::slice::from_ref(&nodes.main));
    add_drm(&mut edits, nodes);
    edits
}

/// Returns the edits for one partition, on top of [`driver_edits`]: the GPU's own node, and the
/// capabilities that say which part of it may be used. The GPU's DRM nodes only if the partition
/// can do graphics.
pub fn partition_edits(gpu: &GpuNodes, partition: &MigNodes, graphics: bool) -> ContainerEdits {
    let mut edits = ContainerEdits::default();
    let nodes = [
        &gpu.main,
        &partition.gpu_instance,
        &partition.compute_instance,
    ]
    .map(DeviceNode::clone);
    add_nodes(&mut edits, &nodes);
    if graphics {
        add_drm(&mut edits, gpu);
    }
    edits
}

/// DRM nodes, and the links to them by PCI address: the folder as a whole, since a mount cannot be
/// a link. Links of other GPUs lead nowhere in the container.
fn add_drm(edits: &mut ContainerEdits, gpu: &GpuNodes) {
    add_nodes(edits, &gpu.drm);
    if gpu.has_links {
        let links = DriverFile {
            host: DRM_LINKS.to_owned(),
            container: DRM_LINKS.to_owned(),
        };
        edits.mounts.push(mount(&links, &READ_ONLY));
    }
}

fn add_nodes(edits: &mut ContainerEdits, nodes: &[DeviceNode]) {
    const OTHERS_READ_WRITE: u32 = 0o006;
    for node in nodes {
        // A program in the container need not be root, so a node that is not open to all needs its
        // group. The group of root would give more than the node.
        let closed = node.info.mode & OTHERS_READ_WRITE != OTHERS_READ_WRITE;
        if closed && node.info.gid != 0 && !edits.additional_gids.contains(&node.info.gid) {
            edits.additional_gids.push(node.info.gid);
        }
        edits.device_nodes.push(node.into());
    }
    edits.additional_gids.sort_unstable();
}

fn mount(file: &DriverFile, options: &[&str]) -> Mount {
    Mount {
        host_path: file.host.clone(),
        container_path: file.container.clone(),
        options: options.iter().map(|&option| option.to_owned()).collect(),
    }
}

/// Returns the call by which the memory of a share is capped before its program runs; `None` where
/// no program is called.
pub fn cap(delivery: &LibraryDelivery, claim: &str, device: &str) -> Option<Hook> {
    let LibraryDelivery::Hook(program) = delivery else {
        return None;
    };
    let socket = &program.socket;
    let args = [
        "limits", "--socket", socket, "--claim", claim, "--device", device,
    ];
    // In the runtime's own namespaces: the container's process has its final control group, and its
    // program cannot run before this ends.
    let args = args.map(str::to_owned);
    Some(hook(Stage::CreateRuntime, program, args))
}

/// Returns a call of the hook program.
fn hook(stage: Stage, program: &HookProgram, args: impl IntoIterator<Item = String>) -> Hook {
    let name = std::iter::once("divvy-cdi-hook".to_owned());
    Hook::new(
        stage,
        program.path.clone(),
        name.chain(args).collect(),
        // An environment of its own: without one, a runtime may pass on another, with an
        // `LD_PRELOAD` of the image in it (ADR 1).
        vec![format!("{HOOK_SOCKET}={}", program.socket)],
        HOOK_TIMEOUT,
    )
}

/// Returns the one call that makes the driver's files found in a container.
fn hooks(files: &DriverFiles, program: &HookProgram) -> Vec<Hook> {
    let links = files.symlinks.iter();
    let links = links.flat_map(|s| ["--link".to_owned(), format!("{}::{}", s.target, s.link)]);
    let mut steps: Vec<Vec<String>> = Vec::new();
    if !files.symlinks.is_empty() {
        let name = std::iter::once("create-symlinks".to_owned());
        steps.push(name.chain(links).collect());
    }
    // In this order: links lead elsewhere for an image with newer libraries of CUDA, and the cache
    // names what is there then.
    let more: [&[&str]; 4] = [
        &[
            "enable-cuda-compat",
            "--host-driver-version",
            &files.version,
            "--folder",
            LIBRARY_DIR,
        ],
        &["update-ldcache", "--folder", LIBRARY_DIR],
        &["disable-device-node-modification"],
        &["update-application-profile"],
    ];
    steps.extend(more.map(|args| args.iter().map(|&arg| arg.to_owned()).collect()));
    // A call for each would cost a container's start three milliseconds more, each.
    let then = "then".to_owned();
    vec![hook(Stage::CreateContainer, program, steps.join(&then))]
}

/// The links as further mounts of the files they lead to.
fn names_as_mounts(files: &DriverFiles) -> Vec<Mount> {
    // Targets are relative to the link's folder. `../` is that of `gbm/`, which leads back to the
    // libraries.
    let target_of = |link: &crate::Symlink| match link.target.strip_prefix("../") {
        Some(above) => format!("{LIBRARY_DIR}/{above}"),
        None => link
            .link
            .rsplit_once('/')
            .map_or_else(String::new, |(folder, _)| {
                format!("{folder}/{}", link.target)
            }),
    };
    let mut mounts = Vec::new();
    for link in &files.symlinks {
        let mut path = target_of(link);
        // A link may lead to another link (libcuda.so to libcuda.so.1), never further.
        if let Some(next) = files.symlinks.iter().find(|other| other.link == path) {
            path = target_of(next);
        }
        // A link without a mounted library behind it would be an empty name.
        if let Some(library) = files
            .libraries
            .iter()
            .find(|library| library.file.container == path)
        {
            let file = DriverFile {
                host: library.file.host.clone(),
                container: link.link.clone(),
            };
            mounts.push(mount(&file, &READ_ONLY));
        }
    }
    mounts
}
