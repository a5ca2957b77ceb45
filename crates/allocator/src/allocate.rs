//! The allocator: what it is asked, what it answers, and the one call between.

mod capacity;
mod constraints;
mod ledger;
mod request;
mod results;
mod search;
mod shares;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim};
use thiserror::Error;

use crate::allocated::{AllocatedState, DeviceId, Holder};
use crate::cel::{self, CelError, Program};
use crate::explain::{self, Explanation};
use crate::features::Features;
use crate::nodes::NodeSelectorError;
use crate::pools::{self, Gathered, Slices};

pub(crate) use capacity::{Unfit, demands};
pub(crate) use constraints::{Constraint, Kind, Value};
pub(crate) use ledger::{Short, holders};
pub(crate) use request::{Candidate, Claim, Mode, Origin, Prepared, Request, Selector};
pub(crate) use search::{Refusal, Search, Verdict};

/// The most devices that one claim can get.
pub const MAX_RESULTS: usize = 32;

/// Compiled selectors that are kept; a cluster has few, a hostile user could send many.
const MAX_PROGRAMS: usize = 1024;

/// The state of the cluster in which to allocate.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Devices that the drivers publish.
    pub slices: &'a Slices<'a>,
    /// All DeviceClasses.
    pub classes: &'a [DeviceClass],
    /// Devices that existing claims hold.
    pub allocated: &'a AllocatedState,
    /// The node that the pod is tried on.
    pub node: &'a Node,
}

/// The answer to "can these claims be satisfied on this node".
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Yes, like this.
    Fits(Allocated),
    /// No, for these reasons.
    DoesNotFit(Explanation),
}

/// An allocation for every claim that was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Allocated {
    /// Results in the order of the claims. There is no timestamp: that is the writer's.
    pub results: Vec<AllocationResult>,
    /// Number of steps that the search took: the measure of its work, independent of the machine.
    pub steps: u64,
}

/// Error that makes an allocation impossible to decide: a mistake in an object, or something not
/// supported.
///
/// To the scheduler these are errors of the pod; those for which [`AllocError::is_of_node`] holds
/// only rule out the node.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AllocError {
    /// A request cannot be satisfied as it is written: a gate is off, a capacity is not an amount,
    /// or it comes from a newer API.
    #[error("claim {claim}, request {request:?}: {problem}")]
    Request {
        /// The claim.
        claim: Holder,
        /// The request, or the part of the claim.
        request: String,
        /// Fault, and how it should be.
        problem: String,
    },
    /// The class of a request does not exist.
    #[error(
        "claim {claim}, request {request:?}: device class {class:?} does not exist; `kubectl get deviceclasses` lists those that do"
    )]
    NoClass {
        /// The claim.
        claim: Holder,
        /// The request.
        request: String,
        /// The class.
        class: String,
    },
    /// A selector does not compile or failed for a device.
    #[error(transparent)]
    Selector(#[from] Box<SelectorError>),
    /// More devices than a claim can have.
    #[error(
        "claim {claim}: exceeds the limit of {MAX_RESULTS} devices per claim: {wanted} are asked for at least"
    )]
    TooManyDevices {
        /// The claim.
        claim: Holder,
        /// The sum of its requests, each at its smallest alternative.
        wanted: usize,
    },
    /// Nothing fits, and a pool that might have is invalid.
    #[error(
        "resource pool {pool} is invalid: {problem}; no other pool of the node can satisfy the claim"
    )]
    InvalidPool {
        /// `driver/pool`.
        pool: String,
        /// Fault of the pool.
        problem: String,
    },
    /// A node selector of a slice or device cannot be evaluated.
    #[error("a node selector in a ResourceSlice cannot be evaluated")]
    NodeSelector(#[from] NodeSelectorError),
    /// A device's node selector has several terms, which a claim's cannot express.
    #[error("ResourceSlice {slice}: its node selector has {terms} terms, exactly one is allowed")]
    NodeSelectorTerms {
        /// The slice.
        slice: String,
        /// The number of its terms.
        terms: usize,
    },
    /// The search was given up.
    #[error(
        "unknown: divvy gave up after {steps} steps of the search, as the scheduler does after ten seconds: there are too many ways to combine the devices; ask for fewer devices in one pod, or pin the requests to a GPU with selectors"
    )]
    TooHard {
        /// The steps taken.
        steps: u64,
    },
    /// A field that is part of Kubernetes and not of this allocator yet.
    #[error("{subject}: unknown: divvy cannot allocate {what} offline, only the scheduler can")]
    Unsupported {
        /// The request or device.
        subject: String,
        /// The field.
        what: &'static str,
    },
}

/// A selector that does not compile or that failed for a device; the text begins as the scheduler's
/// event does.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{origin}: selector #{index}: CEL {} in `{}`", self.stage(), explain::one_line(.expression))]
pub struct SelectorError {
    /// `class NAME` or `claim NAMESPACE/NAME`.
    pub origin: String,
    /// Place of the selector in its list, from 0.
    pub index: usize,
    /// The expression.
    pub expression: String,
    /// The device it was evaluated for; none when it does not compile.
    pub device: Option<DeviceId>,
    /// Cause.
    #[source]
    pub source: CelError,
}

