//! A look at the claims of a namespace: the sum of what they have or may take, and who of those
//! that wait is let through.

use std::collections::BTreeMap;

use divvy_api::names::annotations;
use divvy_api::quota::GpuQuotaSpec;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};

use crate::amount::{Amount, Limits, MILLI};
use crate::catalogue::Catalogue;
use crate::charge::charge;
use crate::price::price;

/// State of a claim for its quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It is allocated: the amount is what it was given.
    Has,
    /// It may be allocated at any time: the amount is the most that it may be given.
    MayTake,
    /// It is not let through, for the reason.
    Waits(String),
}

/// A claim that asks for devices of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Name of the claim.
    pub claim: String,
    /// Amount that it has, may take, or asks for; unknown if nothing can be said of it.
    pub amount: Option<Amount>,
    /// State for the quota.
    pub state: State,
}

/// A claim that is to be let through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Name of the claim.
    pub claim: String,
    /// UID of the claim.
    pub uid: String,
    /// The most that it may be given.
    pub amount: Amount,
}

/// Claims and quota of a namespace, as they were seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    /// The sum of what claims have or may take, the grants of this look among them.
    pub used: Amount,
    /// The claims, oldest first.
    pub claims: Vec<Line>,
    /// The claims that are to be let through now.
    pub grants: Vec<Grant>,
    /// The claims, by name with their UID, whose grant is larger than what they were given. The
    /// grant is to be taken away: else a claim that is deallocated could take all of it after
    /// others got the rest.
    pub settled: Vec<(String, String)>,
    /// The reason why none is let through, if it is not that the quota is used up.
    pub blocked: Option<String>,
    /// A claim is neither allocated nor was let through before: other devices may change what it
    /// may have, also of one that asks for none of ours now.
    pub is_open: bool,
}

impl Look {
    /// Returns the number of claims that wait.
    pub fn waiting(&self) -> usize {
        let waits = |line: &&Line| matches!(line.state, State::Waits(_));
        self.claims.iter().filter(waits).count()
    }
}

/// Returns the limits that a quota sets.
pub fn spec_limits(spec: &GpuQuotaSpec) -> Limits {
    Limits {
        memory: spec.limits.memory.map(|memory| memory.bytes),
        percent: spec
            .limits
            .percent
            .map(|percent| u64::from(percent) * MILLI),
    }
}

/// Looks at all claims of a namespace.
///
/// First the sum of all that claims have: a claim counts with its grant, the most that it may be
/// given, for as long as it has one; without one it counts with what it was given. While one is
/// not known no other is let through. Then those that wait, oldest first; one that does not fit
/// keeps no later one back.
pub fn look<'c>(
    limits: Limits,
    claims: impl IntoIterator<Item = &'c ResourceClaim>,
    classes: &BTreeMap<String, DeviceClass>,
    catalogue: &mut Catalogue,
) -> Look {
    let mut claims: Vec<_> = claims.into_iter().collect();
    claims.sort_by_key(|claim| {
        let meta = &claim.metadata;
        (meta.creation_timestamp.as_ref().map(|at| at.0), &meta.name)
    });
    let mut look = Look::default();
    let mut waiting = Vec::new();
    for claim in claims {
        let name = claim.metadata.name.clone().unwrap_or_default();
        let granted = granted(claim);
        let line = |amount, state| Line {
            claim: name.clone(),
            amount,
            state,
        };
        match (charge(claim, catalogue), granted) {
            (Some(Ok(amount)), _) if amount == Amount::default() => {}
            (Some(Ok(given)), Some(grant)) if given != grant => {
                let uid = claim.metadata.uid.clone().unwrap_or_default();
                look.settled.push((name.clone(), uid));
                look.claims
                    .push(line(Some(grant.or_more(given)), State::Has));
            }
            (Some(Ok(amount)), _) | (Some(Err(_)), Some(amount)) => {
                look.claims.push(line(Some(amount), State::Has));
            }
            (Some(Err(unknown)), None) => {
                look.blocked.get_or_insert_with(|| {
                    format!("the amount of claim {name} is not known: {unknown}")
                });
                look.claims.push(line(None, State::Has));
            }
            (None, Some(amount)) => look.claims.push(line(Some(amount), State::MayTake)),
            (None, None) if claim.metadata.deletion_timestamp.is_some() => {}
            (None, None) => waiting.push((claim, name)),
        }
    }
    look.is_open = !waiting.is_empty() || look.blocked.is_some();
    look.used = look.claims.iter().filter_map(|line| line.amount).sum();
    for (claim, name) in waiting {
        let (amount, state) = match price(claim, classes, catalogue) {
            Ok(None) => continue,
            Err(why) => (None, State::Waits(why.to_string())),
            Ok(Some(amount)) => (Some(amount), state(limits, &look, amount)),
        };
        if let (Some(amount), State::MayTake) = (amount, &state) {
            look.used = look.used.plus(amount);
            look.grants.push(Grant {
                claim: name.clone(),
                uid: claim.metadata.uid.clone().unwrap_or_default(),
                amount,
            });
        }
        look.claims.push(Line {
            claim: name,
            amount,
            state,
        });
    }
    look
}

fn state(limits: Limits, look: &Look, amount: Amount) -> State {
    if let Some(blocked) = &look.blocked {
        State::Waits(blocked.clone())
    } else if limits.hold(look.used.plus(amount)) {
        State::MayTake
    } else if limits.hold(amount) {
        State::Waits("the rest of the quota is smaller".to_owned())
    } else {
        State::Waits(
            "more than the whole quota: raise its limits, or select smaller devices".to_owned(),
        )
    }
}

/// Returns the amount that a claim was let through with. An annotation that cannot be read lets
/// nothing through: the API server takes it from the controller alone.
fn granted(claim: &ResourceClaim) -> Option<Amount> {
    let all = claim.metadata.annotations.as_ref()?;
    all.get(annotations::QUOTA)?.parse().ok()
}
