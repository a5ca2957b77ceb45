//! Why nothing fits: for each request, what is wrong with each device.

mod constraints;
mod reasons;

use std::collections::BTreeMap;

use crate::allocate::{
    MAX_RESULTS, Mode, Origin, Prepared, Refusal, Request, Search, Selector, Verdict,
};
use crate::allocated::{DeviceId, Holder};
use crate::nodes;
use crate::pools::{Gathered, PoolProblem};

/// Why claims cannot be satisfied on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The node that was tried.
    pub node: String,
    /// The requests that cannot be satisfied; all of them where each could be alone but not
    /// together.
    pub requests: Vec<RequestReason>,
    /// Mark that each request could be satisfied alone: they compete for the same devices, or a
    /// constraint refuses.
    pub competing: bool,
    /// Constraints of the claims that no choice among the available devices satisfies.
    pub constraints: Vec<ConstraintReason>,
    /// Number of devices that competing requests want together, and how many of them the available
    /// devices serve at most, where counting alone shows that these are too few.
    pub too_few: Option<(usize, usize)>,
    /// Mark that a claim would have got more devices than it can have.
    pub limited: bool,
    /// Number of devices that the node has in usable pools.
    pub devices: usize,
    /// Pools of the node that are not used now, with the reason.
    pub unusable_pools: Vec<(String, String)>,
    /// Other nodes that have devices, where this one has none.
    pub other_nodes: Vec<String>,
}

/// Why one request, or one alternative of it, is not satisfied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestReason {
    /// The claim.
    pub claim: Holder,
    /// `request`, or `request/subrequest`.
    pub request: String,
    /// The class it asks for.
    pub class: String,
    /// Amounts that it asks for, by capacity, as they are written.
    pub asked: BTreeMap<String, String>,
    /// Expressions of its own selectors, beside those of the class.
    pub expressions: Vec<String>,
    /// Number of devices that it wants; none means all, and there is not even one.
    pub wanted: Option<usize>,
    /// Number of devices that could be given to it, were it alone; each by itself.
    pub available: usize,
    /// The devices that cannot, in the order in which they are tried.
    pub refused: Vec<DeviceReason>,
}

/// Why a constraint of a claim cannot be satisfied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConstraintReason {
    /// The claim.
    pub claim: Holder,
    /// `matchAttribute NAME` or `distinctAttribute NAME`.
    pub constraint: String,
    /// Fault, for people.
    pub problem: String,
}

/// Why a device cannot be given to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceReason {
    /// The device.
    pub device: DeviceId,
    /// The reason: the first that applies, in the scheduler's order.
    pub reason: Reason,
}

/// Fault of a device. Amounts are in Kubernetes' notation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A selector is false.
    SelectorFalse {
        /// `class NAME` or `claim NAMESPACE/NAME`.
        origin: String,
        /// Place of the selector in its list, from 0.
        index: usize,
        /// The expression.
        expression: String,
    },
    /// Existing claims hold it.
    InUse {
        /// Claims that hold it.
        by: Vec<Holder>,
    },
    /// Not enough is left of a counter that it would consume.
    CounterShort {
        /// The counter set.
        set: String,
        /// The counter.
        counter: String,
        /// Amount that it would consume.
        wanted: String,
        /// Amount that is left.
        left: String,
        /// The claims whose devices consume the counter.
        by: Vec<Holder>,
    },
    /// More of a counter of its pool is held than the pool has, which blocks all devices that
    /// consume any.
    PoolOverdrawn {
        /// The counter set.
        set: String,
        /// The counter.
        counter: String,
        /// Amount that is left: below zero.
        left: String,
        /// The claims whose devices consume the counter.
        by: Vec<Holder>,
    },
    /// It has no capacity of that name.
    NoSuchCapacity {
        /// The capacity that the request names.
        capacity: String,
        /// The capacities that it has.
        has: Vec<String>,
    },
    /// It has less of a capacity than is asked for, or its request policy does not allow that much.
    CapacityExceeded {
        /// The capacity.
        capacity: String,
        /// Amount that would be consumed.
        wanted: String,
        /// Most that a request can have, if that is one number.
        most: Option<String>,
    },
    /// Others have so much of a capacity that not enough is left.
    CapacityShort {
        /// The capacity.
        capacity: String,
        /// Amount that would be consumed.
        wanted: String,
        /// Amount that is left.
        left: String,
        /// The claims that have shares of it.
        by: Vec<Holder>,
    },
    /// It has a taint that the request does not tolerate.
    Tainted {
        /// `key=value:effect`.
        taint: String,
    },
    /// It lacks the attribute that a constraint of the claim is about.
    NoSuchAttribute {
        /// `matchAttribute NAME` or `distinctAttribute NAME`.
        constraint: String,
    },
    /// Its own node selection excludes the node.
    NotOnNode,
    /// It uses a feature that the scheduler has switched off.
    FeatureOff,
    /// It could not be judged.
    Failed {
        /// The error, as a text.
        error: String,
    },
}

