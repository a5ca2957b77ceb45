//! The ids of shares.

use k8s_openapi::api::resource::v1::ResourceClaim;

use crate::allocated::{AllocatedState, DeviceId};

/// A share that gets an id.
#[derive(Debug)]
pub(super) struct Share<'a> {
    /// The claim that gets it.
    pub(super) claim: &'a ResourceClaim,
    /// The request, `request` or `request/subrequest`.
    pub(super) request: &'a str,
    /// The device that is shared.
    pub(super) device: DeviceId,
    /// Place of the device in the claim's allocation, from 0.
    pub(super) number: usize,
}

/// The id of a share: the same question has the same answer, unless an existing share of the device
/// has that.
pub(super) fn id(allocated: &AllocatedState, mut share: Share<'_>) -> String {
    let DeviceId {
        driver,
        pool,
        device,
    } = &share.device;
    let uses = allocated.uses(driver, pool, device);
    let mut id = derived(&share);
    while uses.is_some_and(|uses| uses.has_share(&id)) {
        // Beyond the most devices of a claim, so that it is not the number of another share.
        share.number += 1000;
        id = derived(&share);
    }
    id
}

/// A UUID (version 8) from the share's claim, request, device and number, by FNV-1a.
fn derived(share: &Share<'_>) -> String {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let claim = &share.claim.metadata;
    let number = share.number.to_string();
    let parts = [
        claim.uid.as_deref().unwrap_or_default(),
        claim.namespace.as_deref().unwrap_or_default(),
        claim.name.as_deref().unwrap_or_default(),
        share.request,
        &share.device.driver,
        &share.device.pool,
        &share.device.device,
        &number,
    ];
    // No name has a zero byte: parts cannot run into each other.
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    let hash = bytes.fold(OFFSET, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(PRIME)
    });
    let version = hash & !(0xf << 76) & !(0x3 << 62) | (0x8 << 76) | (0x2 << 62);
    let hex = format!("{version:032x}");
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    format!(
        "{}-{}-{}-{}-{}",
        part(0, 8),
        part(8, 12),
        part(12, 16),
        part(16, 20),
        part(20, 32)
    )
}
