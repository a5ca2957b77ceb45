//! Images that point the CDI hook at files that are not theirs. The hook runs as root of the node
//! before the container is confined; a user of the container must not find the files' content.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::SHARED;
use crate::case::Env;
use crate::images::{BUSYBOX, busybox_image, busybox_program};
use crate::objects::{claim, product};

/// User of the containers.
const USER: u32 = 1000;
/// File of a volume that only root may read, and its content.
const SECRET: (&str, &str) = ("/vol/secret", "for-root-only");
/// File of the kernel that only root may read and that no runtime masks.
const KERNEL: &str = "/proc/vmallocinfo";

/// Shows the files that the hook writes as text, and that the user may not read the others.
const SCRIPT: &str = "exec 2>&1; id -u; cat /proc/vmallocinfo /vol/secret; \
                      for file in /etc/ld.so.conf /etc/ld-musl-*.path; do \
                        echo \"--- $file\"; ls -l $file; cat $file; done; \
                      echo libraries: $(grep -c libcuda.so.1 /etc/ld.so.cache); \
                      echo links: $(ls /usr/lib/libcuda.so.1); \
                      echo that is all; exec sleep 1000";

pub(super) fn images(env: &Env) -> Result<()> {
    let arch = std::env::consts::ARCH;
    let loader = format!("/lib/ld-musl-{arch}.so.1");
    let path = format!("/etc/ld-musl-{arch}.path");
    env.create(&claim("one", &product(SHARED)))?;
    let cached = "libraries: 1\n";
    // Links in the folder that a loader searches last, in the place of files that are not to be
    // written.
    let linked = "links: /usr/lib/libcuda.so.1\n";
    let musl = busybox_image(&image_of("musl"))?.program(&loader, busybox_program()?);
    for (name, image, link, target, found) in [
        ("kernel", None, "/etc/ld.so.conf", KERNEL, cached),
        ("volume", None, "/etc/ld.so.conf", SECRET.0, cached),
        ("cache", None, "/etc/ld.so.cache", SECRET.0, linked),
        ("musl", Some(musl), path.as_str(), SECRET.0, linked),
    ] {
        let image = image.map_or_else(|| busybox_image(&image_of(name)), Ok)?;
        env.cluster.import(&image.link(link, target))?;
        env.create(&pod(name))?;
        env.wait_until_running(name)?;
        unread(&env.log(name, "main")?, found).with_context(|| format!("pod {name}"))?;
    }
    Ok(())
}

/// Returns the name of a pod's image.
fn image_of(pod: &str) -> String {
    format!("localhost/hostile-{pod}:1")
}

/// Fails if a container has read what only root may read, or could not show that it has not, or
/// lacks the line that says how it finds the driver's libraries.
fn unread(said: &str, found: &str) -> Result<()> {
    ensure!(
        said.starts_with(&format!("{USER}\n")),
        "it does not run as user {USER}: {said}"
    );
    for file in [KERNEL, SECRET.0] {
        let refused = format!("cat: can't open '{file}': Permission denied");
        ensure!(said.contains(&refused), "{file} is no secret: {said}");
    }
    ensure!(
        said.contains(found),
        "its libraries are not found, without {found:?}: {said}"
    );
    ensure!(
        !said.contains(SECRET.1),
        "it found the content of {}: {said}",
        SECRET.0
    );
    // Each line of the kernel's file begins with an address.
    ensure!(
        !said.lines().any(|line| line.starts_with("0x")),
        "it found the content of {KERNEL}: {said}"
    );
    Ok(())
}

/// Describes a pod of an ordinary user without capabilities, and a volume with a file for root.
fn pod(name: &str) -> Value {
    let (file, content) = SECRET;
    let make = format!("echo {content} > {file} && chmod 600 {file}");
    let mounts = json!([{"name": "vol", "mountPath": "/vol"}]);
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            "resourceClaims": [{"name": "one", "resourceClaimName": "one"}],
            "volumes": [{"name": "vol", "emptyDir": {}}],
            "initContainers": [{
                "name": "secret",
                "image": BUSYBOX,
                "command": ["/bin/sh", "-c", make],
                "volumeMounts": mounts,
            }],
            "containers": [{
                "name": "main",
                "image": image_of(name),
                "command": ["/bin/sh", "-c", SCRIPT],
                "resources": {"claims": [{"name": "one"}]},
                "securityContext": {
                    "runAsUser": USER,
                    "runAsGroup": USER,
                    "allowPrivilegeEscalation": false,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": mounts,
            }],
        },
    })
}
