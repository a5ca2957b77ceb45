//! Selectors: expressions that the API server refuses to compile, and names that no device has.

use std::collections::BTreeSet;

use divvy_allocator::CelError;
use k8s_openapi::api::resource::v1::DeviceSelector;

use super::{Findings, MOST};

impl Findings {
    /// Checks selectors. Only the scheduler can judge one that cannot be evaluated offline.
    pub(super) fn selectors(
        &mut self,
        at: &str,
        selectors: Option<&[DeviceSelector]>,
        attributes: &BTreeSet<String>,
        capacities: &BTreeSet<String>,
    ) {
        let selectors = selectors.unwrap_or_default();
        self.at_most(MOST, selectors.len(), &format!("{at}.selectors"));
        for (number, selector) in selectors.iter().enumerate() {
            let at = format!("{at}.selectors[{number}].cel");
            let Some(cel) = &selector.cel else {
                self.refuse(&at, "Required value");
                continue;
            };
            let at = format!("{at}.expression");
            match divvy_allocator::check_selector(&cel.expression) {
                Err(error @ (CelError::Compile(_) | CelError::TooLong { .. })) => {
                    self.refuse(&at, &format!("Invalid value: {error}"));
                }
                Err(error @ CelError::TooCostly { .. }) => {
                    self.refuse(&at, &format!("Forbidden: {error}"));
                }
                Err(CelError::Offline(_) | CelError::Runtime(_)) | Ok(()) => {
                    self.looked_up(&at, &cel.expression, attributes, capacities);
                }
            }
        }
    }
}
