//! The search against the plainest one there is: same order, no memory, every state checked from
//! scratch.

use proptest::prelude::*;

use super::*;

/// A device of a world, as numbers.
#[derive(Debug, Clone)]
struct Thing {
    /// The GPU whose counters it draws on, how much of the first and of the second; none draws on
    /// nothing.
    draws: Option<(usize, [i64; 2])>,
    /// Value that constraints see; none lacks it.
    colour: Option<i64>,
    /// Amount that can be shared.
    shared: Option<i64>,
    big: bool,
    held: bool,
}

/// A way to satisfy a request.
#[derive(Debug, Clone)]
struct Way {
    /// 0: any device, 1: big ones, 2: shared ones.
    kind: usize,
    count: usize,
    amount: Option<i64>,
}

#[derive(Debug, Clone)]
struct Case {
    /// Amount that each GPU has of its two counters.
    gpus: Vec<[i64; 2]>,
    things: Vec<Thing>,
    /// By claim and request: the ways. A single way is exact, more are a prioritized list.
    claims: Vec<Vec<Vec<Way>>>,
    /// By claim: whether a match and a distinction are asked for, of the first so many requests (0
    /// is all).
    rules: Vec<(Option<usize>, Option<usize>)>,
}

/// A pick: claim, request, way, device.
type Taken = (usize, usize, usize, usize);

impl Case {
    fn way(&self, (claim, request, way, _): Taken) -> &Way {
        &self.claims[claim][request][way]
    }

    fn wanted(&self, taken: Taken) -> bool {
        let (thing, way) = (&self.things[taken.3], self.way(taken));
        match way.kind {
            0 => true,
            1 => thing.big,
            _ => thing.shared.is_some(),
        }
    }

    /// Says whether these picks can stand together, beside what is held.
    fn stands(&self, picks: &[Taken]) -> bool {
        let last = *picks.last().unwrap();
        let thing = &self.things[last.3];
        if !self.wanted(last) || (thing.held && thing.shared.is_none()) {
            return false;
        }
        // A device that is not shared is one claim's, once.
        if thing.shared.is_none() && picks.iter().filter(|p| p.3 == last.3).count() > 1 {
            return false;
        }
        // A capacity is wanted of devices that have one; a share without a wish takes 10.
        if self.way(last).amount.is_some() && thing.shared.is_none() {
            return false;
        }
        if let Some(total) = thing.shared {
            let mine = picks
                .iter()
                .filter(|p| p.3 == last.3)
                .map(|p| self.way(*p).amount.unwrap_or(10));
            if mine.sum::<i64>() + if thing.held { 10 } else { 0 } > total {
                return false;
            }
        }
        let draws = |among: &dyn Fn(usize) -> bool, gpu: usize, counter: usize| -> i64 {
            let used = (0..self.things.len())
                .filter(|d| among(*d))
                .filter_map(|d| self.things[d].draws);
            used.filter(|(g, _)| *g == gpu)
                .map(|(_, amounts)| amounts[counter])
                .sum()
        };
        let held = |d: usize| self.things[d].held;
        if thing.draws.is_some() && !(thing.shared.is_some() && thing.held) {
            let used = |d: usize| held(d) || picks.iter().any(|p| p.3 == d);
            for (gpu, has) in self.gpus.iter().enumerate() {
                for (counter, has) in has.iter().enumerate() {
                    if draws(&used, gpu, counter) > *has {
                        return false;
                    }
                }
            }
        }
        let (matching, distinct) = self.rules[last.0];
        let under = |first: usize| {
            let all: Vec<_> = picks
                .iter()
                .filter(|p| p.0 == last.0 && (first == 0 || p.1 < first))
                .collect();
            all.into_iter()
                .map(|p| self.things[p.3].colour)
                .collect::<Vec<_>>()
        };
        let fine = |colours: &[Option<i64>], alike: bool| {
            colours.iter().all(Option::is_some)
                && (0..colours.len()).all(|a| (0..a).all(|b| (colours[a] == colours[b]) == alike))
        };
        matching.is_none_or(|first| fine(&under(first), true))
            && distinct.is_none_or(|first| fine(&under(first), false))
    }

