//! Which placement of a profile is best tried first: partitions that come and go on a node, and how many of them find
//! no place in each order. Same arrivals for each; nothing depends on the machine.

use anyhow::{Context, Result, ensure};
use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Slices};
use divvy_api::names::{CLASS_MIG, DRIVER};
use divvy_fake_cluster::build::{mk_class, mk_node};
use divvy_offer::{GpuRules, Modes, PlacementOrder};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimStatus};

use crate::allocator::{claim_for, selector};
use crate::offered::{Offered, slices};
use crate::rig::NODE;
use crate::table::{Row, Value};

const GPUS: &str = "h100x8";
const ARRIVALS: u32 = 4000;
/// Of 64 memory slices; above it a claim leaves before the next comes.
const BUSY: u32 = 48;
/// Profiles with their memory slices, as often as they come in ten.
const MIX: [(&str, u32, u32); 4] =
    [("1g.10gb", 1, 5), ("2g.20gb", 2, 2), ("3g.40gb", 4, 2), ("4g.40gb", 4, 1)];

/// How many arrivals found no place, in each order.
pub(crate) fn orders() -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut first = None;
    for (name, order) in
        [("ascending", PlacementOrder::Ascending), ("descending", PlacementOrder::Descending)]
    {
        let refused = refused(order)?;
        let all: u64 = refused.iter().sum();
        let each = MIX.iter().zip(refused).map(|((profile, ..), n)| format!("{profile} {n}"));
        let each = each.collect::<Vec<_>>().join(", ");
        let row = Row::new(format!("{name}: of {ARRIVALS} refused ({each})"), Value::Count(all));
        rows.push(match first {
            Some(of_first) => row.beside("ascending", of_first),
            None => row,
        });
        first = Some(Value::Count(all));
    }
    Ok(rows)
}

fn refused(order: PlacementOrder) -> Result<[u64; MIX.len()]> {
    let rules = GpuRules { modes: Modes::everything(), order, ..GpuRules::default() };
    let published = slices(&Offered::new(GPUS, &rules, "1.37.1")?.carve(NODE).pool, NODE, "bench");
    let published = Slices::new(&published);
    let mut class = mk_class(CLASS_MIG, DRIVER);
    let of_class = format!(r#"device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].type == "mig""#);
    class.spec.get_or_insert_default().selectors = Some(vec![selector(&of_class)]);
    let (classes, node, allocator) = ([class], mk_node(NODE), Allocator::new(Features::ALL));
    let claims = MIX.map(|(profile, ..)| {
        claim_for(CLASS_MIG, &format!(r#"device.attributes["{DRIVER}"].profile == "{profile}""#))
    });

    let mut refused = [0; MIX.len()];
    let mut living: Vec<(ResourceClaim, u32)> = Vec::new();
    let mut used = 0;
    let mut dice = Dice(1);
    for _ in 0..ARRIVALS {
        while used > BUSY {
            let (_, slices) = living.swap_remove(dice.below(living.len()));
            used -= slices;
        }
        let mut drawn = u32::try_from(dice.below(10))?;
        let kind = MIX.iter().position(|(_, _, often)| {
            let here = drawn < *often;
            drawn = drawn.saturating_sub(*often);
            here
        });
        let kind = kind.context("the mix is not of ten")?;
        let (Some(claim), Some((_, slices, _)), Some(count)) =
            (claims.get(kind), MIX.get(kind), refused.get_mut(kind))
        else {
            continue;
        };
        let allocated = AllocatedState::from_claims(living.iter().map(|(claim, _)| claim));
        let inputs = Inputs { slices: &published, classes: &classes, allocated: &allocated, node: &node };
        match allocator.fit(&inputs, &[claim])? {
            None => *count += 1,
            Some(found) => {
                let status = ResourceClaimStatus {
                    allocation: found.results.into_iter().next(),
                    ..ResourceClaimStatus::default()
                };
                living.push((ResourceClaim { status: Some(status), ..claim.clone() }, *slices));
                used += slices;
            }
        }
    }
    ensure!(!living.is_empty(), "nothing was ever allocated");
    Ok(refused)
}

/// Numbers that only look random (Knuth's MMIX generator).
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or(0) % end.max(1)
    }
}
