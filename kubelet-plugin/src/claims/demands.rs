//! The caps that claims demand by their selectors or those of their DeviceClasses, on a node that
//! caps nothing: the scheduler may have chosen a device of it while it still did.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_api::names::{Naming, attributes};
use divvy_claims::{AllocatedDevice, Claim, ClaimRef, Value, can_hold};
use divvy_executor::InventorySource;
use divvy_model::{DeviceKind, Limits, MemoryCaps, Sharing};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::claim::{Choice, ClaimError, expressions};
use super::fetch::ClaimFetcher;

/// Time for which the selectors of a class are kept: claims come in bursts of a class, and each
/// read is a fifth of a prepare. A class that changes meanwhile chooses no device of this node,
/// whose slices say already that nothing is capped.
const KEPT: Duration = Duration::from_secs(30);

/// Finds the requests that demand a cap, where the node has none.
pub(crate) struct Demands {
    driver: String,
    fetcher: Arc<ClaimFetcher>,
    inventory: Arc<dyn InventorySource>,
    classes: Mutex<HashMap<String, Class>>,
}

/// A DeviceClass as it was read.
#[derive(Clone)]
struct Class {
    at: Instant,
    selectors: Arc<Vec<String>>,
}

impl Demands {
    pub(crate) fn new(
        driver: &str,
        fetcher: Arc<ClaimFetcher>,
        inventory: Arc<dyn InventorySource>,
    ) -> Self {
        Self {
            driver: driver.to_owned(),
            fetcher,
            inventory,
            classes: Mutex::default(),
        }
    }

    /// Returns the requests of a claim for shares that were chosen for a cap which the node does
    /// not have: their selectors, or those of their DeviceClass, cannot hold for the device as it
    /// is now.
    pub(crate) fn unmet(
        &self,
        claim: &Claim,
        choices: &[Choice],
        until: Instant,
        cancel: &CancellationToken,
    ) -> Result<BTreeSet<String>, ClaimError> {
        let mut unmet = BTreeSet::new();
        let inventory = self.inventory.inventory();
        let caps = inventory.map_or_else(MemoryCaps::default, |found| found.system.memory_caps);
        if caps.lack().is_none() {
            return Ok(unmet);
        }
        for result in &claim.allocation.results {
            let Some(known) = known(result, &self.driver, caps) else {
                continue;
            };
            let chose = |choice: &&Choice| choice.request == result.request;
            let Some(choice) = choices.iter().find(chose) else {
                continue;
            };
            let fails = |selectors: &[String]| selectors.iter().any(|cel| !can_hold(cel, &known));
            if fails(&choice.selectors)
                || fails(&self.class(&choice.class, &claim.reference(), until, cancel)?)
            {
                unmet.insert(result.request.clone());
            }
        }
        Ok(unmet)
    }

    /// Returns the selectors of a DeviceClass. A class that was deleted demands nothing any more.
    fn class(
        &self,
        class: &str,
        claim: &ClaimRef,
        until: Instant,
        cancel: &CancellationToken,
    ) -> Result<Arc<Vec<String>>, ClaimError> {
        let kept = crate::lock(&self.classes).get(class).cloned();
        if let Some(kept) = kept.filter(|class| class.at.elapsed() < KEPT) {
            return Ok(kept.selectors);
        }
        // Not under the lock: a read may take as long as the call.
        let found = self.fetcher.class(class, claim, until, cancel)?;
        let selectors = found.and_then(|found| found.spec?.selectors);
        let selectors = Arc::new(expressions(selectors.as_deref()));
        let mut classes = crate::lock(&self.classes);
        classes.retain(|_, class| class.at.elapsed() < KEPT);
        let read = Class {
            at: Instant::now(),
            selectors: selectors.clone(),
        };
        classes.insert(class.to_owned(), read);
        Ok(selectors)
    }
}

/// Returns the values that a share's node publishes of it now and that depend on caps; `None` for a
/// device that is none.
fn known<'a>(
    result: &AllocatedDevice,
    driver: &'a str,
    caps: MemoryCaps,
) -> Option<Vec<(String, Value<'a>)>> {
    let kind = DeviceKind::parse(&result.device).ok()?;
    let form = kind.form();
    if !form.sharing.is_shared() {
        return None;
    }
    let limits = Limits::of(form.target, form.sharing, caps);
    let path = |name: &str| {
        let published = Naming::of(driver).attribute(name);
        let (domain, name) = Naming::in_cel(driver, &published);
        format!("device.attributes[\"{domain}\"].{name}")
    };
    // No limit is kept, and so none can be above the request. Slots of MPS do not say it.
    let limit = match form.sharing {
        Sharing::Mps => Value::IntIfThere(0),
        _ => Value::Int(0),
    };
    Some(vec![
        ("device.driver".to_owned(), Value::Text(driver)),
        (
            path(attributes::MEMORY_ENFORCEMENT),
            Value::Text(limits.memory.attribute()),
        ),
        (path(attributes::MEMORY_LIMIT_MAX_PERCENT), limit),
    ])
}

#[cfg(test)]
mod tests {
    use divvy_api::names::DRIVER;

    use super::*;

    #[test]
    fn mps_slots_are_not_said_to_have_a_limit_as_other_shares_are() {
        for (device, is_there) in [
            ("gpu-0-ts", true),
            ("gpu-0-mig-1g10gb-19-0-ts", true),
            ("gpu-0-mps", false),
            ("gpu-0-mig-1g10gb-19-0-mps", false),
        ] {
            let result = AllocatedDevice {
                request: "main".to_owned(),
                pool: "pool".to_owned(),
                device: device.parse().unwrap(),
                share_id: None,
                admin_access: false,
                consumed_capacity: [].into(),
            };
            let known = known(&result, DRIVER, MemoryCaps::default()).unwrap();
            let holds = |expression: &str| {
                let most = r#"device.attributes["gpu.divvy.dev"].memoryLimitMaxPercent"#;
                can_hold(&expression.replace("MOST", most), &known)
            };
            assert_eq!(holds("!has(MOST)"), !is_there, "{device}");
            assert_eq!(holds("!has(MOST) || MOST >= 100"), !is_there, "{device}");
            assert!(holds("has(MOST) && MOST < 100"), "{device}");
            assert!(!holds("MOST >= 100"), "{device}");
            assert!(holds("MOST == 0"), "{device}");
        }
    }
}