    /// The first fit from here on.
    fn fit(
        &self,
        (claim, request): (usize, usize),
        way: Option<usize>,
        found: usize,
        start: usize,
        picks: &mut Vec<Taken>,
    ) -> bool {
        let Some(requests) = self.claims.get(claim) else {
            return true;
        };
        let Some(ways) = requests.get(request) else {
            return self.fit((claim + 1, 0), None, 0, 0, picks);
        };
        let Some(way) = way else {
            return (0..ways.len()).any(|way| self.fit((claim, request), Some(way), 0, 0, picks));
        };
        if found == ways[way].count {
            return self.fit((claim, request + 1), None, 0, 0, picks);
        }
        for device in start..self.things.len() {
            picks.push((claim, request, way, device));
            if self.stands(picks)
                && self.fit((claim, request), Some(way), found + 1, device + 1, picks)
            {
                return true;
            }
            picks.pop();
        }
        false
    }

    fn expected(&self) -> String {
        let mut picks = Vec::new();
        if !self.fit((0, 0), None, 0, 0, &mut picks) {
            return "does not fit".to_owned();
        }
        let of_claim = |claim: usize| {
            let mine = picks.iter().filter(|p| p.0 == claim).map(|p| {
                let sub = if self.claims[p.0][p.1].len() > 1 {
                    format!("/w{}", p.2)
                } else {
                    String::new()
                };
                let amount = self.things[p.3]
                    .shared
                    .map(|_| self.way(*p).amount.unwrap_or(10));
                let amount = amount.map(|a| format!("{{units={a}}}")).unwrap_or_default();
                format!("r{}{sub}=device-{}{amount}", p.1, p.3)
            });
            mine.chain(["@node-1".to_owned()])
                .collect::<Vec<_>>()
                .join(" ")
        };
        (0..self.claims.len())
            .map(of_claim)
            .collect::<Vec<_>>()
            .join(" | ")
    }

    fn world(&self) -> World {
        let devices = self.things.iter().enumerate().map(|(index, thing)| {
            let mut device = Device {
                name: format!("device-{index}"),
                ..Device::default()
            };
            device = with_attribute(
                device,
                "big",
                DeviceAttribute {
                    bool: Some(thing.big),
                    ..Default::default()
                },
            );
            if thing.colour.is_some() {
                device = with_attribute(
                    device,
                    "colour",
                    DeviceAttribute {
                        int: thing.colour,
                        ..Default::default()
                    },
                );
            }
            if let Some((gpu, [a, b])) = thing.draws {
                device = drawing(
                    device,
                    &format!("gpu-{gpu}"),
                    &[("a", &a.to_string()), ("b", &b.to_string())],
                );
            }
            match thing.shared {
                Some(total) => shared(
                    device,
                    &[("units", ranged(&total.to_string(), "10", "0", "", ""))],
                ),
                None => device,
            }
        });
        let names: Vec<(String, String, String)> = self
            .gpus
            .iter()
            .enumerate()
            .map(|(gpu, [a, b])| (format!("gpu-{gpu}"), a.to_string(), b.to_string()))
            .collect();
        let amounts: Vec<[(&str, &str); 2]> = names
            .iter()
            .map(|(_, a, b)| [("a", a.as_str()), ("b", b.as_str())])
            .collect();
        let all: Vec<(&str, &[(&str, &str)])> = names
            .iter()
            .zip(&amounts)
            .map(|((name, ..), amounts)| (name.as_str(), amounts.as_slice()))
            .collect();
        let slices = one_pool(vec![slice_of(devices.collect()), sets(&all)]);
        let claims = self.claims.iter().enumerate().map(|(number, requests)| {
            let list = requests
                .iter()
                .enumerate()
                .map(|(r, ways)| request_of(r, ways))
                .collect();
            let mut claim = claim(&format!("claim-{number}"), list);
            let names: Vec<String> = (0..requests.len()).map(|r| format!("r{r}")).collect();
            let first = |n: usize| names.iter().take(n).map(String::as_str).collect::<Vec<_>>();
            let (matching_first, distinct_first) = self.rules[number];
            if let Some(n) = matching_first {
                claim = matching(claim, "driver-a/colour", &first(n));
            }
            if let Some(n) = distinct_first {
                claim = differing(claim, "driver-a/colour", &first(n));
            }
            claim
        });
        let mut world = World::new(slices, claims.collect());
        for (index, thing) in self.things.iter().enumerate().filter(|(_, t)| t.held) {
            let mut holder = holding(
                &format!("holder-{index}"),
                &[&format!("device-{index}")],
                false,
            );
            if thing.shared.is_some() {
                let allocation = holder.status.as_mut().unwrap().allocation.as_mut().unwrap();
                let result = &mut allocation
                    .devices
                    .as_mut()
                    .unwrap()
                    .results
                    .as_mut()
                    .unwrap()[0];
                result.share_id = Some("an-id".to_owned());
                result.consumed_capacity = Some([("units".to_owned(), raw("10"))].into());
            }
            world.held.push(holder);
        }
        world
    }
}

