//! The real store, locks and CDI folder: on files, with threads, and with folders that are missing
//! or in the way.

use std::sync::Arc;
use std::time::Duration;

use divvy_claims::Record;
use divvy_executor::{
    CdiDir, Clock, Durability, Executor, ExecutorConfig, FileCdiDir, FileLocks, FileMetadataDir,
    FileStore, Folder, LockName, Locks, Parts, Store, SystemClock, Timing, Unprepared, chain,
};
use fs_err as fs;

use crate::mig_hardware::Hardware;
use crate::world::{DRIVER, World, claim};

/// SHA-256 in hex, by the system's tool: the format must not depend on our own code.
pub(crate) fn sha256(text: &str) -> String {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut tool = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    tool.stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let out = String::from_utf8(tool.wait_with_output().unwrap().stdout).unwrap();
    out.split_whitespace().next().unwrap().to_owned()
}

/// An executor on real files; GPUs, edits and the API are the test machine's.
fn on_files(root: &std::path::Path, world: &World) -> Executor {
    with(root, root.join("cdi"), world, Timing::default())
}

fn with(
    root: &std::path::Path,
    cdi: std::path::PathBuf,
    world: &World,
    timing: Timing,
) -> Executor {
    let seam = Arc::new(world.clone());
    let clock = Arc::new(SystemClock);
    let parts = Parts {
        store: Arc::new(FileStore::open(root.join("plugin")).unwrap()),
        locks: Arc::new(FileLocks::open(root.join("plugin/locks"), clock.clone()).unwrap()),
        cdi: Arc::new(FileCdiDir::new(cdi)),
        metadata: Arc::new(FileMetadataDir::new(root.join("plugin/metadata"))),
        edits: seam.clone(),
        gpus: Arc::new(Hardware(world.clone())),
        time_slices: seam.clone(),
        mps: seam.clone(),
        processes: seam.clone(),
        inventory: seam.clone(),
        claims: seam.clone(),
        clock,
    };
    let config = ExecutorConfig {
        timing,
        ..ExecutorConfig::new(DRIVER, "boot-1".parse().unwrap())
    };
    let executor = Executor::new(config, parts);
    let inventory = world.lock().inventory.clone().unwrap();
    let present: Vec<_> = inventory
        .gpus
        .values()
        .map(|g| (g.facts.uuid.clone(), g.facts.pci_address))
        .collect();
    executor.number_gpus(&present, &|_, _| true).unwrap();
    executor
}

fn names(dir: &std::path::Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Two instances prepare and unprepare sixteen claims on eight GPUs at once and never give one out
/// twice.
#[test]
fn two_instances_serve_sixteen_claims_and_give_no_gpu_out_twice() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::new("h100x8", 1);
    let instances = [on_files(dir.path(), &world), on_files(dir.path(), &world)];
    // Two claims want each GPU: the second gets it when the first is unprepared, by the other
    // instance.
    std::thread::scope(|scope| {
        for n in 0..8 {
            let (first, second) = (
                claim(&format!("first-{n}"), &[n], "t1"),
                claim(&format!("second-{n}"), &[n], "t2"),
            );
            instances[0]
                .prepare(&first, &instances[0].begin(Duration::from_secs(45)))
                .unwrap();
            world.lock().api.insert(second.uid.clone(), second.clone());
            let [one, other] = &instances;
            scope.spawn(move || {
                let answer = one
                    .prepare(&second, &one.begin(Duration::from_secs(45)))
                    .unwrap();
                assert_eq!(
                    answer.devices[0].cdi_ids,
                    [format!("{DRIVER}/claim={}-gpu-{n}", second.uid)]
                );
            });
            scope.spawn(move || {
                let done = other
                    .unprepare(&first.uid, &other.begin(Duration::from_secs(45)))
                    .unwrap();
                assert_eq!(done, Unprepared::Done);
            });
        }
    });
    let expected: Vec<_> = (0..8).map(|n| format!("uid-second-{n}.json")).collect();
    assert_eq!(
        names(&dir.path().join("plugin/claims")),
        expected,
        "records, and no temporary file"
    );
    let expected: Vec<_> = (0..8)
        .map(|n| format!("{DRIVER}-claim_uid-second-{n}.json"))
        .collect();
    assert_eq!(names(&dir.path().join("cdi")), expected);
}

