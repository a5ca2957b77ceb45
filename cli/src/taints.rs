//! DeviceTaintRules: administrators' taints on published devices. Pure.

use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceSlice};

/// Adds the taints of these rules to the devices that they select, as the scheduler does.
pub fn taint(slices: &mut [ResourceSlice], rules: &[DeviceTaintRule]) {
    let fits = |wanted: Option<&String>, found: &str| wanted.is_none_or(|wanted| wanted == found);
    for rule in rules {
        // A rule without a selector is for no device; an empty selector is for all.
        let Some(selector) = &rule.spec.device_selector else {
            continue;
        };
        for slice in slices.iter_mut().map(|slice| &mut slice.spec) {
            let fits_slice = fits(selector.driver.as_ref(), &slice.driver)
                && fits(selector.pool.as_ref(), &slice.pool.name);
            if !fits_slice {
                continue;
            }
            let devices = slice.devices.iter_mut().flatten();
            for device in devices.filter(|device| fits(selector.device.as_ref(), &device.name)) {
                device
                    .taints
                    .get_or_insert_default()
                    .push(rule.spec.taint.clone());
            }
        }
    }
}