fn request_of(number: usize, ways: &[Way]) -> DeviceRequest {
    let expressions = [
        "true",
        r#"device.attributes["driver-a"].big"#,
        "device.allowMultipleAllocations",
    ];
    let name = format!("r{number}");
    let capacity = |way: &Way| {
        way.amount
            .map(|a| requirements(&[("units", &a.to_string())]))
    };
    if let [way] = ways {
        return exact(&name, CLASS_A, |r| {
            r.count = Some(i64::try_from(way.count).unwrap());
            r.selectors = Some(vec![selector(expressions[way.kind])]);
            r.capacity = capacity(way);
        });
    }
    let subs = ways.iter().enumerate().map(|(w, way)| DeviceSubRequest {
        selectors: Some(vec![selector(expressions[way.kind])]),
        capacity: capacity(way),
        ..sub(&format!("w{w}"), CLASS_A, i64::try_from(way.count).unwrap())
    });
    first_of(&name, subs.collect())
}

fn things() -> impl Strategy<Value = Vec<Thing>> {
    let draws = prop::option::weighted(0.7, (0_usize..2, [0_i64..3, 0_i64..3]));
    let thing = (
        draws,
        prop::option::weighted(0.9, 0_i64..3),
        prop::option::weighted(0.3, 10_i64..40),
        any::<bool>(),
        prop::bool::weighted(0.15),
    );
    let thing = thing.prop_map(|(draws, colour, shared, big, held)| Thing {
        draws,
        colour,
        shared,
        big,
        held,
    });
    prop::collection::vec(thing, 2..10)
}

fn cases() -> impl Strategy<Value = Case> {
    let count = prop_oneof![3 => Just(1_usize), 2 => 2_usize..4];
    let way = (0_usize..3, count, prop::option::weighted(0.3, 1_i64..20)).prop_map(
        |(kind, count, amount)| Way {
            kind,
            count,
            amount,
        },
    );
    let request = prop_oneof![
        3 => prop::collection::vec(way.clone(), 1..2),
        1 => prop::collection::vec(way, 2..4),
    ];
    let claim = prop::collection::vec(request, 1..4);
    let rule = || prop::option::weighted(0.3, 0_usize..3);
    (
        prop::collection::vec([0_i64..7, 0_i64..7], 2..3),
        things(),
        prop::collection::vec((claim, (rule(), rule())), 1..3),
    )
        .prop_map(|(gpus, things, claims)| {
            let (claims, rules) = claims.into_iter().unzip();
            Case {
                gpus,
                things,
                claims,
                rules,
            }
        })
}

/// `DIVVY_ALLOCATOR_CASES` raises the number of cases.
#[test]
fn remembering_dead_ends_does_not_change_the_answer() {
    let cases = std::env::var("DIVVY_ALLOCATOR_CASES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(192);
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let (fits, all) = (std::cell::Cell::new(0_u32), std::cell::Cell::new(0_u32));
    runner
        .run(&self::cases(), |case| {
            let expected = case.expected();
            all.set(all.get() + 1);
            fits.set(fits.get() + u32::from(expected != "does not fit"));
            prop_assert_eq!(case.world().try_it(), expected);
            Ok(())
        })
        .unwrap();
    // A generator of hopeless worlds would prove nothing, nor one of easy ones.
    let share = f64::from(fits.get()) / f64::from(all.get());
    assert!((0.1..0.9).contains(&share), "{share} of the worlds fit");
}
