//! Any sequence of all of it.

use std::sync::Arc;
use std::time::Duration;

use divvy_fake_cluster::Fault;
use k8s_openapi::api::resource::v1::ResourceSlice;

use crate::world::{NODE, PATIENCE, SLICES, devices, name, pool, server, start};

/// A small deterministic generator; std has none.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// `DIVVY_SEEDS` raises the number of sequences.
#[tokio::test(start_paused = true)]
async fn any_sequence_of_pools_faults_and_neighbours_ends_with_the_last_pool() {
    let seeds = std::env::var("DIVVY_SEEDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(40);
    for seed in 0..seeds {
        let mut random = Random(seed);
        let api = server();
        let mut world = start(&api, None);
        let mut last = pool(&[]);
        for _ in 0..random.below(12) + 3 {
            match random.below(8) {
                0 => drop(api.wipe_slices(NODE, None)),
                1 => api.expire_watches(),
                2 => {
                    let index = usize::try_from(random.below(3)).unwrap();
                    let _missing_is_fine = api.delete::<ResourceSlice>("", &name(index));
                }
                3 | 4 => {
                    let verb = ["create", "update", "delete", "list", "watch"]
                        [usize::try_from(random.below(5)).unwrap()];
                    let faults = [
                        Fault::Status(500),
                        Fault::Status(409),
                        Fault::DropBefore,
                        Fault::DropAfter,
                        Fault::Hang,
                    ];
                    api.fail_next(
                        1,
                        verb,
                        SLICES,
                        faults[usize::try_from(random.below(5)).unwrap()],
                    );
                }
                _ => {
                    let slices: Vec<Vec<String>> = (0..random.below(4))
                        .map(|s| {
                            (0..random.below(4))
                                .map(|d| format!("gpu-{s}-{d}"))
                                .collect()
                        })
                        .collect();
                    let names: Vec<Vec<&str>> = slices
                        .iter()
                        .map(|s| s.iter().map(String::as_str).collect())
                        .collect();
                    last = pool(&names.iter().map(Vec::as_slice).collect::<Vec<_>>());
                    world.desired.send_replace(Some(Arc::new(last.clone())));
                }
            }
            if random.below(2) == 0 {
                tokio::time::sleep(Duration::from_millis(random.below(3000))).await;
            }
        }
        world.desired.send_replace(Some(Arc::new(last.clone())));
        let mut wanted: Vec<Vec<String>> = last
            .slices
            .iter()
            .map(|s| s.devices.iter().map(|d| d.name.to_string()).collect())
            .collect();
        if wanted.is_empty() {
            wanted.push(vec![]);
        }
        let settled = |slices: Vec<ResourceSlice>| {
            let pools: Vec<_> = slices
                .iter()
                .map(|s| (s.spec.pool.generation, s.spec.pool.resource_slice_count))
                .collect();
            let count = i64::try_from(wanted.len()).unwrap();
            devices(&slices) == wanted && pools.iter().all(|pool| *pool == (pools[0].0, count))
        };
        let done = api.wait_until(|view| settled(view.list()), PATIENCE).await;
        assert!(
            done.is_ok(),
            "seed {seed}: {done:?}\n{:?}\n{:?}",
            api.list::<ResourceSlice>(),
            *world.status.borrow()
        );
        world.published(&last).await;
        world.stop.cancel();
        world.publisher.stopped().await;
    }
}
