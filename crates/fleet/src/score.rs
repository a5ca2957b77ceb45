//! Scores of nodes, as the default plugins of the scheduler give them.

use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};

use crate::run::{Strategy, Weights};

/// The most that a plugin gives.
const MOST: i64 = 100;
/// The most alternatives of a request.
const ALTERNATIVES: i64 = 8;
/// Amounts that `NodeResourcesFit` takes for a pod without requests: 0.1 core, 200 MB.
const USUAL: [u64; 2] = [100, 200 * 1024 * 1024];
/// Weight of `DynamicResources` among the default plugins; the others here have 1.
const WEIGHT_OF_ALTERNATIVES: i64 = 2;

/// Processor time and memory of a node: what it has, what its pods request, and the same with the
/// usual amounts for pods that request nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) has: [u64; 2],
    requested: [u64; 2],
    counted: [u64; 2],
}

impl Usage {
    pub(crate) fn of(has: [u64; 2]) -> Self {
        Self {
            has,
            ..Self::default()
        }
    }

    /// Says whether a node that says what it has has so much left.
    pub(crate) fn fits(&self, wanted: [u64; 2]) -> bool {
        let mut both = self.has.iter().zip(self.requested).zip(wanted);
        both.all(|((has, used), wanted)| {
            *has == 0 || wanted == 0 || used.saturating_add(wanted) <= *has
        })
    }

    #[must_use]
    pub(crate) fn with(self, wanted: [u64; 2], add: bool) -> Self {
        let change = |before: [u64; 2], by: [u64; 2]| {
            let sum = |a: u64, b: u64| {
                if add {
                    a.saturating_add(b)
                } else {
                    a.saturating_sub(b)
                }
            };
            let ([cpu, memory], [more_cpu, more_memory]) = (before, by);
            [sum(cpu, more_cpu), sum(memory, more_memory)]
        };
        Self {
            requested: change(self.requested, wanted),
            counted: change(self.counted, counted(wanted)),
            ..self
        }
    }

    /// Computes the score of a node for a pod: `NodeResourcesFit`, and the balance. For each class,
    /// `devices` has the number of its devices, and of those in use with the pod's.
    pub(crate) fn score(
        &self,
        wanted: [u64; 2],
        devices: &[[u64; 2]],
        (strategy, weights): (Strategy, Weights),
    ) -> i64 {
        let after = self.with(wanted, true);
        let [cpu, memory] = after.counted;
        let [has_cpu, has_memory] = self.has;
        let plain = [
            (weights.cpu, has_cpu, cpu),
            (weights.memory, has_memory, memory),
        ];
        let devices = devices
            .iter()
            .map(|[has, used]| (weights.devices, *has, *used));
        let (mut sum, mut all) = (0, 0);
        for (weight, has, used) in plain.into_iter().chain(devices) {
            if has == 0 || weight == 0 {
                continue;
            }
            let used = used.min(has);
            let counts = match strategy {
                Strategy::LeastAllocated => has - used,
                Strategy::MostAllocated => used,
            };
            let part = u128::from(counts) * u128::from(MOST.unsigned_abs()) / u128::from(has);
            sum += i64::try_from(part).unwrap_or(MOST) * weight;
            all += weight;
        }
        let fit = if all == 0 { 0 } else { sum / all };
        if self.has == [0, 0] {
            return fit;
        }
        // A pod without requests has no balance.
        let balance = if wanted == [0, 0] {
            0
        } else {
            MOST / 2
                + (MOST / 2 + balance(self.has, after.requested)
                    - balance(self.has, self.requested))
                    / 2
        };
        fit + balance
    }
}

fn counted(wanted: [u64; 2]) -> [u64; 2] {
    let ([cpu, memory], [usual_cpu, usual_memory]) = (wanted, USUAL);
    let or = |asked: u64, usual: u64| if asked == 0 { usual } else { asked };
    [or(cpu, usual_cpu), or(memory, usual_memory)]
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "as the scheduler computes it, 0 to 100"
)]
fn balance(has: [u64; 2], used: [u64; 2]) -> i64 {
    let ([cpu, memory], [used_cpu, used_memory]) = (has, used);
    if cpu == 0 || memory == 0 {
        return MOST;
    }
    let part = |used: u64, has: u64| (used as f64 / has as f64).min(1.0);
    let apart = (part(used_cpu, cpu) - part(used_memory, memory)).abs() / 2.0;
    ((1.0 - apart) * MOST as f64) as i64
}

/// Computes the score of the alternatives that claims got: the first counts most.
pub(crate) fn of_alternatives(claims: &[&ResourceClaim], results: &[AllocationResult]) -> i64 {
    let mut sum = 0;
    for (claim, result) in claims.iter().zip(results) {
        let given = result
            .devices
            .iter()
            .flat_map(|devices| &devices.results)
            .flatten();
        let given: Vec<&str> = given.map(|device| device.request.as_str()).collect();
        let requests = claim.spec.iter().flat_map(|spec| &spec.devices);
        for request in requests.flat_map(|devices| &devices.requests).flatten() {
            let alternatives = request.first_available.iter().flatten();
            for (number, alternative) in (0..).zip(alternatives) {
                if given.contains(&format!("{}/{}", request.name, alternative.name).as_str()) {
                    sum += ALTERNATIVES - number;
                }
            }
        }
    }
    sum
}

/// Scales scores of alternatives to the most that a plugin gives, with its weight.
pub(crate) fn weigh_alternatives(scores: &mut [i64]) {
    let highest = scores.iter().copied().max().unwrap_or(0);
    for score in scores.iter_mut() {
        *score = if highest == 0 {
            0
        } else {
            MOST * *score / highest * WEIGHT_OF_ALTERNATIVES
        };
    }
}
