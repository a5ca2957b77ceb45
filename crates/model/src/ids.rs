//! Identifiers, each validated once at construction so that the rest of the code can rely on its
//! form.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text is not the identifier it was taken for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {text:?} is not valid: expected {expected}")]
pub struct IdError {
    /// The kind of identifier that the text was taken for.
    pub kind: &'static str,
    /// The text itself.
    pub text: String,
    /// The form that was expected.
    pub expected: &'static str,
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $expected:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The identifier as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                let check: fn(&str) -> bool = $check;
                if check(text) {
                    Ok(Self(text.to_owned()))
                } else {
                    Err(IdError { kind: $kind, text: text.to_owned(), expected: $expected })
                }
            }
        }
        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }
        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

id!(
    /// A GPU's UUID as NVML gives it, `GPU-…`. Stable over reboots; the key of everything we keep
    /// about a GPU.
    GpuUuid, "GPU UUID", "GPU- and a UUID", |t| t.strip_prefix("GPU-").is_some_and(is_uuid_like)
);
id!(
    /// The UUID of a MIG device (one compute instance), `MIG-…`. New at every creation.
    MigUuid, "MIG UUID", "MIG- and a UUID", |t| t.strip_prefix("MIG-").is_some_and(|r| !r.is_empty() && is_token(r))
);
id!(
    /// The UID of a ResourceClaim. Also a file name, so only letters, digits and dashes.
    ClaimUid, "claim UID", "1 to 63 letters, digits and dashes", |t| !t.is_empty() && t.len() <= 63 && t.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
);
id!(
    /// `/proc/sys/kernel/random/boot_id`: records of another boot describe hardware state that is
    /// gone.
    BootId, "boot id", "a UUID", |t| !t.is_empty() && is_token(t)
);
id!(
    /// A device's name in a ResourceSlice: a DNS label (resource/v1 `Device.name`).
    DeviceName, "device name", "a DNS label of at most 63 lower-case letters, digits and dashes", is_dns_label
);

impl BootId {
    /// Makes the id of a boot that is not known: no boot has it.
    pub fn unknown() -> Self {
        Self("unknown".to_owned())
    }
}

fn is_token(text: &str) -> bool {
    // Besides UUIDs this takes the form of drivers before R470, `MIG-GPU-<uuid>/<gi>/<ci>`.
    text.len() <= 128
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'/')
}

fn is_uuid_like(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(i, b)| match i {
            8 | 13 | 18 | 23 => b == b'-',
            _ => b.is_ascii_hexdigit(),
        })
}

fn is_dns_label(text: &str) -> bool {
    let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let (Some(first), Some(last)) = (text.bytes().next(), text.bytes().last()) else {
        return false;
    };
    text.len() <= 63 && ok(first) && ok(last) && text.bytes().all(|b| ok(b) || b == b'-')
}

/// A PCI address, `domain:bus:device.function`. NVML writes an eight-digit domain, sysfs and
/// Kubernetes four.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// PCI domain (segment); over 16 bits on some virtual machines.
    pub domain: u32,
    pub bus: u8,
    /// Device (slot) number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

impl PciAddress {
    /// Returns whether the address has the form of the standard attribute
    /// `resource.kubernetes.io/pciBusID` (a domain of four digits). Longer domains are left out of
    /// what is published.
    pub fn is_standard(self) -> bool {
        self.domain <= 0xffff
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.domain, self.bus, self.device, self.function
        )
    }
}

impl FromStr for PciAddress {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let mut parts = rest.splitn(3, ':');
            let domain = u32::from_str_radix(parts.next()?, 16).ok()?;
            let bus = u8::from_str_radix(parts.next()?, 16).ok()?;
            let device = u8::from_str_radix(parts.next()?, 16).ok()?;
            let function = u8::from_str_radix(function, 16).ok()?;
            (device < 32 && function < 8).then_some(Self {
                domain,
                bus,
                device,
                function,
            })
        };
        parse().ok_or_else(|| IdError {
            kind: "PCI address",
            text: text.to_owned(),
            expected: "domain:bus:device.function in hex, such as 0000:3b:00.0",
        })
    }
}

impl TryFrom<String> for PciAddress {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvml_and_sysfs_forms_of_a_pci_address_are_the_same_address() {
        let nvml: PciAddress = "00000000:3B:00.0".parse().unwrap();
        assert_eq!(nvml, "0000:3b:00.0".parse().unwrap());
        assert_eq!(nvml.to_string(), "0000:3b:00.0");
        assert!(nvml.is_standard());
        assert!(
            !"00010000:3B:00.0"
                .parse::<PciAddress>()
                .unwrap()
                .is_standard()
        );
        for bad in [
            "",
            "3b:00.0",
            "0000:3b:00",
            "0000:3b:20.0",
            "0000:3b:00.8",
            "0000:3g:00.0",
        ] {
            assert!(bad.parse::<PciAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn identifiers_refuse_what_could_not_be_one() {
        assert!(
            "GPU-12345678-1234-1234-1234-123456780001"
                .parse::<GpuUuid>()
                .is_ok()
        );
        assert!(
            "MIG-12345678-1234-1234-1234-123456780001"
                .parse::<GpuUuid>()
                .is_err()
        );
        assert!("../../etc".parse::<ClaimUid>().is_err());
        assert!("gpu-0-mig-1g10gb-19-0".parse::<DeviceName>().is_ok());
        assert!("GPU-0".parse::<DeviceName>().is_err());
        assert_eq!(
            "x y".parse::<ClaimUid>().unwrap_err().to_string(),
            "claim UID \"x y\" is not valid: expected 1 to 63 letters, digits and dashes"
        );
    }
}
