//! A GPU that hangs, beside one that does not.

use std::time::Duration;

use super::*;

/// Bound on what must happen; nothing here waits for it to pass.
const SOON: Duration = Duration::from_secs(10);

/// Two GPUs, with a pod for each that has a share of it, and a third pod that has one of both.
struct Two {
    dir: TempDir,
    sim: SimNode,
    gpus: Vec<GpuUuid>,
    claims: Arc<Claims>,
    capper: Arc<Capper>,
}

impl Two {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let sim = SimNode::parse("h100x2").unwrap();
        let cuda = CudaVersion {
            major: 13,
            minor: 4,
        };
        sim.edit(|e| e.set_driver_version("615.71.09", cuda));
        let claims = Arc::new(Claims::default());
        let capper = Arc::new(capper(&dir, &sim, &claims));
        let two = Self {
            gpus: sim.uuids(),
            dir,
            sim,
            claims,
            capper,
        };
        for (pod, gpus) in [(0, vec![0]), (1, vec![1]), (2, vec![0, 1])] {
            let of_pod = pod_path(pod);
            for path in ["", "kubepods", &of_pod, &format!("{of_pod}/c")] {
                let group = two.dir.path().join("cgroup").join(path);
                fs_err::create_dir_all(&group).unwrap();
                fs_err::write(group.join("cgroup.controllers"), "cpu misc").unwrap();
            }
            let proc = two.dir.path().join(format!("host/proc/{pod}"));
            fs_err::create_dir_all(&proc).unwrap();
            fs_err::write(proc.join("cgroup"), format!("0::/{of_pod}/c\n")).unwrap();
            for gpu in gpus {
                two.prepare(pod, gpu);
            }
        }
        two
    }

    fn prepare(&self, pod: usize, gpu: usize) {
        lock(&self.claims.0).push(Held {
            claim: ClaimRef {
                uid: claim_uid(pod),
                namespace: "ns".to_owned(),
                name: format!("c{pod}"),
            },
            gpu: self.gpus[gpu].clone(),
            pods: vec![PodRef {
                name: format!("p{pod}"),
                uid: pod_uid(pod),
            }],
            device: format!("d{gpu}"),
            bytes: Some(64 * MIB),
            prepared: true,
        });
    }

    fn hang(&self, op: GpuOp) -> divvy_gpu_sim::FaultId {
        self.sim.fault(Fault {
            op: Some(op),
            gpu: Some(self.gpus[0].clone()),
            ..Fault::hang()
        })
    }

    fn limit(&self, pod: usize, gpu: usize) -> Option<u64> {
        let group = self.dir.path().join("cgroup").join(pod_path(pod));
        self.sim.memory_limit(&self.gpus[gpu], &group).ok()?.hard
    }
}

/// The hook of a pod's container asks an instance for its share of a GPU.
fn ask(
    pod: usize,
    gpu: usize,
    capper: &Arc<Capper>,
) -> std::thread::JoinHandle<Result<(), Uncapped>> {
    let capper = capper.clone();
    let question = Question {
        claim: claim_uid(pod),
        device: format!("d{gpu}"),
        pid: u32::try_from(pod).unwrap(),
    };
    std::thread::spawn(move || capper.cap(&question))
}

/// Waits until it is so.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < SOON, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_gpu_that_hangs_keeps_no_container_of_another_gpu_waiting() {
    for op in [GpuOp::SetMemoryLimit, GpuOp::MemoryLimit] {
        let two = Two::new();
        let other = Arc::new(capper(&two.dir, &two.sim, &two.claims));
        let hang = two.hang(op);
        let first = ask(0, 0, &two.capper);
        assert!(two.sim.wait_until_hanging(1, SOON));
        // Another pod, in this instance and in the next one of a rolling update, and a pod that
        // has shares of both.
        for (pod, capper) in [(1, &two.capper), (1, &other), (2, &two.capper)] {
            let asked = ask(pod, 1, capper);
            until("the container of the other GPU waits", || {
                asked.is_finished()
            });
            asked.join().unwrap().unwrap();
        }
        assert!(!first.is_finished());
        two.sim.release(hang);
        first.join().unwrap().unwrap();
    }
}

#[test]
fn a_round_at_a_gpu_that_hangs_keeps_nothing_of_another_waiting() {
    let two = Two::new();
    for (pod, gpu) in [(0, 0), (1, 1), (2, 0), (2, 1)] {
        ask(pod, gpu, &two.capper).join().unwrap().unwrap();
    }
    two.sim.edit(divvy_gpu_sim::Engine::forget_limits);
    let hang = two.hang(GpuOp::MemoryLimit);
    let capper = two.capper.clone();
    let round = std::thread::spawn(move || capper.round(&|| true));
    assert!(two.sim.wait_until_hanging(1, SOON));
    let all = Some(64 * MIB);
    until("the caps of the other GPU", || {
        [1, 2].map(|pod| two.limit(pod, 1)) == [all; 2]
    });
    let asked = ask(1, 1, &two.capper);
    until("the container of the other GPU waits", || {
        asked.is_finished()
    });
    asked.join().unwrap().unwrap();
    assert!(!round.is_finished());
    two.sim.release(hang);
    let round = round.join().unwrap();
    assert_eq!((round.repaired.len(), round.errors.len()), (4, 0));
}

/// Each further question would wait as long as the first.
#[test]
fn a_round_asks_a_gpu_that_does_not_answer_once() {
    let two = Two::new();
    for (pod, gpu) in [(0, 0), (1, 1), (2, 0), (2, 1)] {
        ask(pod, gpu, &two.capper).join().unwrap().unwrap();
    }
    let timeout = Fault::fail(GpuErrorCode::TIMEOUT).of(GpuOp::MemoryLimit);
    two.sim.fault(Fault {
        gpu: Some(two.gpus[0].clone()),
        ..timeout
    });
    let round = two.capper.round(&|| true);
    assert_eq!((round.repaired.len(), round.errors.len()), (0, 1));
}
