//! Limits of memory in configs, against the requests that they are for and what is published.

use divvy_api::MemoryBound;
use divvy_api::names::{self, attributes, capacity};
use divvy_model::Quantity;
use k8s_openapi::api::resource::v1::{
    CapacityRequirements, Device, DeviceClaim, DeviceRequest, DeviceSelector,
};

use super::Findings;
use divvy_why::device::bytes;
use divvy_why::device::memory;

/// The limits that published shares allow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Allowed {
    /// Memory in bytes that the shares of one GPU have together, at most.
    all: u64,
    /// The largest limit in percent of a request; `None` while no share is published.
    percent: Option<u64>,
}

impl Allowed {
    /// Takes in a published device.
    pub(super) fn add(&mut self, device: &Device) {
        let Some(most) = divvy_why::device::number(device, attributes::MEMORY_LIMIT_MAX_PERCENT)
        else {
            return;
        };
        self.percent = self.percent.max(Some(most));
        self.all = self.all.max(memory(device).unwrap_or(0));
    }
}

/// A request for a share, with its place.
struct Share<'r> {
    at: String,
    /// Names by which a config can mean it.
    names: Vec<String>,
    class: &'r str,
    capacity: Option<&'r CapacityRequirements>,
    selectors: &'r [DeviceSelector],
}

impl Share<'_> {
    fn asks(&self, id: &str) -> Option<u64> {
        let requests = self.capacity?.requests.as_ref()?;
        let amount = divvy_why::driver::own(requests, id)?;
        u64::try_from(amount.0.parse::<Quantity>().ok()?.rounded_up()).ok()
    }

    fn selects(&self) -> bool {
        let mut all = self.selectors.iter().filter_map(|s| s.cel.as_ref());
        all.any(|cel| {
            cel.expression
                .contains(attributes::MEMORY_LIMIT_MAX_PERCENT)
        })
    }
}

impl Findings {
    /// Compares a limit with the requests that its config is for. Below a request it is refused, as
    /// by the policy of the chart; that no share here allows it is noted.
    pub(super) fn memory_limit(
        &mut self,
        at: &str,
        bound: MemoryBound,
        (named, devices): (&[String], &DeviceClaim),
        allowed: Allowed,
    ) {
        let at = format!("{at}.limits.memory");
        let requests = devices.requests.iter().flatten();
        let shares = requests.flat_map(shares).filter(|share| {
            [names::CLASS_SHARE, names::CLASS_MIG_SHARE].contains(&share.class)
                && (named.is_empty() || share.names.iter().any(|name| named.contains(name)))
        });
        for share in shares {
            let (unit, wanted) = match bound {
                MemoryBound::Amount(size) => (capacity::MEMORY, size.bytes),
                MemoryBound::Percent(percent) => (capacity::PERCENT, percent.into()),
            };
            let request = share.asks(unit);
            let shown = |amount: u64| match bound {
                MemoryBound::Amount(_) => bytes(amount),
                MemoryBound::Percent(_) => format!("{amount} %"),
            };
            if let Some(request) = request.filter(|request| wanted < *request) {
                let what = format!(
                    "{bound} is below the {} that {} requests: a limit is at least the request",
                    shown(request),
                    share.at
                );
                self.refuse(&at, &what);
            } else if let Some(what) = allowed.lacks(bound, wanted, request, &share) {
                self.doubt(&at, &what);
            }
        }
    }
}

impl Allowed {
    /// Returns what keeps published shares from this limit.
    fn lacks(
        self,
        bound: MemoryBound,
        wanted: u64,
        request: Option<u64>,
        share: &Share<'_>,
    ) -> Option<String> {
        if share.class == names::CLASS_MIG_SHARE {
            return Some(
                "no share of a partition has a limit, so one with it is refused when its pod starts"
                    .to_owned(),
            );
        }
        let most = self.percent?;
        if most == 0 {
            return Some(format!(
                "no node here keeps limits, so a share with one is refused when its pod starts (every share has {} == 0)",
                attributes::MEMORY_LIMIT_MAX_PERCENT
            ));
        }
        if matches!(bound, MemoryBound::Amount(_)) && wanted > self.all {
            return Some(format!(
                "{bound} is above the {} that the shares of a GPU have together",
                bytes(self.all)
            ));
        }
        let request = request.filter(|request| *request > 0)?;
        let percent = (u128::from(wanted) * 100).div_ceil(request.into());
        if percent > u128::from(most) {
            return Some(format!(
                "{bound} is {percent} % of the request, and the policies here allow {most} %: raise shares.burst.memory, or lower the limit"
            ));
        }
        // Shares of other nodes, or under other policies, may allow less.
        (percent > 100 && !share.selects()).then(|| {
            format!(
                "{} does not select shares that allow it, and gets others, too: add the selector device.attributes[\"{}\"].{} >= {percent}",
                share.at,
                names::DRIVER,
                attributes::MEMORY_LIMIT_MAX_PERCENT
            )
        })
    }
}

/// Returns the forms of a request.
fn shares(request: &DeviceRequest) -> impl Iterator<Item = Share<'_>> {
    let exactly = request.exactly.iter().map(|of| Share {
        at: format!("request {}", request.name),
        names: vec![request.name.clone()],
        class: &of.device_class_name,
        capacity: of.capacity.as_ref(),
        selectors: of.selectors.as_deref().unwrap_or_default(),
    });
    let alternatives = request.first_available.iter().flatten().map(|of| {
        let name = format!("{}/{}", request.name, of.name);
        Share {
            at: format!("request {name}"),
            names: vec![request.name.clone(), name],
            class: &of.device_class_name,
            capacity: of.capacity.as_ref(),
            selectors: of.selectors.as_deref().unwrap_or_default(),
        }
    });
    exactly.chain(alternatives)
}