impl SelectorError {
    fn stage(&self) -> String {
        match &self.device {
            None if matches!(self.source, CelError::Offline(_)) => "expression".to_owned(),
            None => "compile error".to_owned(),
            Some(device) => format!("runtime error for device {device}"),
        }
    }
}

impl AllocError {
    pub(crate) fn of(claim: &ResourceClaim, request: &str, problem: impl Into<String>) -> Self {
        Self::Request {
            claim: Holder::of(claim),
            request: request.to_owned(),
            problem: problem.into(),
        }
    }

    pub(crate) fn gate(claim: &ResourceClaim, request: &str, field: &str, gate: &str) -> Self {
        Self::of(
            claim,
            request,
            format!("{field} needs the feature gate {gate}, which is off"),
        )
    }

    /// Returns what to change so that the error goes away, where the error alone does not say it.
    pub fn hint(&self) -> Option<String> {
        let Self::Selector(error) = self else {
            return None;
        };
        let CelError::Runtime(text) = &error.source else {
            return None;
        };
        let key = text.strip_prefix("no such key: ")?;
        Some(format!(
            "not every device has {key:?} and one that has not fails the whole pod: guard it with has(….{key}) && … or read it with ….?{key}.orValue(…)"
        ))
    }

    /// Says whether this is no answer: the scheduler may well allocate the claim.
    pub fn is_unknown(&self) -> bool {
        match self {
            Self::TooHard { .. } | Self::Unsupported { .. } => true,
            Self::Selector(error) => matches!(error.source, CelError::Offline(_)),
            _ => false,
        }
    }

    /// Says whether only this node is ruled out; else the pod cannot be scheduled anywhere until an
    /// object changes.
    pub fn is_of_node(&self) -> bool {
        matches!(self, Self::InvalidPool { .. })
    }
}

/// Allocates devices to claims as the scheduler would.
///
/// Keeps the compiled selectors, so one allocator should live as long as its caller.
#[derive(Debug, Default)]
pub struct Allocator {
    features: Features,
    programs: Mutex<BTreeMap<String, Arc<Result<Program, CelError>>>>,
}

impl Allocator {
    /// An allocator for a scheduler with these features.
    pub fn new(features: Features) -> Self {
        Self {
            features,
            ..Self::default()
        }
    }

    /// Finds devices for the claims of one pod together on the node;
    /// if not, why.
    ///
    /// Claims that are allocated already belong in [`Inputs::allocated`], not here.
    pub fn allocate(
        &self,
        inputs: &Inputs<'_>,
        claims: &[&ResourceClaim],
    ) -> Result<Outcome, AllocError> {
        self.search(inputs, claims, |prepared, search, pools| {
            Outcome::DoesNotFit(explain::explain(prepared, search, pools))
        })
        .map(|found| found.map_or_else(|why| why, Outcome::Fits))
    }

    /// [`Allocator::allocate`] without the reasons: for the many nodes of a cluster, of which one
    /// is enough.
    ///
    /// Reasons look at every device for every request; a yes or no stops as soon as it is certain.
    pub fn fit(
        &self,
        inputs: &Inputs<'_>,
        claims: &[&ResourceClaim],
    ) -> Result<Option<Allocated>, AllocError> {
        self.search(inputs, claims, |_, _, _| ()).map(Result::ok)
    }

    fn search<No>(
        &self,
        inputs: &Inputs<'_>,
        claims: &[&ResourceClaim],
        why: impl for<'a> FnOnce(&Prepared<'a>, &mut Search<'_, 'a>, &[Gathered<'a>]) -> No,
    ) -> Result<Result<Allocated, No>, AllocError> {
        let pools = pools::gather(inputs.slices, inputs.node, self.features)?;
        let prepared = Prepared::new(self, inputs, &pools, claims)?;
        let mut search = Search::new(&prepared, &pools).shortly();
        search.collect_all()?;
        let found = match search.run() {
            // Counting comes second: an answer that is found soon costs nothing more, and errors
            // on the way to it are the scheduler's, too.
            Err(AllocError::TooHard { .. }) => {
                search = Search::new(&prepared, &pools);
                search.collect_all()?;
                if search.too_few().is_some() && !search.may_fail() {
                    false
                } else {
                    search.run()?
                }
            }
            found => found?,
        };
        if found {
            let results = results::assemble(&prepared, &search)?;
            return Ok(Ok(Allocated {
                results,
                steps: search.steps,
            }));
        }
        if let Some((pool, problem)) = pools.iter().find_map(|p| Some((p, p.invalid()?))) {
            return Err(AllocError::InvalidPool {
                pool: pool.id(),
                problem: problem.to_owned(),
            });
        }
        Ok(Err(why(&prepared, &mut search, &pools)))
    }

    pub(crate) fn features(&self) -> Features {
        self.features
    }

    /// The compiled form of an expression, made once.
    pub(crate) fn program(&self, expression: &str) -> Arc<Result<Program, CelError>> {
        // A panic elsewhere cannot leave the map half changed.
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = programs.get(expression) {
            return Arc::clone(program);
        }
        let program = Arc::new(cel::compile(expression));
        if programs.len() >= MAX_PROGRAMS {
            programs.clear();
        }
        programs.insert(expression.to_owned(), Arc::clone(&program));
        program
    }
}
