//! A claim's CDI file: worked out from its record, so that the same record always gives the same file.

use std::collections::BTreeMap;

use divvy_cdi::{Device, Spec};
use divvy_claims::{MetadataFile, Record, cdi_device_name, cdi_file_name, cdi_kind, share_env};
use divvy_model::ClaimUid;

use crate::{CdiError, Executor};

impl Executor {
    /// The content of a claim's CDI file, which mounts these files.
    pub(crate) fn document(&self, record: &Record, files: &[MetadataFile]) -> Result<Vec<u8>, CdiError> {
        let edits = &self.parts.edits;
        let failed = |device: &str| {
            let device = device.to_owned();
            move |source| CdiError::Edits { device, source }
        };
        let inventory = self.parts.inventory.inventory();
        let common = edits.common().map_err(failed("(all)"))?;
        let mut named = BTreeMap::new();
        for device in &record.devices {
            let (name, share) = (&device.allocated.device, device.allocated.share_id.as_deref());
            // One device for two requests (one of them admin access) is one CDI device.
            let cdi_device = cdi_device_name(&record.uid, name, share);
            if named.contains_key(&cdi_device) {
                continue;
            }
            let gpu = inventory
                .as_ref()
                .and_then(|i| i.gpus.get(&device.gpu))
                .ok_or_else(|| CdiError::NoGpu { device: name.to_string(), gpu: device.gpu.clone() })?;
            let mut content = edits.device(gpu, device, &record.steps).map_err(failed(name.as_str()))?;
            content.env.extend(share_env(&record.devices, device));
            content.mounts.extend(self.metadata_mounts(&record.uid, &cdi_device, files));
            named.insert(cdi_device, content);
        }
        let devices =
            named.into_iter().map(|(name, container_edits)| Device { name, container_edits }).collect();
        let spec = Spec { kind: cdi_kind(&self.config.driver), devices, ..Spec::default() };
        spec.into_json_bytes(&common).map_err(|error| CdiError::Document(Box::new(error)))
    }

    pub(crate) fn cdi_name(&self, claim: &ClaimUid) -> String {
        cdi_file_name(&self.config.driver, claim)
    }

    fn cdi_failed(&self, claim: &ClaimUid, action: &'static str) -> impl FnOnce(std::io::Error) -> CdiError {
        let (file, folder) = (self.cdi_name(claim), self.parts.cdi.place());
        move |source| CdiError::File { file, folder, action, source }
    }

    pub(crate) fn write_cdi(&self, claim: &ClaimUid, bytes: &[u8]) -> Result<(), CdiError> {
        self.parts.cdi.write(&self.cdi_name(claim), bytes).map_err(self.cdi_failed(claim, "written"))
    }

    /// Whether there is a file.
    pub(crate) fn has_cdi(&self, claim: &ClaimUid) -> Result<bool, CdiError> {
        self.parts.cdi.exists(&self.cdi_name(claim)).map_err(self.cdi_failed(claim, "read"))
    }

    /// Removes the file, and then those that it mounts.
    pub(crate) fn remove_cdi(&self, claim: &ClaimUid) -> Result<(), CdiError> {
        let removed = self.parts.cdi.remove(&self.cdi_name(claim));
        removed.map_err(self.cdi_failed(claim, "removed"))?;
        self.remove_metadata(claim)
    }

    /// Writes the file if there is none, and those that it mounts.
    pub(crate) fn ensure_cdi(&self, record: &Record) -> Result<bool, CdiError> {
        let files = self.metadata_files(record);
        let metadata = self.ensure_metadata(&record.uid, &files)?;
        if record.devices.is_empty() || self.has_cdi(&record.uid)? {
            return Ok(metadata);
        }
        self.write_cdi(&record.uid, &self.document(record, &files)?)?;
        Ok(true)
    }

    /// Writes the file, and those that it mounts, unless they are as they should be.
    pub(crate) fn refresh_cdi(&self, record: &Record) -> Result<bool, CdiError> {
        if record.devices.is_empty() {
            return Ok(false);
        }
        let files = self.metadata_files(record);
        let metadata = self.ensure_metadata(&record.uid, &files)?;
        let wanted = self.document(record, &files)?;
        let read = self.parts.cdi.read(&self.cdi_name(&record.uid));
        if read.map_err(self.cdi_failed(&record.uid, "read"))?.is_some_and(|bytes| bytes == wanted) {
            return Ok(metadata);
        }
        self.write_cdi(&record.uid, &wanted)?;
        Ok(true)
    }
}
