//! Pods and claims when nothing goes wrong, and what users see when they ask for what there is not.

use anyhow::{Result, bail, ensure};
use divvy_api::names;
use serde_json::{Value, json};

use super::SHARED;
use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::objects::{self, Pod, claim, claim_for, product, request, template};
use crate::wait::wait_for;

pub(super) fn one_pod_one_gpu(env: &Env) -> Result<()> {
    env.create(&claim("one", &product(SHARED)))?;
    env.create(&Pod::new("a").claim("one").build())?;
    let seen = env.check("a", "main", &["one"])?;
    ensure!(seen.len() == 1, "expected one GPU, got {seen:?}");
    Ok(())
}

pub(super) fn two_pods_two_gpus(env: &Env) -> Result<()> {
    for name in ["a", "b"] {
        env.create(&claim(name, &product(SHARED)))?;
        env.create(&Pod::new(name).claim(name).build())?;
    }
    let (a, b) = (
        env.check("a", "main", &["a"])?,
        env.check("b", "main", &["b"])?,
    );
    ensure!(
        a.len() == 1 && b.len() == 1 && a != b,
        "expected a GPU each, got {a:?} and {b:?}"
    );
    Ok(())
}

/// A container reads about its devices what was published of them; so does a later pod after a
/// killed plugin has lost the files.
pub(super) fn metadata(env: &Env) -> Result<()> {
    let script = "echo NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES; ls -d /dev/nvidia[0-9]*; \
                  cd /var/run/kubernetes.io/dra-device-attributes; \
                  cat resourceclaims/one/*/gpu.divvy.dev-metadata.json; \
                  cat resourceclaimtemplates/own/*/gpu.divvy.dev-metadata.json; \
                  echo > resourceclaims/one/*/*.json || echo not written; echo that is all; exec sleep 1000";
    let uid = Env::uid(&env.create(&claim("one", &product(SHARED)))?)?;
    env.create(&template("own", &request(&product(SHARED), 1)))?;
    let pod = |name: &str| {
        let pod = Pod::new(name).claim("one").template("own");
        pod.container_running("main", &["one", "own"], script)
            .in_user_namespace()
    };
    let read = |name: &str| -> Result<Vec<Value>> {
        env.create(&pod(name).build())?;
        let running = env.wait_until_running(name)?;
        let own = Env::claim_of(&running)?;
        env.check(name, "main", &["one", &own])?;
        let said = env.log(name, "main")?;
        ensure!(
            said.contains("not written"),
            "the container can write it: {said}"
        );
        let objects = said
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let objects: Vec<_> = objects
            .filter(|object| at(object, "apiVersion") == "metadata.resource.k8s.io/v1beta1")
            .collect();
        let [shared, other] = &*objects else {
            bail!("expected a file for each claim: {said}")
        };
        ensure!(at(shared, "metadata.uid").as_str() == Some(&uid), "{said}");
        ensure!(at(other, "podClaimName") == "own", "{said}");
        ensure!(at(other, "metadata.name").as_str() == Some(&own), "{said}");
        let published = env.driver.devices()?;
        for object in &objects {
            let device = at(object, "requests.0.devices.0");
            let found = published
                .iter()
                .find(|found| at(found, "name") == at(device, "name"));
            let same =
                found.is_some_and(|found| at(found, "attributes") == at(device, "attributes"));
            ensure!(same, "{device:#} is not as it is published: {found:#?}");
        }
        Ok(objects)
    };
    let before = read("before")?;
    let folder = env.driver.metadata(&uid);
    ensure!(folder.exists(), "{} is not there", folder.display());
    env.driver.kill_and(|| {
        fs_err::remove_dir_all(&folder)?;
        env.driver
            .cdi_files(&uid)?
            .iter()
            .try_for_each(|file| Ok(fs_err::remove_file(file)?))
    })?;
    super::undisturbed(env, "before")?;
    ensure!(
        folder.exists(),
        "the files of a running pod are not there after the plugin's start"
    );
    let after = read("after")?;
    ensure!(
        before.first() == after.first(),
        "the file of the shared claim has changed: {after:#?}"
    );
    env.delete("Pod", "before")?;
    env.end("after", &uid)?;
    ensure!(
        !folder.exists(),
        "the files of an unprepared claim are left"
    );
    Ok(())
}

