//! Requests, checked and ready to be searched for: classes resolved, selectors compiled, devices
//! listed.

use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    CapacityRequirements, Device, DeviceClaim, DeviceClass, DeviceDerivedAttribute, DeviceRequest,
    DeviceSelector, DeviceToleration, ResourceClaim, ResourceSlice,
};

use super::constraints::Constraint;
use super::{AllocError, Allocator, Inputs, MAX_RESULTS};
use crate::allocated::{DeviceId, Holder};
use crate::cel::{CelError, Program};
use crate::features::Features;
use crate::pools::{Charge, Gathered, PoolProblem};

/// Everything that a search reads and never changes.
pub(crate) struct Prepared<'a> {
    pub(crate) inputs: &'a Inputs<'a>,
    pub(crate) features: Features,
    pub(crate) claims: Vec<Claim<'a>>,
    /// Every device that may be tried, in the order in which it is.
    pub(crate) candidates: Vec<Candidate<'a>>,
    /// The number of requests over all claims, alternatives counted one by one.
    pub(crate) requests: usize,
    /// Why the first unusable pool is, for requests of `All`.
    pub(crate) partial: Option<(String, String)>,
}

pub(crate) struct Claim<'a> {
    pub(crate) object: &'a ResourceClaim,
    pub(crate) spec: &'a DeviceClaim,
    pub(crate) requests: Vec<Choice<'a>>,
    pub(crate) constraints: Vec<Constraint<'a>>,
}

/// A request: one way to satisfy it, or several in order of preference.
pub(crate) struct Choice<'a> {
    pub(crate) prioritized: bool,
    pub(crate) alternatives: Vec<Request<'a>>,
}

/// An exact request, or a subrequest.
pub(crate) struct Request<'a> {
    /// Its number among all requests of the call.
    pub(crate) id: usize,
    /// Its claim's number, and its claim.
    pub(crate) claim: usize,
    pub(crate) of: &'a ResourceClaim,
    /// `request`, or `request/subrequest`.
    pub(crate) name: String,
    pub(crate) class: &'a DeviceClass,
    pub(crate) selectors: Vec<Selector<'a>>,
    pub(crate) mode: Mode,
    pub(crate) admin: bool,
    pub(crate) tolerations: Option<&'a Vec<DeviceToleration>>,
    /// Capacities that it wants of the device; none where it says nothing.
    pub(crate) capacity: Option<&'a CapacityRequirements>,
}

/// Number of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Exact(usize),
    All,
}

pub(crate) struct Selector<'a> {
    pub(crate) origin: Origin<'a>,
    pub(crate) index: usize,
    pub(crate) expression: &'a str,
    /// A mistake in it only counts once a device is tried, as in the scheduler.
    pub(crate) program: Arc<Result<Program, CelError>>,
}

/// Where a selector is written.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Origin<'a> {
    Class(&'a str),
    Claim(&'a ResourceClaim),
}

impl fmt::Display for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Class(name) => write!(f, "class {name}"),
            Self::Claim(claim) => write!(f, "claim {}", Holder::of(claim)),
        }
    }
}

/// A device that may be tried.
pub(crate) struct Candidate<'a> {
    pub(crate) driver: &'a str,
    pub(crate) pool: &'a str,
    pub(crate) slice: &'a ResourceSlice,
    pub(crate) device: &'a Device,
    /// The number of its pool on the node.
    pub(crate) home: usize,
    /// Counters of its pool that it consumes.
    pub(crate) charges: Option<&'a [Charge]>,
    /// Permission for several claims to have a share of it.
    pub(crate) shared: bool,
}

impl Candidate<'_> {
    pub(crate) fn id(&self) -> DeviceId {
        DeviceId {
            driver: self.driver.to_owned(),
            pool: self.pool.to_owned(),
            device: self.device.name.clone(),
        }
    }
}

/// The fields that an exact request and a subrequest have in common.
struct Fields<'a> {
    class: &'a str,
    selectors: Option<&'a Vec<DeviceSelector>>,
    mode: Option<&'a str>,
    count: Option<i64>,
    admin: bool,
    tolerations: Option<&'a Vec<DeviceToleration>>,
    capacity: Option<&'a CapacityRequirements>,
    derived: Option<&'a Vec<DeviceDerivedAttribute>>,
}

