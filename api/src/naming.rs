//! [`Naming`]: how attributes and capacities of ours are called under the name of a driver.

use std::borrow::Cow;

use crate::names::{DRIVER, NVIDIA_DRIVER, attributes as attr, capacity as cap};

/// Attributes that NVIDIA's driver publishes too, with the same meaning and type. The standard ones
/// (`resource.kubernetes.io/…`) have a domain of their own.
const NVIDIA_ATTRIBUTES: [&str; 11] = [
    attr::TYPE,
    attr::UUID,
    attr::PARENT_UUID,
    attr::PROFILE,
    attr::PRODUCT_NAME,
    attr::BRAND,
    attr::ARCHITECTURE,
    attr::CUDA_COMPUTE_CAPABILITY,
    attr::DRIVER_VERSION,
    attr::CUDA_DRIVER_VERSION,
    attr::ADDRESSING_MODE,
];

/// Capacities that NVIDIA's driver publishes too.
const NVIDIA_CAPACITIES: [&str; 7] = [
    cap::MEMORY,
    cap::MULTIPROCESSORS,
    cap::COPY_ENGINES,
    cap::DECODERS,
    cap::ENCODERS,
    cap::JPEG_ENGINES,
    cap::OFA_ENGINES,
];

/// The published names of attributes and capacities, which depend on the driver's name.
///
/// Under the name of NVIDIA's driver, divvy stands in for it: what NVIDIA's driver publishes too
/// has no domain, and so the domain `gpu.nvidia.com` in CEL; everything else gets the domain of
/// divvy, since a name of ours in a domain of NVIDIA's may mean something else there one day. Under
/// any other name of the driver, no name gets a domain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Naming {
    stands_in: bool,
}

impl Naming {
    /// Returns the names that a driver of this name publishes.
    pub fn of(driver: &str) -> Self {
        Self {
            stands_in: driver == NVIDIA_DRIVER,
        }
    }

    /// Returns true under the name of NVIDIA's driver.
    pub fn stands_in(self) -> bool {
        self.stands_in
    }

    /// Returns the published name of an attribute.
    pub fn attribute(self, name: &str) -> Cow<'_, str> {
        self.published(name, &NVIDIA_ATTRIBUTES)
    }

    /// Returns the published name of a capacity.
    pub fn capacity(self, name: &str) -> Cow<'_, str> {
        self.published(name, &NVIDIA_CAPACITIES)
    }

    /// Returns the name, as divvy has it, of an attribute or capacity of a driver of this name:
    /// without the driver's domain, which a name without any domain has, too, and without ours
    /// where a stand-in publishes it.
    pub fn ours<'a>(driver: &str, published: &'a str) -> &'a str {
        let Some((domain, name)) = published.split_once('/') else {
            return published;
        };
        let is_ours = domain == driver || domain == DRIVER && Self::of(driver).stands_in;
        if is_ours { name } else { published }
    }

    /// Returns the domain in which CEL finds an attribute, and the name there. `driver` is the name
    /// of the driver that publishes it.
    pub fn in_cel<'a>(driver: &'a str, published: &'a str) -> (&'a str, &'a str) {
        published.split_once('/').unwrap_or((driver, published))
    }

    fn published<'a>(self, name: &'a str, theirs: &[&str]) -> Cow<'a, str> {
        if !self.stands_in || name.contains('/') || theirs.contains(&name) {
            return Cow::Borrowed(name);
        }
        Cow::Owned(format!("{DRIVER}/{name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_stand_in_gives_names_of_ours_our_domain() {
        let [ours, other] = [DRIVER, "gpu.example.com"].map(Naming::of);
        let nvidia = Naming::of(NVIDIA_DRIVER);
        assert!(nvidia.stands_in());
        assert_eq!(Naming::default(), ours);
        for naming in [ours, other] {
            assert!(!naming.stands_in());
            for name in [attr::TYPE, attr::SHARING, attr::PCI_BUS_ID] {
                assert_eq!(naming.attribute(name), name);
            }
            for name in [cap::MEMORY, cap::PERCENT] {
                assert_eq!(naming.capacity(name), name);
            }
        }
        assert_eq!(nvidia.attribute(attr::TYPE), "type");
        assert_eq!(nvidia.attribute(attr::SHARING), "gpu.divvy.dev/sharing");
        assert_eq!(nvidia.attribute(attr::PCI_BUS_ID), attr::PCI_BUS_ID);
        assert_eq!(nvidia.capacity(cap::MEMORY), "memory");
        assert_eq!(nvidia.capacity(cap::PERCENT), "gpu.divvy.dev/percent");
    }

    /// An attribute and a capacity can have one name, of which NVIDIA's driver has the one only.
    #[test]
    fn attributes_and_capacities_are_two_lists() {
        let nvidia = Naming::of(NVIDIA_DRIVER);
        assert_eq!(nvidia.attribute(cap::MEMORY), "gpu.divvy.dev/memory");
        assert_eq!(nvidia.capacity(attr::TYPE), "gpu.divvy.dev/type");
    }

    #[test]
    fn published_names_lead_back_to_ours() {
        for driver in [DRIVER, NVIDIA_DRIVER, "gpu.example.com"] {
            let naming = Naming::of(driver);
            for name in [attr::UUID, attr::GPU_UUID, attr::NUMA_NODE] {
                assert_eq!(Naming::ours(driver, &naming.attribute(name)), name);
            }
            for name in [cap::MEMORY, cap::SLOTS] {
                assert_eq!(Naming::ours(driver, &naming.capacity(name)), name);
                // As a claim may write it, whose scheduler then writes it, too.
                let full = format!("{driver}/{name}");
                assert_eq!(Naming::ours(driver, &full), name, "{driver}");
            }
        }
        for other in ["gpu.divvy.device/x", "gpu.divvy.dev", "example.com/slots"] {
            assert_eq!(Naming::ours(NVIDIA_DRIVER, other), other);
        }
        for (driver, others) in [
            (DRIVER, "gpu.nvidia.com/slots"),
            ("gpu.example.com", "gpu.divvy.dev/slots"),
        ] {
            assert_eq!(Naming::ours(driver, others), others);
        }
    }

    #[test]
    fn cel_finds_a_name_without_a_domain_in_the_drivers() {
        let nvidia = Naming::of(NVIDIA_DRIVER);
        let cel = |name: &str| {
            let published = nvidia.attribute(name);
            let (domain, inside) = Naming::in_cel(NVIDIA_DRIVER, &published);
            format!("{domain} {inside}")
        };
        assert_eq!(cel(attr::PROFILE), "gpu.nvidia.com profile");
        assert_eq!(cel(attr::SHARING), "gpu.divvy.dev sharing");
        assert_eq!(cel(attr::PCIE_ROOT), "resource.kubernetes.io pcieRoot");
    }
}
