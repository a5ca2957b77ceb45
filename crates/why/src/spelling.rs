//! Names that were probably meant by others.

/// Returns ` (did you mean "x"?)` with the name among `known` that was probably meant, or nothing.
pub fn did_you_mean<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> String {
    nearest(name, known)
        .map(|near| format!(" (did you mean {near:?}?)"))
        .unwrap_or_default()
}

/// Returns the name among `known` that was probably meant: at most a third of its letters are
/// others, and it is not the very same.
pub fn nearest<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let distance =
        |other: &str| strsim::damerau_levenshtein(&name.to_lowercase(), &other.to_lowercase());
    known
        .into_iter()
        .filter(|other| *other != name)
        .map(|other| (distance(other), other))
        .min()
        .filter(|(distance, near)| distance * 3 <= name.len().max(near.len()))
        .map(|(_, near)| near)
}
