//! Features of the scheduler that is imitated.

/// The feature gates that change allocation, as one set.
///
/// A request that uses what is off is refused; a device that needs what is off is not usable: both
/// as the scheduler does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is one independent Kubernetes feature gate"
)]
pub struct Features {
    /// `adminAccess` in requests (DRAAdminAccess).
    pub admin_access: bool,
    /// `firstAvailable` (DRAPrioritizedList).
    pub prioritized_list: bool,
    /// Taints of devices keep claims away (DRADeviceTaints).
    pub device_taints: bool,
    /// `perDeviceNodeSelection` and shared counters (DRAPartitionableDevices).
    pub partitionable_devices: bool,
    /// Devices with binding conditions (DRADeviceBindingConditions).
    pub device_binding: bool,
    /// Capacity requests and shared devices (DRAConsumableCapacity).
    pub consumable_capacity: bool,
    /// Valid ranges in fractions of a unit (DRAFractionalCapacityRange).
    pub fractional_capacity: bool,
    /// Constraints over attributes that are lists (DRAListTypeAttributes).
    pub list_attributes: bool,
}

impl Features {
    /// Everything that Kubernetes 1.37 has on by default: all but list attributes, which are alpha.
    pub const ALL: Self = Self {
        admin_access: true,
        prioritized_list: true,
        device_taints: true,
        partitionable_devices: true,
        device_binding: true,
        consumable_capacity: true,
        fractional_capacity: true,
        list_attributes: false,
    };

    /// The defaults of Kubernetes 1.`minor`.
    #[must_use]
    pub fn of_kubernetes(minor: u32) -> Self {
        Self {
            admin_access: minor >= 34,
            prioritized_list: minor >= 34,
            device_taints: minor >= 36,
            partitionable_devices: minor >= 36,
            device_binding: minor >= 36,
            consumable_capacity: minor >= 36,
            fractional_capacity: minor >= 37,
            list_attributes: false,
        }
    }
}

impl Default for Features {
    fn default() -> Self {
        Self::ALL
    }
}
