//! Amounts of GPUs: memory, and thousandths of a percent of a GPU.

use std::fmt;
use std::iter::Sum;
use std::str::FromStr;

/// Thousandths in a percent.
pub(crate) const MILLI: u64 = 1000;
/// A whole GPU.
pub(crate) const WHOLE: u64 = 100 * MILLI;

/// An amount of GPUs. Its text is the value of the annotation `divvy.dev/quota`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// In bytes.
    pub memory: u64,
    /// In thousandths of a percent of a GPU.
    pub percent: u64,
}

impl Amount {
    /// Returns the sum, at most what there can be.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            memory: self.memory.saturating_add(other.memory),
            percent: self.percent.saturating_add(other.percent),
        }
    }

    /// Returns the larger of each part.
    #[must_use]
    pub fn or_more(self, other: Self) -> Self {
        Self {
            memory: self.memory.max(other.memory),
            percent: self.percent.max(other.percent),
        }
    }

    /// Returns it as often as that.
    #[must_use]
    pub fn times(self, count: u64) -> Self {
        Self {
            memory: self.memory.saturating_mul(count),
            percent: self.percent.saturating_mul(count),
        }
    }

    /// Returns the memory for people: `79.6Gi`.
    pub fn memory_text(self) -> String {
        let tenths = (u128::from(self.memory) * 10 + (1 << 29)) >> 30;
        match tenths % 10 {
            0 => format!("{}Gi", tenths / 10),
            rest => format!("{}.{rest}Gi", tenths / 10),
        }
    }

    /// Returns the percent: `12.5`.
    pub fn percent_text(self) -> String {
        let text = format!("{}.{:03}", self.percent / MILLI, self.percent % MILLI);
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

impl Sum for Amount {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::default(), Self::plus)
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory={},percent={}", self.memory, self.percent_text())
    }
}

/// Text that is no amount.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no amount of GPUs")]
pub struct AmountError(String);

impl FromStr for Amount {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, AmountError> {
        let parts = || {
            let (memory, percent) = text.strip_prefix("memory=")?.split_once(",percent=")?;
            let (whole, rest) = percent.split_once('.').unwrap_or((percent, ""));
            let thousandths: u64 = format!("{rest:0<3}").parse().ok()?;
            let whole: u64 = whole.parse().ok()?;
            (rest.len() <= 3).then_some(Self {
                memory: memory.parse().ok()?,
                percent: whole.checked_mul(MILLI)?.checked_add(thousandths)?,
            })
        };
        parts().ok_or_else(|| AmountError(text.to_owned()))
    }
}

/// Limits of a namespace; `None` limits nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// In bytes.
    pub memory: Option<u64>,
    /// In thousandths of a percent of a GPU.
    pub percent: Option<u64>,
}

impl Limits {
    /// Returns whether an amount is within them.
    pub fn hold(self, amount: Amount) -> bool {
        self.memory.is_none_or(|limit| amount.memory <= limit)
            && self.percent.is_none_or(|limit| amount.percent <= limit)
    }
}
