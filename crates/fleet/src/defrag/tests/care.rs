//! Plans without a person who looks: they move pods, or take from less important ones, and end.

use k8s_openapi::jiff::Timestamp;

use super::*;
use crate::tests::REQUESTS;

fn time(number: i64) -> Time {
    Time(Timestamp::from_second(number).unwrap())
}

/// Pods that run, and pods that wait, each with its request.
struct Story {
    cluster: Cluster,
    waiting: Vec<Waits>,
    requests: BTreeMap<String, &'static str>,
    made: i64,
    /// Mark of a scheduler that serves those first that should wait.
    thieves: bool,
}

#[derive(Debug, Clone)]
struct Waits {
    text: &'static str,
    priority: i32,
    made: i64,
}

impl Story {
    fn new(nodes: usize) -> Self {
        Self {
            cluster: cluster(nodes, 2),
            waiting: Vec::new(),
            requests: BTreeMap::new(),
            made: 0,
            thieves: false,
        }
    }

    fn arrive(&mut self, text: &'static str, priority: i32) {
        self.made += 1;
        self.waiting.push(Waits {
            text,
            priority,
            made: self.made,
        });
    }

    /// Starts a pod on a node; says whether it fits there.
    fn start(&mut self, pod: &Waits, node: usize) -> bool {
        let name = format!("p{}", pod.made);
        let fits = start(&mut self.cluster, &name, pod.text, node, pod.priority);
        if fits {
            let placed = self.cluster.pods.last_mut().unwrap();
            placed.metadata.creation_timestamp = Some(time(pod.made));
            self.requests.insert(name, pod.text);
        }
        fits
    }

    /// Tries all waiting pods, each on nodes in any order: in any order, or with the thieves first:
    /// the least important and newest ones.
    fn schedule(&mut self, random: &mut Random) {
        let mut left = std::mem::take(&mut self.waiting);
        left.sort_by_key(|pod| (-pod.priority, pod.made));
        let mut still = Vec::new();
        while !left.is_empty() {
            let last = left.len() - 1;
            let next = if self.thieves {
                last
            } else {
                random.below(left.len())
            };
            let pod = left.remove(next);
            let nodes = self.cluster.nodes.len();
            let first = random.below(nodes);
            if !(0..nodes).any(|step| self.start(&pod, (first + step) % nodes)) {
                still.push(pod);
            }
        }
        self.waiting = still;
    }

    fn remove(&mut self, name: &str) {
        let is_it = |of: &Pod| of.metadata.name.as_deref() == Some(name);
        self.cluster.pods.retain(|pod| !is_it(pod));
        let claim = format!("{name}-gpu");
        let claims = &mut self.cluster.claims;
        claims.retain(|of| of.metadata.name.as_deref() != Some(claim.as_str()));
    }

    /// Carries out the first plan for a waiting pod, whose victims come again as new pods. Returns
    /// the number of evictions.
    fn round(&mut self, random: &mut Random, ask: impl Fn(&Waits) -> Wanted) -> usize {
        let mut waiting = self.waiting.clone();
        waiting.sort_by_key(|pod| (-pod.priority, pod.made));
        for pod in waiting {
            let answer = plan(&self.cluster, &ask(&pod), 37).unwrap();
            let Some(plan) = answer.plan.filter(|plan| !plan.evict.is_empty()) else {
                continue;
            };
            for victim in &plan.evict {
                self.remove(&victim.name);
                let text = self.requests[&victim.name];
                self.arrive(text, victim.priority);
            }
            self.schedule(random);
            return plan.evict.len();
        }
        0
    }
}

fn moving(pod: &Waits) -> Wanted {
    Wanted {
        care: Care {
            made_before: Some(time(pod.made)),
            all_fit: true,
        },
        ..wanted(pod.text, pod.priority)
    }
}

fn preempting(pod: &Waits) -> Wanted {
    Wanted {
        care: Care {
            made_before: Some(time(pod.made)),
            all_fit: false,
        },
        ..wanted(pod.text, pod.priority - 1)
    }
}

/// A world of running pods of any priorities, and some that wait.
fn story(random: &mut Random) -> Story {
    let mut story = Story::new(1 + random.below(3));
    for _ in 0..10 {
        let priority = i32::try_from(random.below(3)).unwrap();
        story.arrive(REQUESTS[random.below(6)], priority);
        // Holes of pods that are gone again.
        story.schedule(random);
        if random.below(3) == 0 && !story.cluster.pods.is_empty() {
            let gone = random.below(story.cluster.pods.len());
            let name = story.cluster.pods[gone].metadata.name.clone().unwrap();
            story.remove(&name);
        }
    }
    story
}

