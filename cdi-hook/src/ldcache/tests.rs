use super::*;

fn entry<'a>(name: &'a str, path: &'a str) -> Entry<'a> {
    Entry {
        flags: NATIVE,
        name: name.as_bytes(),
        path: path.as_bytes(),
        os_version: 0,
        hwcap: 0,
    }
}

fn names(cache: &Cache<'_>) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    cache
        .entries
        .iter()
        .map(|entry| (text(entry.name), text(entry.path)))
        .collect()
}

fn small() -> Cache<'static> {
    let high = Entry {
        hwcap: 1 << 62,
        ..entry("libz.so.1", "/usr/lib/glibc-hwcaps/x86-64-v3/libz.so.1")
    };
    let old = Entry {
        flags: 3,
        os_version: 7,
        ..entry("libcuda.so.1", "/usr/lib32/libcuda.so.1")
    };
    Cache {
        entries: vec![
            high,
            entry("libz.so.1", "/usr/lib/libz.so.1"),
            old,
            entry("libcuda.so.1", "/usr/lib/libcuda.so.1"),
        ],
        hwcaps: vec![b"x86-64-v3"],
    }
}

#[test]
fn a_cache_reads_back_as_written_with_its_hwcaps() {
    assert_eq!(parse(&small().to_bytes().unwrap()).unwrap(), small());
    assert_eq!(
        parse(&Cache::default().to_bytes().unwrap()).unwrap(),
        Cache::default()
    );
}

#[test]
fn the_table_of_older_glibc_before_the_header_is_skipped() {
    let mut file = OLD_MAGIC.to_vec();
    file.extend(1u32.to_ne_bytes());
    file.extend([0; 12]);
    file.resize(32, 0); // 28, aligned
    let new = Cache {
        hwcaps: vec![],
        ..small()
    };
    let bytes = new.to_bytes().unwrap();
    assert_eq!(parse(&[&file[..], &bytes].concat()).unwrap(), new);
    // An extension behind an old table is left out.
    let bytes = small().to_bytes().unwrap();
    assert_eq!(parse(&[file, bytes].concat()).unwrap(), new);
}

#[test]
fn entered_libraries_come_first_and_replace_earlier_ones() {
    let mut cache = small();
    let folders = ["/n/lib64".to_owned()];
    let library = |name: &str| (name.to_owned(), format!("/n/lib64/{name}"));
    let (first, second) = (
        [library("libcuda.so.1"), library("libgone.so.1")],
        [library("libcuda.so.1"), library("libzz.so")],
    );
    cache.enter(&folders, &first);
    cache.enter(&folders, &second);
    let expected = [
        ("libzz.so", "/n/lib64/libzz.so"),
        ("libz.so.1", "/usr/lib/glibc-hwcaps/x86-64-v3/libz.so.1"),
        ("libz.so.1", "/usr/lib/libz.so.1"),
        ("libcuda.so.1", "/n/lib64/libcuda.so.1"),
        ("libcuda.so.1", "/usr/lib32/libcuda.so.1"),
        ("libcuda.so.1", "/usr/lib/libcuda.so.1"),
    ];
    assert_eq!(
        names(&cache),
        expected.map(|(a, b)| (a.to_owned(), b.to_owned()))
    );
}

#[test]
fn numbers_in_names_compare_as_numbers() {
    let sorted = [
        "lib.so",
        "liba.so.2",
        "liba.so.10",
        "libb-a.so",
        "libb.so",
        "libb9.so",
        "libb12.so",
    ];
    for pair in sorted.windows(2) {
        assert!(
            order::compare(pair[0].as_bytes(), pair[1].as_bytes()).is_lt(),
            "{pair:?}"
        );
    }
    assert!(order::compare(b"liba.so.1", b"liba.so.1").is_eq());
}

#[test]
fn names_paths_and_entries_beyond_a_file_systems_are_no_cache() {
    let of = |name: usize, path: usize, entries: usize| {
        let (name, path) = ("n".repeat(name), "p".repeat(path));
        let cache = Cache {
            entries: vec![entry(&name, &path); entries],
            hwcaps: vec![],
        };
        cache.to_bytes().map(|bytes| parse(&bytes).is_some())
    };
    assert_eq!(of(LONGEST_NAME, LONGEST_PATH, 2), Some(true));
    assert_eq!(of(LONGEST_NAME + 1, 1, 1), Some(false));
    assert_eq!(of(1, LONGEST_PATH + 1, 1), Some(false));
    assert_eq!(of(1, 1, MOST_ENTRIES), Some(true));
    assert_eq!(of(1, 1, MOST_ENTRIES + 1), Some(false));
    assert_eq!(
        of(255, 4096, 4000),
        None,
        "written, it would be larger than 16 MiB"
    );
}

#[test]
fn no_damage_to_a_cache_does_more_than_make_it_unusable() {
    let good = small().to_bytes().unwrap();
    for length in 0..good.len() {
        let _ = parse(&good[..length]);
    }
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] = 0xff;
        let _ = parse(&bad);
    }
    assert_eq!(parse(b""), None);
    assert_eq!(parse(&good[..HEADER + 3]), None);
    let huge = [MAGIC.as_slice(), &[0xff; 28]].concat();
    assert_eq!(parse(&huge), None);
}

/// Reads the cache of the machine that runs the test, made by its `ldconfig`.
#[test]
fn this_machines_cache_is_understood_sorted_and_kept() {
    let Ok(file) = fs_err::read("/etc/ld.so.cache") else {
        return;
    };
    let cache = parse(&file).expect("a cache that the loader uses is one we can read");
    let sorted = cache
        .entries
        .windows(2)
        .all(|pair| order::compare(pair[0].name, pair[1].name).is_ge());
    assert!(sorted, "the order of names is the loader's");
    assert_eq!(parse(&cache.to_bytes().unwrap()).unwrap(), cache);
}
