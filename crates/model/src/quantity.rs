//! Kubernetes quantities, exact: the one parser of divvy.
//!
//! A quantity is a decimal number with at most nine fractional digits and a suffix (`40Gi`, `100m`,
//! `5e3`). The value is kept as a whole number of *nano* units in an `i128`: every sum and
//! comparison is exact up to about 1.7e29, far beyond anything an amount of memory or a counter can
//! be; a larger number is an error and never a wrong value.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A unit, in nanos.
const ONE: i128 = 1_000_000_000;

/// Suffixes of powers of ten, with the exponent.
const DECIMAL: [(&str, i32); 10] = [
    ("n", -9),
    ("u", -6),
    ("m", -3),
    ("", 0),
    ("k", 3),
    ("M", 6),
    ("G", 9),
    ("T", 12),
    ("P", 15),
    ("E", 18),
];

/// Suffixes of powers of 1024, with the power.
const BINARY: [(&str, u32); 6] = [
    ("Ki", 1),
    ("Mi", 2),
    ("Gi", 3),
    ("Ti", 4),
    ("Pi", 5),
    ("Ei", 6),
];

/// Why a text is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum QuantityError {
    /// Not `<sign><digits>[.<digits>]<suffix>`.
    #[error(
        "{0:?} is not a quantity: expected a number and one of the suffixes n u m k M G T P E Ki Mi Gi Ti Pi Ei or an exponent e<n>"
    )]
    Format(String),
    /// A number that does not fit (about 1.7e29).
    #[error("{0:?} is out of range")]
    Range(String),
}

/// The notation of a quantity; arithmetic keeps the format of the left operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// `1Ki`, `2Gi`.
    BinarySi,
    /// `1k`, `100m`.
    DecimalSi,
    /// `1e3`.
    DecimalExponent,
}

/// An exact amount, as Kubernetes writes it.
///
/// Equality and order are of the amount: `1Gi` equals `1024Mi`. `Display` gives the canonical form.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    nanos: i128,
    format: Format,
}

impl Quantity {
    /// A whole number of units: an `i64` or a `u64`, say. Saturates beyond the range.
    pub fn from_units(units: impl Into<i128>, format: Format) -> Self {
        Self {
            nanos: units.into().saturating_mul(ONE),
            format,
        }
    }

    /// A number of billionths.
    pub fn from_nanos(nanos: i128, format: Format) -> Self {
        // An amount below one has no binary form that is easier to read.
        let format = if format == Format::BinarySi && 0 < nanos && nanos < ONE {
            Format::DecimalSi
        } else {
            format
        };
        Self { nanos, format }
    }

    /// The amount in billionths, exact.
    pub fn nanos(&self) -> i128 {
        self.nanos
    }

    /// Returns how it is written.
    pub fn format(&self) -> Format {
        self.format
    }

    /// -1, 0 or 1.
    pub fn signum(&self) -> i64 {
        match self.nanos.cmp(&0) {
            Ordering::Less => -1,
            Ordering::Equal => 0,
            Ordering::Greater => 1,
        }
    }

    /// The amount as an integer, where it is one and fits.
    pub fn to_i64(&self) -> Option<i64> {
        if self.nanos % ONE == 0 {
            i64::try_from(self.nanos / ONE).ok()
        } else {
            None
        }
    }

    /// The amount as a number of bytes or pieces, where it is a whole one and fits.
    pub fn to_u64(&self) -> Option<u64> {
        if self.nanos % ONE == 0 {
            u64::try_from(self.nanos / ONE).ok()
        } else {
            None
        }
    }

    /// The amount rounded away from zero to whole units, as Kubernetes' `Value()` does.
    pub fn rounded_up(&self) -> i128 {
        div_away(self.nanos, ONE)
    }

    /// The nearest double.
    #[expect(
        clippy::cast_precision_loss,
        reason = "the caller asked for an approximation"
    )]
    pub fn to_f64(&self) -> f64 {
        self.nanos as f64 / ONE as f64
    }

    /// The exact sum, in the format of `self`; `None` when it does not fit.
    #[must_use]
    pub fn checked_add(&self, other: &Self) -> Option<Self> {
        Some(Self {
            nanos: self.nanos.checked_add(other.nanos)?,
            format: self.format,
        })
    }

    /// The exact difference, in the format of `self`; `None` when it does not fit.
    #[must_use]
    pub fn checked_sub(&self, other: &Self) -> Option<Self> {
        Some(Self {
            nanos: self.nanos.checked_sub(other.nanos)?,
            format: self.format,
        })
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let wrong = || QuantityError::Format(text.to_owned());
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, text.get(1..).unwrap_or_default()),
            Some(b'+') => (false, text.get(1..).unwrap_or_default()),
            _ => (false, text),
        };
        let (whole, rest) = split_digits(rest);
        let (fraction, suffix) = match rest.strip_prefix('.') {
            Some(after) => split_digits(after),
            None => ("", rest),
        };
        if whole.is_empty() && fraction.is_empty() {
            return Err(wrong());
        }
        let number = Number { whole, fraction };
        // Suffixes as `resource.ParseQuantity` has them. Decimal ones are tried before exponents: a
        // bare `E` is exa, and `E3` is 10^3. A suffix that does not exist is reported before a
        // number that is too large.
        let (magnitude, format) =
            if let Some((_, power)) = BINARY.iter().find(|(s, _)| *s == suffix) {
                (number.times_1024_pow(*power), Format::BinarySi)
            } else if let Some((_, exponent)) = DECIMAL.iter().find(|(s, _)| *s == suffix) {
                (number.times_ten_pow(*exponent), Format::DecimalSi)
            } else {
                let exponent = suffix.strip_prefix(['e', 'E']).ok_or_else(wrong)?;
                let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
                if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
                    return Err(wrong());
                }
                let exponent: i32 = exponent
                    .parse()
                    .map_err(|_| QuantityError::Range(text.to_owned()))?;
                (number.times_ten_pow(exponent), Format::DecimalExponent)
            };
        // The sign comes last: the magnitude is rounded up, so both signs round away from zero.
        let nanos = magnitude.ok_or_else(|| QuantityError::Range(text.to_owned()))?;
        let magnitude = Self::from_nanos(nanos, format);
        Ok(Self {
            nanos: if negative { -nanos } else { nanos },
            ..magnitude
        })
    }
}

