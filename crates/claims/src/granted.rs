//! The environment variables with which a container learns what its shares were granted.

use divvy_api::names::{capacity, env};
use divvy_model::Quantity;

use crate::{AllocatedDevice, RecordedDevice, base_request};

/// Returns the environment of a share: memory and cores that its request was granted of its device,
/// and those of the share alone. Shares of one device for one request come to the same containers,
/// so they are added up; the claims and requests that meet in one container are not known here, so
/// their total can only be added up there. A capacity that was not granted, or does not fit a
/// number, is left out.
pub fn share_env(devices: &[RecordedDevice], share: &RecordedDevice) -> Vec<String> {
    if !share.sharing.is_shared() {
        return Vec::new();
    }
    let of = &share.allocated;
    let together = |d: &&RecordedDevice| {
        d.sharing.is_shared()
            && d.allocated.device == of.device
            && base_request(&d.allocated.request) == base_request(&of.request)
    };
    let sum = |amount: fn(&ShareAmounts) -> Option<u64>| {
        let each = devices.iter().filter(together);
        each.map(|d| amount(&d.amounts()))
            // An unknown amount leaves the sum out: a sum that is too small would look
            // like a limit.
            .try_fold(0_u64, |so_far, amount| so_far.checked_add(amount?))
    };
    let device = of.device.as_str();
    let own = share.amounts();
    let mut variables = vec![
        (env::share_memory(device), sum(|amounts| amounts.memory)),
        (
            env::share_memory_limit(device),
            sum(|amounts| amounts.limit),
        ),
        (env::share_cores(device), sum(|amounts| amounts.cores)),
    ];
    if let Some(id) = &of.share_id {
        let [memory, limit, cores] = env::one_share(device, id);
        variables.extend([(memory, own.memory), (limit, own.limit), (cores, own.cores)]);
    }
    variables
        .into_iter()
        .filter_map(|(name, amount)| Some(format!("{name}={}", amount?)))
        .collect()
}

/// Amounts of its GPU that a share was granted, in whatever unit it is given out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShareAmounts {
    /// Memory in bytes.
    pub memory: Option<u64>,
    /// Limit of the memory in bytes, at least that much, where the driver keeps one.
    pub limit: Option<u64>,
    /// Compute in percent.
    pub cores: Option<u64>,
}

impl RecordedDevice {
    /// Returns the amounts that a share was granted. Percent mean that part of the compute, and of
    /// the memory what they came to when the share was prepared; an MPS share has its slot.
    pub fn amounts(&self) -> ShareAmounts {
        let granted = ShareAmounts::of(&self.allocated);
        // Limits of a claim that has the GPU alone are for each process, and no grant.
        let slot = self.mps.filter(|_| self.sharing.is_shared());
        let of_slot = || Some(u64::from(slot?.server.cores));
        ShareAmounts {
            // By amounts, by percent or by slots: a share has one of them.
            memory: granted.memory.or(self.share_memory),
            limit: self.memory_cap,
            cores: granted.cores.or_else(of_slot),
        }
    }
}

impl ShareAmounts {
    /// Returns the amounts that an allocation names by itself. Percent are that part of the
    /// compute.
    pub(crate) fn of(allocated: &AllocatedDevice) -> Self {
        let of = |name: &str| allocated.granted(name);
        Self {
            memory: of(capacity::MEMORY),
            limit: None,
            cores: of(capacity::CORES).or_else(|| of(capacity::PERCENT)),
        }
    }
}

