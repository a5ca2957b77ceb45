//! Quantities as the server stores them: canonical, so `1024Mi` comes back as `1Gi`.

use std::cmp::Ordering;

const NANO: i128 = 1_000_000_000;
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
/// Decimal suffixes with their power of ten above nano.
const DECIMAL: [(&str, u32); 10] =
    [("E", 27), ("P", 24), ("T", 21), ("G", 18), ("M", 15), ("k", 12), ("", 9), ("m", 6), ("u", 3), ("n", 0)];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Binary,
    Decimal,
    Exponent,
}

/// A parsed quantity, exact to one billionth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quantity {
    nano: i128,
    format: Format,
}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        self.nano.partial_cmp(&other.nano)
    }
}

impl Quantity {
    /// Parses what the server accepts; `None` for anything else and for values beyond i128 nanos.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (negative, rest) = match text.as_bytes().first()? {
            b'-' => (true, text.get(1..)?),
            b'+' => (false, text.get(1..)?),
            _ => (false, text),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return None;
        }
        let digits: i128 = format!("0{whole}{fraction}").parse().ok()?;
        let scale = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        let (factor, format) = if let Some(power) = BINARY.iter().position(|s| *s == suffix) {
            (NANO.checked_mul(1024_i128.checked_pow(u32::try_from(power).ok()? + 1)?)?, Format::Binary)
        } else if let Some((_, power)) = DECIMAL.iter().find(|(s, _)| *s == suffix) {
            (10_i128.checked_pow(*power)?, Format::Decimal)
        } else {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            (10_i128.checked_pow(u32::try_from(exponent.checked_add(9)?).ok()?)?, Format::Exponent)
        };
        // The server rounds away from zero at the ninth decimal.
        let product = digits.checked_mul(factor)?;
        let nano = product / scale + i128::from(product % scale != 0);
        Some(Self { nano: if negative { -nano } else { nano }, format })
    }

    /// The canonical text: no fraction, the largest suffix that keeps it exact.
    pub(crate) fn canonical(self) -> String {
        let sign = if self.nano < 0 { "-" } else { "" };
        let nano = self.nano.abs();
        if nano == 0 {
            return "0".into();
        }
        // A binary quantity below 1024, or with a fraction, is written in decimal.
        if self.format == Format::Binary && nano % NANO == 0 && nano / NANO >= 1024 {
            let (mut value, mut suffix) = (nano / NANO, "");
            for next in BINARY {
                if value % 1024 != 0 {
                    break;
                }
                (value, suffix) = (value / 1024, next);
            }
            return format!("{sign}{value}{suffix}");
        }
        for (suffix, power) in DECIMAL {
            let factor = 10_i128.pow(power);
            if nano % factor == 0 {
                let value = nano / factor;
                return if self.format == Format::Exponent && power != 9 {
                    format!("{sign}{value}e{}", i64::from(power) - 9)
                } else {
                    format!("{sign}{value}{suffix}")
                };
            }
        }
        format!("{sign}{nano}n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_come_back_in_canonical_form() {
        let cases = [
            ("1024Mi", "1Gi"),
            ("0.5Gi", "512Mi"),
            ("1000", "1k"),
            ("1500m", "1500m"),
            ("2000m", "2"),
            ("81559Mi", "81559Mi"),
            ("85520809984", "85520809984"),
            ("512", "512"),
            ("1E", "1E"),
            ("16Ei", "16Ei"),
            ("1e3", "1e3"),
            ("0Gi", "0"),
            ("-2048Ki", "-2Mi"),
        ];
        for (input, expected) in cases {
            assert_eq!(Quantity::parse(input).unwrap().canonical(), expected, "{input}");
        }
    }

    #[test]
    fn text_that_is_no_quantity_is_refused() {
        for input in ["", "Gi", "1GiB", "1.2.3", "ten", "1 Gi"] {
            assert_eq!(Quantity::parse(input), None, "{input}");
        }
    }
}
