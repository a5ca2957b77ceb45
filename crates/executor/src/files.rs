//! The files that containers get: a claim's CDI file and the metadata files that it mounts. Both
//! are worked out from the claim's record alone, so that the same record always gives the same
//! files. Written under the claim's lock.

use std::collections::BTreeMap;

use std::io;

use divvy_cdi::{Device, Mount, Spec};
use divvy_claims::{
    Attributes, Claim, Metadata, MetadataFile, Record, RecordedDevice, cdi_device_name,
    cdi_file_name, cdi_kind, metadata_files, share_env,
};
use divvy_model::{ClaimUid, DeviceName};

use crate::CdiError;
use crate::context::Context;

/// The CDI files that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// Files that are not there.
    Missing,
    /// Also files that differ from what would be written today: at start, and when driver files
    /// have changed.
    All,
}

/// The files of claims.
#[derive(Clone, Copy)]
pub(crate) struct Files<'a> {
    context: &'a Context,
}

impl<'a> Files<'a> {
    pub(crate) fn of(context: &'a Context) -> Self {
        Self { context }
    }

    /// The content of a claim's CDI file, which mounts these files.
    pub(crate) fn document(
        self,
        record: &Record,
        files: &[MetadataFile],
    ) -> Result<Vec<u8>, CdiError> {
        let edits = &self.context.parts.edits;
        let failed = |device: &str| {
            let device = device.to_owned();
            move |source| CdiError::Edits { device, source }
        };
        let inventory = self.context.parts.inventory.inventory();
        let common = edits.common().map_err(failed("(all)"))?;
        let mut named = BTreeMap::new();
        for device in &record.devices {
            let (name, share) = (
                &device.allocated.device,
                device.allocated.share_id.as_deref(),
            );
            // A device of two requests (one of them admin access) is a single CDI device.
            let cdi_device = cdi_device_name(&record.uid, name, share);
            if named.contains_key(&cdi_device) {
                continue;
            }
            let gpu = inventory
                .as_ref()
                .and_then(|i| i.gpus.get(&device.gpu))
                .ok_or_else(|| CdiError::NoGpu {
                    device: name.to_string(),
                    gpu: device.gpu.clone(),
                })?;
            let mut content = edits.device(gpu, device).map_err(failed(name.as_str()))?;
            content.env.extend(share_env(&record.devices, device));
            let call = || edits.cap(&record.uid, &cdi_device);
            match device.memory_cap {
                Some(cap) => {
                    content.env.extend(of_toolkit(cap));
                    // Without the call the container would run without its cap.
                    content.hooks.push(call().ok_or_else(|| CdiError::NoCap {
                        device: name.to_string(),
                    })?);
                }
                // Without it a container could be held to an earlier cap, which harms no other.
                None if device.clears_caps => content.hooks.extend(call()),
                None => {}
            }
            content
                .mounts
                .extend(self.metadata_mounts(&record.uid, &cdi_device, files));
            named.insert(cdi_device, content);
        }
        let devices = named
            .into_iter()
            .map(|(name, container_edits)| Device {
                name,
                container_edits,
            })
            .collect();
        let spec = Spec {
            kind: cdi_kind(&self.context.config.driver),
            devices,
            ..Spec::default()
        };
        spec.into_json_bytes(&common)
            .map_err(|error| CdiError::Document(Box::new(error)))
    }

    pub(crate) fn cdi_name(self, claim: &ClaimUid) -> String {
        cdi_file_name(&self.context.config.driver, claim)
    }

    fn cdi_failed(
        self,
        claim: &ClaimUid,
        action: &'static str,
    ) -> impl FnOnce(std::io::Error) -> CdiError {
        let (file, folder) = (self.cdi_name(claim), self.context.parts.cdi.place());
        move |source| CdiError::File {
            file,
            folder,
            action,
            source,
        }
    }

    pub(crate) fn write_cdi(self, claim: &ClaimUid, bytes: &[u8]) -> Result<(), CdiError> {
        self.context
            .parts
            .cdi
            .write(&self.cdi_name(claim), bytes)
            .map_err(self.cdi_failed(claim, "written"))
    }

    /// Returns whether there is a file.
    pub(crate) fn has_cdi(self, claim: &ClaimUid) -> Result<bool, CdiError> {
        self.context
            .parts
            .cdi
            .exists(&self.cdi_name(claim))
            .map_err(self.cdi_failed(claim, "read"))
    }

    /// Removes the file, and then those that it mounts.
    pub(crate) fn remove_cdi(self, claim: &ClaimUid) -> Result<(), CdiError> {
        // The CDI file first: it names the others, and a container that starts in between must not
        // be given mounts of missing files.
        let removed = self.context.parts.cdi.remove(&self.cdi_name(claim));
        removed.map_err(self.cdi_failed(claim, "removed"))?;
        self.remove_metadata(claim)
    }

