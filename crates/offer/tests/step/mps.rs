//! MPS shares while no supervisor answers, by which alone their servers start and end.

use divvy_model::{MpsAbility, MpsProtocol};
use divvy_offer::Fact;

use crate::cluster::{Cluster, blocked};

const SHARES: &str = r#"{"modes":["TimeSlicing","Mps"]}"#;

/// A node with two GPUs, one of which a claim has an MPS share of.
fn with_share(protocol: MpsProtocol) -> Cluster {
    let mut cluster = Cluster::new("h100x2", SHARES);
    cluster.inventory.system.mps = MpsAbility::Available(protocol);
    cluster.read();
    cluster.settle();
    cluster.choose(&"gpu-0-mps".parse().unwrap(), 0);
    cluster.settle();
    cluster
}

/// Returns whether a device is published and takes new claims.
fn takes(cluster: &Cluster, name: &str) -> Option<bool> {
    let device = cluster.slices.device(&name.parse().unwrap())?;
    Some(!blocked(device))
}

#[test]
fn mps_shares_get_no_new_claim_while_no_supervisor_answers() {
    for protocol in [MpsProtocol::V2, MpsProtocol::V3] {
        let mut cluster = with_share(protocol);
        let names = cluster.names().len();
        assert_eq!(takes(&cluster, "gpu-0-mps"), Some(true));
        assert_eq!(takes(&cluster, "gpu-1-mps"), Some(true));
        cluster.learn(Fact::MpsAway(true));
        for _ in 0..2 {
            // At once, and for as long as it lasts: nothing is withdrawn.
            for name in ["gpu-0-mps", "gpu-1-mps"] {
                assert_eq!(takes(&cluster, name), Some(false), "{name}");
            }
            assert_eq!(takes(&cluster, "gpu-1-ts"), Some(true), "needs none");
            assert_eq!(cluster.names().len(), names);
            cluster.settle();
        }
        cluster.learn(Fact::MpsAway(false));
        assert_eq!(takes(&cluster, "gpu-0-mps"), Some(true));
        assert_eq!(takes(&cluster, "gpu-1-mps"), Some(true));
    }
}

/// The reason of the taint is one of its own, and ends by itself.
#[test]
fn a_share_that_is_held_is_tainted_and_stays() {
    let mut cluster = with_share(MpsProtocol::V2);
    cluster.learn(Fact::MpsAway(true));
    let values = |cluster: &Cluster| {
        let device = cluster.slices.device(&"gpu-0-mps".parse().unwrap());
        let taints = &device.unwrap().taints;
        let values = taints.iter().filter_map(|taint| taint.value.clone());
        values.collect::<Vec<_>>()
    };
    assert_eq!(values(&cluster), ["supervisor-away"]);
    // Rules without MPS withdraw it, and it stays for its claim with both taints.
    cluster.rules(r#"{"modes":["TimeSlicing"]}"#);
    cluster.settle();
    assert!(values(&cluster).contains(&"supervisor-away".to_owned()));
    cluster.learn(Fact::MpsAway(false));
    assert!(!values(&cluster).contains(&"supervisor-away".to_owned()));
    assert_eq!(takes(&cluster, "gpu-0-mps"), Some(false), "withdrawn");
}
