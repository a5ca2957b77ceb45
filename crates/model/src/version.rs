//! Driver versions as semantic versions: NVML's `580.95.05` has a leading zero, which semver (and
//! so the API server) refuses.

/// Turns a dotted version of one to three numbers into a semantic version: `580.95.05` →
/// `580.95.5`, `12.4` → `12.4.0`. `None` for anything else: what we cannot read is left out, never
/// invented.
pub fn normalise_version(text: &str) -> Option<semver::Version> {
    let mut numbers = [0u64; 3];
    let mut parts = text.trim().split('.');
    for slot in &mut numbers {
        match parts.next() {
            Some(part) if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) => {
                *slot = part.parse().ok()?;
            }
            Some(_) => return None,
            None => break,
        }
    }
    if parts.next().is_some() || text.trim().is_empty() {
        return None;
    }
    let [major, minor, patch] = numbers;
    Some(semver::Version::new(major, minor, patch))
}

#[cfg(test)]
mod tests {
    use super::normalise_version;

    #[test]
    fn versions_are_normalised_or_left_out() {
        let norm = |t| normalise_version(t).map(|v| v.to_string());
        assert_eq!(norm("580.95.05").as_deref(), Some("580.95.5"));
        assert_eq!(norm("535.161.07").as_deref(), Some("535.161.7"));
        assert_eq!(norm("12.4").as_deref(), Some("12.4.0"));
        assert_eq!(norm("13").as_deref(), Some("13.0.0"));
        for bad in [
            "",
            "a",
            "1..2",
            "1.2.3.4",
            "1.2-rc1",
            "99999999999999999999.1",
        ] {
            assert_eq!(norm(bad), None, "{bad}");
        }
    }
}
