//! The MIG profiles and placements of the simulated boards, as NVML reports them.

use divvy_model::mig::{
    ComputeInstanceProfile, ComputeInstanceProfileId, ComputeInstanceProfileIndex, Engines,
    GpuInstanceProfile, GpuInstanceProfileId, GpuInstanceProfileIndex, MigCapabilities, Placement,
};

/// A profile wherever it appears: id, enum index, compute slices, size of a placement, starts, how
/// many at most, and which of the board's sizes of memory and of multiprocessors it has.
struct Shape(u32, u32, u32, u32, &'static [u32], u32, usize, usize);

/// Seven compute and eight memory slices: A100 and every large board since. The last memory slice
/// is out of reach of the smallest profile.
const SEVEN: [Shape; 7] = [
    Shape(19, 0, 1, 1, &[0, 1, 2, 3, 4, 5, 6], 7, 0, 0),
    Shape(20, 7, 1, 1, &[0, 1, 2, 3, 4, 5, 6], 1, 0, 0),
    Shape(15, 9, 1, 2, &[0, 2, 4, 6], 4, 1, 1),
    Shape(14, 1, 2, 2, &[0, 2, 4], 3, 1, 2),
    Shape(9, 2, 3, 4, &[0, 4], 2, 2, 3),
    Shape(5, 3, 4, 4, &[0], 1, 2, 4),
    Shape(0, 4, 7, 8, &[0], 1, 3, 5),
];

/// A30: four and four.
const FOUR: [Shape; 5] = [
    Shape(14, 0, 1, 1, &[0, 1, 2, 3], 4, 0, 0),
    Shape(21, 7, 1, 1, &[0, 1, 2, 3], 1, 0, 0),
    Shape(5, 1, 2, 2, &[0, 2], 2, 1, 1),
    Shape(6, 8, 2, 2, &[0, 2], 1, 1, 1),
    Shape(0, 3, 4, 4, &[0], 1, 2, 2),
];

/// RTX PRO 6000: four compute slices over twelve units of memory.
const TWELVE: [Shape; 11] = [
    Shape(14, 0, 1, 3, &[0, 3, 6, 9], 4, 0, 0),
    Shape(21, 7, 1, 3, &[0, 3, 6, 9], 1, 0, 0),
    Shape(47, 0xa, 1, 3, &[0, 3, 6, 9], 4, 0, 0),
    Shape(65, 0xf, 1, 3, &[0, 3, 6, 9], 1, 0, 0),
    Shape(67, 0xd, 1, 3, &[0, 3, 6, 9], 4, 0, 0),
    Shape(5, 1, 2, 6, &[0, 6], 2, 1, 1),
    Shape(35, 0xb, 2, 6, &[0, 6], 2, 1, 1),
    Shape(64, 0x10, 2, 6, &[0, 6], 1, 1, 1),
    Shape(66, 0xe, 2, 6, &[0, 6], 2, 1, 1),
    Shape(0, 3, 4, 12, &[0], 1, 2, 2),
    Shape(32, 0xc, 4, 12, &[0], 1, 2, 2),
];

/// RTX PRO 5000: two compute slices. The list of profiles, and the number of each, is the MIG
/// guide's. Ids and sizes are inferred: an id says the part of the GPU and the variant (0 the
/// whole, 5 a half), as A30 and RTX PRO 6000 have it.
const TWO: [Shape; 7] = [
    Shape(5, 0, 1, 3, &[0, 3], 2, 0, 0),
    Shape(6, 7, 1, 3, &[0, 3], 1, 0, 0),
    Shape(35, 0xa, 1, 3, &[0, 3], 2, 0, 0),
    Shape(64, 0xf, 1, 3, &[0, 3], 1, 0, 0),
    Shape(66, 0xd, 1, 3, &[0, 3], 2, 0, 0),
    Shape(0, 1, 2, 6, &[0], 1, 1, 1),
    Shape(32, 0xb, 2, 6, &[0], 1, 1, 1),
];

/// Copy engines, decoders, encoders, JPEG and OFA engines of each profile, in the order of its
/// shapes.
type EngineRows = &'static [[u32; 5]];

const AMPERE: EngineRows = &[
    [1, 0, 0, 0, 0],
    [1, 1, 0, 1, 1],
    [1, 1, 0, 0, 0],
    [2, 1, 0, 0, 0],
    [3, 2, 0, 0, 0],
    [4, 2, 0, 0, 0],
    [7, 5, 0, 1, 1],
];
const GA100_HALF: EngineRows = &[
    [1, 0, 0, 0, 0],
    [1, 1, 0, 1, 1],
    [2, 2, 0, 0, 0],
    [2, 2, 0, 1, 1],
    [4, 4, 0, 1, 1],
];
const HOPPER: EngineRows = &[
    [1, 1, 0, 1, 0],
    [1, 1, 0, 1, 1],
    [1, 1, 0, 1, 0],
    [2, 2, 0, 2, 0],
    [3, 3, 0, 3, 0],
    [4, 4, 0, 4, 0],
    [8, 7, 0, 7, 1],
];
/// Media engines from 3g on are inferred.
const BLACKWELL: EngineRows = &[
    [2, 1, 0, 1, 0],
    [2, 1, 0, 1, 1],
    [2, 1, 0, 1, 0],
    [4, 2, 0, 2, 0],
    [6, 3, 0, 3, 0],
    [8, 4, 0, 4, 0],
    [16, 7, 0, 7, 1],
];
const GB202: EngineRows = &[
    [1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1],
    [1, 1, 1, 1, 0],
    [1, 4, 4, 4, 1],
    [1, 0, 0, 0, 0],
    [2, 2, 2, 2, 0],
    [2, 2, 2, 2, 0],
    [2, 4, 4, 4, 1],
    [2, 0, 0, 0, 0],
    [4, 4, 4, 4, 1],
    [4, 4, 4, 4, 1],
];
/// Inferred from the three decoders and encoders of the datasheet.
const GB202_HALF: EngineRows = &[
    [1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1],
    [1, 1, 1, 1, 0],
    [1, 3, 3, 3, 1],
    [1, 0, 0, 0, 0],
    [2, 3, 3, 3, 1],
    [2, 3, 3, 3, 1],
];

/// Board, its shapes and engines, MiB and multiprocessors of its sizes, ascending.
struct Table(
    &'static str,
    &'static [Shape],
    EngineRows,
    &'static [u64],
    &'static [u32],
);

const GH100: &[u32] = &[16, 26, 32, 60, 64, 132];
const A100: &[u32] = &[14, 14, 28, 42, 56, 98];
const PRO_6000: Table = Table(
    "rtx-pro-6000",
    &TWELVE,
    GB202,
    &[24192, 48512, 97280],
    &[46, 94, 188],
);

/// Profiles in the form that `nvidia-smi mig -lgip` prints them, from the place named (MP:
/// mig-parted); what is inferred is marked, memory so that the driver's formula gives the published
/// name. The memory depends on the driver: B200 also had 20.5 GiB.
#[rustfmt::skip]
const TABLES: [Table; 21] = [
    Table("a100-40",      &SEVEN, AMPERE, &[4864, 9856, 19968, 40192], A100),
    Table("a100-80",      &SEVEN, AMPERE, &[9728, 19968, 40192, 80896], A100),
    Table("a100-pcie-40", &SEVEN, AMPERE, &[4864, 9856, 19968, 40192], A100),
    Table("a100-pcie-80", &SEVEN, AMPERE, &[9728, 19968, 40192, 80896], A100),
    Table("a30",          &FOUR, GA100_HALF, &[5939, 11968, 24064], &[14, 28, 56]), // MIG guide
    // MP#166; from 3g on inferred.
    Table("b200",         &SEVEN, BLACKWELL, &[22528, 45312, 91136, 182_656], &[18, 30, 36, 70, 72, 148]),
    // Names: GPU Operator 25.10. All figures inferred from the names and from B200.
    Table("b300",         &SEVEN, BLACKWELL, &[33792, 67840, 136_704, 273_920], &[18, 30, 36, 70, 72, 148]),
    // MP#227; from 3g on inferred.
    Table("gb200",        &SEVEN, BLACKWELL, &[22528, 46592, 94208, 188_416], &[18, 32, 38, 70, 76, 152]),
    // Names: DGX Station's MIG playbook (R59x; R61x has others). All figures inferred from the
    // names and from GB200.
    Table("gb300",        &SEVEN, BLACKWELL, &[34816, 70144, 141_312, 283_136], &[18, 32, 38, 70, 76, 152]),
    // A GH200 480GB of CU Anschutz, R545; 3g and 2g also in sgawe11/RAG-on-GH200-with-MIG.
    Table("gh200-96",     &SEVEN, HOPPER, &[11264, 23552, 47616, 95232], GH100),
    // MP#139; memory from 3g on inferred.
    Table("gh200-144",    &SEVEN, HOPPER, &[17920, 36096, 72704, 145_920], GH100),
    Table("h100",         &SEVEN, HOPPER, &[9984, 20096, 40448, 81152], GH100),
    Table("h100-nvl",     &SEVEN, HOPPER, &[11008, 22144, 47488, 95360], GH100), // MP#101
    Table("h100-pcie",    &SEVEN, HOPPER, &[9984, 20096, 40448, 81152], &[14, 14, 30, 46, 62, 114]),
    // Names: MIG guide. Memory inferred from GH200 with the same total; multiprocessors inferred
    // from H100, as 78 is to 132.
    Table("h20",          &SEVEN, HOPPER, &[11264, 23552, 47616, 95232], &[8, 14, 18, 34, 36, 78]),
    Table("h200",         &SEVEN, HOPPER, &[16384, 33024, 71168, 143_104], GH100), // MP#120
    Table("h200-nvl",     &SEVEN, HOPPER, &[16384, 33024, 71168, 143_104], GH100), // names: MP#146; figures inferred from H200
    // All figures inferred from RTX PRO 6000.
    Table("rtx-pro-5000", &TWO, GB202_HALF, &[24192, 48384], &[54, 110]),
    PRO_6000, // container-engine-accelerators#564; cubecos#312 has 23.12 GiB for 1g
    // The MIG guide has one table for the three.
    Table("rtx-pro-6000-maxq", PRO_6000.1, PRO_6000.2, PRO_6000.3, PRO_6000.4),
    Table("rtx-pro-6000-ws",   PRO_6000.1, PRO_6000.2, PRO_6000.3, PRO_6000.4),
];

/// The boards that do MIG.
#[expect(
    clippy::indexing_slicing,
    reason = "worked out by the compiler, which checks it"
)]
pub const MIG_BOARDS: [&str; TABLES.len()] = {
    let mut boards = [""; TABLES.len()];
    let mut at = 0;
    while at < TABLES.len() {
        boards[at] = TABLES[at].0;
        at += 1;
    }
    boards
};

