//! `update-application-profile`: EGL and Vulkan ask the kernel module for all GPUs of the node and
//! give up at the first that the container may not open, unless an application profile says which
//! ones to look at.

use crate::error::HookError;
use crate::rootfs::{Reach, Rights, RootFs};

/// File in a folder whose files the driver's libraries read in the order of names.
const PROFILE: &str = "/etc/nvidia/nvidia-application-profiles-rc.d/10-divvy.conf";

/// Writes the profile. Does nothing in a container without GPUs.
pub(crate) fn update(root: &RootFs) -> Result<(), HookError> {
    match visible(&root.names("/dev", Reach::Runtime)?) {
        0 => Ok(()),
        mask => root.write(PROFILE, text(mask).as_bytes(), Rights::PUBLIC),
    }
}

/// Sets a bit for each GPU whose device node is there, by its minor number.
fn visible(nodes: &[String]) -> u64 {
    let minors = nodes
        .iter()
        .filter_map(|name| name.strip_prefix("nvidia")?.parse::<u32>().ok());
    minors
        // The mask has 64 bits; a node with a higher minor number has none.
        .filter_map(|minor| 1u64.checked_shl(minor))
        .fold(0, |mask, bit| mask | bit)
}

fn text(mask: u64) -> String {
    format!(
        r#"{{"profiles": [{{"name": "divvy", "settings": ["EGLVisibleDGPUDevices", {mask:#x}]}}], "rules": [{{"pattern": [], "profile": "divvy"}}]}}"#
    ) + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_has_a_bit_for_each_minor_number_and_none_for_other_nodes() {
        let mask = |names: &[&str]| {
            visible(
                &names
                    .iter()
                    .map(|&name| name.to_owned())
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(
            mask(&["nvidia0", "nvidia5", "nvidiactl", "nvidia-uvm", "null"]),
            0b10_0001
        );
        assert_eq!(
            mask(&["nvidia63", "nvidia64", "nvidia99999999999"]),
            1 << 63
        );
        assert_eq!(mask(&["nvidiactl"]), 0);
    }
}