/// A waiting prepare is woken by the unprepare at the other instance and by its own cancellation.
#[test]
fn a_waiting_prepare_is_woken_by_the_other_instance_and_by_cancel() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::new("h100x2", 1);
    let never = Duration::from_secs(30);
    let timing = Timing {
        poll: never,
        look_again: never,
        ..Timing::default()
    };
    let one = with(dir.path(), dir.path().join("cdi"), &world, timing);
    let other = on_files(dir.path(), &world);
    let (first, second, third) = (
        claim("first", &[0], "t1"),
        claim("second", &[0], "t2"),
        claim("third", &[0], "t3"),
    );
    other.prepare(&first, &other.begin(never)).unwrap();
    world.lock().api.insert(second.uid.clone(), second.clone());
    let (call, start) = (one.begin(never), std::time::Instant::now());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| one.prepare(&second, &one.begin(never)));
        other.unprepare(&first.uid, &other.begin(never)).unwrap();
        waiting.join().unwrap().unwrap();
        let cancelled = scope.spawn(|| one.prepare(&third, &call));
        call.cancel.cancel();
        cancelled.join().unwrap().unwrap_err();
    });
    assert!(start.elapsed() < never, "{:?}", start.elapsed());
}

#[test]
fn old_tombstones_go_but_not_that_of_a_claim_that_is_being_worked_on() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::new("h100x2", 1);
    let timing = |tombstones| Timing {
        tombstones,
        ..Timing::default()
    };
    let at_once = with(
        dir.path(),
        dir.path().join("cdi"),
        &world,
        timing(Duration::ZERO),
    );
    let a = claim("a", &[0], "t1");
    at_once
        .prepare(&a, &at_once.begin(Duration::from_secs(45)))
        .unwrap();
    at_once
        .unprepare(&a.uid, &at_once.begin(Duration::from_secs(45)))
        .unwrap();
    let left = || names(&dir.path().join("plugin/tombstones"));
    on_files(dir.path(), &world).reconcile(&world.view());
    assert_eq!(left(), ["uid-a.json"], "not old");
    let other = FileLocks::open(dir.path().join("plugin/locks"), Arc::new(SystemClock)).unwrap();
    let lock = other
        .acquire(&LockName::Claim(a.uid.clone()), SystemClock.now())
        .unwrap();
    assert_eq!(
        at_once.reconcile(&world.view()).events,
        [],
        "left for the next time, which is no failure"
    );
    assert_eq!(left(), ["uid-a.json"], "worked on");
    drop(lock);
    at_once.reconcile(&world.view());
    assert_eq!(left(), Vec::<String>::new());
}

#[test]
fn eight_calls_for_one_claim_at_once_get_one_answer() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::new("h100x2", 1);
    let executor = on_files(dir.path(), &world);
    let a = claim("a", &[0, 1], "t1");
    let answers: Vec<_> = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    executor
                        .prepare(&a, &executor.begin(Duration::from_secs(45)))
                        .unwrap()
                })
            })
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(names(&dir.path().join("plugin/claims")), ["uid-a.json"]);
}

#[test]
fn the_checksum_of_a_record_is_the_sha256_of_its_body_as_it_stands() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::new("h100x2", 1);
    let executor = on_files(dir.path(), &world);
    let a = claim("a", &[0], "t1");
    executor
        .prepare(&a, &executor.begin(Duration::from_secs(45)))
        .unwrap();
    let text = fs::read_to_string(dir.path().join("plugin/claims/uid-a.json")).unwrap();
    let (head, body) = text.split_once(",\"body\":").unwrap();
    let body = body.trim_end().strip_suffix('}').unwrap();
    assert_eq!(head, format!("{{\"checksum\":\"{}\"", sha256(body)));
    assert!(Record::decode(text.as_bytes()).fine().is_some());
}

#[test]
fn the_cdi_folder_is_made_but_not_the_one_above_it() {
    let dir = tempfile::tempdir().unwrap();
    let cdi = FileCdiDir::new(dir.path().join("cdi"));
    assert_eq!(
        (
            cdi.list().unwrap(),
            cdi.exists("a.json").unwrap(),
            cdi.remove("a.json").unwrap()
        ),
        (vec![], false, false)
    );
    cdi.write("a.json", b"one").unwrap();
    cdi.write("a.json", b"two").unwrap();
    assert_eq!(
        (cdi.list().unwrap(), cdi.read("a.json").unwrap()),
        (vec!["a.json".to_owned()], Some(b"two".to_vec()))
    );
    assert!(cdi.exists("a.json").unwrap());
    assert!(cdi.remove("a.json").unwrap());
    assert_eq!(cdi.read("a.json").unwrap(), None);
    // What cannot be read is not taken for a file that is missing.
    fs::create_dir(dir.path().join("cdi/b.json")).unwrap();
    assert_eq!(
        cdi.read("b.json").unwrap_err().kind(),
        std::io::ErrorKind::IsADirectory
    );

    let missing = FileCdiDir::new(dir.path().join("absent/cdi"));
    assert_eq!(
        missing.write("a.json", b"x").unwrap_err().kind(),
        std::io::ErrorKind::NotFound
    );
}

