//! What the boards we simulate can be cut into, as NVML says it. Values from `hardware.md` 1.3 and 1.4.

use divvy_model::mig::{
    ComputeInstanceProfile, ComputeInstanceProfileId, ComputeInstanceProfileIndex, Engines,
    GpuInstanceProfile, GpuInstanceProfileId, GpuInstanceProfileIndex, MigCapabilities, Placement,
};

/// A profile: memory in MiB, multiprocessors, engines (copy, decoders, encoders, JPEG, OFA) and how many at most;
/// what it is on every board of the family is in [`Shape`].
struct Row(u32, u64, u32, [u32; 5], u32);

/// A profile wherever it appears: id, enum index, compute slices, size of a placement, starts.
struct Shape {
    id: u32,
    index: u32,
    slices: u32,
    size: u32,
    starts: &'static [u32],
}

const fn shape(id: u32, index: u32, slices: u32, size: u32, starts: &'static [u32]) -> Shape {
    Shape { id, index, slices, size, starts }
}

/// Seven compute and eight memory slices: A100 and every large board since. The last memory slice is out of reach
/// of the smallest profile.
const SEVEN: [Shape; 7] = [
    shape(19, 0, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
    shape(20, 7, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
    shape(15, 9, 1, 2, &[0, 2, 4, 6]),
    shape(14, 1, 2, 2, &[0, 2, 4]),
    shape(9, 2, 3, 4, &[0, 4]),
    shape(5, 3, 4, 4, &[0]),
    shape(0, 4, 7, 8, &[0]),
];

/// A30: four and four.
const FOUR: [Shape; 5] = [
    shape(14, 0, 1, 1, &[0, 1, 2, 3]),
    shape(21, 7, 1, 1, &[0, 1, 2, 3]),
    shape(5, 1, 2, 2, &[0, 2]),
    shape(6, 8, 2, 2, &[0, 2]),
    shape(0, 3, 4, 4, &[0]),
];

/// RTX PRO 6000: four compute slices over twelve units of memory.
const TWELVE: [Shape; 11] = [
    shape(14, 0, 1, 3, &[0, 3, 6, 9]),
    shape(21, 7, 1, 3, &[0, 3, 6, 9]),
    shape(47, 0xa, 1, 3, &[0, 3, 6, 9]),
    shape(65, 0xf, 1, 3, &[0, 3, 6, 9]),
    shape(67, 0xd, 1, 3, &[0, 3, 6, 9]),
    shape(5, 1, 2, 6, &[0, 6]),
    shape(35, 0xb, 2, 6, &[0, 6]),
    shape(64, 0x10, 2, 6, &[0, 6]),
    shape(66, 0xe, 2, 6, &[0, 6]),
    shape(0, 3, 4, 12, &[0]),
    shape(32, 0xc, 4, 12, &[0]),
];

const A100_40: [Row; 7] = [
    Row(19, 4864, 14, [1, 0, 0, 0, 0], 7),
    Row(20, 4864, 14, [1, 1, 0, 1, 1], 1),
    Row(15, 9856, 14, [1, 1, 0, 0, 0], 4),
    Row(14, 9856, 28, [2, 1, 0, 0, 0], 3),
    Row(9, 19968, 42, [3, 2, 0, 0, 0], 2),
    Row(5, 19968, 56, [4, 2, 0, 0, 0], 1),
    Row(0, 40192, 98, [7, 5, 0, 1, 1], 1),
];
const A100_80: [Row; 7] = [
    Row(19, 9728, 14, [1, 0, 0, 0, 0], 7),
    Row(20, 9728, 14, [1, 1, 0, 1, 1], 1),
    Row(15, 19968, 14, [1, 1, 0, 0, 0], 4),
    Row(14, 19968, 28, [2, 1, 0, 0, 0], 3),
    Row(9, 40192, 42, [3, 2, 0, 0, 0], 2),
    Row(5, 40192, 56, [4, 2, 0, 0, 0], 1),
    Row(0, 80896, 98, [7, 5, 0, 1, 1], 1),
];
const A30: [Row; 5] = [
    Row(14, 5939, 14, [1, 0, 0, 0, 0], 4),
    Row(21, 5939, 14, [1, 1, 0, 1, 1], 1),
    Row(5, 11968, 28, [2, 2, 0, 0, 0], 2),
    Row(6, 11968, 28, [2, 2, 0, 1, 1], 1),
    Row(0, 24064, 56, [4, 4, 0, 1, 1], 1),
];
const H100: [Row; 7] = hopper([9984, 20096, 40448, 81152], [16, 26, 32, 60, 64, 132]);
const H100_PCIE: [Row; 7] = hopper([9984, 20096, 40448, 81152], [14, 14, 30, 46, 62, 114]);
const H100_NVL: [Row; 7] = hopper([11008, 22144, 47488, 95360], [16, 26, 32, 60, 64, 132]);
const H200: [Row; 7] = hopper([16384, 33024, 71168, 143_104], [16, 26, 32, 60, 64, 132]);
/// Memory and multiprocessors of the profiles from 3g on are inferred, as are their media engines.
const B200: [Row; 7] = [
    Row(19, 22528, 18, [2, 1, 0, 1, 0], 7),
    Row(20, 22528, 18, [2, 1, 0, 1, 1], 1),
    Row(15, 45312, 30, [2, 1, 0, 1, 0], 4),
    Row(14, 45312, 36, [4, 2, 0, 2, 0], 3),
    Row(9, 91136, 70, [6, 3, 0, 3, 0], 2),
    Row(5, 91136, 72, [8, 4, 0, 4, 0], 1),
    Row(0, 182_656, 148, [16, 7, 0, 7, 1], 1),
];
const RTX_PRO_6000: [Row; 11] = [
    Row(14, 24192, 46, [1, 1, 1, 1, 0], 4),
    Row(21, 24192, 46, [1, 1, 1, 1, 1], 1),
    Row(47, 24192, 46, [1, 1, 1, 1, 0], 4),
    Row(65, 24192, 46, [1, 4, 4, 4, 1], 1),
    Row(67, 24192, 46, [1, 0, 0, 0, 0], 4),
    Row(5, 48512, 94, [2, 2, 2, 2, 0], 2),
    Row(35, 48512, 94, [2, 2, 2, 2, 0], 2),
    Row(64, 48512, 94, [2, 4, 4, 4, 1], 1),
    Row(66, 48512, 94, [2, 0, 0, 0, 0], 2),
    Row(0, 97280, 188, [4, 4, 4, 4, 1], 1),
    Row(32, 97280, 188, [4, 4, 4, 4, 1], 1),
];

/// Hopper boards differ in memory (1g, 1g with double memory and 2g, 3g and 4g, 7g) and in multiprocessors.
const fn hopper(mib: [u64; 4], sm: [u32; 6]) -> [Row; 7] {
    let ([one, two, four, eight], [sm1, sm1x, sm2, sm3, sm4, sm7]) = (mib, sm);
    [
        Row(19, one, sm1, [1, 1, 0, 1, 0], 7),
        Row(20, one, sm1, [1, 1, 0, 1, 1], 1),
        Row(15, two, sm1x, [1, 1, 0, 1, 0], 4),
        Row(14, two, sm2, [2, 2, 0, 2, 0], 3),
        Row(9, four, sm3, [3, 3, 0, 3, 0], 2),
        Row(5, four, sm4, [4, 4, 0, 4, 0], 1),
        Row(0, eight, sm7, [8, 7, 0, 7, 1], 1),
    ]
}

/// Boards there is a table for; a superset of the boards with [`crate::profile`]s that do MIG.
pub const MIG_BOARDS: [&str; 11] = [
    "a100-40",
    "a100-80",
    "a100-pcie-40",
    "a100-pcie-80",
    "a30",
    "b200",
    "h100",
    "h100-nvl",
    "h100-pcie",
    "h200",
    "rtx-pro-6000",
];

/// What a board can be cut into, by the key of its [`crate::profile`].
pub fn mig_capabilities(board: &str) -> Option<MigCapabilities> {
    let (total_mib, shapes, rows): (u64, &[Shape], &[Row]) = match board {
        "a100-40" | "a100-pcie-40" => (40960, &SEVEN, &A100_40),
        "a100-80" | "a100-pcie-80" => (81920, &SEVEN, &A100_80),
        "a30" => (24576, &FOUR, &A30),
        "b200" => (183_359, &SEVEN, &B200),
        "h100" => (81559, &SEVEN, &H100),
        "h100-nvl" => (95830, &SEVEN, &H100_NVL),
        "h100-pcie" => (81559, &SEVEN, &H100_PCIE),
        "h200" => (143_771, &SEVEN, &H200),
        "rtx-pro-6000" => (97887, &TWELVE, &RTX_PRO_6000),
        _ => return None,
    };
    let profile = |row: &Row| {
        let Row(id, memory_mib, multiprocessors, [copy, decoders, encoders, jpeg, ofa], max_instances) = *row;
        let shape = shapes.iter().find(|shape| shape.id == id)?;
        Some(GpuInstanceProfile {
            id: GpuInstanceProfileId(id),
            index: GpuInstanceProfileIndex(shape.index),
            slices: shape.slices,
            memory_mib,
            multiprocessors,
            engines: Engines { copy, decoders, encoders, jpeg, ofa },
            max_instances,
            placements: shape
                .starts
                .iter()
                .map(|start| Placement { start: *start, size: shape.size })
                .collect(),
            driver_name: None,
        })
    };
    Some(MigCapabilities::new(total_mib << 20, rows.iter().filter_map(profile)))
}

/// The compute-instance profiles of a GPU instance: each number of slices that the driver offers in one, the
/// multiprocessors in proportion, all of them for the one that takes everything.
pub fn compute_profiles(of: &GpuInstanceProfile) -> Vec<ComputeInstanceProfile> {
    /// NVML's number and the slices.
    const OFFERED: [(u32, u32); 7] = [(0, 1), (1, 2), (2, 3), (3, 4), (6, 6), (4, 7), (5, 8)];
    OFFERED
        .into_iter()
        .filter(|(_, slices)| *slices == of.slices || (*slices < of.slices && 2 * slices <= of.slices + 1))
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
            ("a100-40", "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
            ("a100-80", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
            ("a30", "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb"),
            ("h100", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
            ("h100-pcie", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
            ("h100-nvl", "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb"),
            ("h200", "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
            ("b200", "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
            (
                "rtx-pro-6000",
                "1g.24gb 1g.24gb+me 1g.24gb+me.all 1g.24gb-me 1g.24gb+gfx 2g.48gb 2g.48gb+me.all 2g.48gb-me \
                 2g.48gb+gfx 4g.96gb 4g.96gb+gfx",
            ),
        ];
        for (board, expected) in boards {
            let caps = mig_capabilities(board).unwrap();
            let names: Vec<_> = caps.profiles().iter().map(|p| caps.name(p).unwrap().to_string()).collect();
            assert_eq!(names.join(" "), expected, "{board}");
        }
    }

    #[test]
    fn every_board_that_does_mig_has_a_table_that_fits_its_facts() {
        for board in profiles().iter().filter(|board| board.mig) {
            let caps = mig_capabilities(board.key).unwrap_or_else(|| panic!("{}", board.key));
            assert_eq!(caps.memory_bytes, board.memory_bytes, "{}", board.key);
            assert!(
                caps.profiles().iter().all(|p| p.multiprocessors <= board.multiprocessors),
                "{}",
                board.key
            );
        }
        let counts = MIG_BOARDS.map(|board| {
            let caps = mig_capabilities(board).unwrap();
            (caps.memory_slices(), caps.placements().count())
        });
        let (seven, four, twelve) = ((8, 25), (4, 13), (12, 30));
        assert_eq!(counts, [seven, seven, seven, seven, four, seven, seven, seven, seven, seven, twelve]);
        assert_eq!(mig_capabilities("l4"), None);
    }

    #[test]
    fn instances_are_counted_as_published() {
        let most = |board| -> Vec<u32> {
            let caps = mig_capabilities(board).unwrap();
            caps.profiles().iter().map(|profile| caps.most(profile)).collect()
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
                assert_eq!((whole.slices, whole.multiprocessors), (profile.slices, profile.multiprocessors));
            }
            let slices = |id| -> Vec<u32> {
                let profile = caps.profile(GpuInstanceProfileId(id)).unwrap();
                compute_profiles(profile).iter().map(|ci| ci.slices).collect()
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
