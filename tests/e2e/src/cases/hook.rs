//! The hook that makes libraries found, in containers that are read-only, have volumes where it
//! writes, or run an `ldconfig`; by each runtime of the node. crun before 1.26 makes a root
//! read-only before it calls the hook, runc after it.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use divvy_host::fixture::minimal_library;
use fs_err as fs;
use serde_json::{Value, json};

use super::SHARED;
use super::shares::groups::Runtimes;
use crate::case::{Env, PATIENCE};
use crate::config::Layout;
use crate::images::busybox_image;
use crate::objects::{SAY_AND_STAY, claim, product};
use crate::process::say;
use crate::wait::wait_for;

const IMAGE: &str = "localhost/with-cuda:1";
const LDCONFIG: &str = "/sbin/ldconfig";
const LIBRARY: &str = "/usr/local/nvidia/lib64/libcuda.so.1";
const LIBRARY_DIR: &str = "/usr/local/nvidia/lib64";
/// Folder for names of libraries that a volume keeps from their own.
const INSTEAD: &str = "/usr/lib/divvy";
/// Folder that the loader searches last, in an image without any other.
const LAST: &str = "/usr/lib";
/// Folder of the image with a driver older than the node's, and the file that enters it.
const COMPAT: &str = "/usr/local/cuda-12.9/compat";
const COMPAT_FILE: &str = "/etc/ld.so.conf.d/00-cuda-compat.conf";

/// Shows where the loader finds CUDA, before and after an `ldconfig`, and what a user can write to.
const SCRIPT: &str = "trap 'exit 0' TERM; exec 2>&1; \
                      first() { echo \"$1: $(ldconfig -p | grep -m1 'libcuda.so.1 ')\"; }; \
                      ls -l /usr/local/nvidia/lib64/libcuda.so.1; first hook; \
                      touch /new && echo root: open || echo root: closed; \
                      cat /etc/nvidia/app.conf; \
                      ldconfig && first ldconfig; echo that is all; \
                      while :; do sleep 1000 & wait $!; done";

pub(super) fn roots_and_volumes(env: &Env) -> Result<()> {
    if !Path::new(LDCONFIG).exists() {
        say("this machine has no ldconfig, so that no image has one");
        return Ok(());
    }
    import(env)?;
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "app"}, "data": {"app.conf": "an app's own\n"},
    });
    env.create(&map)?;
    env.create(&claim("one", &product(SHARED)))?;
    let runtimes = Runtimes::create(env)?;
    let crun = runtimes.has(Layout::CRUN_WITH_GROUPS);
    if !crun {
        say("crun is not installed, so that no pod was started by it");
    }
    let by_crun = crun.then_some(("crun", Some(Layout::CRUN_WITH_GROUPS)));
    for (name, runtime) in [("runc", None)].into_iter().chain(by_crun) {
        for is_read_only in [false, true] {
            let name = format!("{name}-{}", if is_read_only { "closed" } else { "open" });
            env.create(&pod(&name, runtime, is_read_only))?;
            env.wait_until_running(&name)?;
            let said = env.log(&name, "main")?;
            found(&said, is_read_only).with_context(|| format!("pod {name} said {said}"))?;
        }
    }
    for (name, runtime) in [("runc", None)].into_iter().chain(by_crun) {
        let name = format!("{name}-covered");
        let places = ["/etc", "/usr/local/nvidia"];
        let script = format!("ls -l {INSTEAD}/libcuda.so.1 {LAST}/libcuda.so.1; {SAY_AND_STAY}");
        env.create(&with_volumes(&name, runtime, &places, &script))?;
        env.wait_until_running(&name)?;
        let said = env.log(&name, "main")?;
        for link in [
            format!("{INSTEAD}/libcuda.so.1 -> {LIBRARY_DIR}/libcuda.so."),
            format!("{LAST}/libcuda.so.1 -> {INSTEAD}/libcuda.so.1"),
        ] {
            ensure!(said.contains(&link), "pod {name} has no {link}: {said}");
        }
    }
    // A step that the GPU needs: the pod does not start. crun shows the reason's number and no
    // word, which the plugin's Event has.
    for (name, runtime) in [("runc", None)].into_iter().chain(by_crun) {
        let name = format!("{name}-stopped");
        let places = ["/etc", LAST];
        env.create(&with_volumes(&name, runtime, &places, "exit 0"))?;
        let says = |what: &str, parts: &[&str]| {
            wait_for(what, PATIENCE, || {
                let mut messages = env.messages(&name).into_iter();
                Ok(messages.find(|text| parts.iter().all(|part| text.contains(part))))
            })
            .with_context(|| format!("Events of {name}: {:?}", env.messages(&name)))
        };
        if runtime.is_some() {
            says("status of a hook that fails", &["exit code: 75"])?;
        }
        let start = format!(
            "A container of pod {}/{name} does not start: ",
            env.namespace
        );
        let parts = [
            &*start,
            "cannot read /etc/ld.so.cache",
            "exit status 75 of divvy-cdi-hook",
        ];
        says("words of a hook that fails", &parts)?;
    }
    Ok(())
}

