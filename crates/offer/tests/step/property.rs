//! Random facts in random order. `PROPTEST_CASES` raises the number of sequences.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_model::{DeviceKind, Form};
use divvy_offer::{KubeVersion, validate};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use crate::cluster::{Cluster, LATEST_WRITE, blocked, is_by_percent};

const RULES: [&str; 8] = [
    r#"{"modes":["Whole","Mig","TimeSlicing"]}"#,
    r#"{"modes":["Whole"]}"#,
    r#"{"modes":["TimeSlicing"]}"#,
    r#"{"modes":["Whole","Mig"],"mig":{"profiles":["3g.40gb"]}}"#,
    r#"{"gpus":{"ordinals":[0]},"modes":["Mig","TimeSlicing"]}"#,
    r#"{"gpus":{"ordinals":[1]},"modes":[]}"#,
    r#"{"modes":["Whole","TimeSlicing"],"shares":{"unit":"Percent"}}"#,
    r#"{"gpus":{"ordinals":[0]},"modes":["TimeSlicing"],"shares":{"unit":"Percent","minPercent":10}}"#,
];

#[derive(Debug, Clone)]
enum Event {
    Rules(usize),
    Server(KubeVersion),
    Sick(u32, bool),
    Lose(u32),
    Remove(u32),
    Find,
    Choose(Index, u64),
    Prepare(Index),
    Unprepare(Index),
    End(Index),
    Pass(u64),
    Answer(bool),
    Restart,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..RULES.len()).prop_map(Event::Rules),
        1 => prop::sample::select(vec![(34, 9), (36, 1), (37, 1)])
            .prop_map(|(minor, patch)| Event::Server(KubeVersion::new(1, minor, patch))),
        2 => (0..2_u32, any::<bool>()).prop_map(|(gpu, sick)| Event::Sick(gpu, sick)),
        1 => (0..2_u32).prop_map(Event::Lose),
        1 => (0..2_u32).prop_map(Event::Remove),
        1 => Just(Event::Find),
        8 => (any::<Index>(), 0..LATEST_WRITE).prop_map(|(which, late)| Event::Choose(which, late)),
        3 => any::<Index>().prop_map(Event::Prepare),
        1 => any::<Index>().prop_map(Event::Unprepare),
        3 => any::<Index>().prop_map(Event::End),
        6 => (0..100_u64).prop_map(Event::Pass),
        6 => prop::bool::weighted(0.8).prop_map(Event::Answer),
        1 => Just(Event::Restart),
    ]
}

impl Cluster {
    fn happens(&mut self, event: &Event) {
        match *event {
            Event::Rules(n) => self.rules(RULES[n]),
            Event::Server(version) => self.server(version),
            Event::Sick(gpu, is_sick) => self.sick(gpu, is_sick),
            Event::Lose(gpu) => {
                self.inventory.gpus.remove(&self.gpu(gpu));
                self.read();
            }
            Event::Remove(gpu) => {
                self.inventory.gpus.remove(&self.gpu(gpu));
                let gpu = self.gpu(gpu);
                self.health.removed.insert(gpu);
                self.read();
                self.learn(divvy_offer::Fact::Health(std::sync::Arc::new(
                    self.health.clone(),
                )));
            }
            Event::Find => {
                self.health.removed.clear();
                self.inventory = self.all.clone();
                self.learn(divvy_offer::Fact::Health(std::sync::Arc::new(
                    self.health.clone(),
                )));
                self.read();
            }
            Event::Choose(which, late) => {
                let slices = self.slices.clone();
                let free: Vec<_> = slices
                    .devices()
                    .filter(|device| self.can_be_given(device))
                    .collect();
                if !free.is_empty() {
                    self.choose(&which.get(&free).name, late);
                }
            }
            Event::Prepare(which) => {
                let now = self.now;
                let mut written: Vec<_> = self
                    .claims
                    .iter_mut()
                    .filter(|c| c.written <= now)
                    .collect();
                if !written.is_empty() {
                    let n = which.index(written.len());
                    written[n].prepared = true;
                }
                self.records();
            }
            Event::Unprepare(which) if !self.claims.is_empty() => {
                let n = which.index(self.claims.len());
                self.claims[n].prepared = false;
                self.records();
            }
            Event::End(which) if !self.claims.is_empty() => {
                let n = which.index(self.claims.len());
                self.claims.remove(n);
                self.records();
            }
            Event::Unprepare(_) | Event::End(_) => {}
            Event::Pass(seconds) => self.pass(Duration::from_secs(seconds)),
            Event::Answer(well) => self.answer(well),
            Event::Restart => self.begin(),
        }
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let pool = &self.slices;
        prop_assert_eq!(validate(pool), Ok(()));
        let mut modes = BTreeMap::<u32, BTreeSet<Form>>::new();
        for claim in &self.claims {
            let device = pool.device(&claim.device);
            prop_assert!(
                device.is_some(),
                "{} is given out and withdrawn",
                claim.device
            );
            // A device of a GPU that was away when a process began has no capacity at all.
            prop_assert!(
                device
                    .is_some_and(|device| device.capacity.is_empty()
                        || is_by_percent(device) == claim.percent),
                "{} is given out in two units",
                claim.device
            );
            let kind = DeviceKind::parse(&claim.device).unwrap();
            modes.entry(kind.ordinal()).or_default().insert(kind.form());
        }
        prop_assert!(
            modes.values().all(|modes| modes.len() == 1),
            "two modes of one GPU: {:?}",
            modes
        );
        prop_assert!(self.fits(None), "a counter is below zero");
        if self.out.pool.is_none() {
            return Ok(());
        }
        let by_rule = |ordinal: u32| {
            self.out
                .resolved
                .rules
                .get(&self.gpu(ordinal))
                .map(|rules| &rules.modes)
        };
        for device in pool
            .devices()
            .filter(|device| !device.name.as_str().ends_with("-admin"))
        {
            let kind = DeviceKind::parse(&device.name).unwrap();
            let gpu = self.gpu(kind.ordinal());
            let there = self.inventory.gpus.contains_key(&gpu);
            prop_assert!(
                blocked(device) || (there && !self.health.sick.contains_key(&gpu)),
                "{} of a GPU that is ill or away is given out",
                device.name
            );
            let asked = match by_rule(kind.ordinal()) {
                Some(divvy_offer::Modes::Only(modes)) => modes.contains(&kind.form()),
                _ => kind.form() == Form::WHOLE,
            };
            prop_assert!(
                blocked(device) || asked,
                "{} leaves and is given out",
                device.name
            );
        }
        Ok(())
    }
}

fn cases() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(64);
    ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 3000,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn what_is_given_out_stays_published_and_everything_settles(
        events in vec(event(), 1..60),
    ) {
        let mut cluster = Cluster::new("h100x2", RULES[0]);
        for event in events {
            cluster.happens(&event);
            cluster.check()?;
        }
        // Facts stop, time passes.
        cluster.settle();
        cluster.check()?;
        let settled = cluster.slices.clone();
        cluster.settle();
        prop_assert_eq!(&cluster.slices, &settled, "it goes on changing");
        // When all claims have ended, it is as on a node that has just begun.
        cluster.claims.clear();
        cluster.happens(&Event::Find);
        cluster.records();
        cluster.settle();
        let settled = cluster.slices.clone();
        cluster.begin();
        cluster.answer(true);
        cluster.settle();
        prop_assert_eq!(&cluster.slices, &settled, "something is left of what was");
    }
}
