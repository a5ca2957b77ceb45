//! A claim's CDI file: worked out from its record, so that the same record always gives the same file.

use std::collections::BTreeSet;

use divvy_cdi::ClaimSpec;
use divvy_claims::{Record, cdi_device_name, cdi_file_name, metadata_files, share_env};
use divvy_model::ClaimUid;

use crate::{CdiError, Executor};

impl Executor {
    /// The content of a claim's CDI file.
    pub(crate) fn document(&self, record: &Record) -> Result<Vec<u8>, CdiError> {
        let edits = &self.parts.edits;
        let failed = |device: &str| {
            let device = device.to_owned();
            move |source| CdiError::Edits { device, source }
        };
        let inventory = self.parts.inventory.inventory();
        let mut spec = ClaimSpec::new(
            &self.config.driver,
            record.uid.as_str(),
            edits.common().map_err(failed("(all)"))?,
        );
        let files = metadata_files(&self.config.driver, record);
        let mut named = BTreeSet::new();
        for device in &record.devices {
            let (name, share) = (&device.allocated.device, device.allocated.share_id.as_deref());
            // One device for two requests (one of them admin access) is one CDI device.
            let cdi_device = cdi_device_name(&record.uid, name, share);
            let mounts = self.metadata_mounts(&record.uid, &cdi_device, &files);
            if !named.insert(cdi_device) {
                continue;
            }
            let gpu = inventory
                .as_ref()
                .and_then(|i| i.gpus.get(&device.gpu))
                .ok_or_else(|| CdiError::NoGpu { device: name.to_string(), gpu: device.gpu.clone() })?;
            let mut content = edits.device(gpu, device, &record.steps).map_err(failed(name.as_str()))?;
            content.env.extend(share_env(&record.devices, device));
            content.mounts.extend(mounts);
            spec.add(name.as_str(), share, content);
        }
        spec.into_json_bytes().map_err(|error| CdiError::Document(Box::new(error)))
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

    /// Removes the file, and then those that it mounts.
    pub(crate) fn remove_cdi(&self, claim: &ClaimUid) -> Result<(), CdiError> {
        let removed = self.parts.cdi.remove(&self.cdi_name(claim));
        removed.map_err(self.cdi_failed(claim, "removed"))?;
        self.remove_metadata(claim)
    }

    /// Writes the file if there is none, and those that it mounts.
    pub(crate) fn ensure_cdi(&self, record: &Record) -> Result<bool, CdiError> {
        let metadata = self.ensure_metadata(record)?;
        let there = self.parts.cdi.exists(&self.cdi_name(&record.uid));
        if record.devices.is_empty() || there.map_err(self.cdi_failed(&record.uid, "read"))? {
            return Ok(metadata);
        }
        self.write_cdi(&record.uid, &self.document(record)?)?;
        Ok(true)
    }

    /// Writes the file, and those that it mounts, unless they are as they should be.
    pub(crate) fn refresh_cdi(&self, record: &Record) -> Result<bool, CdiError> {
        if record.devices.is_empty() {
            return Ok(false);
        }
        let metadata = self.ensure_metadata(record)?;
        let wanted = self.document(record)?;
        let read = self.parts.cdi.read(&self.cdi_name(&record.uid));
        if read.map_err(self.cdi_failed(&record.uid, "read"))?.is_some_and(|bytes| bytes == wanted) {
            return Ok(metadata);
        }
        self.write_cdi(&record.uid, &wanted)?;
        Ok(true)
    }
}