#[test]
fn a_missing_cdi_mount_is_named_with_the_flag_to_check() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::new("h100x2", 1);
    let folder = dir.path().join("no/such/cdi");
    let executor = with(dir.path(), folder.clone(), &world, Timing::default());
    let error = executor
        .prepare(
            &claim("a", &[0], "t1"),
            &executor.begin(Duration::from_secs(45)),
        )
        .unwrap_err();
    assert_eq!(
        chain(&error),
        format!(
            "claim ns/a (UID uid-a) cannot be prepared: CDI file gpu.divvy.dev-claim_uid-a.json in {0} cannot be written (its parent folder does not exist: mount the host's CDI folder into the plugin, at the path of --cdi-dir): failed to create directory `{0}`: No such file or directory (os error 2)",
            folder.display()
        )
    );
    assert_eq!(
        names(&dir.path().join("plugin/claims")),
        Vec::<String>::new(),
        "nothing is left"
    );
}

/// No two contents of a file have the same stamp however fast they follow each other.
#[test]
fn no_two_contents_of_a_file_have_the_same_stamp() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let write = |n: usize| {
        let bytes = format!("{n:04}");
        let written = store
            .write(Folder::Claims, "a.json", bytes.as_bytes(), Durability::Lazy)
            .unwrap();
        let listed = store.list(Folder::Claims).unwrap()[0].stamp;
        assert_eq!(written, listed);
        listed
    };
    let stamps: std::collections::BTreeSet<_> = (0..500).map(write).collect();
    assert_eq!(stamps.len(), 500);
}

#[test]
fn a_store_replaces_files_as_a_whole_and_changes_their_stamp() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    assert_eq!(store.read(Folder::Claims, "a.json").unwrap(), None);
    assert!(
        !store
            .remove(Folder::Claims, "a.json", Durability::Synced)
            .unwrap()
    );
    let mut stamps = vec![store.stamp(Folder::Claims).unwrap()];
    assert_ne!(stamps[0], store.stamp(Folder::Gpus).unwrap());
    for content in [b"one", b"two"] {
        store
            .write(Folder::Claims, "a.json", content, Durability::Synced)
            .unwrap();
        assert_eq!(
            store.read(Folder::Claims, "a.json").unwrap().as_deref(),
            Some(content.as_slice())
        );
        stamps.push(store.list(Folder::Claims).unwrap()[0].stamp);
    }
    stamps.dedup();
    assert_eq!(stamps.len(), 3, "{stamps:?}");
    assert_eq!(names(&dir.path().join("claims")), ["a.json"]);
    assert!(
        store
            .remove(Folder::Claims, "a.json", Durability::Synced)
            .unwrap()
    );
    assert_eq!(store.list(Folder::Claims).unwrap(), []);
}

#[test]
fn a_store_removes_what_a_crash_left_half_written_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let claims = dir.path().join("claims");
    drop(FileStore::open(dir.path()).unwrap());
    let write = |name: &str, minutes: u64| {
        let file = fs::File::create(claims.join(name)).unwrap();
        file.file()
            .set_modified(std::time::SystemTime::now() - Duration::from_mins(minutes))
            .unwrap();
    };
    write(".a.json.1.0.tmp", 11);
    write(".b.json.1.0.tmp", 1);
    write("c.json", 11);
    let store = FileStore::open(dir.path()).unwrap();
    assert_eq!(
        names(&claims),
        [".b.json.1.0.tmp", "c.json"],
        "another instance may be at .b.json now"
    );
    // What is no file is no record.
    fs::create_dir(claims.join("d.json")).unwrap();
    let listed: Vec<_> = store
        .list(Folder::Claims)
        .unwrap()
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    assert_eq!(listed, ["c.json"]);
}

#[test]
fn the_clock_of_the_machine_sleeps_as_long_as_it_says() {
    let begun = SystemClock.now();
    SystemClock.sleep(Duration::from_millis(2));
    assert!(SystemClock.now() >= begun + Duration::from_millis(2));
}
