//! Use of the multiprocessors, from two samples of the performance monitors: the driver keeps the
//! first until it is asked again.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use divvy_model::mig::GpuInstanceId;
use divvy_model::{GpuErrorCode, GpuUuid, MigDevice, MigUuid, lock};

use crate::ffi::{Failure, GpmSample, Handle, Library};

/// NVML compares samples that are 100 ms apart.
const SHORTEST: Duration = Duration::from_millis(150);
/// A mean over more says little about now.
const LONGEST: Duration = Duration::from_mins(3);

/// The last sample of each GPU and GPU instance.
#[derive(Default)]
pub(crate) struct Samples(Mutex<BTreeMap<Key, Kept>>);

type Key = (GpuUuid, Option<GpuInstanceId>);

struct Kept {
    sample: GpmSample,
    at: Instant,
    /// The MIG device at that time: another may have the instance's id now.
    device: Option<MigUuid>,
}

impl Samples {
    /// Measures as [`divvy_model::GpuDriver::sm_utilization`] has it.
    pub(crate) fn measure(
        &self,
        library: &Library,
        gpu: Handle,
        uuid: &GpuUuid,
        part: Option<&MigDevice>,
    ) -> Result<Option<f64>, Failure> {
        let key = (uuid.clone(), part.map(|part| part.gpu_instance));
        // No lock is held while NVML is called: the call may hang, and other GPUs must not.
        let mut kept = self.take(&key);
        // Too early to compare: the sample goes back to its place.
        if let Some(found) = &kept
            && found.device.as_ref() == part.map(|part| &part.uuid)
            && found.at.elapsed() < SHORTEST
        {
            self.put(library, key, kept);
            return Ok(None);
        }
        let comparable = |kept: &Kept| {
            kept.device.as_ref() == part.map(|part| &part.uuid) && kept.at.elapsed() <= LONGEST
        };
        // Too late, or of another instance: the sample is of no use any more.
        if let Some(useless) = kept.take_if(|kept| !comparable(kept)) {
            library.free_gpm_sample(useless.sample);
        }
        // Take a sample now, compare, and keep the new one in the place of the old one.
        let result = self.compare(library, gpu, &key, part, kept.as_ref());
        if let Some(old) = kept {
            library.free_gpm_sample(old.sample);
        }
        result
    }

    fn compare(
        &self,
        library: &Library,
        gpu: Handle,
        key: &Key,
        part: Option<&MigDevice>,
        before: Option<&Kept>,
    ) -> Result<Option<f64>, Failure> {
        // A sample that was kept shows that the GPU has these monitors: ask only without one.
        if before.is_none() && !library.supports_gpm(gpu)? {
            return Err(Failure::code(GpuErrorCode::NOT_SUPPORTED));
        }
        let sample = library.gpm_sample(gpu, part.map(|part| part.gpu_instance.0))?;
        let used = before
            .map(|before| library.sm_utilization(&before.sample, &sample))
            .transpose();
        let now = Kept {
            sample,
            at: Instant::now(),
            device: part.map(|part| part.uuid.clone()),
        };
        self.put(library, key.clone(), Some(now));
        used
    }

    /// Gives all samples back.
    pub(crate) fn free(&self, library: &Library) {
        for kept in std::mem::take(&mut *self.lock()).into_values() {
            library.free_gpm_sample(kept.sample);
        }
    }

    /// Lets kept samples have been taken earlier.
    #[cfg(test)]
    pub(crate) fn age(&self, by: Duration) {
        for kept in self.lock().values_mut() {
            kept.at = kept.at.checked_sub(by).unwrap();
        }
    }

    fn take(&self, key: &Key) -> Option<Kept> {
        self.lock().remove(key)
    }

    fn put(&self, library: &Library, key: Key, kept: Option<Kept>) {
        let replaced = kept.and_then(|kept| self.lock().insert(key, kept));
        if let Some(replaced) = replaced {
            library.free_gpm_sample(replaced.sample);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Key, Kept>> {
        lock(&self.0)
    }
}
