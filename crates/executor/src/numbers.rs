//! The numbers in device names: given to new GPUs, taken from those long gone, and made again when
//! their file is lost.

use std::time::Duration;

use divvy_claims::{Record, Stored};
use divvy_model::{DeviceKind, GpuUuid, Ordinals, PciAddress};

use crate::context::Context;
use crate::state::Records;
use crate::{LockError, LockName, StoreError};

/// GPUs could not be numbered.
#[derive(Debug, thiserror::Error)]
pub enum NumberError {
    /// Another instance is at it.
    #[error("GPUs cannot be numbered")]
    Lock(#[from] LockError),
    /// The file cannot be used.
    #[error("GPUs cannot be numbered")]
    Store(#[from] StoreError),
    /// The file is lost, and the API server does not say what it knows of its content.
    #[error(
        "GPUs cannot be numbered: the file of their numbers is lost, and the numbers in use cannot be read from the API server: {0}"
    )]
    Api(String),
}

/// Gives new GPUs a number and forgets GPUs that are neither present nor kept. `keep` says
/// whether an allocation in the API may still refer to a number; what records refer to is kept
/// anyway. Call it whenever the inventory changes, before devices are published. If the file of
/// numbers is lost, the API server is asked, with only the numbers' lock held.
pub(crate) fn number_gpus(
    context: &Context,
    present: &[(GpuUuid, PciAddress)],
    keep: &dyn Fn(&GpuUuid, u32) -> bool,
) -> Result<Ordinals, NumberError> {
    let until = context.now() + Duration::from_secs(10);
    let _lock = context.parts.locks.acquire(&LockName::Ordinals, until)?;
    let records = context.state.records()?;
    let stored = context.state.stored_ordinals()?;
    // The numbers in memory are of no use to a prepare, which reads the file: whatever did not
    // come from the file is written to it, even if every GPU has its number already.
    let is_on_disk = stored.fine().is_some();
    let mut ordinals = match stored {
        Stored::Fine(ordinals) => ordinals,
        Stored::Absent => rebuild_numbers(context, &records, None)?,
        Stored::Corrupt { reason } => rebuild_numbers(context, &records, Some(&reason))?,
        Stored::Newer { version, .. } => {
            let reason = format!("a later version of divvy wrote it (format {version})");
            rebuild_numbers(context, &records, Some(&reason))?
        }
    };
    // A record that cannot be read may refer to any number.
    let all_readable = records.values().all(|r| r.fine().is_some());
    let recorded: Vec<_> = records
        .values()
        .filter_map(|r| r.fine())
        .flat_map(Record::gpus)
        .collect();
    let forgot = all_readable
        && ordinals.forget(|gpu, number| {
            present.iter().any(|(p, _)| p == gpu) || recorded.contains(gpu) || keep(gpu, number)
        });
    let assigned = ordinals.assign(present.iter().cloned());
    let is_new = !is_on_disk && !ordinals.is_empty();
    if forgot || assigned || is_new {
        context.state.write_ordinals(&ordinals)?;
    }
    Ok(ordinals)
}

/// The numbers from all that still refers to them; `broken` says what is wrong with a file that
/// is there. A node without a file, records and slices is a fresh one.
fn rebuild_numbers(
    context: &Context,
    records: &Records,
    broken: Option<&str>,
) -> Result<Ordinals, NumberError> {
    let api = &context.parts.claims;
    // The node's own slices first, which cost little. A fresh node has none, and does not list all
    // claims of the cluster.
    let published = api.published_numbers().map_err(NumberError::Api)?;
    if broken.is_none() && published.is_empty() && records.is_empty() {
        return Ok(Ordinals::default());
    }
    let allocated = api.allocated_numbers().map_err(NumberError::Api)?;
    let devices = records
        .values()
        .filter_map(|stored| stored.fine())
        .flat_map(|record| &record.devices);
    let recorded = devices.filter_map(|d| {
        Some((
            DeviceKind::parse(&d.allocated.device).ok()?.ordinal(),
            d.gpu.clone(),
        ))
    });
    let ordinals = Ordinals::rebuild(recorded, published, allocated);
    let reason = broken.unwrap_or("it does not exist");
    tracing::error!(reason, numbers = ?ordinals, "the file of GPU numbers is lost; rebuilt from records, slices and claims");
    if broken.is_some() {
        context.state.copy_ordinals_aside(context.now())?;
    }
    Ok(ordinals)
}
