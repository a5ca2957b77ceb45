//! Two plugin instances on one machine: on real files and locks, with threads that race, and with
//! NVML calls that one of them has begun and that come back late.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_executor::{
    Clock, Executor, ExecutorConfig, FileCdiDir, FileLocks, FileMarks, FileMetadataDir, FileStore,
    Parts, Refresh, SystemClock, Timing, Unprepared, chain,
};
use divvy_gpu_sim::Fault;
use divvy_model::{GpuDriver, GpuOp, Grant};
use divvy_nvml::{Session, SessionConfig};

use crate::mig_world::{HALF, claim_of, living, mig_world, mode, shape, sim};
use crate::world::accessors::picture_of;
use crate::world::{DRIVER, World};

/// Returns a plugin instance on real files and real locks.
fn instance(root: &Path, world: &World, gpus: Arc<dyn GpuDriver>, timing: Timing) -> Executor {
    let seam = Arc::new(world.clone());
    let clock = Arc::new(SystemClock);
    let parts = Parts {
        store: Arc::new(FileStore::open(root.join("plugin")).unwrap()),
        locks: Arc::new(FileLocks::open(root.join("plugin/locks"), clock.clone()).unwrap()),
        cdi: Arc::new(FileCdiDir::new(root.join("cdi"))),
        metadata: Arc::new(FileMetadataDir::new(root.join("plugin/metadata"))),
        edits: seam.clone(),
        gpus,
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
    let may = Grant {
        may_change_mode: Some(true),
        offers_partitions: Some(true),
        share_time_slice: None,
        ..Grant::default()
    };
    executor
        .grant(&present.into_iter().map(|(gpu, _)| (gpu, may)).collect())
        .unwrap();
    executor
}

fn quick() -> Timing {
    Timing {
        hand_over: Duration::from_millis(300),
        process_wait: Duration::from_millis(50),
        poll: Duration::from_millis(1),
        look_again: Duration::from_millis(5),
        orphan_grace: Duration::ZERO,
        ..Timing::default()
    }
}

const DEVICES: [(&str, u32, u32, usize); 7] = [
    ("gpu-0", 0, 8, 0),
    ("gpu-0-mig-3g40gb-9-0", 0, 4, 0),
    ("gpu-0-mig-3g40gb-9-4", 4, 4, 0),
    ("gpu-0-mig-1g10gb-19-0", 0, 1, 0),
    ("gpu-0-mig-1g10gb-19-5", 5, 1, 0),
    ("gpu-1", 0, 8, 1),
    ("gpu-1-mig-1g10gb-19-0", 0, 1, 1),
];

/// State that the threads of a race have in common.
struct Race<'a> {
    world: &'a World,
    instances: [Executor; 2],
    in_use: Mutex<Vec<(String, u32, u32, usize)>>,
    got: AtomicUsize,
    broken: Mutex<Vec<String>>,
}

impl Race<'_> {
    fn fault(&self, what: String) {
        self.broken.lock().unwrap().push(what);
    }

    /// Runs a claim's life through one instance, and its end through another.
    fn live(&self, thread: usize, round: usize) {
        let (device, start, size, gpu) =
            DEVICES[(round * 5 + thread * 3 + round / 7) % DEVICES.len()];
        let name = format!("t{thread}-{round}");
        let wanted = claim_of(&name, &[device], "t1");
        self.world
            .lock()
            .api
            .insert(wanted.uid.clone(), wanted.clone());
        let [one, other] = [thread, thread + round].map(|n| &self.instances[n % 2]);
        match one.prepare(&wanted, &one.begin(Duration::from_secs(5))) {
            Ok(_) => self.use_it(&name, device, (start, size, gpu)),
            Err(error) => {
                if !matches!(
                    error.category(),
                    "held" | "conflict" | "in-use" | "mode-conflict" | "lock"
                ) {
                    self.fault(format!("{}: {}", error.category(), chain(&error)));
                }
            }
        }
        // Some are never unprepared: reconcile finds them.
        self.world.lock().api.remove(&wanted.uid);
        if !round.is_multiple_of(5)
            && let Err(error) = other.unprepare(&wanted.uid, &other.begin(Duration::from_secs(5)))
        {
            self.fault(chain(&error));
        }
    }

    fn use_it(&self, name: &str, device: &str, (start, size, gpu): (u32, u32, usize)) {
        self.got.fetch_add(1, Ordering::Relaxed);
        let mut used = self.in_use.lock().unwrap();
        let clash = used
            .iter()
            .find(|(_, s, n, g)| *g == gpu && *s < start + size && start < *s + *n);
        if let Some(other) = clash {
            self.fault(format!("{name} has {device} beside {other:?}"));
        }
        used.push((name.to_owned(), start, size, gpu));
        drop(used);
        if mode(self.world, &self.world.gpu(gpu)) != device.contains("mig") {
            self.fault(format!("{name} has {device}, and MIG mode is another"));
        }
        std::thread::yield_now();
        self.in_use.lock().unwrap().retain(|(n, ..)| n != name);
    }
}

