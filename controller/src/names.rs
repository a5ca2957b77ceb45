//! Names of slices. The scheduler tries slices in the order of their names, so a name begins with
//! the slice's index. The rest is fixed too: a create that is repeated after a lost answer finds
//! its slice instead of making a twin, and two publishers of one node (a rolling update) cannot
//! both create.

const MAX: usize = 253;

/// The name of the slice at an index: `00000-gpu.divvy.dev-node-1`.
pub fn slice_name(index: usize, driver: &str, node: &str) -> String {
    let name = format!("{index:05x}-{driver}-{node}");
    if name.len() <= MAX {
        return name;
    }
    // The hash of the whole name keeps shortened names apart.
    let hash = divvy_model::fnv1a(name.bytes());
    let kept = name
        // Room for a dash and the 16 digits of the hash.
        .get(..MAX - 17)
        .unwrap_or_default()
        .trim_end_matches(['.', '-']);
    format!("{kept}-{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::slice_name;

    #[test]
    fn names_sort_as_indexes_do_and_stay_within_the_limit() {
        assert_eq!(
            slice_name(0, "gpu.divvy.dev", "node-1"),
            "00000-gpu.divvy.dev-node-1"
        );
        let names: Vec<_> = [0, 9, 10, 15, 16, 255, 4096, 0xf_ffff]
            .map(|i| slice_name(i, "d", "n"))
            .into();
        assert!(names.is_sorted(), "{names:?}");
        let long =
            |tail: &str| slice_name(0, "gpu.divvy.dev", &format!("{}.{tail}", "n".repeat(250)));
        assert!(
            long("a").len() <= 253 && long("a") != long("b"),
            "{}",
            long("a")
        );
    }
}
