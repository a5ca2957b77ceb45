//! Pods of every kind that come and go.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use divvy_api::names;
use serde_json::{Value, json};

use super::{Day, Dice, END, Shared};
use crate::api::{at, has_condition};
use crate::case::Env;
use crate::objects::{Pod, claim_for, collection};
use crate::wait::{poll, wait_for};

/// A pod that has not run for so long must have a visible reason. The kubelet retries a failed
/// prepare after 60 to 90 s, and everything may have been down in between.
const STUCK: Duration = Duration::from_mins(4);

/// Devices that a pod asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Whole,
    Partition,
    TwoPartitions,
    Share,
    TwoShares,
    OneClaimTwoPods,
    Admin,
}

impl Kind {
    pub(super) const ALL: [Self; 7] = [
        Self::Whole,
        Self::Partition,
        Self::TwoPartitions,
        Self::Share,
        Self::TwoShares,
        Self::OneClaimTwoPods,
        Self::Admin,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Whole => "a whole GPU",
            Self::Partition => "a partition",
            Self::TwoPartitions => "two partitions",
            Self::Share => "a share",
            Self::TwoShares => "two shares",
            Self::OneClaimTwoPods => "one share for two pods",
            Self::Admin => "admin access",
        }
    }

    /// The spec of a claim.
    fn spec(self, dice: &mut Dice) -> Value {
        const PROFILES: [&str; 5] = ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"];
        let driver = names::DRIVER;
        let exactly = |name: &str, exactly: Value| json!({"name": name, "exactly": exactly});
        let mut partition = |name: &str| {
            let profile = dice.one_of(&PROFILES).copied().unwrap_or("1g.10gb");
            let cel = format!("device.attributes['{driver}'].profile == '{profile}'");
            exactly(
                name,
                json!({"deviceClassName": names::CLASS_MIG, "selectors": [{"cel": {"expression": cel}}]}),
            )
        };
        let requests = match self {
            Self::Whole => vec![exactly("gpu", json!({"deviceClassName": names::CLASS_GPU}))],
            Self::Partition => vec![partition("part")],
            Self::TwoPartitions => vec![partition("x"), partition("y")],
            Self::Share | Self::OneClaimTwoPods => vec![share("share", 1 + dice.below(8))],
            Self::TwoShares => vec![share("x", 1 + dice.below(4)), share("y", 1)],
            Self::Admin => {
                vec![exactly(
                    "all",
                    json!({"deviceClassName": names::CLASS_ADMIN, "adminAccess": true}),
                )]
            }
        };
        json!({"devices": {"requests": requests}})
    }
}

fn share(name: &str, gib: usize) -> Value {
    json!({"name": name, "exactly": {
        "deviceClassName": names::CLASS_SHARE,
        "capacity": {"requests": {"memory": format!("{gib}Gi"), "cores": "2"}},
    }})
}

/// A claim with its pods.
#[derive(Debug, Clone)]
struct One {
    name: String,
    kind: Kind,
    pods: Vec<String>,
    since: Instant,
    ran: bool,
    /// Deleted; it is on its way.
    ending: bool,
}

/// All that there are.
#[derive(Debug, Default)]
pub(super) struct Live(Vec<One>);

/// Creates and ends pods until the day is over.
pub(super) fn run(shared: &Shared, day: &Day) -> Live {
    let (mut dice, mut live, mut number) = (Dice(day.seed), Live::default(), 0_usize);
    while !shared.is_over() {
        shared.rest(Duration::from_millis(100 + dice.below(400) as u64));
        let ready = live.0.iter().filter(|one| !one.ending).count();
        let creates = ready < day.pods && dice.below(day.pods) >= ready / 2;
        if creates {
            number += 1;
            let kind = dice.one_of(&Kind::ALL).copied().unwrap_or(Kind::Share);
            match create(&shared.env, &format!("pod-{number}"), kind, &mut dice) {
                Ok(one) => {
                    shared.count(format!("pods with {}", kind.name()));
                    live.0.push(one);
                }
                Err(_) => shared.count("requests while the API server is away"),
            }
        } else {
            live.end_one(shared, &mut dice);
        }
        live.look(shared);
    }
    live
}

fn create(env: &Env, name: &str, kind: Kind, dice: &mut Dice) -> Result<One> {
    let pods = match kind {
        Kind::OneClaimTwoPods => vec![format!("{name}-a"), format!("{name}-b")],
        _ => vec![name.to_owned()],
    };
    env.create(&claim_for(name, &kind.spec(dice)))?;
    for pod in &pods {
        env.create(&Pod::new(pod).claim(name).grace(2).build())?;
    }
    let since = Instant::now();
    Ok(One {
        name: name.to_owned(),
        kind,
        pods,
        since,
        ran: false,
        ending: false,
    })
}