pub(super) fn user_namespace(env: &Env) -> Result<()> {
    // The GPU can be opened, and the hook has run: its cache names the driver's library.
    let script = "echo NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES; ls -d /dev/nvidia[0-9]*; \
                  cat /proc/self/uid_map; cat /dev/nvidia[0-9]* && echo opened; ls /dev/nvidiactl /dev/dri; \
                  cat /etc/nvidia/nvidia-application-profiles-rc.d/*; \
                  grep -c libcuda.so.1 /etc/ld.so.cache; echo that is all; exec sleep 1000";
    let uid = Env::uid(&env.create(&claim("one", &product(SHARED)))?)?;
    let pod = Pod::new("a")
        .claim("one")
        .container_running("main", &["one"], script)
        .in_user_namespace();
    env.create(&pod.build())?;
    let minors = env.check("a", "main", &["one"])?;
    let said = env.log("a", "main")?;
    let map: Vec<&str> = said
        .lines()
        .find(|line| line.starts_with(' '))
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    ensure!(
        map.first() == Some(&"0") && map.get(1) != Some(&"0"),
        "its root is the node's: {said}"
    );
    ensure!(
        said.contains("opened\n/dev/nvidiactl\n"),
        "a node cannot be used: {said}"
    );
    ensure!(
        said.contains("\nrenderD"),
        "the GPU has no DRM node: {said}"
    );
    let mask = minors.iter().fold(0u64, |mask, minor| mask | 1 << minor);
    ensure!(
        said.contains(&format!("\"EGLVisibleDGPUDevices\", {mask:#x}]")),
        "graphics looks at others: {said}"
    );
    ensure!(
        said.contains("\n1\nthat is all"),
        "the hook has not entered the libraries: {said}"
    );
    env.end("a", &uid)
}

pub(super) fn one_claim_two_pods(env: &Env) -> Result<()> {
    let uid = Env::uid(&env.create(&claim("shared", &product(SHARED)))?)?;
    for pod in ["a", "b"] {
        env.create(&Pod::new(pod).claim("shared").build())?;
    }
    for pod in ["a", "b"] {
        env.check(pod, "main", &["shared"])?;
    }
    env.delete("Pod", "a")?;
    env.wait_until_gone("Pod", "a")?;
    ensure!(
        env.driver.record(&uid).exists(),
        "the claim was unprepared although pod b still uses it"
    );
    env.end("b", &uid)
}

pub(super) fn one_claim_two_containers(env: &Env) -> Result<()> {
    env.create(&claim("one", &product(SHARED)))?;
    let pod = Pod::new("a")
        .claim("one")
        .container("x", &["one"])
        .container("y", &["one"]);
    // A third has no GPU: what a pod has, its containers get only if they say so.
    let quiet = "echo NVIDIA_VISIBLE_DEVICES=void; ls -d /dev/nvidia[0-9]*; echo that is all; exec sleep 1000";
    let pod = pod.container_running("quiet", &[], quiet);
    env.create(&pod.build())?;
    env.check("a", "x", &["one"])?;
    env.check("a", "y", &["one"])?;
    env.check("a", "quiet", &[])?;
    Ok(())
}

pub(super) fn two_claims_one_pod(env: &Env) -> Result<()> {
    for name in ["first", "second"] {
        env.create(&claim(name, &product(SHARED)))?;
    }
    let pod = Pod::new("a").claim("first").claim("second");
    env.create(
        &pod.container("both", &["first", "second"])
            .container("one", &["second"])
            .build(),
    )?;
    let both = env.check("a", "both", &["first", "second"])?;
    ensure!(both.len() == 2, "expected two GPUs, got {both:?}");
    env.check("a", "one", &["second"])?;
    Ok(())
}

pub(super) fn count_two(env: &Env) -> Result<()> {
    env.create(&claim_for("two", &request(&product(SHARED), 2)))?;
    env.create(&Pod::new("a").claim("two").build())?;
    let seen = env.check("a", "main", &["two"])?;
    ensure!(seen.len() == 2, "expected two GPUs, got {seen:?}");
    Ok(())
}

pub(super) fn count_beyond_node(env: &Env) -> Result<()> {
    env.create(&claim_for(
        "all",
        &request("true", env.driver.gpus().count() + 1),
    ))?;
    env.create(&Pod::new("a").claim("all").build())?;
    let reason = env.wait_until_unschedulable("a")?;
    ensure!(
        reason.contains("cannot allocate all claims"),
        "the scheduler's reason is another: {reason}"
    );
    Ok(())
}

