//! Names of kinds and devices, and their rules.

use std::fmt;
use std::str::FromStr;

/// A name that breaks the format's rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// No `/` between vendor and class.
    #[error("kind {0:?} is not of the form vendor/class, such as gpu.divvy.dev/claim")]
    NotAKind(String),
    /// The vendor part.
    #[error(
        "vendor {0:?} must begin with a letter, end with a letter or digit, and hold only letters, digits, '_', '.' and '-' (at most 253)"
    )]
    Vendor(String),
    /// The class part.
    #[error(
        "class {0:?} must begin with a letter, end with a letter or digit, and hold only letters, digits, '_', '.' and '-' (at most 63)"
    )]
    Class(String),
    /// A device name.
    #[error(
        "device name {0:?} must begin and end with a letter or digit and hold only letters, digits, '_', '.', ':' and '-'"
    )]
    Device(String),
}

/// `vendor/class`, checked.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind {
    vendor: String,
    class: String,
}

impl Kind {
    /// Checks both parts.
    pub fn new(vendor: &str, class: &str) -> Result<Self, NameError> {
        if !is_name(vendor, 253) {
            return Err(NameError::Vendor(vendor.to_owned()));
        }
        if !is_name(class, 63) {
            return Err(NameError::Class(class.to_owned()));
        }
        Ok(Self { vendor: vendor.to_owned(), class: class.to_owned() })
    }

    /// The vendor, for us the driver's name.
    pub fn vendor(&self) -> &str {
        &self.vendor
    }

    pub fn class(&self) -> &str {
        &self.class
    }

    /// The name by which a container asks for a device: `vendor/class=device`.
    pub fn qualified(&self, device: &str) -> String {
        format!("{self}={device}")
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.vendor, self.class)
    }
}

impl FromStr for Kind {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (vendor, class) = text.split_once('/').ok_or_else(|| NameError::NotAKind(text.to_owned()))?;
        Self::new(vendor, class)
    }
}

fn is_name(text: &str, longest: usize) -> bool {
    text.len() <= longest
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

/// Checks a device's name.
pub fn check_device_name(name: &str) -> Result<(), NameError> {
    let good = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | ':' | '-'));
    if good { Ok(()) } else { Err(NameError::Device(name.to_owned())) }
}
