//! Time-sliced shares of GPUs and partitions.

pub(crate) mod device;

use divvy_model::{DeviceKind, Form, GpuFacts, Grant, MpsAbility, TargetKind, TimeSlice};

use crate::{Definition, Device, GpuRules, Said, Source};

/// The form.
#[derive(Debug)]
pub(crate) struct Share(Form);

impl Share {
    pub(crate) const OF_GPUS: Self = Self(Form::TIME_SLICED);
    pub(crate) const OF_PARTITIONS: Self = Self(Form::SHARED_PARTITIONS);

    /// Returns what such shares say: no time slice is set in partitions.
    fn own(&self, said: Said) -> Said {
        Said {
            time_slice: said.time_slice.filter(|_| self.0.target == TargetKind::Gpu),
            ..said
        }
    }
}

impl Definition for Share {
    fn form(&self) -> Form {
        self.0
    }

    fn device(&self, plain: Device, from: &Source<'_>) -> Option<Device> {
        let slice = from.rules.shares.time_slice.unwrap_or(TimeSlice::Default);
        let said = Said {
            time_slice: Some(slice),
            caps: device::caps(from),
        };
        device::given_out(plain, from, self.own(said), &from.rules.shares)
    }

    fn described(&self, kind: &DeviceKind, plain: Device, said: Said) -> Device {
        device::described(kind, plain, self.own(said))
    }

    fn offered(&self) -> String {
        match self.0.target {
            TargetKind::Gpu => format!("as {}", self.0.name()),
            TargetKind::Partition => "as shares of such partitions".to_owned(),
        }
    }

    fn has_units(&self, _: MpsAbility) -> bool {
        true
    }

    fn grant(&self, rules: &GpuRules, _: Option<&GpuFacts>, _: MpsAbility, to: &mut Grant) {
        if self.0.target == TargetKind::Gpu {
            to.share_time_slice = rules.shares.time_slice;
        }
    }
}