pub(super) fn selectors(env: &Env) -> Result<()> {
    let driver = names::DRIVER;
    // NVML must report the CUDA version without libcuda, which is in the driver root and not in the
    // plugin's image.
    let l40s = format!(
        "device.attributes['{driver}'].productName.contains('L40S') \
         && device.capacity['{driver}'].memory.compareTo(quantity('40Gi')) > 0 \
         && device.attributes['{driver}'].driverVersion.isGreaterThan(semver('500.0.0')) \
         && device.attributes['{driver}'].cudaDriverVersion.isGreaterThan(semver('12.0.0'))"
    );
    env.create(&claim("fits", &l40s))?;
    env.create(&Pod::new("a").claim("fits").build())?;
    env.check("a", "main", &["fits"])?;
    let uuid = env.driver.gpus().of_product("L40S");
    let minor = env
        .driver
        .gpus()
        .get(uuid.first().copied().unwrap_or_default())?
        .minor;
    ensure!(
        env.minors("fits")? == [minor].into(),
        "another GPU than the L40S was selected"
    );

    env.create(&claim("fits-none", &l40s.replace("40Gi", "900Gi")))?;
    env.create(&Pod::new("b").claim("fits-none").build())?;
    env.wait_until_unschedulable("b").map(drop)
}

pub(super) fn deployment(env: &Env) -> Result<()> {
    env.create(&template("gpu", &request(&product(SHARED), 1)))?;
    env.create(&objects::deployment("d", 2, &Pod::new("").template("gpu")))?;
    env.wait_for_replicas("d", 2)?;
    let pods = env.api().list(&env.path("Pod", "")?)?;
    let mut all = std::collections::BTreeSet::new();
    let mut uids = Vec::new();
    for pod in &pods {
        let (name, claim) = (
            at(pod, "metadata.name").as_str().unwrap_or_default(),
            Env::claim_of(pod)?,
        );
        all.append(&mut env.check(name, "main", &[&claim])?);
        uids.push(Env::uid(&env.claim(&claim)?)?);
    }
    ensure!(all.len() == 2, "expected two different GPUs, got {all:?}");
    env.delete("Deployment", "d")?;
    uids.iter()
        .try_for_each(|uid| env.driver.wait_until_unprepared(uid))
}

pub(super) fn deletion_frees(env: &Env) -> Result<()> {
    env.create(&template("gpu", &request(&product(SHARED), 1)))?;
    env.create(&Pod::new("a").template("gpu").build())?;
    let claim = Env::claim_of(&env.wait_until_running("a")?)?;
    env.check("a", "main", &[&claim])?;
    let uid = Env::uid(&env.claim(&claim)?)?;
    ensure!(
        env.driver.record(&uid).exists(),
        "a prepared claim has no record"
    );
    ensure!(
        !env.driver.cdi_files(&uid)?.is_empty(),
        "a prepared claim has no CDI file"
    );
    env.end("a", &uid)?;
    env.wait_until_gone("ResourceClaim", &claim)
}

pub(super) fn not_offered(env: &Env) -> Result<()> {
    let mut spec = request(&product(SHARED), 1);
    let parameters =
        json!({"apiVersion": names::API_VERSION, "kind": "GpuConfig", "extraNodes": ["/dev/kvm"]});
    let config = json!([{"opaque": {"driver": names::DRIVER, "parameters": parameters}}]);
    if let Some(devices) = spec
        .get_mut("devices")
        .and_then(|devices| devices.as_object_mut())
    {
        devices.insert("config".to_owned(), config);
    }
    env.create(&claim_for("wrong", &spec))?;
    env.create(&Pod::new("a").claim("wrong").build())?;
    wait_for(
        "event of pod a that names the device node",
        PATIENCE,
        || {
            let messages = env.messages("a");
            Ok(messages
                .into_iter()
                .find(|text| text.contains("requests /dev/kvm (extraNodes)")))
        },
    )?;
    // Said on the claim, too, as the plugin's own rights let it: an Event and a condition.
    wait_for(
        "event of the claim that names the device node",
        PATIENCE,
        || {
            Ok(env
                .messages("wrong")
                .into_iter()
                .find(|text| text.contains("/dev/kvm")))
        },
    )?;
    wait_for(
        "condition of the claim that names the device node",
        PATIENCE,
        || {
            let claim = env.claim("wrong")?;
            let condition = at(&claim, "status.devices.0.conditions.0");
            let message = at(condition, "message").as_str().unwrap_or_default();
            Ok((at(condition, "status") == "False" && message.contains("/dev/kvm")).then_some(()))
        },
    )
}
