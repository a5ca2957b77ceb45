//! The folder that a failed case leaves behind, which explains it.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use fs_err as fs;

use crate::cluster::Cluster;

/// Every kind whose objects are worth reading afterwards.
const KINDS: &str = "pods,resourceclaims,resourceclaimtemplates,resourceslices,deviceclasses,nodes,daemonsets,\
                     deployments,replicasets,jobs,services,serviceaccounts,validatingadmissionpolicies";

/// Questions whose answers go into a file each.
const ASKED: &[(&str, &[&str])] = &[
    (
        "events.txt",
        &[
            "kubectl",
            "get",
            "events",
            "--all-namespaces",
            "--sort-by=.lastTimestamp",
        ],
    ),
    (
        "pods.txt",
        &[
            "kubectl",
            "get",
            "pods",
            "--all-namespaces",
            "--output=wide",
        ],
    ),
    (
        "describe.txt",
        &[
            "kubectl",
            "describe",
            "pods,resourceclaims",
            "--all-namespaces",
        ],
    ),
    (
        "objects.yaml",
        &["kubectl", "get", KINDS, "--all-namespaces", "--output=yaml"],
    ),
    (
        "containers.txt",
        &["ctr", "--namespace=k8s.io", "containers", "list"],
    ),
    (
        "processes.txt",
        &["ps", "axfww", "--format=pid,ppid,stat,lstart,args"],
    ),
    ("mounts.txt", &["cat", "/proc/self/mountinfo"]),
];

/// Folders of the node whose files are copied, and the name they get.
const COPIED: &[(&str, &str)] = &[
    ("/var/lib/kubelet/plugins", "plugins"),
    ("/run/cdi", "cdi"),
    ("/etc/cdi", "etc-cdi"),
    ("/var/log/pods", "pods"),
];

/// Writes all of it. A part that cannot be had (the API server may be what failed) is noted in its
/// own file.
pub(crate) fn collect(cluster: &Cluster, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    copy(&cluster.state().join("logs"), &dir.join("logs"))?;
    for (file, command) in ASKED {
        let Some((program, args)) = command.split_first() else {
            continue;
        };
        fs::write(dir.join(file), said(&mut cluster.command(program, args)))?;
    }
    for (inside, name) in COPIED {
        let from = cluster.node_path(inside);
        if from.exists() {
            copy(&from, &dir.join(name))?;
        }
    }
    Ok(())
}

fn said(command: &mut Command) -> Vec<u8> {
    match command.output() {
        Ok(mut done) => {
            done.stdout.append(&mut done.stderr);
            done.stdout
        }
        Err(error) => format!("{command:?}: {error}\n").into_bytes(),
    }
}

/// Copies files and folders; links are followed only if they lead to something, sockets are
/// skipped.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (kind, target) = (entry.file_type()?, to.join(entry.file_name()));
        if kind.is_dir() {
            copy(&entry.path(), &target)?;
        } else if kind.is_file() {
            // It may have been removed since it was listed.
            if let Err(error) = fs::copy(entry.path(), &target) {
                fs::write(&target, format!("not copied: {error}\n"))?;
            }
        }
    }
    Ok(())
}