impl Live {
    /// Deletes a pod, sometimes by force.
    fn end_one(&mut self, shared: &Shared, dice: &mut Dice) {
        let mut candidates: Vec<&mut One> = self.0.iter_mut().filter(|one| !one.ending).collect();
        let chosen = dice.below(candidates.len());
        let Some(one) = candidates.get_mut(chosen) else {
            return;
        };
        let force = dice.below(4) == 0;
        match end(&shared.env, one, force) {
            Ok(()) => {
                one.ending = true;
                one.since = Instant::now();
                shared.count(if force {
                    "pods deleted by force"
                } else {
                    "pods deleted"
                });
            }
            Err(_) => shared.count("requests while the API server is away"),
        }
    }

    /// Forgets what is gone, notes what runs, and asks those that wait why.
    fn look(&mut self, shared: &Shared) {
        let env = &shared.env;
        let (Some(pods), Some(claims)) = (
            collection("Pod", &env.namespace),
            collection("ResourceClaim", &env.namespace),
        ) else {
            return;
        };
        let (Ok(pods), Ok(claims)) = (env.api().list(&pods), env.api().list(&claims)) else {
            return;
        };
        let named = |all: &[Value], name: &str| {
            all.iter()
                .find(|one| at(one, "metadata.name") == name)
                .cloned()
        };
        self.0.retain_mut(|one| {
            let own: Vec<Value> = one
                .pods
                .iter()
                .filter_map(|pod| named(&pods, pod))
                .collect();
            if own.is_empty() && one.ending && named(&claims, &one.name).is_none() {
                return false;
            }
            if !one.ran && !own.is_empty() && own.iter().all(|pod| has_condition(pod, "Ready")) {
                one.ran = true;
                shared.count(format!("pods that ran, with {}", one.kind.name()));
            }
            if (one.ending || !one.ran) && one.since.elapsed() > STUCK {
                let why = reason(env, one, &own);
                let what = if one.ending { "end" } else { "start" };
                match why {
                    Some(_) => {
                        shared.count(format!("pods that waited long to {what}, and said why"));
                    }
                    None => shared.wrong(format!(
                        "{} ({}) waits to {what} without a visible reason",
                        one.name,
                        one.kind.name()
                    )),
                }
                one.since = Instant::now();
            }
            true
        });
    }

    /// Ends all, and waits until they are gone.
    pub(super) fn end_all(&self, shared: &Shared) -> Result<()> {
        let env = &shared.env;
        for one in &self.0 {
            poll("deleted pods", END, || end(env, one, false).map(|()| true))?;
        }
        for kind in ["Pod", "ResourceClaim"] {
            let path = collection(kind, &env.namespace).context("unknown kind")?;
            let names = || -> Result<Vec<String>> {
                let left = env.api().list(&path)?;
                Ok(left
                    .iter()
                    .filter_map(|one| at(one, "metadata.name").as_str().map(str::to_owned))
                    .collect())
            };
            poll(&format!("end of every {kind}"), END, || {
                Ok(names()?.is_empty())
            })
            .with_context(|| {
                let left = names().unwrap_or_default();
                let why: Vec<String> = left.iter().flat_map(|name| env.messages(name)).collect();
                format!("left: {left:?}: {}", why.join("; "))
            })?;
        }
        Ok(())
    }
}

/// Deletes pods and their claim; the claim goes when no pod uses it.
fn end(env: &Env, one: &One, force: bool) -> Result<()> {
    for pod in &one.pods {
        if force {
            env.force_delete(pod)?;
        } else {
            env.delete("Pod", pod)?;
        }
    }
    env.delete("ResourceClaim", &one.name)
}

/// The visible reasons why pods wait.
fn reason(env: &Env, one: &One, pods: &[Value]) -> Option<String> {
    let unschedulable = pods.iter().find_map(|pod| {
        let conditions = at(pod, "status.conditions").as_array()?;
        let refused = conditions
            .iter()
            .find(|condition| at(condition, "reason") == "Unschedulable")?;
        Some(at(refused, "message").as_str()?.to_owned())
    });
    unschedulable.or_else(|| {
        let about = one.pods.iter().chain([&one.name]);
        about
            .flat_map(|name| env.messages(name))
            .find(|text| !text.starts_with("Successfully assigned"))
    })
}

/// A pod of this kind, from its creation to its end.
pub(super) fn tomorrow(env: &Env, kind: Kind) -> Result<()> {
    let name = format!("tomorrow-{}", kind.name().replace(' ', "-").to_lowercase());
    let one = create(env, &name, kind, &mut Dice(1))?;
    for pod in &one.pods {
        env.wait_until_running(pod)?;
    }
    end(env, &one, false)?;
    wait_for("end of the pods", END, || {
        let mut left = None;
        for pod in &one.pods {
            left = left.or(env.api().get(&env.path("Pod", pod)?)?);
        }
        Ok(left.is_none().then_some(()))
    })?;
    env.wait_until_gone("ResourceClaim", &name)
}