    /// Writes the file if there is none, and those that it mounts.
    pub(crate) fn ensure_cdi(self, record: &Record) -> Result<bool, CdiError> {
        let files = self.metadata_files(record);
        let metadata = self.ensure_metadata(&record.uid, &files)?;
        // The CDI file comes last: it names the files that it mounts.
        if record.devices.is_empty() || self.has_cdi(&record.uid)? {
            return Ok(metadata);
        }
        self.write_cdi(&record.uid, &self.document(record, &files)?)?;
        Ok(true)
    }

    /// Returns whether there is no file that differs from what the record says.
    pub(crate) fn is_current(self, record: &Record) -> Result<bool, CdiError> {
        let read = self.context.parts.cdi.read(&self.cdi_name(&record.uid));
        let there = read.map_err(self.cdi_failed(&record.uid, "read"))?;
        let Some(there) = there else {
            return Ok(true);
        };
        let wanted = self.document(record, &self.metadata_files(record))?;
        Ok(there == wanted)
    }

    /// Writes the file, and those that it mounts, unless they are as they should be.
    pub(crate) fn refresh_cdi(self, record: &Record) -> Result<bool, CdiError> {
        if record.devices.is_empty() {
            return Ok(false);
        }
        let files = self.metadata_files(record);
        let metadata = self.ensure_metadata(&record.uid, &files)?;
        let wanted = self.document(record, &files)?;
        // Compare bytes, and leave equal ones alone: runtimes watch the folder and parse all of it
        // after each change.
        let read = self.context.parts.cdi.read(&self.cdi_name(&record.uid));
        if read
            .map_err(self.cdi_failed(&record.uid, "read"))?
            .is_some_and(|bytes| bytes == wanted)
        {
            return Ok(metadata);
        }
        self.write_cdi(&record.uid, &wanted)?;
        Ok(true)
    }

    /// Returns what a claim's files say beyond its record; `None` if it is to have none.
    pub(crate) fn metadata_of(self, claim: &Claim, devices: &[RecordedDevice]) -> Option<Metadata> {
        let attributes = self
            .context
            .config
            .metadata
            .then(|| self.attributes_of(devices))?;
        Some(Metadata {
            pod_claim_name: claim.pod_claim_name.clone(),
            attributes,
        })
    }

    /// Returns the attributes that are published of these devices now.
    pub(crate) fn attributes_of(
        self,
        devices: &[RecordedDevice],
    ) -> BTreeMap<DeviceName, Attributes> {
        let Some(inventory) = self.context.parts.inventory.inventory() else {
            return BTreeMap::new();
        };
        let name = |device: &RecordedDevice| device.allocated.device.clone();
        devices
            .iter()
            .map(|d| (name(d), self.context.parts.edits.attributes(&inventory, d)))
            .collect()
    }

    /// The mounts that a device of the claim's CDI file brings.
    pub(crate) fn metadata_mounts(
        self,
        claim: &ClaimUid,
        device: &str,
        files: &[MetadataFile],
    ) -> Vec<Mount> {
        let mount = |file: &MetadataFile| Mount {
            host_path: self
                .context
                .parts
                .metadata
                .path(claim, &file.request)
                .display()
                .to_string(),
            container_path: file.container_path.clone(),
            options: vec!["ro".to_owned(), "bind".to_owned()],
        };
        files
            .iter()
            .filter(|file| file.cdi_device == device)
            .map(mount)
            .collect()
    }

    fn metadata_failed(
        self,
        claim: &ClaimUid,
        request: &str,
        action: &'static str,
    ) -> impl FnOnce(io::Error) -> CdiError {
        let file = self.context.parts.metadata.path(claim, request);
        move |source| CdiError::Metadata {
            file,
            action,
            source,
        }
    }

    /// The files of a claim, as its record has them.
    pub(crate) fn metadata_files(self, record: &Record) -> Vec<MetadataFile> {
        metadata_files(&self.context.config.driver, record)
    }

    /// Writes a claim's files unless they are as they should be: running containers have the very
    /// files that are there.
    pub(crate) fn ensure_metadata(
        self,
        uid: &ClaimUid,
        files: &[MetadataFile],
    ) -> Result<bool, CdiError> {
        let dir = &self.context.parts.metadata;
        let mut changed = false;
        for file in files {
            let there = dir.read(uid, &file.request);
            let there = there.map_err(self.metadata_failed(uid, &file.request, "read"))?;
            if there.is_none_or(|bytes| bytes != file.bytes) {
                let written = dir.write(uid, &file.request, &file.bytes);
                written.map_err(self.metadata_failed(uid, &file.request, "written"))?;
                changed = true;
            }
        }
        Ok(changed)
    }

    pub(crate) fn remove_metadata(self, claim: &ClaimUid) -> Result<(), CdiError> {
        let failed = self.metadata_failed(claim, "*", "removed");
        self.context.parts.metadata.remove(claim).map_err(failed)
    }
}

/// Returns the variables from which the hook of NVIDIA's container toolkit takes limits of memory,
/// with those of the share: an image with others must not have them set beside ours. An empty value
/// would make that hook fail.
fn of_toolkit(cap: u64) -> [String; 2] {
    [
        "NVIDIA_GPU_MEMORY_REQUEST=0".to_owned(),
        format!("NVIDIA_GPU_MEMORY_LIMIT={}", cap >> 20),
    ]
}