/// The fewest pods of one node after whose eviction the wanted pod and then all of them fit.
fn fewest(story: &Story, pod: &Waits) -> Option<usize> {
    let older = |of: &&Pod| {
        of.metadata.creation_timestamp < Some(time(pod.made)) && pod::priority(of) <= pod.priority
    };
    let mut best = None;
    for node in 0..story.cluster.nodes.len() {
        let on = format!("node-{node}");
        let here = |of: &&Pod| of.spec.as_ref().unwrap().node_name.as_ref() == Some(&on);
        let its = story.cluster.pods.iter().filter(here).filter(older);
        let mut its: Vec<(i32, String)> = its
            .map(|of| (pod::priority(of), of.metadata.name.clone().unwrap()))
            .collect();
        // Important ones are placed again first.
        its.sort_by_key(|of| std::cmp::Reverse((of.0, waiting_name(&of.1))));
        for subset in 0..1_u32 << its.len() {
            let chosen = its.iter().enumerate();
            let gone: Vec<&(i32, String)> = chosen
                .filter(|(bit, _)| subset >> bit & 1 == 1)
                .map(|(_, of)| of)
                .collect();
            let mut after = Story {
                cluster: story.cluster.clone(),
                waiting: Vec::new(),
                requests: BTreeMap::new(),
                made: story.made,
                thieves: false,
            };
            for (_, name) in &gone {
                after.remove(name);
            }
            let nodes = after.cluster.nodes.len();
            let again = |(priority, name): &&(i32, String)| Waits {
                text: story.requests[name],
                priority: *priority,
                made: 100,
            };
            let fits = after.start(pod, node)
                && gone
                    .iter()
                    .map(again)
                    .all(|of| (0..nodes).any(|node| after.start(&of, node)));
            if fits && best.is_none_or(|best| gone.len() < best) {
                best = Some(gone.len());
            }
        }
    }
    best
}

fn waiting_name(name: &str) -> String {
    format!("ns/{name}")
}

#[test]
fn a_plan_that_moves_pods_finds_a_place_for_each_and_moves_the_fewest() {
    let mut random = Random::new(11);
    let (mut moved, mut none, mut several) = (0, 0, 0);
    for world in 0..200 {
        let story = story(&mut random);
        for pod in &story.waiting {
            let found = plan(&story.cluster, &moving(pod), 37).unwrap().plan;
            let expected = fewest(&story, pod);
            let count = found.as_ref().map(|plan| plan.evict.len());
            assert_eq!(count, expected, "world {world}: {pod:?}");
            let Some(plan) = found else {
                none += 1;
                continue;
            };
            assert!(plan.evict.iter().all(|victim| victim.then.is_some()));
            moved += usize::from(!plan.evict.is_empty());
            several += usize::from(plan.evict.len() > 1);
        }
    }
    assert!(
        moved > 10 && none > 50 && several > 1,
        "{moved} {none} {several}"
    );
}

/// Whatever the scheduler does with the places that are made free, preemption ends: a pod takes
/// from less important ones that are older, and what comes in their place is newer.
#[test]
fn rounds_of_preemption_end() {
    let mut random = Random::new(12);
    let (mut evictions, mut most) = (0, 0);
    for world in 0..300 {
        let mut story = story(&mut random);
        story.thieves = world % 2 == 0;
        let mut rounds = 0;
        while story.round(&mut random, preempting) > 0 {
            rounds += 1;
            assert!(rounds < 200, "world {world} does not end");
        }
        evictions += rounds;
        most = most.max(rounds);
    }
    assert!(evictions > 100 && most > 2, "{evictions} {most}");
}

/// Moves end where the scheduler decides by chance, and more pods run than before.
#[test]
fn rounds_of_moves_end_with_more_pods_that_run() {
    let mut random = Random::new(13);
    let (mut rounds, mut more, mut fewer) = (0, 0, 0);
    for world in 0..250 {
        let mut story = story(&mut random);
        let (before, mut own) = (story.cluster.pods.len(), 0);
        while story.round(&mut random, moving) > 0 {
            own += 1;
            assert!(own < 200, "world {world} does not end");
        }
        rounds += own;
        more += usize::from(story.cluster.pods.len() > before);
        fewer += usize::from(story.cluster.pods.len() < before);
    }
    assert!(rounds > 20, "{rounds}");
    assert!(more > 10 * fewer.max(1), "{more} {fewer}");
}
