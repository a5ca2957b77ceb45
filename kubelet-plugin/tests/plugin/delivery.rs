//! How containers find the driver's libraries.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::node::{Node, plain, wait};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_hook_the_plugin_starts_only_where_mounts_are_chosen() {
    let node = Node::new("h100x1");
    let ended = node.start_with(node.config(&["--library-delivery", "hook"])).ended().await;
    assert!(ended.starts_with("there is no CDI hook program: --hook-path is not given"), "{ended}");
    assert!(ended.contains("--library-delivery mounts (chart value libraryDelivery)"), "{ended}");
    let plugin = node.start_with(node.config(&["--library-delivery", "mounts"]));
    plugin.wait_ready().await;
    plugin.stop().await;
}

/// What every container's CDI file names must be reached by a user to whom only what is open to all is open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hook_is_where_a_user_of_a_namespace_can_call_it() {
    let node = Node::new("h100x1");
    let program = node.dir.path().join("hook");
    fs_err::write(&program, "#!/bin/sh\nexit 0\n").unwrap();
    let folder = node.dir.path().join("opt/divvy");
    let (path, dir) = (program.display().to_string(), folder.display().to_string());
    let flags = ["--library-delivery", "hook", "--hook-path", &path, "--hook-dir", &dir];
    let plugin = node.start_with(node.config(&flags));
    plugin.wait_ready().await;
    wait("slices", || (node.published() == plain(&["gpu-0"])).then_some(())).await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let installed = folder.join("divvy-cdi-hook");
    let text = node.cdi_files().into_values().next().unwrap().to_string();
    assert!(text.contains(&format!("\"path\":\"{}\"", installed.display())), "{text}");
    for open in [&folder, &installed] {
        assert_eq!(fs_err::metadata(open).unwrap().permissions().mode() & 0o777, 0o755);
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_for_graphics_have_drm_nodes_and_others_have_none() {
    let node = Node::new("rtx-pro-6000x1");
    let plugin = node.start_with(node.config(&["--offer", "everything", "--mig-profiles", "+gfx"]));
    plugin.wait_ready().await;
    wait("partitions", || node.published().iter().any(|(name, _)| name.contains("gfx")).then_some(())).await;
    for (device, drm) in [("gpu-0-mig-1g24gb-gfx-47-0", 2), ("gpu-0-mig-1g24gb-14-3", 0)] {
        let claim = node.claim(device, &[device]);
        node.prepare(&claim).await.unwrap();
        let file = node.cdi_files().into_values().find(|file| file.to_string().contains(device)).unwrap();
        assert_eq!(file.to_string().matches("/dev/dri/").count(), drm, "{file}");
    }
    plugin.stop().await;
}

#[test]
fn a_folder_for_the_hook_that_is_mounted_noexec_is_refused() {
    let allowed = Command::new("unshare").args(["-Urm", "true"]).status().is_ok_and(|done| done.success());
    if !allowed {
        return; // user namespaces are not allowed here
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (node, kubeconfig) = runtime.block_on(async {
        let node = Node::new("h100x1");
        let server = node.api.serve_http().await.unwrap();
        (node, server.kubeconfig())
    });
    let dir = node.dir.path();
    let (config, folder) = (dir.join("kubeconfig"), dir.join("noexec"));
    fs_err::write(&config, kubeconfig).unwrap();
    fs_err::create_dir(&folder).unwrap();
    let script = format!(
        "mount -t tmpfs -o noexec none {folder} && exec {plugin} --node-name n1 --kubeconfig {config} \
         --plugin-dir {dir}/p --registry-dir {dir}/r --cdi-dir {dir}/c --host-root {dir}/host \
         --hook-path /bin/true --hook-dir {folder}",
        folder = folder.display(),
        plugin = env!("CARGO_BIN_EXE_divvy-kubelet-plugin"),
        config = config.display(),
        dir = dir.display(),
    );
    let out = Command::new("unshare").args(["-Urm", "sh", "-c", &script]).output().unwrap();
    assert!(!out.status.success());
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(text.contains("chart value hookDir: a writable folder of the host"), "{text}");
    assert!(text.contains("it is mounted noexec"), "{text}");
}
