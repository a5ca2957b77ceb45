//! A published device in our words, and the parts that it is made of.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use divvy_api::names::taints as keys;
use divvy_model::{AttributeValue, DeviceName};
use serde::Serialize;

/// Characters of a string attribute that the API takes.
pub const MAX_STRING: usize = 64;
/// The largest amount of a capacity: the scheduler adds amounts up as `int64`.
pub const MAX_INTEGER: u64 = i64::MAX.unsigned_abs();

/// An entry that a claim can be given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Name, unique in the pool.
    pub name: DeviceName,
    /// Attributes by name; a name without a domain is in the driver's. The names are constants: a
    /// pool has thousands of them.
    pub attributes: BTreeMap<Cow<'static, str>, AttributeValue>,
    /// Capacities by name.
    pub capacity: BTreeMap<Cow<'static, str>, Capacity>,
    /// Taints, sorted.
    pub taints: Vec<Taint>,
    /// The counters that it takes from sets when it is allocated.
    pub consumes: Vec<CounterUse>,
    /// True if several claims can have it at once.
    pub allow_multiple: bool,
}

impl Device {
    /// A device with nothing but a name.
    pub fn new(name: DeviceName) -> Self {
        Self {
            name,
            attributes: BTreeMap::new(),
            capacity: BTreeMap::new(),
            taints: Vec::new(),
            consumes: Vec::new(),
            allow_multiple: false,
        }
    }

    /// Returns whether it stays published only for claims that hold it, or may.
    pub fn is_withdrawn(&self) -> bool {
        // The taint is the only trace of it in the pool, and it is there wherever the server stores
        // taints.
        self.taints.iter().any(|taint| taint.key == keys::WITHDRAWN)
    }
}

/// A capacity of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Capacity {
    pub value: Amount,
    /// The policy by which it is given out in parts; only for devices with `allow_multiple`.
    pub policy: Option<RequestPolicy>,
}

impl Capacity {
    /// A capacity that is given out as a whole.
    pub fn whole(value: Amount) -> Self {
        Self {
            value,
            policy: None,
        }
    }
}

/// The rule by which claims ask for part of a capacity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RequestPolicy {
    /// The amount for a claim that asks for nothing. Required: without it such a claim would take
    /// all.
    pub default: Amount,
    /// The amounts that can be asked for.
    pub allowed: Allowed,
}

/// The amounts that can be asked for under a [`RequestPolicy`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Allowed {
    /// Anything up to the capacity.
    Any,
    /// Any of these, ascending.
    Values(Vec<Amount>),
    /// A range in steps.
    Range {
        min: Amount,
        /// Most; the capacity if absent.
        max: Option<Amount>,
        /// Rounded up to a multiple of this above `min`.
        step: Option<Amount>,
    },
}

/// A Kubernetes quantity: its number, and how it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub enum Amount {
    /// Bytes, written with binary suffixes.
    Bytes(u64),
    /// A count, written with decimal suffixes.
    Count(u64),
}

impl Amount {
    pub fn value(self) -> u64 {
        match self {
            Self::Bytes(value) | Self::Count(value) => value,
        }
    }
}

impl fmt::Display for Amount {
    /// The canonical form, as the API server stores it: the largest suffix that leaves a whole
    /// number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut value, base, suffixes) = match *self {
            Self::Bytes(value) => (value, 1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]),
            Self::Count(value) => (value, 1000, ["", "k", "M", "G", "T", "P", "E"]),
        };
        let mut suffix = "";
        for next in suffixes.into_iter().skip(1) {
            if value == 0 || value % base != 0 {
                break;
            }
            value /= base;
            suffix = next;
        }
        write!(f, "{value}{suffix}")
    }
}

impl From<Amount> for String {
    fn from(amount: Amount) -> Self {
        amount.to_string()
    }
}

/// A mark that keeps claims away from a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Taint {
    /// A label key, such as [`divvy_api::names::taints::LOST`].
    pub key: String,
    /// A label value.
    pub value: Option<String>,
    pub effect: TaintEffect,
}

impl Taint {
    /// A taint that lets running pods be and keeps new ones away.
    pub fn no_schedule(key: impl Into<String>, value: Option<&str>) -> Self {
        Self {
            key: key.into(),
            value: value.map(str::to_owned),
            effect: TaintEffect::NoSchedule,
        }
    }
}

/// The effect of a taint. Ordered by strength.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum TaintEffect {
    /// Not given to claims that do not tolerate it.
    NoSchedule,
    /// Pods that use it and do not tolerate it are evicted too.
    NoExecute,
}

impl TaintEffect {
    /// Returns it as the API writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

/// The part that a device takes of one counter set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CounterUse {
    /// Name of the set.
    pub set: String,
    /// The amount of each counter.
    pub counters: BTreeMap<String, Amount>,
}

#[cfg(test)]
mod tests {
    use super::Amount;

    #[test]
    fn amounts_are_written_as_the_api_server_stores_them() {
        let cases = [
            (Amount::Bytes(0), "0"),
            (Amount::Bytes(1023), "1023"),
            (Amount::Bytes(1024), "1Ki"),
            (Amount::Bytes(85_520_809_984), "81559Mi"),
            (Amount::Bytes(85_899_345_920), "80Gi"),
            (Amount::Bytes(1 << 60), "1Ei"),
            (Amount::Count(132), "132"),
            (Amount::Count(2000), "2k"),
            (Amount::Count(1_500_000), "1500k"),
        ];
        for (amount, text) in cases {
            assert_eq!(amount.to_string(), text);
        }
    }
}
