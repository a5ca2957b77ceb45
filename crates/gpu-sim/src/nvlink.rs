//! Connections between simulated GPUs.

use serde::{Deserialize, Serialize};

/// Way in which a board reaches others over NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NvLinkShape {
    /// Not at all.
    None,
    /// Through NVSwitches: everything behind them reaches everything.
    Switch {
        /// Active links to the switches.
        links: u32,
    },
    /// Directly to each other GPU of the same baseboard (HGX boards with four GPUs).
    Mesh {
        /// Number of the baseboard.
        board: u32,
        /// Active links to each other GPU.
        links_per_peer: u32,
    },
    /// A bridge between two neighbouring PCIe cards.
    Bridge {
        /// Number of the bridge: the two GPUs with the same number are connected.
        bridge: u32,
        /// Active links over the bridge.
        links: u32,
    },
}