/// Makes the image: `ldconfig`, and an older driver of its own that is entered before any other.
fn import(env: &Env) -> Result<()> {
    let folder = env.cluster.state().join("with-cuda");
    fs::create_dir_all(&folder)?;
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).map(|()| path)
    };
    let library = file("library", &minimal_library("libcuda.so.1"))?;
    let entry = file("entry", format!("{COMPAT}\n").as_bytes())?;
    let include = file("include", b"include /etc/ld.so.conf.d/*.conf\n")?;
    let image = busybox_image(IMAGE)?
        .program("/bin/ldconfig", Path::new(LDCONFIG))
        .program(&format!("{COMPAT}/libcuda.so.575.57.08"), &library)
        .link(&format!("{COMPAT}/libcuda.so.1"), "libcuda.so.575.57.08")
        .program(COMPAT_FILE, &entry)
        .program("/etc/ld.so.conf", &include)
        .folder("/var/cache/ldconfig");
    env.cluster.import(&image)?;
    Ok(fs::remove_dir_all(&folder)?)
}

/// Fails unless the container has found the node's library first, each time.
fn found(said: &str, is_read_only: bool) -> Result<()> {
    let line = |label: &str| {
        let start = format!("{label}: ");
        said.lines()
            .find_map(|line| line.strip_prefix(start.as_str()))
    };
    let by_hook = line("hook").context("no library after the hook")?;
    ensure!(by_hook.ends_with(LIBRARY), "after the hook: {by_hook}");
    let root = if is_read_only { "closed" } else { "open" };
    ensure!(line("root") == Some(root), "its root is not {root}");
    ensure!(said.contains("an app's own"), "its volume is not there");
    // A read-only container cannot make a cache.
    if !is_read_only {
        let after = line("ldconfig").context("no library after ldconfig")?;
        ensure!(after.ends_with(LIBRARY), "after ldconfig: {after}");
    }
    Ok(())
}

/// Describes a pod with volumes at these places.
fn with_volumes(name: &str, runtime: Option<&str>, places: &[&str], script: &str) -> Value {
    let volume = |nr: usize| format!("volume-{nr}");
    let numbers = 0..places.len();
    let volumes = numbers.map(|nr| json!({"name": volume(nr), "emptyDir": {}}));
    let mounts = places.iter().enumerate();
    let mounts = mounts.map(|(nr, place)| json!({"name": volume(nr), "mountPath": place}));
    describe(
        name,
        runtime,
        &volumes.collect::<Vec<_>>().into(),
        &json!({
            "name": "main",
            "image": IMAGE,
            "command": ["/bin/sh", "-c", script],
            "resources": {"claims": [{"name": "one"}]},
            "volumeMounts": mounts.collect::<Vec<_>>(),
        }),
    )
}

/// Describes a pod with a ConfigMap at `/etc/nvidia`, as for an application that computes.
fn pod(name: &str, runtime: Option<&str>, is_read_only: bool) -> Value {
    let app = json!([{"name": "app", "configMap": {"name": "app"}}]);
    describe(
        name,
        runtime,
        &app,
        &json!({
            "name": "main",
            "image": IMAGE,
            "command": ["/bin/sh", "-c", SCRIPT],
            "resources": {"claims": [{"name": "one"}]},
            "securityContext": {"readOnlyRootFilesystem": is_read_only},
            "volumeMounts": [{"name": "app", "mountPath": "/etc/nvidia", "readOnly": true}],
        }),
    )
}

fn describe(name: &str, runtime: Option<&str>, volumes: &Value, container: &Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            "runtimeClassName": runtime,
            "resourceClaims": [{"name": "one", "resourceClaimName": "one"}],
            "volumes": volumes,
            "containers": [container],
        },
    })
}