/// The digits of a text before and after the point, as many as there are: each counts where a
/// suffix multiplies it.
struct Number<'a> {
    whole: &'a str,
    fraction: &'a str,
}

impl Number<'_> {
    /// The amount times `1024^power`, in nanos, rounded up.
    fn times_1024_pow(&self, power: u32) -> Option<i128> {
        let factor = 1024_i128.checked_pow(power)?.checked_mul(ONE)?;
        // From the last digit of the fraction to the first: a tenth of the digit's share and of
        // what comes after it. A remainder anywhere is less than one in the end, and rounds up.
        let (mut fraction, mut is_exact) = (0_i128, true);
        for digit in self.fraction.bytes().rev() {
            let share = factor.checked_mul(i128::from(digit.saturating_sub(b'0')))?;
            let tenths = fraction.checked_add(share)?;
            is_exact &= tenths % 10 == 0;
            fraction = tenths / 10;
        }
        integer(self.whole)?
            .checked_mul(factor)?
            .checked_add(fraction)?
            .checked_add(i128::from(!is_exact))
    }

    /// The amount times `10^exponent`, in nanos, rounded up.
    fn times_ten_pow(&self, exponent: i32) -> Option<i128> {
        let digits = format!("{}{}", self.whole, self.fraction);
        let is_zero = |digits: &str| digits.bytes().all(|digit| digit == b'0');
        if is_zero(&digits) {
            return Some(0);
        }
        // So many of the digits are whole nano units.
        let whole = i64::try_from(self.whole.len()).ok()? + i64::from(exponent) + 9;
        let Ok(whole) = usize::try_from(whole) else {
            // Less than the smallest amount.
            return Some(1);
        };
        if let Some((nanos, rest)) = digits.split_at_checked(whole) {
            return integer(nanos)?.checked_add(i128::from(!is_zero(rest)));
        }
        let zeros = u32::try_from(whole - digits.len()).ok()?;
        integer(&digits)?.checked_mul(10_i128.checked_pow(zeros)?)
    }
}

/// Reads digits; none are zero. `None` if the number is too large.
fn integer(digits: &str) -> Option<i128> {
    match digits.trim_start_matches('0') {
        "" => Some(0),
        digits => digits.parse().ok(),
    }
}

/// Integer division that rounds away from zero.
fn div_away(value: i128, divisor: i128) -> i128 {
    let quotient = value / divisor;
    if value % divisor == 0 {
        quotient
    } else {
        quotient + value.signum()
    }
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text
        .bytes()
        .position(|b| !b.is_ascii_digit())
        .unwrap_or(text.len());
    text.split_at(end)
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = self.nanos % ONE == 0;
        let units = self.nanos / ONE;
        // The form of `resource.Quantity.CanonicalizeBytes`: binary amounts between -1024 and 1024,
        // and those that are not whole, are written in decimal.
        if self.format == Format::BinarySi && whole && units.unsigned_abs() >= 1024 {
            let (mut number, mut power) = (units, 0_usize);
            while number % 1024 == 0 && power < BINARY.len() {
                number /= 1024;
                power += 1;
            }
            let suffix = power
                .checked_sub(1)
                .and_then(|p| BINARY.get(p))
                .map_or("", |(s, _)| *s);
            return write!(f, "{number}{suffix}");
        }
        if self.nanos == 0 {
            return f.write_str("0");
        }
        // The largest step of 1000 that leaves an integer.
        let (mut number, mut exponent) = (self.nanos, -9_i32);
        while number % 1000 == 0 && (exponent < 18 || self.format == Format::DecimalExponent) {
            number /= 1000;
            exponent += 3;
        }
        if self.format == Format::DecimalExponent {
            return if exponent == 0 {
                write!(f, "{number}")
            } else {
                write!(f, "{number}e{exponent}")
            };
        }
        let suffix = DECIMAL
            .iter()
            .find(|(_, e)| *e == exponent)
            .map_or("", |(s, _)| *s);
        write!(f, "{number}{suffix}")
    }
}

#[cfg(test)]
mod tests;