impl<'a> Prepared<'a> {
    pub(crate) fn new(
        allocator: &Allocator,
        inputs: &'a Inputs<'a>,
        pools: &'a [Gathered<'a>],
        claims: &[&'a ResourceClaim],
    ) -> Result<Self, AllocError> {
        let mut prepared = Self {
            inputs,
            features: allocator.features(),
            claims: Vec::with_capacity(claims.len()),
            candidates: Vec::new(),
            requests: 0,
            partial: None,
        };
        for (index, claim) in claims.iter().enumerate() {
            let claim = prepared.claim(allocator, index, claim)?;
            prepared.claims.push(claim);
        }
        prepared
            .candidates
            .reserve(pools.iter().map(|p| p.devices.len()).sum());
        for (home, pool) in pools.iter().enumerate() {
            let state = match &pool.problem {
                None => {
                    prepared
                        .candidates
                        .extend(candidates(home, pool, allocator.features()));
                    continue;
                }
                Some(PoolProblem::Incomplete { .. }) => "being updated".to_owned(),
                Some(PoolProblem::Invalid(problem)) => format!("invalid: {problem}"),
            };
            prepared.partial.get_or_insert((pool.id(), state));
        }
        Ok(prepared)
    }

    fn claim(
        &mut self,
        allocator: &Allocator,
        index: usize,
        claim: &'a ResourceClaim,
    ) -> Result<Claim<'a>, AllocError> {
        static NO_DEVICES: DeviceClaim = DeviceClaim {
            config: None,
            constraints: None,
            requests: None,
        };
        let spec = claim
            .spec
            .as_ref()
            .and_then(|s| s.devices.as_ref())
            .unwrap_or(&NO_DEVICES);
        let mut requests = Vec::new();
        for request in spec.requests.iter().flatten() {
            requests.push(self.request(allocator, (index, claim), request)?);
        }
        // Each request at its smallest: if even that is too much, no search can help.
        let wanted = requests
            .iter()
            .map(|r: &Choice<'_>| r.fewest())
            .fold(0, usize::saturating_add);
        if wanted > MAX_RESULTS {
            return Err(AllocError::TooManyDevices {
                claim: Holder::of(claim),
                wanted,
            });
        }
        let constraints = spec.constraints.iter().flatten().map(|c| {
            let problem = "empty constraint (unsupported constraint type?)";
            Constraint::new(c)
                .ok_or_else(|| AllocError::of(claim, "spec.devices.constraints", problem))
        });
        let constraints = constraints.collect::<Result<_, _>>()?;
        Ok(Claim {
            object: claim,
            spec,
            requests,
            constraints,
        })
    }

    fn request(
        &mut self,
        allocator: &Allocator,
        (index, claim): (usize, &'a ResourceClaim),
        request: &'a DeviceRequest,
    ) -> Result<Choice<'a>, AllocError> {
        if let Some(exact) = &request.exactly {
            if exact.admin_access.is_some() && !self.features.admin_access {
                return Err(AllocError::gate(
                    claim,
                    &request.name,
                    "adminAccess",
                    "DRAAdminAccess",
                ));
            }
            let fields = Fields {
                class: &exact.device_class_name,
                selectors: exact.selectors.as_ref(),
                mode: exact.allocation_mode.as_deref(),
                count: exact.count,
                admin: exact.admin_access == Some(true),
                tolerations: exact.tolerations.as_ref(),
                capacity: exact.capacity.as_ref(),
                derived: exact.derived_attributes.as_ref(),
            };
            let only = self.exact(allocator, (index, claim), request.name.clone(), &fields)?;
            return Ok(Choice {
                prioritized: false,
                alternatives: vec![only],
            });
        }
        let subrequests = request.first_available.as_deref().unwrap_or_default();
        if subrequests.is_empty() {
            let problem = "neither exactly nor firstAvailable is set (unsupported request type?)";
            return Err(AllocError::of(claim, &request.name, problem));
        }
        if !self.features.prioritized_list {
            return Err(AllocError::gate(
                claim,
                &request.name,
                "firstAvailable",
                "DRAPrioritizedList",
            ));
        }
        let mut alternatives = Vec::with_capacity(subrequests.len());
        for sub in subrequests {
            let fields = Fields {
                class: &sub.device_class_name,
                selectors: sub.selectors.as_ref(),
                mode: sub.allocation_mode.as_deref(),
                count: sub.count,
                admin: false,
                tolerations: sub.tolerations.as_ref(),
                capacity: sub.capacity.as_ref(),
                derived: sub.derived_attributes.as_ref(),
            };
            let name = format!("{}/{}", request.name, sub.name);
            alternatives.push(self.exact(allocator, (index, claim), name, &fields)?);
        }
        Ok(Choice {
            prioritized: true,
            alternatives,
        })
    }

