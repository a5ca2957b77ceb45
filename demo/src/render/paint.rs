//! Colours: a claim's letter and part of a GPU have one, the same in the picture and beside the
//! claim's name.

const GREEN: u8 = 32;
pub(super) const YELLOW: u8 = 33;
pub(super) const RED: u8 = 31;

/// A mark before a line, and its colour.
pub(super) type Mark = (char, u8);
/// All is as expected.
pub(super) const GOOD: Mark = ('✓', GREEN);
/// Something is not.
pub(super) const BAD: Mark = ('✗', RED);
/// It was not run.
pub(super) const SKIPPED: Mark = ('·', 90);

/// By letter, in turn.
const HOLDERS: [u8; 6] = [36, 35, 34, 33, 32, 31];

pub(super) fn paint(text: &str, code: u8, colour: bool) -> String {
    if colour {
        format!("\u{1b}[{code}m{text}\u{1b}[0m")
    } else {
        text.to_owned()
    }
}

pub(super) fn mark((mark, code): Mark, colour: bool) -> String {
    paint(&mark.to_string(), code, colour)
}

/// A line of a GPU's picture: what is between bars, and a letter before a claim's name.
pub(super) fn picture(line: &str, colour: bool) -> String {
    if !colour {
        return line.to_owned();
    }
    if line.contains('│') {
        return line.split('│').map(cell).collect::<Vec<_>>().join("│");
    }
    let letter = line
        .strip_prefix("        ")
        .and_then(|rest| rest.chars().next());
    // Not the numbers of memory slices, which are farther apart.
    let is_legend = |letter: &char| {
        letter.is_alphanumeric()
            && line.get(9..11) == Some("  ")
            && !line
                .trim_start()
                .replace(' ', "")
                .bytes()
                .all(|b| b.is_ascii_digit())
    };
    match letter.filter(is_legend) {
        Some(letter) => line.replacen(letter, &paint(&letter.to_string(), code(letter), true), 1),
        None => line.to_owned(),
    }
}

/// A box: `A whole` and `A 1g.10gb` are one claim's; in a bar each letter is a claim's.
fn cell(text: &str) -> String {
    let mut letters = text.chars();
    match (letters.next(), letters.next()) {
        (Some(letter), Some(' ')) if letter.is_ascii_uppercase() => paint(text, code(letter), true),
        (Some(letter), Some(next))
            if letter.is_ascii_uppercase() && (next == letter || !next.is_lowercase()) =>
        {
            let painted = |letter: char| {
                if letter.is_alphanumeric() {
                    paint(&letter.to_string(), code(letter), true)
                } else {
                    letter.to_string()
                }
            };
            text.chars().map(painted).collect()
        }
        _ => text.to_owned(),
    }
}

fn code(letter: char) -> u8 {
    HOLDERS
        .get(letter as usize % HOLDERS.len())
        .copied()
        .unwrap_or(GREEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_has_one_colour_in_the_picture_and_beside_its_name() {
        let a = format!("\u{1b}[{}m", code('A'));
        for line in [
            "gpu-0  │A whole   │",
            "gpu-0  │AAB·······│",
            "       │A 1g.10gb│free │",
            "        A  whole  x/y",
        ] {
            assert!(picture(line, true).contains(&a), "{line}");
            assert_eq!(picture(line, false), line);
        }
        for line in [
            "gpu-0  │idle      │",
            "        shared: 40 GiB of 80 GiB",
            "       ┌───┐",
            "        0        1",
        ] {
            assert_eq!(picture(line, true), line);
        }
    }
}
