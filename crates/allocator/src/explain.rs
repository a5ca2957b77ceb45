//! Why nothing fits: for each request, what is wrong with each device.

mod display;

pub(crate) use display::one_line;

use crate::allocate::{MAX_RESULTS, Mode, Prepared, Refusal, Request, Search, Verdict};
use crate::allocated::{DeviceId, Holder};
use crate::nodes;
use crate::pools::{Pool, PoolProblem};

/// Why claims cannot be satisfied on a node.
///
/// `Display` gives a short text for people, one line a reason, with a hint at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The node that was tried.
    pub node: String,
    /// The requests that cannot be satisfied; all of them where each could be alone but not together.
    pub requests: Vec<RequestReason>,
    /// Whether each request could be satisfied alone: they compete for the same devices.
    pub competing: bool,
    /// Whether a claim would have got more devices than it can have.
    pub limited: bool,
    /// How many devices the node has in usable pools.
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
    /// How many devices it wants; none means all, and there is not even one.
    pub wanted: Option<usize>,
    /// How many could be given to it, were it alone.
    pub available: usize,
    /// The devices that cannot, in the order in which they are tried.
    pub refused: Vec<DeviceReason>,
}

/// Why a device cannot be given to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceReason {
    /// The device.
    pub device: DeviceId,
    /// The reason: the first that applies, in the scheduler's order.
    pub reason: Reason,
}

/// What is wrong with a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A selector is false.
    SelectorFalse {
        /// `class NAME` or `claim NAMESPACE/NAME`.
        origin: String,
        /// Which selector of it, from 0.
        index: usize,
        /// The expression.
        expression: String,
    },
    /// Existing claims hold it.
    InUse {
        /// Who.
        by: Vec<Holder>,
    },
    /// It has a taint that the request does not tolerate.
    Tainted {
        /// `key=value:effect`.
        taint: String,
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
    pools: &[Pool<'a>],
) -> Explanation {
    let mut all = Vec::new();
    for claim in &prepared.claims {
        for choice in &claim.requests {
            let holder = Holder::of(claim.object);
            let reasons =
                choice.alternatives.iter().map(|request| of_request(prepared, search, &holder, request));
            all.push(reasons.collect::<Vec<_>>());
        }
    }
    // A request is hopeless when none of its alternatives could be satisfied, were it alone.
    let hopeless = |reasons: &Vec<RequestReason>| reasons.iter().all(|r| !r.satisfiable());
    let competing = !all.iter().any(hopeless);
    let requests = all.into_iter().filter(|r| competing || hopeless(r)).flatten().collect();
    let node = nodes::name(prepared.inputs.node).to_owned();
    let other_nodes = if prepared.candidates.is_empty() {
        prepared.inputs.slices.nodes().filter(|n| *n != node).map(str::to_owned).collect()
    } else {
        Vec::new()
    };
    let unusable = pools.iter().filter_map(|pool| {
        let problem = match pool.problem.as_ref()? {
            PoolProblem::Incomplete { seen, wanted } => {
                format!("is being updated: {seen} of {wanted} slices are there")
            }
            PoolProblem::Invalid(problem) => format!("is invalid: {problem}"),
        };
        Some((pool.id(), problem))
    });
    Explanation {
        node,
        requests,
        competing,
        limited: search.limited,
        devices: prepared.candidates.len(),
        unusable_pools: unusable.collect(),
        other_nodes,
    }
}

fn of_request<'a>(
    prepared: &Prepared<'a>,
    search: &mut Search<'_, 'a>,
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
            Ok(Some(Refusal::Taken)) => {
                // What the class and claim would not want anyway is not a matter of who holds it.
                match search.verdict(request, index) {
                    Ok(verdict) => rejection(request, &Refusal::Verdict(verdict)),
                    Err(_) => None,
                }
                .unwrap_or_else(|| {
                    let (driver, pool) = (candidate.driver, candidate.pool);
                    let by = prepared.inputs.allocated.holders(driver, pool, &candidate.device.name);
                    Reason::InUse { by: by.into_iter().cloned().collect() }
                })
            }
            Ok(Some(refusal)) => rejection(request, &refusal).unwrap_or(Reason::FeatureOff),
            Err(error) => Reason::Failed { error: error.to_string() },
        };
        refused.push(DeviceReason { device: candidate.id(), reason });
    }
    let wanted = match request.mode {
        Mode::Exact(count) => Some(count),
        Mode::All => Some(search.wanted(request)).filter(|n| *n > 0),
    };
    RequestReason {
        claim: claim.clone(),
        request: request.name.clone(),
        class: request.class.metadata.name.clone().unwrap_or_default(),
        wanted,
        available,
        refused,
    }
}

/// The reason for a refusal that lies in the device; `None` for a device that the request would take.
fn rejection(request: &Request<'_>, refusal: &Refusal<'_>) -> Option<Reason> {
    match refusal {
        Refusal::Verdict(Verdict::Rejected(place)) => {
            let selector = request.selectors.get(*place)?;
            let origin = selector.origin.to_string();
            let expression = selector.program()?.source().to_owned();
            Some(Reason::SelectorFalse { origin, index: selector.index, expression })
        }
        Refusal::Verdict(Verdict::NotOnNode) => Some(Reason::NotOnNode),
        Refusal::Verdict(Verdict::FeatureOff) => Some(Reason::FeatureOff),
        Refusal::Tainted(taint) => {
            let value = taint.value.as_deref().map(|v| format!("={v}")).unwrap_or_default();
            Some(Reason::Tainted { taint: format!("{}{value}:{}", taint.key, taint.effect) })
        }
        Refusal::Taken | Refusal::Verdict(Verdict::Selected) => None,
    }
}

impl RequestReason {
    /// Whether the request could be satisfied, were it alone.
    fn satisfiable(&self) -> bool {
        self.wanted.is_some_and(|wanted| self.available >= wanted && wanted <= MAX_RESULTS)
    }
}
