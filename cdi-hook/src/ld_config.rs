//! `/etc/ld.so.conf`, as far as the hook has to understand it: does `ldconfig` read a certain file
//! because of it?
//!
//! The format, as glibc's `elf/ldconfig.c` reads it: a `#` begins a comment anywhere in a line; a
//! line `include PATTERN …` names files by glob patterns, relative ones from the configuration's
//! folder. An include that is not recognized here costs a second include of the same files, which
//! is harmless. So files that are included by included files are not looked at, and patterns with
//! brackets or backslashes count as others.

const FOLDER: &[u8] = b"/etc/";

/// Returns `true` if the configuration includes the file at this absolute path.
pub(crate) fn includes(config: &[u8], file: &str) -> bool {
    config
        .split(|byte| *byte == b'\n')
        .filter_map(patterns)
        .flat_map(|patterns| patterns.split(|byte| matches!(byte, b' ' | b'\t')))
        .any(|pattern| matches_path(pattern, file.as_bytes()))
}

/// Returns the patterns of an include line.
fn patterns(line: &[u8]) -> Option<&[u8]> {
    let end = line.iter().position(|byte| matches!(byte, b'#' | 0));
    let line = line.get(..end.unwrap_or(line.len()))?.trim_ascii_start();
    let rest = line.strip_prefix(b"include")?;
    rest.starts_with(b" ")
        .then_some(rest)
        .or_else(|| rest.starts_with(b"\t").then_some(rest))
}

/// Compares folder by folder, since `*` and `?` match no `/`.
fn matches_path(pattern: &[u8], path: &[u8]) -> bool {
    if pattern.is_empty() {
        return false;
    }
    let prefix = if pattern.starts_with(b"/") {
        b""
    } else {
        FOLDER
    };
    let pattern = [prefix, pattern].concat();
    let parts = |path: &[u8]| -> Vec<Vec<u8>> {
        path.split(|byte| *byte == b'/')
            .filter(|part| !part.is_empty())
            .map(<[u8]>::to_vec)
            .collect()
    };
    let (patterns, names) = (parts(&pattern), parts(path));
    patterns.len() == names.len()
        && patterns
            .iter()
            .zip(&names)
            .all(|(pattern, name)| matches_name(pattern, name))
}

/// Matches a name with `*` and `?`. Goes back to the last `*` only, so that a hostile pattern costs
/// no more than its length times that of the name.
fn matches_name(pattern: &[u8], name: &[u8]) -> bool {
    if pattern.iter().any(|byte| matches!(byte, b'[' | b'\\')) {
        return false;
    }
    let (mut at, mut seen) = (0, 0);
    let mut star = None;
    while let Some(byte) = name.get(seen) {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, seen));
                at += 1;
            }
            Some(wanted) if *wanted == b'?' || wanted == byte => {
                at += 1;
                seen += 1;
            }
            _ => {
                let Some((star_at, from)) = star else {
                    return false;
                };
                star = Some((star_at, from + 1));
                at = star_at + 1;
                seen = from + 1;
            }
        }
    }
    pattern.iter().skip(at).all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "/etc/ld.so.conf.d/00-divvy.conf";

    #[test]
    fn includes_that_reach_the_file_count() {
        for config in [
            "include /etc/ld.so.conf.d/*.conf",
            "/opt/lib\ninclude ld.so.conf.d/*.conf\n",
            "\t include\t/etc/a.conf  /etc/ld.so.conf.d/*  # ours",
            "include /etc//ld.so.conf.d/??-*v*.conf",
            "include /etc/ld.so.conf.d/00-divvy.conf",
            "include /etc/*/*",
        ] {
            assert!(includes(config.as_bytes(), OURS), "{config}");
        }
    }

    #[test]
    fn comments_and_patterns_for_other_files_do_not_count() {
        for config in [
            "",
            "# include /etc/ld.so.conf.d/*.conf",
            "/opt/lib # include /etc/ld.so.conf.d/*.conf",
            "include # /etc/ld.so.conf.d/*.conf",
            "include /etc/ld.so.conf.d/x86_64*.conf",
            "include /etc/ld.so.conf.d/*.confs",
            "include /etc/ld.so.conf.d",
            "include /etc/*",
            "include /opt/ld.so.conf.d/*.conf",
            "include\0 /etc/ld.so.conf.d/*.conf",
            "included /etc/ld.so.conf.d/*.conf",
            "/etc/ld.so.conf.d/*.conf",
            "include",
        ] {
            assert!(!includes(config.as_bytes(), OURS), "{config}");
        }
    }
}
