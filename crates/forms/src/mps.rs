//! MPS shares of GPUs and partitions.

mod device;

use divvy_model::{
    DeviceKind, Form, GpuFacts, Grant, MpsAbility, MpsProtocol, MpsServer, TargetKind,
};

use crate::share::device::{caps, described, given_out};
use crate::{Definition, Device, GpuRules, Modes, Said, Source};

/// The form.
#[derive(Debug)]
pub(crate) struct Mps(Form);

impl Mps {
    pub(crate) const OF_GPUS: Self = Self(Form::MPS);
    pub(crate) const OF_PARTITIONS: Self = Self(Form::MPS_PARTITIONS);

    /// Returns the server of a target: the one that runs, since claims have its slots, or the one
    /// that rules ask for. `None` if a slot would have no memory.
    fn server(&self, plain: &Device, from: &Source<'_>) -> Option<MpsServer> {
        // That of a claim which has the target alone says nothing about slots.
        let running = from.server.filter(|server| server.slots.is_some());
        running.or_else(|| match self.0.target {
            TargetKind::Gpu => device::server(&from.gpu.facts, from.rules, from.system.mps),
            TargetKind::Partition => {
                MpsServer::equal(from.rules.shares.slots, device::memory_mib(plain))
            }
        })
    }
}

impl Definition for Mps {
    fn form(&self) -> Form {
        self.0
    }

    fn device(&self, plain: Device, from: &Source<'_>) -> Option<Device> {
        let server = self.server(&plain, from)?;
        match server.protocol {
            MpsProtocol::V2 => {
                // The driver's caps of memory come with R615, whose servers have no slots.
                let shares = described(from.kind, plain, Said::default());
                Some(device::with_slots(shares, server))
            }
            MpsProtocol::V3 => {
                let said = Said {
                    caps: caps(from),
                    ..Said::default()
                };
                let mut shares = from.rules.shares;
                shares.slots = shares.slots.min(MpsServer::MOST_SLOTS);
                given_out(plain, from, said, &shares)
            }
        }
    }

    fn described(&self, kind: &DeviceKind, plain: Device, said: Said) -> Device {
        let said = Said {
            time_slice: None,
            ..said
        };
        described(kind, plain, said)
    }

    fn offered(&self) -> String {
        match self.0.target {
            TargetKind::Gpu => format!("as {}", self.0.name()),
            TargetKind::Partition => "as MPS shares of such partitions".to_owned(),
        }
    }

    fn has_units(&self, node: MpsAbility) -> bool {
        self.0.target == TargetKind::Gpu && node.protocol() == Some(MpsProtocol::V3)
    }

    fn node_lacks(&self, node: MpsAbility) -> Option<&'static str> {
        node.lack()
    }

    fn lack(&self, gpu: &GpuFacts, node: MpsAbility) -> Option<&'static str> {
        node.lack_for(gpu.architecture)
    }

    fn grant(&self, rules: &GpuRules, gpu: Option<&GpuFacts>, node: MpsAbility, to: &mut Grant) {
        let is_asked = matches!(&rules.modes, Modes::Only(asked) if asked.contains(&self.0));
        match self.0.target {
            TargetKind::Gpu => {
                to.mps = gpu
                    .filter(|_| is_asked)
                    .and_then(|gpu| device::server(gpu, rules, node));
                to.restarts_wedged_mps = rules.restarts_wedged_mps;
            }
            TargetKind::Partition => {
                to.mps_slots_in_partitions = is_asked.then_some(rules.shares.slots);
            }
        }
    }
}