/// Returns the profiles of a board, by the key of its [`crate::profile()`].
pub fn mig_capabilities(board: &str) -> Option<MigCapabilities> {
    let Table(_, shapes, engines, mib, multiprocessors) =
        TABLES.iter().find(|table| table.0 == board)?;
    let profile = |(shape, engines): (&Shape, &[u32; 5])| {
        let Shape(id, index, slices, size, starts, max_instances, memory, sm) = *shape;
        let [copy, decoders, encoders, jpeg, ofa] = *engines;
        Some(GpuInstanceProfile {
            id: GpuInstanceProfileId(id),
            index: GpuInstanceProfileIndex(index),
            slices,
            memory_mib: *mib.get(memory)?,
            multiprocessors: *multiprocessors.get(sm)?,
            engines: Engines {
                copy,
                decoders,
                encoders,
                jpeg,
                ofa,
            },
            max_instances,
            placements: starts
                .iter()
                .map(|start| Placement {
                    start: *start,
                    size,
                })
                .collect(),
            driver_name: None,
        })
    };
    let profiles = shapes.iter().zip(*engines).filter_map(profile);
    Some(MigCapabilities::new(
        crate::profile(board)?.memory_bytes?,
        profiles,
    ))
}

/// The compute-instance profiles of a GPU instance: each number of slices that the driver offers in
/// one, the multiprocessors in proportion, all of them for the one that takes everything.
pub fn compute_profiles(of: &GpuInstanceProfile) -> Vec<ComputeInstanceProfile> {
    /// NVML's number and the slices.
    const OFFERED: [(u32, u32); 7] = [(0, 1), (1, 2), (2, 3), (3, 4), (6, 6), (4, 7), (5, 8)];
    OFFERED
        .into_iter()
        .filter(|(_, slices)| {
            *slices == of.slices || (*slices < of.slices && 2 * slices <= of.slices + 1)
        })
        .filter(|(_, slices)| !matches!(slices, 6 | 8) || *slices == of.slices)
        .map(|(index, slices)| ComputeInstanceProfile {
            id: ComputeInstanceProfileId(index),
            index: ComputeInstanceProfileIndex(index),
            slices,
            multiprocessors: of.multiprocessors * slices / of.slices.max(1),
            max_instances: of.slices / slices,
            shared: of.engines,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profiles;

    /// Names as published, in the order of [`MigCapabilities::profiles`].
    #[test]
    fn every_profile_has_its_published_name() {
        let boards = [
            (
                "a100-40",
                "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb",
            ),
            (
                "a100-80",
                "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
            ),
            ("a30", "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb"),
            (
                "h100",
                "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
            ),
            (
                "h100-pcie",
                "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
            ),
            (
                "h100-nvl",
                "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb",
            ),
            (
                "h200",
                "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb",
            ),
            (
                "gh200-96",
                "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb",
            ),
            (
                "gh200-144",
                "1g.18gb 1g.18gb+me 1g.36gb 2g.36gb 3g.72gb 4g.72gb 7g.144gb",
            ),
            (
                "h20",
                "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb",
            ),
            (
                "h200-nvl",
                "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb",
            ),
            (
                "b300",
                "1g.34gb 1g.34gb+me 1g.67gb 2g.67gb 3g.135gb 4g.135gb 7g.269gb",
            ),
            (
                "gb200",
                "1g.23gb 1g.23gb+me 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb",
            ),
            (
                "gb300",
                "1g.35gb 1g.35gb+me 1g.70gb 2g.70gb 3g.139gb 4g.139gb 7g.278gb",
            ),
            (
                "rtx-pro-5000",
                "1g.24gb 1g.24gb+me 1g.24gb+me.all 1g.24gb-me 1g.24gb+gfx 2g.48gb 2g.48gb+gfx",
            ),
            (
                "b200",
                "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb",
            ),
            (
                "rtx-pro-6000",
                "1g.24gb 1g.24gb+me 1g.24gb+me.all 1g.24gb-me 1g.24gb+gfx 2g.48gb 2g.48gb+me.all 2g.48gb-me \
                 2g.48gb+gfx 4g.96gb 4g.96gb+gfx",
            ),
        ];
        for (board, expected) in boards {
            let caps = mig_capabilities(board).unwrap();
            let names: Vec<_> = caps
                .profiles()
                .iter()
                .map(|p| caps.name(p).unwrap().to_string())
                .collect();
            assert_eq!(names.join(" "), expected, "{board}");
        }
    }

    #[test]
    fn every_board_that_does_mig_has_a_table_that_fits_its_facts() {
        let able = profiles().iter().filter(|board| board.make.mig);
        assert_eq!(
            able.clone().map(|board| board.key).collect::<Vec<_>>(),
            MIG_BOARDS
        );
        for board in able {
            let caps = mig_capabilities(board.key).unwrap();
            let fits = |p: &GpuInstanceProfile| {
                p.multiprocessors <= board.multiprocessors
                    && Some(p.memory_bytes()) < board.memory_bytes
            };
            assert!(caps.profiles().iter().all(fits), "{}", board.key);
            let placements = match caps.memory_slices() {
                8 => 25,
                4 => 13,
                6 => 12,
                _ => 30,
            };
            assert_eq!(caps.placements().count(), placements, "{}", board.key);
        }
        assert_eq!(mig_capabilities("l4"), None);
    }

    #[test]
    fn instances_are_counted_as_published() {
        let most = |board| -> Vec<u32> {
            let caps = mig_capabilities(board).unwrap();
            caps.profiles()
                .iter()
                .map(|profile| caps.most(profile))
                .collect()
        };
        assert_eq!(most("h100"), [7, 1, 4, 3, 2, 1, 1]);
        assert_eq!(most("a30"), [4, 1, 2, 1, 1]);
        assert_eq!(most("rtx-pro-6000"), [4, 1, 1, 4, 4, 2, 1, 2, 2, 1, 1]);
    }

    #[test]
    fn a_compute_instance_can_take_all_or_some_of_each_instance() {
        for board in MIG_BOARDS {
            let caps = mig_capabilities(board).unwrap();
            for profile in caps.profiles() {
                let offered = compute_profiles(profile);
                let whole = profile.whole_compute_profile(&offered).unwrap();
                assert_eq!(
                    (whole.slices, whole.multiprocessors),
                    (profile.slices, profile.multiprocessors)
                );
            }
            let slices = |id| -> Vec<u32> {
                let profile = caps.profile(GpuInstanceProfileId(id)).unwrap();
                compute_profiles(profile)
                    .iter()
                    .map(|ci| ci.slices)
                    .collect()
            };
            if caps.memory_slices() == 8 {
                assert_eq!(
                    (slices(9), slices(5), slices(0)),
                    (vec![1, 2, 3], vec![1, 2, 4], vec![1, 2, 3, 4, 7])
                );
            }
        }
    }
}