impl AllocatedDevice {
    /// Returns the amount of a capacity that the share was granted, rounded up as the API does;
    /// `None` if it was granted none, or the amount does not fit a number.
    pub fn granted(&self, capacity: &str) -> Option<u64> {
        u64::try_from(
            self.consumed_capacity
                .get(capacity)?
                .parse::<Quantity>()
                .ok()?
                .rounded_up(),
        )
        .ok()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use divvy_model::{Sharing, Target};

    use super::*;

    fn share(request: &str, device: &str, id: &str, granted: &[(&str, &str)]) -> RecordedDevice {
        let granted = granted
            .iter()
            .map(|(name, amount)| ((*name).to_owned(), (*amount).to_owned()));
        RecordedDevice {
            allocated: AllocatedDevice {
                request: request.to_owned(),
                pool: "n1".to_owned(),
                device: device.parse().unwrap(),
                share_id: Some(id.to_owned()),
                admin_access: false,
                consumed_capacity: granted.collect::<BTreeMap<_, _>>(),
            },
            gpu: "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap(),
            target: Target::Gpu,
            sharing: Sharing::TimeSliced,
            theirs: false,
            time_slice: None,
            share_memory: None,
            memory_cap: None,
            clears_caps: false,
            mps: None,
            extra_nodes: Vec::new(),
            given: None,
        }
    }

    #[test]
    fn a_container_sees_what_its_requests_were_granted_of_a_device() {
        let devices = [
            share(
                "main/big",
                "gpu-0-ts",
                "a",
                &[("memory", "100Mi"), ("cores", "10"), ("slots", "1")],
            ),
            share(
                "main/big",
                "gpu-0-ts",
                "b",
                &[("memory", "100Mi"), ("cores", "5")],
            ),
            share(
                "main/big",
                "gpu-1-ts",
                "c",
                &[("memory", "1Gi"), ("cores", "x")],
            ),
            share("other", "gpu-0-ts", "d", &[("memory", "1Mi")]),
        ];
        let env: Vec<_> = devices
            .iter()
            .map(|device| share_env(&devices, device).join(" "))
            .collect();
        assert_eq!(
            env,
            [
                "DIVVY_MEMORY_GPU_0_TS=209715200 DIVVY_CORES_GPU_0_TS=15 DIVVY_SHARE_MEMORY_GPU_0_TS_A=104857600 DIVVY_SHARE_CORES_GPU_0_TS_A=10",
                "DIVVY_MEMORY_GPU_0_TS=209715200 DIVVY_CORES_GPU_0_TS=15 DIVVY_SHARE_MEMORY_GPU_0_TS_B=104857600 DIVVY_SHARE_CORES_GPU_0_TS_B=5",
                "DIVVY_MEMORY_GPU_1_TS=1073741824 DIVVY_SHARE_MEMORY_GPU_1_TS_C=1073741824",
                "DIVVY_MEMORY_GPU_0_TS=1048576 DIVVY_SHARE_MEMORY_GPU_0_TS_D=1048576",
            ]
        );
    }

    /// A sum is left out where one of its limits is not known.
    #[test]
    fn a_container_sees_its_limits_of_memory_beside_its_grants() {
        let limited = |id: &str, mib: Option<u64>| RecordedDevice {
            memory_cap: mib.map(|mib| mib << 20),
            ..share("main", "gpu-0-ts", id, &[("memory", "100Mi")])
        };
        let devices = [limited("a", Some(150)), limited("b", Some(100))];
        assert_eq!(
            share_env(&devices, &devices[0]).join(" "),
            "DIVVY_MEMORY_GPU_0_TS=209715200 DIVVY_MEMORY_LIMIT_GPU_0_TS=262144000 DIVVY_SHARE_MEMORY_GPU_0_TS_A=104857600 \
             DIVVY_SHARE_MEMORY_LIMIT_GPU_0_TS_A=157286400"
        );
        let devices = [limited("a", Some(150)), limited("b", None)];
        let found = share_env(&devices, &devices[0]).join(" ");
        assert!(!found.contains("DIVVY_MEMORY_LIMIT"), "{found}");
    }

    /// CDI devices that come to one container set its environment one after another: a name that
    /// two of them set has the last one's value.
    #[test]
    fn grants_of_several_claims_and_requests_can_be_added_up() {
        let claims = [
            vec![
                share(
                    "main",
                    "gpu-0-ts",
                    "5c6e-1",
                    &[("memory", "100Mi"), ("cores", "10")],
                ),
                share(
                    "side",
                    "gpu-0-ts",
                    "5c6e-2",
                    &[("memory", "10Mi"), ("cores", "3")],
                ),
            ],
            vec![share(
                "main",
                "gpu-0-ts",
                "5c6e-3",
                &[("memory", "1Mi"), ("cores", "1")],
            )],
        ];
        let all = claims
            .iter()
            .flat_map(|devices| devices.iter().flat_map(|d| share_env(devices, d)));
        let container: BTreeMap<String, u64> = all
            .map(|line| {
                line.split_once('=')
                    .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
            })
            .map(Option::unwrap)
            .collect();
        let together = |prefix: &str| -> u64 {
            container
                .iter()
                .filter(|(name, _)| name.starts_with(prefix))
                .map(|(_, amount)| amount)
                .sum()
        };
        assert_eq!(together("DIVVY_SHARE_MEMORY_GPU_0_TS_"), 111 << 20);
        assert_eq!(together("DIVVY_SHARE_CORES_GPU_0_TS_"), 14);
        assert_eq!(
            container["DIVVY_MEMORY_GPU_0_TS"],
            1 << 20,
            "that of one of them"
        );
    }
}
