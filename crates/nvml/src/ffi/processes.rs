//! Lists of processes. NVML's `_v3` functions changed the size of their entries without a new name,
//! so the list is read as words and has room for the longest.

use divvy_model::{GpuErrorCode, GpuProcess};

use super::{Failure, Handle, Library, check, missing};

/// Words of the longest entry of any version.
const ROOM: usize = 5;
/// Words of an entry: process id, memory, the ids of the instances.
const SHORT: usize = 3;
/// The same, and the memory protected by confidential computing.
const LONG: usize = 4;

impl Library {
    /// Processes with a compute context.
    pub(crate) fn compute_processes(&self, gpu: Handle) -> Result<Vec<GpuProcess>, Failure> {
        let newest = processes(self.process_words()?, |count, list| {
            call!(self.nvmlDeviceGetComputeRunningProcesses_v3(gpu.0, count, list.cast()))
        });
        or_without(newest, || {
            processes(SHORT, |count, list| {
                call!(self.nvmlDeviceGetComputeRunningProcesses_v2(gpu.0, count, list.cast()))
            })
        })
    }

    /// Lists clients of MPS, as [`Library::compute_processes`] does processes.
    pub(crate) fn mps_processes(&self, gpu: Handle) -> Result<Vec<GpuProcess>, Failure> {
        let newest = processes(self.process_words()?, |count, list| {
            call!(self.nvmlDeviceGetMPSComputeRunningProcesses_v3(gpu.0, count, list.cast()))
        });
        or_without(newest, || {
            processes(SHORT, |count, list| {
                call!(self.nvmlDeviceGetMPSComputeRunningProcesses_v2(gpu.0, count, list.cast()))
            })
        })
    }

    /// Words of the entries that the `_v3` functions write: four in the first drivers of R535
    /// (go-nvml#75, nvitop#79).
    fn process_words(&self) -> Result<usize, Failure> {
        let version = self.driver_version()?;
        let mut numbers = version.split('.').map(|part| part.parse::<u32>().ok());
        match (numbers.next().flatten(), numbers.next().flatten()) {
            (Some(535), Some(minor)) if minor < 98 => Ok(LONG),
            _ => Ok(SHORT),
        }
    }
}

/// The older call where the library lacks the newer one (before R510, and 535.98).
fn or_without<T>(
    newer: Result<T, Failure>,
    older: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    match newer {
        Err(failure) if failure.code == GpuErrorCode::FUNCTION_NOT_FOUND => older(),
        answer => answer,
    }
}

/// Reads an entry. All bits set is NVML's word for nothing.
fn process(entry: &[u64]) -> Option<GpuProcess> {
    let [pid, memory, instances, ..] = entry else {
        return None;
    };
    let given = |id: u32| (id != u32::MAX).then_some(id);
    // Pairs of 32-bit fields: the process id and padding, and the ids of GPU and compute instance.
    let (gpu_instance, compute_instance) = halves(*instances)?;
    Some(GpuProcess {
        pid: halves(*pid)?.0,
        gpu_instance: given(gpu_instance),
        compute_instance: given(compute_instance),
        memory_bytes: (*memory != u64::MAX).then_some(*memory),
    })
}

fn halves(word: u64) -> Option<(u32, u32)> {
    let bytes = word.to_ne_bytes();
    Some((
        u32::from_ne_bytes(*bytes.first_chunk()?),
        u32::from_ne_bytes(*bytes.last_chunk()?),
    ))
}

/// Asks with room for more and more processes until all fit: more may start between two calls.
fn processes(
    words: usize,
    call: impl Fn(*mut u32, *mut u64) -> Result<(), Failure>,
) -> Result<Vec<GpuProcess>, Failure> {
    let mut room: u32 = 32;
    for _ in 0..8 {
        let mut list = vec![0; room as usize * ROOM];
        let mut count = room;
        match call(&raw mut count, list.as_mut_ptr()) {
            Ok(()) => {
                // Never more than there was room for, whatever the library says.
                let entries = list.chunks_exact(words).take(count.min(room) as usize);
                return Ok(entries.filter_map(process).collect());
            }
            Err(failure) if failure.code == GpuErrorCode::INSUFFICIENT_SIZE => {
                // Twice as much, since more may have started meanwhile.
                room = count.max(room).saturating_mul(2).min(1 << 16);
            }
            Err(failure) => return Err(failure),
        }
    }
    Err(Failure::code(GpuErrorCode::INSUFFICIENT_SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More may start between the library's count and its writing.
    #[test]
    fn no_more_entries_are_read_than_there_is_room_for() {
        let listed = processes(SHORT, |count, list| {
            // SAFETY: both point to living memory of `processes`, the list with room for `count`.
            unsafe {
                let room = *count;
                for at in 0..room as usize * ROOM {
                    *list.add(at) = 7;
                }
                *count = room * 10;
            }
            Ok(())
        });
        assert_eq!(listed.unwrap().len(), 32);
    }
}
