//! The factor by which the limit of a share may be above its request.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Factor of a share's request, in hundredths: `1.5x` is 150. At least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Burst(u32);

/// Not a factor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no factor (write a number from 1 to 99.99 with an x, such as \"1.5x\")")]
pub struct BurstError(String);

impl Burst {
    /// The limit is the request.
    pub const NONE: Self = Self(100);
    /// The form in which factors are written, as a regular expression.
    pub const PATTERN: &'static str = r"^[1-9][0-9]?(\.[0-9]{1,2})?x$";

    /// Returns the largest limit in percent of the request.
    pub fn percent(self) -> u32 {
        self.0
    }

    /// Returns true if no limit may be above its request.
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }

    /// Returns the largest limit of a request, rounded down.
    pub fn of(self, request: u64) -> u64 {
        // In 128 bits: no request overflows.
        let most = u128::from(request) * u128::from(self.0) / 100;
        u64::try_from(most).unwrap_or(u64::MAX)
    }
}

impl Default for Burst {
    fn default() -> Self {
        Self::NONE
    }
}

impl fmt::Display for Burst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, hundredths) = (self.0 / 100, self.0 % 100);
        match hundredths {
            0 => write!(f, "{whole}x"),
            tenths if tenths % 10 == 0 => write!(f, "{whole}.{}x", tenths / 10),
            hundredths => write!(f, "{whole}.{hundredths:02}x"),
        }
    }
}

impl FromStr for Burst {
    type Err = BurstError;

    fn from_str(text: &str) -> Result<Self, BurstError> {
        // Digit by digit, as in the pattern: a floating-point number would take more forms, and
        // some factors would not be what is written.
        let read = || {
            let number = text.strip_suffix('x')?;
            let (whole, hundredths) = match number.split_once('.') {
                None => (number, "00".to_owned()),
                Some((whole, part)) => (whole, format!("{part:0<2}")),
            };
            let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
            let has_form = digits(whole)
                && digits(&hundredths)
                && (1..=2).contains(&whole.len())
                && !whole.starts_with('0')
                && hundredths.len() == 2
                && !number.ends_with('.');
            let parse = |text: &str| text.parse::<u32>().ok().filter(|_| has_form);
            Some(Self(parse(whole)? * 100 + parse(&hundredths)?))
        };
        read().ok_or_else(|| BurstError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_read_as_written_and_bound_requests() {
        const GIB: u64 = 1 << 30;
        for (text, percent, written, of_10_gib) in [
            ("1x", 100, "1x", 10 * GIB),
            ("1.5x", 150, "1.5x", 15 * GIB),
            ("1.50x", 150, "1.5x", 15 * GIB),
            ("1.05x", 105, "1.05x", 10 * GIB + GIB / 2),
            ("2x", 200, "2x", 20 * GIB),
            ("99.99x", 9999, "99.99x", 1_073_634_449_817),
        ] {
            let burst: Burst = text.parse().unwrap();
            let found = (burst.percent(), burst.to_string(), burst.of(10 * GIB));
            assert_eq!(found, (percent, written.to_owned(), of_10_gib), "{text}");
            assert_eq!(burst.is_none(), text == "1x");
        }
        assert_eq!("99x".parse::<Burst>().unwrap().of(u64::MAX), u64::MAX);
        assert_eq!(Burst::default(), Burst::NONE);
        for bad in [
            "", "x", "1", "1.5", "0.5x", "0x", "01x", "100x", "1.x", "1.234x", "-2x", "+2x",
            "1,5x", "150%", "1.5X", "1.5 x", ".5x", "1e1x",
        ] {
            let error = bad.parse::<Burst>().unwrap_err().to_string();
            assert!(error.contains("such as \"1.5x\""), "{bad}: {error}");
        }
    }
}