    fn exact(
        &mut self,
        allocator: &Allocator,
        (index, claim): (usize, &'a ResourceClaim),
        name: String,
        fields: &Fields<'a>,
    ) -> Result<Request<'a>, AllocError> {
        let malformed = |problem: String| AllocError::of(claim, &name, problem);
        if fields.class.is_empty() {
            return Err(malformed(
                "deviceClassName is empty (unsupported request type?)".to_owned(),
            ));
        }
        let class = self
            .inputs
            .classes
            .iter()
            .find(|c| c.metadata.name.as_deref() == Some(fields.class));
        let class = class.ok_or_else(|| AllocError::NoClass {
            claim: Holder::of(claim),
            request: name.clone(),
            class: fields.class.to_owned(),
        })?;
        let mode = match fields.mode {
            // The API server fills in the defaults, also for a count of 0; a file that was never
            // sent to one has none.
            None | Some("" | "ExactCount") => {
                let count = fields.count.filter(|count| *count != 0).unwrap_or(1);
                let count = usize::try_from(count).ok();
                Mode::Exact(count.ok_or_else(|| malformed("count must be at least 1".to_owned()))?)
            }
            Some("All") => Mode::All,
            Some(other) => return Err(malformed(format!("unsupported allocationMode {other:?}"))),
        };
        let capacity = fields
            .capacity
            .filter(|c| c.requests.as_ref().is_some_and(|r| !r.is_empty()));
        if capacity.is_some() && !self.features.consumable_capacity {
            return Err(AllocError::gate(
                claim,
                &name,
                "capacity",
                "DRAConsumableCapacity",
            ));
        }
        if fields.derived.is_some_and(|d| !d.is_empty()) {
            return Err(AllocError::Unsupported {
                subject: format!("claim {}, request {name:?}", Holder::of(claim)),
                what: "derivedAttributes",
            });
        }
        let class_name = class.metadata.name.as_deref().unwrap_or_default();
        let mut selectors = Vec::new();
        let of_class = class
            .spec
            .iter()
            .flat_map(|s| s.selectors.iter().flatten())
            .enumerate();
        let of_request = fields.selectors.into_iter().flatten().enumerate();
        let all = of_class.map(|s| (Origin::Class(class_name), s));
        for (origin, (number, selector)) in all.chain(of_request.map(|s| (Origin::Claim(claim), s)))
        {
            let Some(cel) = &selector.cel else {
                return Err(malformed(format!(
                    "{origin}: selector #{number}: CEL expression empty (unsupported selector type?)"
                )));
            };
            let program = allocator.program(&cel.expression);
            let expression = cel.expression.as_str();
            selectors.push(Selector {
                origin,
                index: number,
                expression,
                program,
            });
        }
        let id = self.requests;
        self.requests += 1;
        let (admin, tolerations) = (fields.admin, fields.tolerations);
        Ok(Request {
            id,
            claim: index,
            of: claim,
            name,
            class,
            selectors,
            mode,
            admin,
            tolerations,
            capacity,
        })
    }
}

impl Choice<'_> {
    /// The fewest devices it can take, as far as is known before devices are counted.
    fn fewest(&self) -> usize {
        let counts = self.alternatives.iter().map(|a| match a.mode {
            Mode::Exact(count) => count,
            Mode::All => 0,
        });
        counts.min().unwrap_or(0)
    }
}

fn candidates<'a>(
    home: usize,
    pool: &'a Gathered<'a>,
    features: Features,
) -> impl Iterator<Item = Candidate<'a>> {
    pool.devices.iter().map(move |of_pool| Candidate {
        driver: pool.driver,
        pool: pool.name,
        slice: of_pool.slice,
        device: of_pool.device,
        home,
        charges: of_pool.charges.as_deref(),
        shared: features.consumable_capacity
            && of_pool.device.allow_multiple_allocations == Some(true),
    })
}