/// R1. Prepares, unprepares (through the same and the other instance), orphans, restores and
/// reconciles race for the same places; no slice is ever used by two claims at once, and nothing is
/// left at the end.
#[test]
fn racing_threads_of_two_instances_use_no_slice_twice() {
    let dir = tempfile::tempdir().unwrap();
    let world = mig_world("h100x2", 1);
    let new = || instance(dir.path(), &world, Arc::new(sim(&world)), quick());
    let race = Race {
        world: &world,
        instances: [new(), new()],
        in_use: Mutex::default(),
        got: AtomicUsize::new(0),
        broken: Mutex::default(),
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (race, stop) = (&race, &stop);
        let workers: Vec<_> = (0..6)
            .map(|t| scope.spawn(move || (0..60).for_each(|i| race.live(t, i))))
            .collect();
        for executor in &race.instances {
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    executor.reconcile(&race.world.view());
                    executor.restore_cdi(Refresh::All);
                    std::thread::yield_now();
                }
            });
        }
        for worker in workers {
            worker.join().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    for _ in 0..3 {
        race.instances[0].reconcile(&world.view());
    }
    let broken = race.broken.into_inner().unwrap();
    println!(
        "{} prepares, {} faults",
        race.got.into_inner(),
        broken.len()
    );
    assert!(broken.is_empty(), "{:#?}", &broken[..broken.len().min(12)]);
    assert_eq!(race.instances[0].held().unwrap().len(), 0);
    assert_eq!(shape(&world), []);
    for number in 0..2 {
        let state = fs_err::read(
            dir.path()
                .join(format!("plugin/gpus/{}.json", world.gpu(number))),
        )
        .unwrap();
        let state = picture_of(&state);
        assert_eq!((state.noted, state.open), (Vec::new(), Vec::new()));
    }
}

/// A plugin instance whose NVML session knows of its own calls only, and marks them for others.
fn with_session(root: &Path, world: &World) -> Executor {
    let config = SessionConfig {
        deadline: Duration::from_millis(300),
        ..SessionConfig::default()
    };
    let (marks, sim) = (FileMarks::new(root.join("plugin/locks")), sim(world));
    let gpus = Arc::new(Session::marked(config, Arc::new(marks), move || {
        Ok(sim.clone())
    }));
    instance(
        root,
        world,
        gpus,
        Timing {
            hand_over: Duration::ZERO,
            ..quick()
        },
    )
}

/// H4. A rolling update while a call of the old instance hangs in the driver: to the new one "not
/// there" must not be "will never be".
#[test]
fn a_call_of_the_other_instance_that_comes_back_late_leaks_no_partition() {
    let dir = tempfile::tempdir().unwrap();
    let world = mig_world("h100x2", 1);
    let (sim, gpu) = (sim(&world), world.gpu(0));
    sim.set_mig_mode(&gpu, true).unwrap();
    let old = with_session(dir.path(), &world);
    let hangs = sim.fault(Fault::hang().of(GpuOp::CreateGpuInstance).times(1));
    let a = claim_of("a", &[HALF], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    old.prepare(&a, &old.begin(Duration::from_secs(5)))
        .unwrap_err();
    assert_eq!(old.fences().unwrap().len(), 1, "nothing new is put there");
    // The new instance comes up beside the old one, as the DaemonSet's maxSurge has it.
    let new = with_session(dir.path(), &world);
    new.restore_cdi(Refresh::All);
    new.reconcile(&world.view());
    assert_eq!(new.fences().unwrap().len(), 1, "it still hangs");
    let b = claim_of("b", &["gpu-0-mig-1g10gb-19-0"], "t2");
    let refused = new
        .prepare(&b, &new.begin(Duration::from_secs(5)))
        .unwrap_err();
    assert_eq!(refused.category(), "fenced");
    world.lock().api.clear();
    let lingers = new
        .unprepare(&a.uid, &new.begin(Duration::from_millis(50)))
        .unwrap();
    assert!(
        matches!(&lingers, Unprepared::Lingering(why) if why.contains("has not returned")),
        "{lingers:?}"
    );
    sim.release(hangs);
    let began = SystemClock.now();
    while !new.held().unwrap().is_empty() || !living(&world, &gpu).is_empty() {
        new.reconcile(&world.view());
        assert!(
            SystemClock.now() < began + Duration::from_secs(20),
            "left: {:?}",
            shape(&world)
        );
        std::thread::yield_now();
    }
    assert_eq!(new.fences().unwrap().len(), 0);
}