/// Explains a search that found nothing; the search must have taken all its picks back.
pub(crate) fn explain<'a>(
    prepared: &Prepared<'a>,
    search: &mut Search<'_, 'a>,
    pools: &[Gathered<'a>],
) -> Explanation {
    let mut all = Vec::new();
    for claim in &prepared.claims {
        for choice in &claim.requests {
            let holder = Holder::of(claim.object);
            let reasons = choice
                .alternatives
                .iter()
                .map(|request| of_request(prepared, search, pools, &holder, request));
            all.push(reasons.collect::<Vec<_>>());
        }
    }
    // A request is hopeless when none of its alternatives could be satisfied, were it alone.
    let hopeless = |reasons: &Vec<RequestReason>| reasons.iter().all(|r| !r.satisfiable());
    let competing = !all.iter().any(hopeless);
    let requests = all
        .into_iter()
        .filter(|r| competing || hopeless(r))
        .flatten()
        .collect();
    let node = nodes::name(prepared.inputs.node).to_owned();
    let other_nodes = if prepared.candidates.is_empty() {
        prepared
            .inputs
            .slices
            .nodes()
            .filter(|n| *n != node)
            .map(str::to_owned)
            .collect()
    } else {
        Vec::new()
    };
    let unusable = pools.iter().filter_map(|pool| {
        let problem = match pool.problem.as_ref()? {
            PoolProblem::Incomplete { seen, wanted } => {
                format!("is being updated: {seen} of {wanted} slices exist")
            }
            PoolProblem::Invalid(problem) => format!("is invalid: {problem}"),
        };
        Some((pool.id(), problem))
    });
    Explanation {
        node,
        requests,
        competing,
        constraints: if competing {
            constraints::unsatisfied(prepared, search)
        } else {
            Vec::new()
        },
        too_few: if competing { search.too_few() } else { None },
        limited: search.limited,
        devices: prepared.candidates.len(),
        unusable_pools: unusable.collect(),
        other_nodes,
    }
}

fn of_request<'a>(
    prepared: &Prepared<'a>,
    search: &mut Search<'_, 'a>,
    pools: &[Gathered<'a>],
    claim: &Holder,
    request: &Request<'a>,
) -> RequestReason {
    let (mut available, mut refused) = (0, Vec::new());
    for (index, candidate) in prepared.candidates.iter().enumerate() {
        let reason = match search.refusal(request, index) {
            Ok(None) => {
                available += 1;
                continue;
            }
            // A device that the class or the claim does not select is refused for that, and not for
            // its holder.
            Ok(Some(Refusal::Taken)) => match search.verdict(request, index) {
                Ok(verdict) if verdict != Verdict::Selected => {
                    reasons::of_verdict(request, verdict).unwrap_or(Reason::FeatureOff)
                }
                _ => {
                    let (driver, pool) = (candidate.driver, candidate.pool);
                    let by =
                        prepared
                            .inputs
                            .allocated
                            .holders(driver, pool, &candidate.device.name);
                    Reason::InUse {
                        by: by.into_iter().cloned().collect(),
                    }
                }
            },
            Ok(Some(refusal)) => reasons::of_refusal(prepared, pools, request, candidate, &refusal)
                .unwrap_or(Reason::FeatureOff),
            Err(error) => Reason::Failed {
                error: error.to_string(),
            },
        };
        refused.push(DeviceReason {
            device: candidate.id(),
            reason,
        });
    }
    let wanted = match request.mode {
        Mode::Exact(count) => Some(count),
        Mode::All => Some(search.wanted(request)).filter(|n| *n > 0),
    };
    let amounts = request.capacity.and_then(|of| of.requests.as_ref());
    let of_claim = |selector: &&Selector<'_>| matches!(selector.origin, Origin::Claim(_));
    RequestReason {
        claim: claim.clone(),
        request: request.name.clone(),
        class: request.class.metadata.name.clone().unwrap_or_default(),
        asked: amounts
            .into_iter()
            .flatten()
            .map(|(name, amount)| (name.clone(), amount.0.clone()))
            .collect(),
        expressions: (request.selectors.iter().filter(of_claim))
            .map(|selector| selector.expression.to_owned())
            .collect(),
        wanted,
        available,
        refused,
    }
}

impl RequestReason {
    /// Says whether the request could be satisfied, were it alone.
    fn satisfiable(&self) -> bool {
        self.wanted
            .is_some_and(|wanted| self.available >= wanted && wanted <= MAX_RESULTS)
    }
}

impl Reason {
    /// Returns the claims that are in the way.
    pub fn holders(&self) -> &[Holder] {
        match self {
            Self::InUse { by }
            | Self::CounterShort { by, .. }
            | Self::PoolOverdrawn { by, .. }
            | Self::CapacityShort { by, .. } => by,
            _ => &[],
        }
    }
}

/// Returns an expression written over several lines in one.
pub(crate) fn one_line(expression: &str) -> String {
    expression.split_whitespace().collect::<Vec<_>>().join(" ")
}
