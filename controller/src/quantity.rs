//! Quantities compared by their number: the server stores `1024Mi` as `1Gi`, and that is no change.

/// A quantity in a form that is equal for equal numbers. What cannot be read stays as it is: equal to itself only.
pub(crate) fn comparable(text: &str) -> String {
    match nano(text) {
        Some(nano) => format!("{nano}n"),
        None => text.to_owned(),
    }
}

/// Billionths, rounded away from zero as the server does.
fn nano(text: &str) -> Option<i128> {
    let (sign, rest) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    let (number, suffix) = rest.split_at_checked(end)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let digits: i128 = format!("0{whole}{fraction}").parse().ok()?;
    let scale = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let ten = |power: u32| 10_i128.checked_pow(power);
    let two = |power: u32| ten(9)?.checked_mul(1_i128.checked_shl(power)?);
    let factor = match suffix {
        "n" => ten(0),
        "u" => ten(3),
        "m" => ten(6),
        "" => ten(9),
        "k" => ten(12),
        "M" => ten(15),
        "G" => ten(18),
        "T" => ten(21),
        "P" => ten(24),
        "E" => ten(27),
        "Ki" => two(10),
        "Mi" => two(20),
        "Gi" => two(30),
        "Ti" => two(40),
        "Pi" => two(50),
        "Ei" => two(60),
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            ten(u32::try_from(exponent.checked_add(9)?).ok()?)
        }
    }?;
    let product = digits.checked_mul(factor)?;
    let up = i128::from(product.checked_rem(scale)? != 0);
    Some(sign * (product.checked_div(scale)? + up))
}

#[cfg(test)]
mod tests {
    use super::comparable;

    #[test]
    fn equal_numbers_compare_equal_however_they_are_written() {
        for (a, b) in [
            ("1024Mi", "1Gi"),
            ("0.5Gi", "512Mi"),
            ("85520809984", "81559Mi"),
            ("1000", "1k"),
            ("1e3", "1k"),
            ("+2", "2000m"),
            ("16Ei", "18446744073709551616"),
            ("-1.5", "-1500m"),
        ] {
            assert_eq!(comparable(a), comparable(b));
        }
        for (a, b) in [("1", "2"), ("1Gi", "1G"), ("1", "-1"), ("x", "y"), ("", "0")] {
            assert_ne!(comparable(a), comparable(b));
        }
    }
}
